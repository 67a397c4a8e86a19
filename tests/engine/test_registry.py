"""Caches that are made, offered and ended: ids, access of peers, refusals."""

from __future__ import annotations

import ctypes
import gc
import pickle
import weakref
from dataclasses import replace
from functools import partial
from types import CodeType

import numpy as np
import pytest

from kvplan import BlocksCacheKey, Cache, CacheDesc, CacheKey, DataType, LLMException, Placement
from kvplan.engine.entry import PendingDeregistrations
from kvplan.engine.memory import tensor_arrays
from kvplan.engine.options import Options
from kvplan.engine.registry import CacheRegistry
from kvplan.transport.local import LocalTransport
from tests.support.lines import interrupted
from tests.support.refusals import refused

from .caches import BLOCKS, SLOTS, as_peer, free_nbytes, key, pulled
from .conftest import MAX_RANGES, POOL

TOO_LARGE = CacheDesc(num_tensors=1, shape=(1, POOL + 1), data_type=DataType.DT_UINT8)


def tensors(desc=SLOTS, value=0):
    return [np.full(desc.shape, value + i, np.uint8) for i in range(desc.num_tensors)]


def addresses(arrays):
    return [array.ctypes.data for array in arrays]


def test_ids_rise_from_one_with_every_attempt(registry):
    assert registry.allocate(SLOTS, paged=False).cache.cache_id == 1
    with refused("LLM_OUT_OF_MEMORY", "1048577 bytes requested"):
        registry.allocate(TOO_LARGE, paged=False)
    with refused("LLM_PARAM_INVALID", "tensors has 1 elements; num_tensors=2"):
        registry.register(SLOTS, [1], paged=False)
    with pytest.raises(TypeError, match=r"keys\[0\]"):  # refused before it counts as an attempt
        registry.allocate(SLOTS, paged=False, keys=[5])
    assert registry.register(SLOTS, tensors(), paged=False).cache.cache_id == 4


def test_peers_reach_offered_caches_until_they_are_freed(registry, transport, changes):
    entry = registry.allocate(SLOTS, paged=False)
    for i, array in enumerate(tensor_arrays(SLOTS, entry.memory)):
        array[:] = 5 + i
    assert registry.survey(dict) == {1: entry}
    assert pulled(transport, entry) == [5, 6]
    remote = as_peer(transport, entry)
    registry.deallocate(1)
    assert changes == [[1], []]
    with refused("LLM_KV_CACHE_NOT_EXIST", "deregistered"):
        remote.check()
    with refused("LLM_KV_CACHE_NOT_EXIST", r"cache_id=1 does not exist; known are \[\]"):
        registry.get(1)


def test_registered_arrays_are_reached_in_place(registry, transport):
    arrays = tensors(value=3)
    entry = registry.register(SLOTS, arrays, paged=False)
    assert entry.cache.tensor_addrs == tuple(addresses(arrays))
    assert pulled(transport, entry) == [3, 4]
    registry.unregister(entry.cache.cache_id)
    assert registry.survey(dict) == {}


@pytest.mark.parametrize("writable", [None, False])
def test_registered_arrays_are_held_until_they_are_unregistered(registry, writable):
    held = np.zeros((2, *SLOTS.shape), np.uint8)
    gone = weakref.ref(held)
    registry.register(SLOTS, list(held), paged=False, writable=writable)
    del held
    assert gone() is not None
    registry.unregister(1)
    assert gone() is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            np.zeros(SLOTS.shape, np.float16),
            r"is float16 of shape \(4, 256\); cache_desc says DT_UINT8 of shape \(4, 256\)",
        ),
        (
            np.zeros((4, 255), np.uint8),
            r"is uint8 of shape \(4, 255\); cache_desc says DT_UINT8 of shape \(4, 256\)",
        ),
        (
            bytearray(3),
            r"has 3 bytes; a tensor of the cache, of shape \(4, 256\) and DT_UINT8, has 1024",
        ),
    ],
)
def test_a_tensor_of_another_form_is_named_with_what_the_cache_has(registry, wrong, message):
    with refused("LLM_PARAM_INVALID", rf"tensors\[1\] {message}"):
        registry.register(SLOTS, [tensors()[0], wrong], paged=False)


def test_addresses_work_like_arrays(registry, transport):
    arrays = tensors(value=8)
    for given in (addresses(arrays), tuple(np.array(addresses(arrays), np.uint64))):
        entry = registry.register(SLOTS, given, paged=False)
        assert pulled(transport, entry) == [8, 9]


