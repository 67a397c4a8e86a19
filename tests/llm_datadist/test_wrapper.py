"""The functions that the original's Python part reaches its C++ part by, over this engine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvplan.llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMRole,
    Placement,
)
from kvplan.llm_datadist import llm_datadist_wrapper as wrapper
from kvplan.llm_datadist.configs import trans_str_ip
from kvplan.llm_datadist.v2.llm_utils import (
    pack_block_cache_key,
    pack_cache_desc,
    pack_cache_key,
    pack_cache_key_by_id,
)
from tests.llm_datadist.conftest import MakePeer, options
from tests.llm_datadist.contents import Arrays, fill, views
from tests.llm_datadist.descs import desc
from tests.llm_datadist.peer import REMOTE, REQUEST, Peer

NONE = 2**64 - 1
OK = wrapper.kSuccess


class Made:
    """A cache that the wrapper has made."""

    def __init__(self, cache: tuple[int, list[list[int]]], cache_desc: Any) -> None:
        self.cache_id, (self.tensor_addrs,) = cache
        self.cache_desc = cache_desc


def allocate(*keys: Any, is_blocks: bool = False, num_tensors: int = 4) -> Made:
    described = desc(num_tensors)
    described._is_blocks = is_blocks
    status, cache = wrapper.allocate_cache_v2(pack_cache_desc(described), keys)
    assert status == OK
    return Made(cache, described)


@pytest.fixture
def initialized() -> Iterator[None]:
    """The engine of this process, made by the wrapper, in request mode."""
    assert wrapper.initialize_v2(2, options(**{"llm.Role": "Decoder"})) == OK
    yield
    wrapper.finalize_v2()


def test_the_wrapper_makes_the_engine_of_the_process(initialized: None) -> None:
    datadist = LLMDataDist.llm_engine_instance
    assert datadist is not None
    assert datadist.cluster_id == 2
    assert wrapper.initialize_v2(3, options(**{"llm.Role": "Mix"})) == wrapper.kFailed
    assert wrapper.switch_role_v2("Prompt", {}) == OK
    assert datadist._role is LLMRole.PROMPT
    assert wrapper.switch_role_v2("Nobody", {}) == wrapper.kParamInvalid
    wrapper.finalize_v2()
    wrapper.finalize_v2()
    assert LLMDataDist.llm_engine_instance is None


@pytest.mark.parametrize("role", ["Prefill", None])
def test_an_engine_has_one_of_three_roles(role: str | None) -> None:
    given = options() if role is None else options(**{"llm.Role": role})
    assert wrapper.initialize_v2(2, given) == wrapper.kParamInvalid


def test_nothing_works_without_an_engine() -> None:
    failed, invalid = wrapper.kFailed, wrapper.kParamInvalid
    packed = pack_cache_desc(desc())
    assert wrapper.link("a", {1: 0, 2: 1}, "") == (failed, 0)
    assert wrapper.unlink(1) == failed
    assert wrapper.query_register_mem_status(1) == (failed, 0)
    assert wrapper.link_clusters_v2([], 1000) == (failed, [])
    assert wrapper.unlink_clusters_v2([], 1000, False) == (failed, [])
    assert wrapper.allocate_cache_v2(packed, []) == (failed, (-1, []))
    assert wrapper.register_cache(packed, [1] * 4, [], True) == (failed, (-1, []))
    assert wrapper.unregister_cache(1) == failed
    assert wrapper.deallocate_cache_v2(1) == invalid
    assert wrapper.remove_cache_key_v2(pack_cache_key(CacheKey(1, 2))) == invalid
    assert wrapper.copy_cache_v2((1, 1, 0, 1, 0, -1, NONE, [])) == invalid
    assert wrapper.remap_registered_memory([(0, 4096, 1)]) == invalid
    assert wrapper.switch_role_v2("Mix", {}) == invalid
    assert wrapper.check_capacity_v2(1) == invalid


def test_the_pool_is_asked_for_room_and_keeps_it(initialized: None) -> None:
    for _ in range(3):
        assert wrapper.check_capacity_v2(8_000_000) == OK
    assert wrapper.check_capacity_v2(8_400_000) == wrapper.kLLMOutOfMemory


def test_without_a_pool_there_is_no_capacity() -> None:
    assert wrapper.initialize_v2(2, {"llm.Role": "Mix"}) == OK
    assert wrapper.check_capacity_v2(1) == wrapper.kLLMFeatureNotEnabled
    wrapper.finalize_v2()


def test_caches_are_made_and_ended(initialized: None) -> None:
    key = pack_cache_key(CacheKey(2, 7))
    made = allocate(key)
    assert (made.cache_id, len(made.tensor_addrs)) == (1, 4)
    again, nothing = wrapper.allocate_cache_v2(pack_cache_desc(desc()), [key])
    assert (again, nothing) == (wrapper.kParamInvalid, (-1, []))
    assert wrapper.remove_cache_key_v2(key) == OK
    for _ in range(2):
        assert wrapper.deallocate_cache_v2(made.cache_id) == OK
    memory = ctypes.create_string_buffer(4 * 128)
    addrs = [ctypes.addressof(memory) + 128 * it for it in range(4)]
    status, cache = wrapper.register_cache(pack_cache_desc(desc()), addrs, [], True)
    assert (status, cache) == (OK, (3, [addrs]))
    assert wrapper.unregister_cache(3) == OK
    assert wrapper.unregister_cache(3) == OK


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, 0), (1, 28), (1, 99), (3, [0]), (4, 2)],
    ids=["no tensor", "no width", "no type", "no row", "no placement"],
)
def test_a_description_of_nothing_is_invalid(
    initialized: None, position: int, value: object
) -> None:
    packed: list[Any] = list(pack_cache_desc(desc()))
    packed[position] = value
    status, _ = wrapper.allocate_cache_v2(tuple(packed), [])  # type: ignore[arg-type]
    assert status == wrapper.kParamInvalid


def test_a_key_is_of_the_kind_of_its_cache(initialized: None) -> None:
    blocks, request = pack_block_cache_key(BlocksCacheKey(2)), pack_cache_key(CacheKey(2, 1))
    contiguous, paged = pack_cache_desc(desc()), (*pack_cache_desc(desc())[:5], True)
    for packed, keys in ((contiguous, [blocks]), (paged, [request]), (paged, [blocks, blocks])):
        assert wrapper.allocate_cache_v2(packed, keys)[0] == wrapper.kParamInvalid


def test_slots_and_blocks_are_copied(initialized: None) -> None:
    slots, blocks = allocate(), allocate(is_blocks=True)
    arrays = fill(slots, 1)
    before = [it.copy() for it in arrays]
    assert wrapper.copy_cache_v2((slots.cache_id, slots.cache_id, 1, 0, 8, 16, NONE, [])) == OK
    for array, given in zip(arrays, before, strict=True):
        given[1, 8:24] = given[0, 8:24]
        assert (array == given).all()
    arrays, own = fill(blocks, 2), blocks.cache_id
    before = [it.copy() for it in arrays]
    pairs = [(0, 2), (0, 3), (1, 2)]  # the last of a destination counts
    for each in (pairs, []):
        assert wrapper.copy_cache_v2((own, own, 0, 0, 0, -1, NONE, each)) == OK
        for array, given in zip(arrays, before, strict=True):
            assert (array == given[[0, 1, 1, 0]]).all()
    before = [it.copy() for it in arrays]
    assert wrapper.copy_cache_v2((own, own, 0, 0, 0, -1, NONE, [(1, 0), (0, 0)])) == OK
    for array, given in zip(arrays, before, strict=True):
        assert (array == given[[1, 1, 2, 3]]).all()  # a copy of a block to itself changes nothing
    assert wrapper.copy_cache_v2((99, own, 0, 0, 0, -1, NONE, [])) != OK


def test_blocks_are_swapped_by_address(initialized: None) -> None:
    on_device, on_host = allocate(is_blocks=True), allocate(is_blocks=True)
    given, found = fill(on_host, 1), views(on_device)
    device, host = (-1, [on_device.tensor_addrs]), (-1, [on_host.tensor_addrs])
    assert wrapper.swap_blocks_v2(host, device, 32, 0, [(0, 3), (2, 1)]) == OK
    assert all((d[[3, 1]] == h[[0, 2]]).all() for d, h in zip(found, given, strict=True))
    assert wrapper.swap_blocks_v2(device, host, 32, 1, [(3, 1)]) == OK
    assert all((h[1] == h[0]).all() for h in given)
    assert wrapper.swap_blocks_v2(device, host, 32, 1, []) == OK
    two_devices = (-1, [on_host.tensor_addrs, on_host.tensor_addrs])
    assert wrapper.swap_blocks_v2(two_devices, device, 32, 0, [(0, 0)]) == wrapper.kParamInvalid


def link_with(peer: Peer) -> list[tuple[int, int, list[tuple[int, int]], list[tuple[int, int]]]]:
    ip, _, port = peer.address.partition(":")
    return [(peer.cluster_id, 0, [], [(trans_str_ip(ip), int(port))])]


@pytest.fixture
def request_peer(make_peer: MakePeer, initialized: None) -> Peer:
    peer = make_peer(**REQUEST)
    assert wrapper.link_clusters_v2(link_with(peer), 10_000) == (OK, [OK])
    return peer


@pytest.fixture
def remote_peer(make_peer: MakePeer) -> Iterator[Peer]:
    peer = make_peer(**REMOTE)
    assert wrapper.initialize_v2(2, options(**REMOTE, **{"llm.Role": "Mix"})) == OK
    assert wrapper.link_clusters_v2(link_with(peer), 10_000) == (OK, [OK])
    peer.run(
        """
        cache = manager.allocate_cache(desc(6, 4))
        paged = manager.allocate_blocks_cache(desc(6, 4), BlocksCacheKey(1, 5))
        clear(cache), clear(paged)
        """
    )
    yield peer
    wrapper.finalize_v2()


def test_links_have_a_status_each(request_peer: Peer) -> None:
    cluster = link_with(request_peer)
    already = wrapper.kAlreadyLink
    assert wrapper.link_clusters_v2(cluster, 10_000) == (already, [already])
    assert wrapper.unlink_clusters_v2(cluster, 10_000, False) == (OK, [OK])
    failed = wrapper.kUnlinkFailed
    assert wrapper.unlink_clusters_v2(cluster, 10_000, False) == (failed, [failed])
    assert wrapper.unlink_clusters_v2(cluster, 10_000, True) == (OK, [OK])


def theirs(peer: Peer, keys: str, make: str = "allocate_cache") -> Arrays:
    """Let the peer make and fill a cache; return what is in it."""
    peer.run(f"cache = manager.{make}(desc(4, 4), {keys}); fill(cache, 3)")
    return list(peer.bytes_of("cache"))


def test_a_request_is_pulled_once(request_peer: Peer) -> None:
    given = theirs(request_peer, "[CacheKey(0, 5), CacheKey(0, 6)]")
    local = allocate()
    param = (-1, 2, [], [], [], [], -1, -1, 2)
    key = pack_cache_key(CacheKey(1, 6))
    assert wrapper.pull_cache_v2(local.cache_id, key, param) == OK
    assert all((a[2] == b[1]).all() for a, b in zip(views(local), given, strict=True))
    assert wrapper.pull_cache_v2(local.cache_id, key, param) == wrapper.kLLMKVCacheNotExist


def test_layers_and_offsets_of_a_slot_are_pulled(request_peer: Peer) -> None:
    given = theirs(request_peer, "[]")
    local = allocate()
    for array in views(local):
        array[:] = 0
    key = pack_cache_key_by_id(CacheKeyByIdAndIndex(1, 1, 3))
    assert (
        wrapper.pull_cache_v2(local.cache_id, key, (8, 0, [], [], [2, 3], [0, 1], 4, 16, 2)) == OK
    )
    found = views(local)
    assert all((found[it][0, 16:24] == given[it + 2][3, 4:12]).all() for it in range(2))
    assert sum(int(np.count_nonzero(it)) for it in found) == 16
    half_layers = (-1, 0, [], [], [1, 2], [0, 1], -1, -1, 2)
    assert wrapper.pull_cache_v2(local.cache_id, key, half_layers) == wrapper.kParamInvalid


def test_blocks_are_pulled(request_peer: Peer) -> None:
    given = theirs(request_peer, "BlocksCacheKey(0, 5)", "allocate_blocks_cache")
    local = allocate(is_blocks=True)
    key = pack_block_cache_key(BlocksCacheKey(1, 5))
    param = (-1, 0, [0, 3, 1], [2, 1, 2], [], [], -1, -1, 2)
    assert wrapper.pull_cache_v2(local.cache_id, key, param) == OK
    found = views(local)
    assert all((a[[1, 2]] == b[[3, 1]]).all() for a, b in zip(found, given, strict=True))


def test_in_remote_mode_no_request_has_a_key(remote_peer: Peer) -> None:
    status = wrapper.pull_cache_v2(
        allocate().cache_id, pack_cache_key(CacheKey(1, 5)), (-1, 0, [], [], [], [], -1, -1, 2)
    )
    assert status == wrapper.kLLMKVCacheNotExist


def test_a_layer_is_pushed_into_a_slot(remote_peer: Peer) -> None:
    local = allocate(num_tensors=6)
    given = fill(local, 1)
    # slot 1, layer 2 of two tensors -> slot 3, layer 0 of cache 1
    config = (local.cache_id, 1, 2, [], 1, 1, 3, 2, 0, 2)
    assert wrapper.transfer_cache_v2(0, config, (0, [], [])) == OK
    found = remote_peer.bytes_of("cache")
    assert all((found[it][3] == given[it + 4][1]).all() for it in range(2))
    assert np.count_nonzero(found) == 2 * 32


def test_a_layer_is_pushed_into_blocks(remote_peer: Peer) -> None:
    local = allocate(is_blocks=True, num_tensors=6)
    given = fill(local, 1)
    config = (local.cache_id, 0, 1, [], 1, 5, 0, 1, 1, 2)
    assert wrapper.transfer_cache_v2(0, config, (0, [0, 3], [2, 1])) == OK
    found = remote_peer.bytes_of("paged")
    assert all((found[it][[2, 1]] == given[it][[0, 3]]).all() for it in (2, 3))
    assert np.count_nonzero(found) == 2 * 2 * 32


def test_a_paged_row_is_pushed_to_a_row(remote_peer: Peer) -> None:
    local = allocate(is_blocks=True, num_tensors=6)
    given = fill(local, 1)
    config = (local.cache_id, 3, 0, [], 1, 5, 0, 1, 0, 2)
    assert wrapper.transfer_cache_v2(0, config, (0, [], [])) == OK
    found = remote_peer.bytes_of("paged")
    assert all((found[it][0] == given[it][3]).all() for it in range(2))


def test_a_layer_is_pushed_to_addresses(remote_peer: Peer) -> None:
    local = allocate()
    given = fill(local, 1)
    addrs = remote_peer.run("result = list(cache.tensor_addrs[:2])")
    config = (local.cache_id, 2, 1, addrs, 1, 0, 0, 0, 0, 2)
    assert wrapper.transfer_cache_v2(0, config, (0, [], [])) == OK
    found = remote_peer.bytes_of("cache")
    assert all((found[it][0] == given[it + 2][2]).all() for it in range(2))


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, 99), (2, 9), (4, 7), (5, 99), (7, 3), (9, 0)],
    ids=["cache", "layer", "cluster", "cache there", "push type", "tensors per layer"],
)
def test_a_layer_that_cannot_be_pushed_has_a_status(
    remote_peer: Peer, position: int, value: int
) -> None:
    local = allocate(num_tensors=6)
    config: list[Any] = [local.cache_id, 1, 2, [], 1, 1, 3, 2, 0, 2]
    assert wrapper.transfer_cache_v2(0, tuple(config), (0, [], [])) == OK
    config[position] = value
    assert wrapper.transfer_cache_v2(0, tuple(config), (0, [], [])) != OK


def test_placements_have_the_numbers_that_cross() -> None:
    assert [pack_cache_desc(desc(placement=it))[4] for it in Placement] == [0, 1]
