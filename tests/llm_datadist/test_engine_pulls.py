"""Pulls between processes, in request mode (by key) and in remote mode (by id)."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan.llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMStatusCode,
)
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from tests.llm_datadist.contents import clear
from tests.llm_datadist.descs import HOST, desc
from tests.llm_datadist.peer import Peer
from tests.support.refusals import refused

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NO_ID = 2**64 - 1

SLOTS = """
cache = manager.allocate_cache(desc(4, 4), [CacheKey(99, 1), CacheKey(99, NO_ID, 0, 5)])
fill(cache, 1)
result = cache.cache_id
"""
BLOCKS = """
paged = manager.allocate_blocks_cache(desc(4, 8), BlocksCacheKey(99))
fill(paged, 2)
result = paged.cache_id
"""
REGISTERED = """
arrays = [pattern(3, it, 4, 32) for it in range(4)]
registered = manager.register_cache(
    desc(4, 4, placement=Placement.%s), [it.ctypes.data for it in arrays], [CacheKey(0, 9)]
)
result = registered.cache_id
"""


@pytest.fixture
def pair(request: Any) -> tuple[Peer, CacheManager]:
    """Peer 1 and the manager of this process, linked by `remote_pair` or a given fixture."""
    name = getattr(request, "param", "remote_pair")
    peer, datadist = request.getfixturevalue(name)
    peer.run(f"NO_ID = {NO_ID}")
    return peer, datadist.cache_manager


in_both_modes = pytest.mark.parametrize("pair", ["request_pair", "remote_pair"], indirect=True)
in_request_mode = pytest.mark.parametrize("pair", ["request_pair"], indirect=True)


@in_request_mode
def test_a_key_is_consumed_by_its_pull(pair: tuple[Peer, CacheManager]) -> None:
    peer, manager = pair
    peer.run(SLOTS)
    cache = manager.allocate_cache(desc())
    found = clear(cache)
    manager.pull_cache(CacheKey(1, 1), cache, 2)
    assert [item[2].tolist() for item in found] == peer.bytes_of("cache")[:, 0].tolist()
    assert not any(item[[0, 1, 3]].any() for item in found)
    with refused(NOT_EXIST):
        manager.pull_cache(CacheKey(1, 1), cache, 2)
    for _ in range(2):  # the pull of a prefix consumes no key
        manager.pull_cache(CacheKey(1, NO_ID, 0, 5), cache=cache, batch_index=0)
        assert [item[0].tolist() for item in found] == peer.bytes_of("cache")[:, 1].tolist()


@in_request_mode
def test_a_key_is_consumed_tensor_by_tensor(pair: tuple[Peer, CacheManager]) -> None:
    peer, manager = pair
    peer.run(SLOTS)
    cache = manager.allocate_cache(desc())
    found = clear(cache)
    key = CacheKey(1, 1)
    for layer in (range(1, 2), range(1)):
        manager.pull_cache(key, cache, src_layer_range=layer, dst_layer_range=layer)
    assert [item[0].tolist() for item in found] == peer.bytes_of("cache")[:, 0].tolist()
    with refused(NOT_EXIST):
        manager.pull_cache(key, cache)


@in_request_mode
def test_a_cache_lives_as_long_as_its_keys(pair: tuple[Peer, CacheManager]) -> None:
    peer, manager = pair
    cache_id = peer.run(SLOTS)
    expected = peer.bytes_of("cache")[:, 0].tolist()
    peer.run("manager.deallocate_cache(cache); assert cache.tensor_addrs == []")
    cache = manager.allocate_cache(desc())
    found = clear(cache)
    manager.pull_cache(CacheKey(1, 1), cache)
    assert [item[0].tolist() for item in found] == expected
    peer.run("manager.remove_cache_key(CacheKey(1, NO_ID, 0, 5))")
    with refused(NOT_EXIST):
        manager.pull_cache(CacheKey(1, NO_ID, 0, 5), cache)
    with refused(NOT_EXIST):
        manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id), cache)


@pytest.mark.parametrize("placement", ["DEVICE", "HOST"])
@in_request_mode
def test_no_pull_consumes_the_key_of_a_registered_cache(
    pair: tuple[Peer, CacheManager], placement: str
) -> None:
    peer, manager = pair
    cache_id = peer.run(REGISTERED % placement)
    cache = manager.allocate_cache(desc(placement=HOST))
    found = clear(cache)
    for _ in range(2):
        manager.pull_cache(CacheKey(1, 9), cache)
        manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 2), cache, 1)
    theirs = peer.bytes_of("registered")
    assert [item[:2].tolist() for item in found] == theirs[:, [0, 2]].tolist()


def test_in_remote_mode_host_memory_is_offered_on_request(
    pair: tuple[Peer, CacheManager],
) -> None:
    peer, manager = pair
    cache = manager.allocate_cache(desc())
    found = clear(cache)
    host = peer.run(REGISTERED % "HOST")
    with refused(NOT_EXIST):
        manager.pull_cache(CacheKeyByIdAndIndex(1, host), cache)
    offered = peer.run(
        """
        offered = manager.register_cache(
            registered.cache_desc, registered.tensor_addrs, remote_accessible=True
        )
        result = offered.cache_id
        """
    )
    manager.pull_cache(CacheKeyByIdAndIndex(1, offered), cache)
    assert [item[0].tolist() for item in found] == peer.bytes_of("offered")[:, 0].tolist()


@in_both_modes
def test_pull_by_id(pair: tuple[Peer, CacheManager]) -> None:
    peer, manager = pair
    cache_id = peer.run(SLOTS)
    cache = manager.allocate_cache(desc())
    found, theirs = clear(cache), peer.bytes_of("cache")
    for _ in range(2):  # a pull by id consumes nothing
        manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 3), cache, 1)
    manager.pull_cache(cache_key=CacheKeyByIdAndIndex(1, cache_id, 2), cache=cache, size=5)
    for ours, their in zip(found, theirs, strict=True):
        assert (ours[1] == their[3]).all()
        assert (ours[0, :5] == their[2, :5]).all()
        assert not ours[0, 5:].any()
    for size in (0, -2, 33):
        with refused("LLM_PARAM_INVALID"):
            manager.pull_cache(CacheKeyByIdAndIndex(1, 1), cache, 0, size)
    with refused("LLM_PARAM_INVALID"):
        manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id), cache, 4)
    with refused(NOT_EXIST):
        manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 4), cache)
    with refused(NOT_EXIST):
        manager.pull_cache(CacheKeyByIdAndIndex(1, 77), cache)
    later = peer.run(SLOTS.replace("99, 1)", "99, 2)").replace("0, 5)", "0, 6)"))
    manager.pull_cache(CacheKeyByIdAndIndex(1, later), cache)
    peer.run("manager.deallocate_cache(cache); manager.remove_cache_key(CacheKey(0, 2))")
    peer.run("manager.remove_cache_key(CacheKey(0, NO_ID, 0, 6))")
    with refused(NOT_EXIST):
        manager.pull_cache(CacheKeyByIdAndIndex(1, later), cache)


@in_both_modes
def test_layers_go_where_the_ranges_say(pair: tuple[Peer, CacheManager]) -> None:
    peer, manager = pair
    cache_id = peer.run(SLOTS)
    key = CacheKeyByIdAndIndex(1, cache_id)
    cache = manager.allocate_cache(desc(6))
    found, theirs = clear(cache), peer.bytes_of("cache")
    manager.pull_cache(key, cache, src_layer_range=range(1, 2), dst_layer_range=range(2, 3))
    manager.pull_cache(
        key,
        cache,
        src_layer_range=range(1),
        dst_layer_range=range(1, 2),
        tensor_num_per_layer=1,
        ignored="it is",
        offset="the name of an argument of another method",
    )
    assert [item[0].tolist() for item in found[4:]] == theirs[2:, 0].tolist()
    assert found[1][0].tolist() == theirs[0, 0].tolist()
    assert not any(found[number].any() for number in (0, 2, 3))
    wrong: Any
    for wrong in (
        {"src_layer_range": range(1)},  # the destination has more than one layer
        {"src_layer_range": range(0, 2, 2), "dst_layer_range": range(1)},
        {"src_layer_range": range(2, 3), "dst_layer_range": range(1)},
        {"src_layer_range": range(1), "dst_layer_range": range(3, 4)},
        {"src_layer_range": range(-1, 0), "dst_layer_range": range(1)},
        {"src_layer_range": range(1, 1), "dst_layer_range": range(1, 1)},
        {"tensor_num_per_layer": 0},
        {"tensor_num_per_layer": 7},
    ):
        with refused("LLM_PARAM_INVALID"):
            manager.pull_cache(key, cache, **wrong)
    for wrong in ({"src_layer_range": [0]}, {"tensor_num_per_layer": "2"}):
        with pytest.raises(TypeError):
            manager.pull_cache(key, cache, **wrong)
    for wrong in ({"tensor_num_per_layer": -1}, {"src_layer_range": range(2**32, 2**32 + 1)}):
        with pytest.raises(ValueError, match="out of range"):
            manager.pull_cache(key, cache, **wrong)


@in_both_modes
def test_pull_blocks(pair: tuple[Peer, CacheManager]) -> None:
    peer, manager = pair
    peer.run(BLOCKS)
    cache = manager.allocate_blocks_cache(desc(rows=6))
    found, theirs = clear(cache), peer.bytes_of("paged")
    key = BlocksCacheKey(1)
    manager.pull_blocks(key, cache, [7, 0], (1, 2))
    for ours, their in zip(found, theirs, strict=True):
        assert (ours[[1, 2]] == their[[7, 0]]).all()
        assert not ours[[0, 3, 4, 5]].any()
    # block 5 comes twice: the last source wins
    manager.pull_blocks(key, cache, [3, 4, 5], [5, 4, 5])
    assert all((a[[5, 4]] == b[[5, 4]]).all() for a, b in zip(found, theirs, strict=True))
    one = range(1)
    manager.pull_blocks(
        src_cache_key=key,
        dst_cache=cache,
        src_blocks=[1],
        dst_blocks=[0],
        src_layer_range=one,
        dst_layer_range=one,
    )
    assert [bool(item[0].any()) for item in found] == [True, True, False, False]
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(key, cache, [0], [])
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(key, cache, [], [0])
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(key, cache, [0, 1], [0])
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(key, cache, [8], [0])
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(key, cache, [0], [6])
    with refused(NOT_EXIST):
        manager.pull_blocks(BlocksCacheKey(1, 7), cache, [0], [0])
    wrong: Any
    for wrong in ([-1], ["0"], [2**64], 0, None):
        with pytest.raises(TypeError):
            manager.pull_blocks(key, cache, wrong, [0])
        with pytest.raises(TypeError):
            manager.pull_blocks(key, cache, [0], wrong)
    for wrong in (-1, 2**70, None):
        with pytest.raises(TypeError):
            manager.pull_blocks(BlocksCacheKey(wrong), cache, [0], [0])


@in_both_modes
def test_a_slot_is_pulled_into_blocks(pair: tuple[Peer, CacheManager]) -> None:
    peer, manager = pair
    cache_id = peer.run(SLOTS)
    cache = manager.allocate_blocks_cache(desc(rows=6, nbytes=12))
    found, theirs = clear(cache), peer.bytes_of("cache")
    key = CacheKeyByIdAndIndex(1, cache_id, 2)
    manager.pull_blocks(key, cache, dst_blocks=[5, 0, 3])
    for ours, their in zip(found, theirs, strict=True):
        assert ours[[5, 0]].reshape(-1).tolist() == their[2, :24].tolist()
        assert ours[3, :8].tolist() == their[2, 24:].tolist()
        assert not ours[3, 8:].any()
        assert not ours[[1, 2, 4]].any()
    manager.pull_blocks(key, cache, (), [1])
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(key, cache, [0], [0])
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(key, cache, [], [0, 1, 2, 3])


@in_request_mode
def test_a_slot_is_pulled_into_blocks_by_key(pair: tuple[Peer, CacheManager]) -> None:
    peer, manager = pair
    peer.run(SLOTS)
    cache = manager.allocate_blocks_cache(desc(rows=6, nbytes=16))
    found = clear(cache)
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(CacheKey(1, 1), cache, [0], [0])
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(CacheKey(1, NO_ID), cache, [], [0])
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(CacheKey(1, 1, 0, 1), cache, [], [0])
    manager.pull_blocks(CacheKey(1, 1), cache, [], [4, 2])
    expected = peer.bytes_of("cache")[:, 0].tolist()
    assert [item[[4, 2]].reshape(-1).tolist() for item in found] == expected
    with refused(NOT_EXIST):
        manager.pull_blocks(CacheKey(1, 1), cache, [], [4, 2])


def test_in_remote_mode_keys_of_requests_are_refused(pair: tuple[Peer, CacheManager]) -> None:
    peer, manager = pair
    peer.run(SLOTS)
    slots, blocks = manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc())
    with pytest.raises(TypeError):
        manager.pull_cache(CacheKey(1, 1), slots)
    with refused(NOT_EXIST):
        manager.pull_blocks(CacheKey(1, 1), blocks, [], [0])


@in_both_modes
def test_invalid_pulls_are_refused(pair: tuple[Peer, CacheManager]) -> None:
    _, manager = pair
    slots, blocks = manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc())
    with refused("LLM_PARAM_INVALID"):
        manager.pull_cache(CacheKeyByIdAndIndex(1, 1), blocks)
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(BlocksCacheKey(1), slots, [0], [0])
    with refused("LLM_PARAM_INVALID"):  # the cluster of this process
        manager.pull_cache(CacheKeyByIdAndIndex(2, 1), slots)
    with refused("LLM_PARAM_INVALID"):
        manager.pull_blocks(BlocksCacheKey(2), blocks, [0], [0])
    not_linked = LLMStatusCode.LLM_NOT_YET_LINK
    with refused(not_linked):
        manager.pull_cache(CacheKeyByIdAndIndex(3, 1), slots)
    with refused(not_linked):
        manager.pull_blocks(BlocksCacheKey(3), blocks, [0], [0], x=1)
    for call in (
        lambda: manager.pull_cache(BlocksCacheKey(1), slots),  # type: ignore[arg-type]
        lambda: manager.pull_cache(None, slots),  # type: ignore[arg-type]
        lambda: manager.pull_cache(CacheKeyByIdAndIndex(1, 1), None),  # type: ignore[arg-type]
        lambda: manager.pull_blocks("key", blocks, [0], [0]),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError, match="batch_index"):
        manager.pull_cache(CacheKeyByIdAndIndex(1, 1), slots, -1)


def test_a_dead_peer_fails_the_pull(remote_pair: tuple[Peer, LLMDataDist]) -> None:
    peer, datadist = remote_pair
    cache_id = peer.run("result = manager.allocate_cache(desc(4, 4)).cache_id")
    cache = datadist.cache_manager.allocate_cache(desc())
    peer.kill()
    with refused(LLMStatusCode.LLM_LINK_FAILED):
        datadist.cache_manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id), cache)