def test_adjacent_tensors_are_one_range(registry, transport):
    both = np.full((2, *SLOTS.shape), 5, np.uint8)
    wide = CacheDesc(num_tensors=1, shape=SLOTS.shape, data_type=DataType.DT_UINT8)
    for _ in range(MAX_RANGES):  # one range each, in any order
        entry = registry.register(SLOTS, [both[1], both[0]], paged=False)
        assert pulled(transport, entry) == [5, 5]
    with refused("LLM_OUT_OF_MEMORY", f"{MAX_RANGES}"):
        registry.register(wide, [both[0]], paged=False)
    registry.unregister(1)
    registry.register(wide, [both[0]], paged=False)


def test_a_cache_that_cannot_be_offered_leaves_nothing_behind(registry, transport, changes):
    apart = np.zeros((4, *SLOTS.shape), np.uint8)
    for _ in range(MAX_RANGES // 2 - 1):
        registry.register(SLOTS, [apart[0], apart[2]], paged=False)
    registry.allocate(SLOTS, paged=False)
    before, offered = free_nbytes(registry), transport.metadata()
    with refused("LLM_OUT_OF_MEMORY", "max_registrations"):  # the second range does not fit
        registry.register(SLOTS, [apart[0], apart[2]], paged=False, keys=[key(1)])
    assert transport.metadata() == offered
    registry.allocate(SLOTS, paged=False, keys=[key(1)])  # the key is free again
    with refused("LLM_OUT_OF_MEMORY", "max_registrations"):
        registry.allocate(SLOTS, paged=False)
    assert free_nbytes(registry) == before - (1 << 12)
    assert len(changes) == MAX_RANGES // 2 + 1


def test_caches_that_peers_do_not_reach(registry, transport):
    entry = registry.register(SLOTS, tensors(), paged=False, keys=[key(1)], remote_accessible=False)
    assert (entry.offered.metadata, registry.survey(dict)) == ({}, {})
    assert registry.entries() == [(entry, True)]
    assert transport.metadata() == transport.metadata([])
    with refused("LLM_KV_CACHE_NOT_EXIST", "not remote accessible"):
        registry.find(key(1))
    with refused("LLM_KV_CACHE_NOT_EXIST", "not remote accessible"):
        registry.claim(key(1), "decode")


def test_read_only_arrays_are_not_offered_for_writing(registry, transport):
    arrays = tensors()
    arrays[1].flags.writeable = False
    entry = registry.register(SLOTS, arrays, paged=False)
    assert not entry.memory.writable
    with refused("LLM_PARAM_INVALID", "writable=False"):
        transport.connect(entry.offered.metadata["local"]).memory(
            entry.cache.tensor_addrs, SLOTS.tensor_nbytes, writable=True
        )
    with refused("LLM_PARAM_INVALID", "writable=True"):
        registry.register(SLOTS, arrays, paged=False, writable=True)
    for given in (tensors(), addresses(arrays)):
        assert not registry.register(SLOTS, given, paged=False, writable=False).memory.writable


def test_without_a_pool_a_cache_has_an_arena_of_its_own(registry, transport):
    host = CacheDesc(1, (2, 100), DataType.DT_UINT8, placement=Placement.HOST)
    before = free_nbytes(registry)
    entry = registry.allocate(host, paged=True)
    assert pulled(transport, entry) == [0]
    assert free_nbytes(registry) == before
    registry.deallocate(1)


def test_an_arena_of_one_cache_is_zeroed_and_ends_with_its_last_user(transport):
    registry = CacheRegistry((transport,), Options(), lambda: None)
    entry = registry.allocate(SLOTS, paged=False)
    arrays = tensor_arrays(SLOTS, entry.memory)
    address = arrays[0].ctypes.data
    assert not arrays[0].any()
    registry.deallocate(1)
    registry.close()
    del entry
    arrays[0][:] = 7  # still there
    del arrays
    with refused("LLM_PARAM_INVALID", "not mapped"):
        registry.resolve(Cache(SLOTS, tensor_addrs=(address, address + SLOTS.tensor_nbytes)))


def test_every_transport_offers_a_cache(transport):
    with LocalTransport() as second:
        second.name = "second"
        registry = CacheRegistry((transport, second), Options(), lambda: None)
        entry = registry.allocate(SLOTS, paged=False)
        assert list(entry.offered.metadata) == ["local", "second"]
        for each in (transport, second):
            as_peer(each, entry).check()
        registry.close()
        assert second.metadata() == second.metadata([])


class TestResolve:
    def test_a_copy_and_one_made_by_hand_are_the_cache_of_that_id(self, registry):
        entry = registry.allocate(SLOTS, paged=True)
        made = entry.cache
        for same in (made, pickle.loads(pickle.dumps(made)), Cache(SLOTS, 1),
                     Cache(SLOTS, 1, made.tensor_addrs)):  # fmt: skip
            assert registry.resolve(same) is entry

    def test_one_that_differs_is_refused_with_what_is_here(self, registry):
        made = registry.allocate(SLOTS, paged=True).cache
        with refused("LLM_PARAM_INVALID", r"dst=.*: cache 1 of this engine has cache_desc="):
            registry.resolve(Cache(BLOCKS, 1), "dst")
        with refused("LLM_PARAM_INVALID", r"cache 1 of this engine has tensor_addrs="):
            registry.resolve(replace(made, tensor_addrs=(1,) * SLOTS.num_tensors))
        with refused("LLM_KV_CACHE_NOT_EXIST", "dst=.* was made by another engine"):
            registry.resolve(replace(made, owner=b"another"), "dst")

    def test_a_cache_without_id_is_found_by_its_addresses(self, registry):
        arrays = tensors()
        entry = registry.resolve(Cache(SLOTS, tensor_addrs=addresses(arrays)))
        assert entry.memory.addresses.tolist() == addresses(arrays)
        assert entry.paged is None
        assert registry.survey(dict) == {}

    def test_a_cache_without_id_and_addresses_is_refused(self, registry):
        with refused("LLM_PARAM_INVALID", "addresses is empty"):
            registry.resolve(Cache(SLOTS))
        with refused("LLM_KV_CACHE_NOT_EXIST", "cache_id=3"):
            registry.resolve(Cache(SLOTS, cache_id=3))
        with pytest.raises(TypeError, match="cache=3 must be Cache"):
            registry.resolve(3)


class TestEnds:
    def test_an_error_names_the_caches_that_can_be_given(self, registry):
        registry.allocate(SLOTS, paged=False, keys=[key(1)])  # its key keeps the memory
        registry.allocate(SLOTS, paged=False)
        registry.deallocate(1)
        with refused("LLM_KV_CACHE_NOT_EXIST", r"cache_id=1 does not exist; known are \[2\]"):
            registry.get(1)

    def test_unknown_and_ended_caches_are_ignored(self, registry):
        registry.allocate(SLOTS, paged=False)
        for _ in range(2):
            for cache_id in (1, 5, -1):
                registry.deallocate(cache_id)
            registry.unregister(1)
        registry.register(SLOTS, tensors(), paged=False)
        assert [*registry.survey(dict)] == [2]
        for _ in range(2):
            registry.unregister(2)
            assert registry.survey(dict) == {}

    def test_each_kind_of_cache_has_its_own_end(self, registry):
        registry.allocate(SLOTS, paged=False)
        registry.register(SLOTS, tensors(), paged=False)
        with refused("LLM_PARAM_INVALID", "cache_id=1 was allocated; deallocate it"):
            registry.unregister(1)
        with refused("LLM_PARAM_INVALID", "cache_id=2 was registered; unregister it"):
            registry.deallocate(2)
        with pytest.raises(TypeError, match="cache_id='a'"):
            registry.unregister("a")
        with pytest.raises(ValueError, match="cache_id"):
            registry.deallocate(2**63)

    def test_a_closed_registry_refuses_calls(self, registry, transport):
        entry = registry.allocate(SLOTS, paged=False, keys=[key(1)])
        claim = registry.claim(key(1), "decode")
        for _ in range(2):
            registry.close()
        assert registry.entries() == []
        assert transport.metadata() == transport.metadata([])
        registry.release(claim.claim_id, range(2))
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            registry.find(key(1))
        with refused("LLM_ENGINE_FINALIZED", "finalized"):
            registry.allocate(SLOTS, paged=False)
        cache = Cache(SLOTS, tensor_addrs=entry.cache.tensor_addrs)
        registry.resolve(cache)  # a caller still uses it
        del entry, claim
        with refused("LLM_PARAM_INVALID", "not mapped"):
            registry.resolve(cache)


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "error"),
        [
            ("ab", TypeError),
            ({1, 2}, TypeError),
            (np.zeros((2, 4, 256), np.uint8), TypeError),
            ([1, "a"], TypeError),
            ([True, True], TypeError),
            ([0, 4096], LLMException),
            ([-1, 4096], ValueError),
            ([2**64, 4096], ValueError),
            ([4096, 8192], LLMException),
            ([], LLMException),
            ([np.zeros(1024, np.uint8)], LLMException),
            ([np.zeros(1024, np.uint8), np.zeros(1023, np.uint8)], LLMException),
            ([np.zeros(1024, np.uint8), np.zeros(2048, np.uint8)[::2]], LLMException),
        ],
        ids=str,
    )
    def test_invalid_tensors_are_refused(self, registry, given, error):
        with pytest.raises(error):
            registry.register(SLOTS, given, paged=False)
        assert registry.entries() == []

    @pytest.mark.parametrize("wrong", [0, -1, "a", np.zeros((4, 512), np.uint8)[:, ::2]])
    def test_errors_call_a_tensor_as_the_caller_does(self, registry, wrong):
        given = [4096 if isinstance(wrong, int) else np.zeros(1024, np.uint8), wrong]
        with pytest.raises(Exception, match=r"tensors\[1\]"):
            registry.register(SLOTS, given, paged=False)

    def test_more_tensors_than_the_options_allow(self, registry):
        nine = CacheDesc(num_tensors=9, shape=(1, 8), data_type=DataType.DT_UINT8)
        with refused("LLM_PARAM_INVALID", "num_tensors=9; at most max_tensors=8"):
            registry.register(nine, tensors(nine), paged=True)

    def test_more_caches_than_can_be_published(self, registry, transport):
        many = CacheDesc(num_tensors=60_000, shape=(1,), data_type=DataType.DT_UINT8)
        before = free_nbytes(registry)
        with refused(
            "LLM_PARAM_INVALID", "num_tensors=60000 take .* about 58[0-9]{3} such tensors"
        ):
            registry.allocate(many, paged=True)
        gc.collect()
        assert free_nbytes(registry) == before
        assert registry.entries() == []
        assert transport.metadata() == transport.metadata([])

    def test_more_ranges_than_can_be_published(self):
        scattered = CacheDesc(num_tensors=8_000, shape=(1,), data_type=DataType.DT_UINT8)
        memory = np.zeros(16_000, np.uint8)
        addresses = range(memory.ctypes.data, memory.ctypes.data + 16_000, 2)
        with LocalTransport() as transport:
            registry = CacheRegistry((transport,), Options(max_tensors=8_000), lambda: None)
            with refused("LLM_PARAM_INVALID", "num_tensors=8000 take .* such tensors"):
                registry.register(scattered, addresses, paged=True)
            registry.register(scattered, addresses, paged=True, remote_accessible=False)
            registry.close()

    def test_invalid_keys_are_refused(self, registry):
        with refused("LLM_PARAM_INVALID", "cache_keys has 5 elements; at most batch_size=4"):
            registry.allocate(SLOTS, paged=False, keys=[key(i) for i in range(5)])
        with refused("LLM_PARAM_INVALID", "blocks_cache_key=.*at most one"):
            registry.allocate(BLOCKS, paged=True, keys=[BlocksCacheKey(1), BlocksCacheKey(1, 2)])
        with pytest.raises(TypeError, match="blocks_cache_key="):
            registry.allocate(BLOCKS, paged=True, keys=[CacheKey(1, 1)])
        with pytest.raises(TypeError, match=r"cache_keys\[0\]="):
            registry.allocate(SLOTS, paged=False, keys=[BlocksCacheKey(1)])
        with pytest.raises(TypeError, match="cache_keys=5"):
            registry.allocate(SLOTS, paged=False, keys=5)

    def test_a_missing_description_is_refused(self, registry):
        with pytest.raises(TypeError, match="cache_desc=5"):
            registry.allocate(5, paged=False)


