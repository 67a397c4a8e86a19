"""Caches of one process: allocation, registration, release, copies and swaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvplan.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMDataDist,
    LLMStatusCode,
    MemInfo,
    Memtype,
)
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from tests.llm_datadist.conftest import MakeDataDist
from tests.llm_datadist.contents import clear, fill, views
from tests.llm_datadist.descs import DEVICE, HOST, desc
from tests.support.refusals import refused

NO_ID = 2**64 - 1


@pytest.fixture
def manager(datadist: LLMDataDist) -> CacheManager:
    return datadist.cache_manager


def tensors(num_tensors: int = 4, rows: int = 4, nbytes: int = 32) -> list[np.ndarray[Any, Any]]:
    return [np.zeros((rows, nbytes), np.uint8) for _ in range(num_tensors)]


def addresses(arrays: list[np.ndarray[Any, Any]]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def test_cache_ids_rise_with_each_attempt(manager: CacheManager) -> None:
    assert manager.allocate_cache(desc()).cache_id == 1
    with refused(LLMStatusCode.LLM_OUT_OF_MEMORY):
        manager.allocate_cache(desc(rows=2**20, nbytes=2**10))
    assert manager.allocate_blocks_cache(desc()).cache_id == 3
    arrays = tensors()
    assert manager.register_cache(desc(), addresses(arrays)).cache_id == 4


def test_the_attributes_of_a_cache(manager: CacheManager) -> None:
    contiguous = manager.allocate_cache(cache_desc=(item := desc()), cache_keys=[CacheKey(99, 1)])
    assert contiguous.cache_desc is item
    assert not contiguous.is_blocks_cache
    assert len(set(contiguous.tensor_addrs)) == 4
    assert isinstance(contiguous.tensor_addrs, list)
    paged = manager.allocate_blocks_cache(desc(), blocks_cache_key=BlocksCacheKey(99))
    assert paged.is_blocks_cache
    arrays = tensors()
    registered = manager.register_cache(desc(), addresses(arrays))
    assert registered.tensor_addrs == addresses(arrays)


def test_a_deallocated_cache_has_no_addresses(manager: CacheManager) -> None:
    contiguous, paged = manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc())
    with refused("LLM_PARAM_INVALID"):
        manager.deallocate_cache(paged)
    with refused("LLM_PARAM_INVALID"):
        manager.deallocate_blocks_cache(contiguous)
    for _ in range(2):
        manager.deallocate_cache(contiguous)
        manager.deallocate_blocks_cache(paged)
        assert contiguous.tensor_addrs == paged.tensor_addrs == []
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        manager.copy_cache(contiguous, contiguous, 1)


def test_a_pool_is_needed_for_each_placement(make_datadist: MakeDataDist) -> None:
    manager = make_datadist(**{"llm.HostMemPoolConfig": ""}).cache_manager
    manager.allocate_cache(desc(placement=DEVICE))
    for allocate in (manager.allocate_cache, manager.allocate_blocks_cache):
        with refused("LLM_PARAM_INVALID"):
            allocate(desc(placement=HOST))
        with refused("LLM_PARAM_INVALID"):
            allocate(desc(num_tensors=0))


def test_keys_of_an_allocated_cache(manager: CacheManager) -> None:
    one, two, padding = CacheKey(1, 1), CacheKey(1, 2), CacheKey(1, NO_ID)
    first = manager.allocate_cache(desc(), [one, padding, padding])
    with refused("LLM_PARAM_INVALID"):  # whichever cluster the key names
        manager.allocate_cache(desc(), (CacheKey(7, 1),))
    with refused("LLM_PARAM_INVALID"):
        manager.allocate_cache(desc(), [two, two])
    with refused("LLM_PARAM_INVALID"):
        manager.allocate_cache(desc(rows=1), [two, padding])
    manager.deallocate_cache(first)
    with refused("LLM_PARAM_INVALID"):  # the cache lives as long as its key
        manager.allocate_cache(desc(), [one])
    manager.remove_cache_key(one)
    manager.remove_cache_key(one)
    manager.allocate_cache(desc(), [one, two])
    manager.allocate_blocks_cache(desc(), BlocksCacheKey(1))
    with refused("LLM_PARAM_INVALID"):
        manager.allocate_blocks_cache(desc(), BlocksCacheKey(2))
    manager.allocate_blocks_cache(desc(), BlocksCacheKey(2, model_id=1))


@pytest.mark.parametrize(
    "call",
    [
        lambda value: value.allocate_cache(None),
        lambda value: value.allocate_cache("desc"),
        lambda value: value.allocate_cache(desc(), None),
        lambda value: value.allocate_cache(desc(), [BlocksCacheKey(1)]),
        lambda value: value.allocate_blocks_cache(desc(), CacheKey(1, 1)),
        lambda value: value.deallocate_cache(1),
        lambda value: value.deallocate_blocks_cache(None),
        lambda value: value.remove_cache_key(BlocksCacheKey(1)),
        lambda value: value.register_cache(desc(), (1, 2, 3, 4)),
        lambda value: value.register_cache(desc(), None),
        lambda value: value.register_cache(desc(), ["1"] * 4),
        lambda value: value.register_cache(desc(), [1] * 4, remote_accessible=1),
        lambda value: value.register_blocks_cache(desc(), [1] * 4, CacheKey(1, 1)),
        lambda value: value.unregister_cache("a"),
    ],
)
def test_arguments_of_another_type(manager: CacheManager, call: Any) -> None:
    with pytest.raises(TypeError):
        call(manager)


def test_addresses_that_cannot_be_registered(manager: CacheManager) -> None:
    arrays = tensors()
    found = addresses(arrays)
    for register in (manager.register_cache, manager.register_blocks_cache):
        for wrong in ([], found[:-1], [*found, found[0]], [0, *found[1:]], [8] * 4):
            with refused("LLM_PARAM_INVALID"):
                register(desc(), wrong)
        register(desc(), found)


def test_registered_caches_can_be_unregistered(manager: CacheManager) -> None:
    arrays = tensors()
    cache = manager.register_cache(desc(), addresses(arrays), [CacheKey(1, 5)])
    manager.remove_cache_key(CacheKey(1, 5))  # a registered cache stays
    with refused("LLM_PARAM_INVALID"):
        manager.register_cache(desc(), addresses(arrays), [CacheKey(1, 5)])
    manager.unregister_cache(cache.cache_id)
    manager.unregister_cache(cache.cache_id)
    manager.unregister_cache(-1)
    with pytest.raises(ValueError, match="cache_id"):
        manager.unregister_cache(2**63)
    manager.register_cache(desc(), addresses(arrays), [CacheKey(1, 5)])
    paged = manager.register_blocks_cache(desc(), addresses(arrays), BlocksCacheKey(1))
    with refused("LLM_PARAM_INVALID"):
        manager.register_blocks_cache(desc(), addresses(arrays), BlocksCacheKey(1))
    assert paged.is_blocks_cache
    assert not views(cache)[0].any()


def test_after_link_nothing_is_registered_for_peers(manager: CacheManager) -> None:
    arrays = tensors()
    manager.register_cache(desc(), addresses(arrays), remote_accessible=True)
    manager.set_is_call_linked()
    with refused("LLM_PARAM_INVALID"):
        manager.register_cache(desc(), addresses(arrays), remote_accessible=True)
    with refused("LLM_PARAM_INVALID"):
        manager.register_blocks_cache(desc(), addresses(arrays), remote_accessible=True)
    manager.register_cache(desc(), addresses(arrays), remote_accessible=False)
    manager.register_blocks_cache(desc(), addresses(arrays))
    assert [cache.remote_accessible for cache in manager._engine.caches()] == [True, False, False]


def test_copy_cache_goes_from_the_second_to_the_first(manager: CacheManager) -> None:
    src, dst = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    given, found = fill(src, 1), clear(dst)
    manager.copy_cache(dst, src, 3, 1)
    manager.copy_cache(dst=dst, src=src, dst_batch_index=0, src_batch_index=2, offset=8, size=4)
    manager.copy_cache(dst, src, 1, 1, 30, -1, 7)
    for theirs, ours in zip(found, given, strict=True):
        assert (theirs[3] == ours[1]).all()
        assert (theirs[0, 8:12] == ours[2, 8:12]).all()
        assert not theirs[0, :8].any()
        assert not theirs[0, 12:].any()
        assert (theirs[1, 30:] == ours[1, 30:]).all()
        assert not theirs[1, :30].any()
        assert not theirs[2].any()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"size": 0}, None),
        ({"size": -2}, None),
        ({"size": 33}, None),
        ({"offset": 32, "size": 1}, None),
        ({"dst_batch_index": 4}, None),
        ({"src_batch_index": 4}, None),
        ({"offset": -1}, ValueError),
        ({"req_id": -1}, ValueError),
        ({"dst_batch_index": -1}, ValueError),
        ({"src_batch_index": 2**32}, ValueError),
        ({"size": 2**63}, ValueError),
        ({"size": "1"}, TypeError),
        ({"src": None}, TypeError),
    ],
)
def test_invalid_copies_are_refused(
    manager: CacheManager, options: dict[str, Any], error: type[Exception] | None
) -> None:
    cache = manager.allocate_cache(desc())
    args = {"dst": cache, "src": cache, "dst_batch_index": 1} | options
    if error is None:
        with refused("LLM_PARAM_INVALID"):
            manager.copy_cache(**args)
    else:
        with pytest.raises(error):
            manager.copy_cache(**args)


def test_only_slots_are_copied_as_slots(manager: CacheManager) -> None:
    slots, blocks = manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc())
    with refused("LLM_PARAM_INVALID"):
        manager.copy_cache(slots, blocks)
    with refused("LLM_PARAM_INVALID"):
        manager.copy_cache(blocks, slots)
    with refused("LLM_PARAM_INVALID"):
        manager.copy_blocks(slots, {0: [1]})
    with pytest.raises(TypeError):
        manager.copy_cache(slots, slots, True)  # a bool does not name a slot


def test_copy_blocks(manager: CacheManager) -> None:
    cache = manager.allocate_blocks_cache(desc(rows=8))
    arrays = fill(cache, 3)
    before = [array.copy() for array in arrays]
    manager.copy_blocks(cache, {})
    manager.copy_blocks(cache, {0: []})
    assert all((a == b).all() for a, b in zip(arrays, before, strict=True))
    # block 5 comes twice: the last source wins
    manager.copy_blocks(cache, {0: [4, 5], 1: [5, 6], 2: [7, 7]})
    for now, was in zip(arrays, before, strict=True):
        assert (now[4:] == was[[0, 1, 1, 2]]).all()
        assert (now[:4] == was[:4]).all()
    with refused("LLM_PARAM_INVALID"):
        manager.copy_blocks(cache, {0: [8]})
    with refused("LLM_PARAM_INVALID"):
        manager.copy_blocks(cache, {8: [0]})
    for wrong in ({0: ["1"]}, {"0": [1]}, {0: 1}, None, [(0, 1)], {0: [-1]}):
        with pytest.raises(TypeError):
            manager.copy_blocks(cache, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ({0: [1], 1: [1]}, [0, 0, 2, 3]),
        ({1: [1], 0: [1]}, [0, 0, 2, 3]),
        ({0: [0, 1, 0]}, [0, 0, 2, 3]),
    ],
    ids=str,
)
def test_a_copy_of_a_block_to_itself_hides_no_other(
    manager: CacheManager, copies: dict[int, list[int]], expected: list[int]
) -> None:
    cache = manager.allocate_blocks_cache(desc())
    arrays = fill(cache, 3)
    before = [array.copy() for array in arrays]
    manager.copy_blocks(cache, copies)
    for now, was in zip(arrays, before, strict=True):
        assert (now == was[expected]).all()


def test_a_copy_of_a_missing_block_to_itself_is_refused(manager: CacheManager) -> None:
    with refused("LLM_PARAM_INVALID"):
        manager.copy_blocks(manager.allocate_blocks_cache(desc()), {4: [4]})


def test_swap_blocks_in_and_out(manager: CacheManager) -> None:
    device = manager.allocate_blocks_cache(desc(rows=8))
    host_arrays = tensors(rows=6)
    host = Cache.create_cpu_cache(desc(rows=6, placement=HOST), addresses(host_arrays))
    given = fill(device, 5)
    manager.swap_blocks(device, host, {7: 0, 1: 5})
    for theirs, ours in zip(host_arrays, given, strict=True):
        assert (theirs[[0, 5]] == ours[[7, 1]]).all()
        assert not theirs[1:5].any()
    clear(device)
    manager.swap_blocks(src_cache=host, dst_cache=device, src_to_dst={0: 3, 5: 3, 1: 0})
    for theirs, ours in zip(host_arrays, given, strict=True):
        assert (ours[3] == theirs[5]).all()  # the last source wins
        assert not ours[[0, 1, 2, 4, 5, 6, 7]].any()
    manager.swap_blocks(host, device, {})
    manager.swap_blocks(host, manager.allocate_blocks_cache(desc()), {0: 0})


def test_invalid_swaps_are_refused(manager: CacheManager) -> None:
    device, host = (
        manager.allocate_blocks_cache(desc(placement=value)) for value in (DEVICE, HOST)
    )
    slots = manager.allocate_cache(desc(placement=HOST))
    small = manager.allocate_blocks_cache(desc(nbytes=16, placement=HOST))
    few = manager.allocate_blocks_cache(desc(num_tensors=2, placement=HOST))
    for src, dst in ((device, device), (host, host), (slots, device), (device, slots)):
        with refused("LLM_PARAM_INVALID"):
            manager.swap_blocks(src, dst, {0: 1})
        with refused("LLM_PARAM_INVALID"):
            manager.swap_blocks(src, dst, {})
    for other in (small, few):
        with refused("LLM_PARAM_INVALID"):
            manager.swap_blocks(other, device, {0: 1})
        with refused("LLM_PARAM_INVALID"):
            manager.swap_blocks(device, other, {0: 1})
        with refused("LLM_PARAM_INVALID"):
            manager.swap_blocks(device, other, {})
    for pairs in ({9: 0}, {0: 4}, {-1: 0}):
        with refused("LLM_PARAM_INVALID"):
            manager.swap_blocks(host, device, pairs)
    for wrong in ({"0": 1}, {0: "1"}, [(0, 1)], None):
        with pytest.raises(TypeError):
            manager.swap_blocks(host, device, wrong)  # type: ignore[arg-type]


def test_remap_needs_a_link_and_device_memory(manager: CacheManager) -> None:
    arrays = tensors()
    manager.register_cache(desc(), addresses(arrays))
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, addresses(arrays)[0], 32)
    with refused(LLMStatusCode.LLM_NOT_YET_LINK):
        manager.remap_registered_memory(info)
    wrong: Any
    for wrong in (
        [],
        None,
        [info, 1],
        MemInfo(Memtype.MEM_TYPE_HOST, 8, 8),
        MemInfo(Memtype.MEM_TYPE_DEVICE, 0, 8),
        [MemInfo(Memtype.MEM_TYPE_DEVICE, 8, 0)],
    ):
        with refused("LLM_PARAM_INVALID"):
            manager.remap_registered_memory(wrong)


def test_a_key_names_a_request_or_a_prefix() -> None:
    CacheManager.check_cache_key(CacheKey(1, 0))
    CacheManager.check_cache_key(CacheKey(1, NO_ID, 0, 0))
    with refused("LLM_PARAM_INVALID"):
        CacheManager.check_cache_key(CacheKey(1, NO_ID))
    with refused("LLM_PARAM_INVALID"):
        CacheManager.check_cache_key(CacheKey(1, 1, 0, 1))
    with pytest.raises(TypeError, match="cache_key"):
        CacheManager.check_cache_key(BlocksCacheKey(1))  # type: ignore[arg-type]


def test_a_cache_needs_a_placement(manager: CacheManager) -> None:
    nowhere = CacheDesc(2, [2, 8], DataType.DT_INT8, None)  # type: ignore[arg-type]
    for allocate in (manager.allocate_cache, manager.allocate_blocks_cache):
        with pytest.raises(TypeError, match="placement"):
            allocate(nowhere)


def test_an_address_has_64_bits(manager: CacheManager) -> None:
    for register in (manager.register_cache, manager.register_blocks_cache):
        for wrong in (-1, 2**64):
            with pytest.raises(TypeError, match="addrs"):
                register(desc(2), [8, wrong])


@pytest.mark.parametrize("wrong", [True, 1.5, None])
def test_each_address_is_an_int(manager: CacheManager, wrong: Any) -> None:
    for register in (manager.register_cache, manager.register_blocks_cache):
        with pytest.raises(TypeError, match=f"addrs holds {wrong}: its inner type only supports"):
            register(desc(2), [8, wrong])


def test_each_key_of_a_new_cache_is_a_key_of_slots(manager: CacheManager) -> None:
    wrong: Any = BlocksCacheKey(1)
    with pytest.raises(TypeError, match="cache_keys holds BlocksCacheKey"):
        manager.allocate_cache(desc(), [CacheKey(1, 0), wrong])
    with pytest.raises(TypeError, match="cache_keys holds BlocksCacheKey"):
        manager.register_cache(desc(2), [8, 16], [wrong])


def test_the_first_wrong_argument_is_named_however_they_are_ordered(
    manager: CacheManager,
) -> None:
    right = {"cache_key": CacheKey(1, 1), "cache": manager.allocate_cache(desc()), "batch_index": 0}
    given: dict[str, Any] = dict.fromkeys(reversed(right), "wrong")
    for name, value in right.items():
        with pytest.raises(TypeError, match=f"^{name}="):
            manager.pull_cache(**given)
        given[name] = value
