"""Pushes between processes, in remote mode: request mode has none."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMStatusCode,
    MemInfo,
    Memtype,
)
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from tests.llm_datadist.contents import fill
from tests.llm_datadist.descs import desc
from tests.llm_datadist.peer import Peer
from tests.support.refusals import refused

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST

OFFER = """
cache, paged = manager.allocate_cache(desc(6, 4)), manager.allocate_blocks_cache(
    desc(6, 8), BlocksCacheKey(99)
)
clear(cache), clear(paged)
result = cache.cache_id
"""


@pytest.fixture
def peer(remote_pair: tuple[Peer, LLMDataDist]) -> Peer:
    """The peer with `cache` (id 1) and `paged` (id 2), both of six zeroed tensors."""
    peer, _ = remote_pair
    assert peer.run(OFFER) == 1
    return peer


@pytest.fixture
def manager(remote_pair: tuple[Peer, LLMDataDist]) -> CacheManager:
    return remote_pair[1].cache_manager


@pytest.fixture
def slots(manager: CacheManager) -> Cache:
    cache = manager.allocate_cache(desc(6))
    fill(cache, 1)
    return cache


@pytest.fixture
def blocks(manager: CacheManager) -> Cache:
    cache = manager.allocate_blocks_cache(desc(6))
    fill(cache, 2)
    return cache


def test_push_cache(peer: Peer, manager: CacheManager, slots: Cache) -> None:
    given = fill(slots, 1)
    manager.push_cache(CacheKeyByIdAndIndex(1, 1, 3), slots, 2)
    found = peer.bytes_of("cache")
    assert all((their[3] == ours[2]).all() for their, ours in zip(found, given, strict=True))
    assert not found[:, :3].any()


def test_layers_of_a_slot_are_pushed(peer: Peer, manager: CacheManager, slots: Cache) -> None:
    given = fill(slots, 1)
    key = CacheKeyByIdAndIndex(1, 1)
    manager.push_cache(
        dst_cache_key=key,
        src_cache=slots,
        src_batch_index=1,
        src_layer_range=range(1, 3),
        dst_layer_range=range(2),
        size=-1,
        tensor_num_per_layer=2,
    )
    found = peer.bytes_of("cache")
    assert [item[0].tolist() for item in found[:4]] == [item[1].tolist() for item in given[2:]]
    assert not found[4:].any()
    manager.push_cache(key, slots, 0, range(5, 6), range(4, 5), -1, 1)
    assert peer.bytes_of("cache")[4, 0].tolist() == given[5][0].tolist()
    manager.push_cache(CacheKeyByIdAndIndex(1, 1, 1), slots, tensor_num_per_layer=4)
    found = peer.bytes_of("cache")
    # With four tensors a layer, the last layer has only two, which move as well.
    assert [item[1].tolist() for item in found] == [item[0].tolist() for item in given]


def test_a_cache_of_fewer_layers_is_pushed_to_the_first_layers(
    peer: Peer, manager: CacheManager
) -> None:
    short = manager.allocate_cache(desc(2))
    given = fill(short, 5)
    manager.push_cache(CacheKeyByIdAndIndex(1, 1), short)
    found = peer.bytes_of("cache")
    assert [item[0].tolist() for item in found[:2]] == [item[0].tolist() for item in given]
    assert not found[2:].any()


def test_push_blocks(peer: Peer, manager: CacheManager, blocks: Cache) -> None:
    given = fill(blocks, 2)
    key = BlocksCacheKey(1)
    manager.push_blocks(key, blocks, (3, 0), [1, 6])
    found = peer.bytes_of("paged")
    for their, ours in zip(found, given, strict=True):
        assert (their[[1, 6]] == ours[[3, 0]]).all()
        assert not their[[0, 2, 3, 4, 5, 7]].any()
    manager.push_blocks(key, blocks, [0, 1, 2], [7, 5, 7], range(1), range(2, 3))
    found = peer.bytes_of("paged")
    # block 7 comes twice: the last source wins
    assert found[4, [5, 7]].tolist() == given[0][[1, 2]].tolist()
    assert not found[:4, [5, 7]].any()


def test_invalid_pushes_are_refused(
    peer: Peer, manager: CacheManager, slots: Cache, blocks: Cache
) -> None:
    key, paged = CacheKeyByIdAndIndex(1, 1), BlocksCacheKey(1)
    with refused("LLM_PARAM_INVALID"):
        manager.push_cache(key, blocks)
    with refused("LLM_PARAM_INVALID"):
        manager.push_blocks(paged, slots, [0], [0])
    with refused("LLM_PARAM_INVALID"):
        manager.push_cache(key, slots, size=5)
    with refused("LLM_PARAM_INVALID"):
        manager.push_cache(key, slots, 4)
    with refused("LLM_PARAM_INVALID"):
        manager.push_blocks(paged, blocks, [0], [])
    with refused("LLM_PARAM_INVALID"):
        manager.push_blocks(paged, blocks, [], [0])
    with refused("LLM_PARAM_INVALID"):
        manager.push_blocks(paged, blocks, None, [0])
    with refused("LLM_PARAM_INVALID"):
        manager.push_blocks(paged, blocks, [0, 1], [0])
    with refused("LLM_PARAM_INVALID"):
        manager.push_blocks(paged, blocks, [0], [8])
    with refused("LLM_PARAM_INVALID"):
        manager.push_cache(CacheKeyByIdAndIndex(2, 1), slots)
    with refused(NOT_EXIST):
        manager.push_cache(CacheKeyByIdAndIndex(1, 1, 4), slots)
    with refused(NOT_EXIST):
        manager.push_cache(CacheKeyByIdAndIndex(1, 9), slots)
    with refused(NOT_EXIST):
        manager.push_blocks(BlocksCacheKey(1, 9), blocks, [0], [0])
    not_linked = LLMStatusCode.LLM_NOT_YET_LINK
    with refused(not_linked):
        manager.push_cache(CacheKeyByIdAndIndex(7, 1), slots)
    with refused(not_linked):
        manager.push_blocks(BlocksCacheKey(7), blocks, [0], [0])
    wrong: Any
    for wrong in (
        {"src_layer_range": range(2), "dst_layer_range": range(1)},
        {"src_layer_range": range(2)},
        {"dst_layer_range": range(2)},
        {"src_layer_range": range(0, 2, 2), "dst_layer_range": range(1)},
        {"src_layer_range": range(3, 4), "dst_layer_range": range(1)},
        {"src_layer_range": range(1), "dst_layer_range": range(3, 4)},
        {"src_layer_range": range(1, 1), "dst_layer_range": range(1, 1)},
        {"tensor_num_per_layer": 0},
        {"tensor_num_per_layer": 7},
    ):
        with refused("LLM_PARAM_INVALID"):
            manager.push_cache(key, slots, **wrong)
        with refused("LLM_PARAM_INVALID"):
            manager.push_blocks(paged, blocks, [0], [0], **wrong)
    assert not peer.bytes_of("cache").any()
    assert not peer.bytes_of("paged").any()
    for call in (
        lambda: manager.push_cache(paged, slots),  # type: ignore[arg-type]
        lambda: manager.push_cache(CacheKey(1, 1), slots),  # type: ignore[arg-type]
        lambda: manager.push_cache(key, None),  # type: ignore[arg-type]
        lambda: manager.push_cache(key, slots, "0"),  # type: ignore[arg-type]
        lambda: manager.push_blocks(key, blocks, [0], [0]),  # type: ignore[arg-type]
        lambda: manager.push_blocks(paged, blocks, [0], [-1]),
        lambda: manager.push_blocks(paged, blocks, [0], None),  # type: ignore[arg-type]
        lambda: manager.push_blocks(paged, blocks, [0], [0], 1, 1),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            call()


def test_in_request_mode_pushes_are_refused(request_pair: tuple[Peer, LLMDataDist]) -> None:
    _, datadist = request_pair
    manager = datadist.cache_manager
    slots, blocks = manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc())
    with refused("LLM_PARAM_INVALID"):
        manager.push_cache(CacheKeyByIdAndIndex(1, 1), slots)
    with refused("LLM_PARAM_INVALID"):
        manager.push_blocks(BlocksCacheKey(1), blocks, [0], [0])


def test_memory_is_remapped_while_linked(peer: Peer, manager: CacheManager, slots: Cache) -> None:
    given = fill(slots, 1)
    cache_id = peer.run(
        """
        arrays = [np.zeros((4, 32), np.uint8) for _ in range(6)]
        registered = manager.register_cache(desc(6, 4), [it.ctypes.data for it in arrays])
        result = registered.cache_id
        """
    )
    manager.push_cache(CacheKeyByIdAndIndex(1, cache_id), slots)
    peer.run(
        """
        infos = [MemInfo(Memtype.MEM_TYPE_DEVICE, it.ctypes.data, it.nbytes) for it in arrays]
        manager.remap_registered_memory(infos)
        manager.remap_registered_memory(infos[0])
        """
    )
    manager.push_cache(CacheKeyByIdAndIndex(1, cache_id, 1), slots)
    found = peer.bytes_of("registered")
    assert [item[:2].tolist() for item in found] == [[item[0].tolist()] * 2 for item in given]
    elsewhere = MemInfo(Memtype.MEM_TYPE_DEVICE, slots.tensor_addrs[0], 2**40)
    with refused("LLM_PARAM_INVALID"):
        manager.remap_registered_memory(elsewhere)