def test_addresses_are_looked_up_once_when_they_are_registered(registry):
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(SLOTS.nbytes)
    # Far below other mappings, so that no other thread fills the hole.
    memory = libc.mmap(ctypes.c_void_p(1 << 45), size, 3, 0x22, -1, 0)
    given = [memory, memory + SLOTS.tensor_nbytes]
    entry = registry.register(SLOTS, given, paged=False)
    libc.munmap(ctypes.c_void_p(memory), size)
    # users promise to keep the memory: a check for each transfer would cost too much
    entry.memory.check()
    with refused("LLM_PARAM_INVALID", "not mapped"):
        registry.register(SLOTS, given, paged=False)


def test_a_renewed_cache_is_found_by_its_addresses_as_it_is_now(registry):
    entry = registry.register(SLOTS, tensors(), paged=False)
    cache_id = entry.cache.cache_id
    assert [extent.cache for extent in registry.address_index().extents] == [entry] * 2
    registry.renew([cache_id])
    renewed = registry.get(cache_id)
    assert renewed is not entry
    assert all(extent.cache is renewed for extent in registry.address_index().extents)


@pytest.mark.parametrize("same", [True, False])
def test_a_signal_handler_may_unregister_too(registry, same):
    """The handler unregisters the same cache or another one at a line of the interrupted call."""
    functions = [CacheRegistry.unregister, *vars(PendingDeregistrations).values()]
    inside = [function.__code__ for function in functions if hasattr(function, "__code__")]
    # Before Python 3.12 a comprehension is a separate function.
    inside += [const for code in inside for const in code.co_consts if isinstance(const, CodeType)]
    for line in range(1, 100):
        first, second = (
            registry.register(SLOTS, tensors(), paged=False).cache.cache_id for _ in range(2)
        )
        if not interrupted(
            line,
            partial(registry.unregister, first),
            partial(registry.unregister, first if same else second),
            inside,
        ):
            break
        registry.unregister(second)
        assert registry.survey(dict) == {}
    assert line > 10
