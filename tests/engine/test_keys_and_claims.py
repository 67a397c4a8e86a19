"""Keys: the rows that they name, the peers that may pull by them, and their end."""

from __future__ import annotations

import gc
import tracemalloc
from inspect import getfile

import pytest

import kvplan
from kvplan import BlocksCacheKey, CacheKey, LLMStatusCode, Rows, Transfer, Transfers
from kvplan.engine.claims import MAX_CLAIMS, KeyIndex
from kvplan.types import NO_ID
from tests.support.refusals import refused
from tests.support.wrappers import delay

from .caches import ALL_TENSORS, BLOCKS, SLOTS, as_peer, free_nbytes, key, pulled
from .conftest import POOL
from .test_registry import tensors

PADDING = CacheKey(7)
PREFIX = CacheKey(7, prefix_id=1)


def claimed(registry, item, holder="decode"):
    return registry.claim(item, holder)


class TestNames:
    def test_key_i_names_row_i_for_any_cluster(self, registry):
        entry = registry.allocate(SLOTS, paged=False, keys=[key(5, 98), PADDING, key(6, 99)])
        assert registry.find(key(5)) == (entry, 0)
        assert registry.find(key(6, cluster_id=2)) == (entry, 2)
        for unknown in (key(7), CacheKey(7, 5, model_id=1), CacheKey(7, prefix_id=5)):
            with refused("LLM_KV_CACHE_NOT_EXIST", "no cache has"):
                registry.find(unknown)
        with refused("LLM_PARAM_INVALID", "neither a request nor a prefix"):
            registry.find(PADDING)

    def test_a_key_has_one_owner(self, registry):
        registry.allocate(SLOTS, paged=False, keys=[PADDING, key(5)])
        with refused("LLM_PARAM_INVALID", r"cache_keys\[0\]=.* slot 1 of cache 1"):
            registry.register(SLOTS, tensors(), paged=False, keys=[key(5, cluster_id=3)])
        with refused("LLM_PARAM_INVALID", r"cache_keys\[2\]=.* slot 1 of this cache"):
            registry.allocate(SLOTS, paged=False, keys=[PADDING, key(6), key(6)])
        registry.allocate(SLOTS, paged=False, keys=[PADDING, PADDING, key(6)])  # no key was bound

    def test_a_key_names_a_request_or_a_prefix(self, registry):
        with refused("LLM_PARAM_INVALID", "a request and a prefix"):
            registry.allocate(SLOTS, paged=False, keys=[CacheKey(7, 1, prefix_id=1)])
        registry.allocate(SLOTS, paged=False, keys=[key(1), PREFIX])
        assert registry.find(key(1))[1] == 0
        assert registry.find(PREFIX)[1] == 1

    @pytest.mark.parametrize("first", ["allocate", "register"])
    @pytest.mark.parametrize("second", ["allocate", "register"])
    def test_a_paged_cache_of_a_model_is_not_replaced(self, registry, first, second):
        def make(kind, model_id):
            given = () if kind == "allocate" else (tensors(BLOCKS),)
            blocks_key = BlocksCacheKey(7, model_id)
            return getattr(registry, kind)(BLOCKS, *given, paged=True, keys=[blocks_key])

        entry = make(first, 1)
        with refused(
            "LLM_PARAM_INVALID", r"blocks_cache_key=BlocksCacheKey\(.*\) already names cache 1"
        ):
            make(second, 1)
        make(second, 2)
        assert entry.blocks_key == BlocksCacheKey(7, 1)
        assert registry.find(BlocksCacheKey(9, 1)) == (entry, 0)


class TestConsumption:
    def test_a_request_is_pulled_once(self, registry, transport):
        entry = registry.allocate(SLOTS, paged=False, keys=[key(1), key(2)])
        for item, row in ((key(2), 1), (key(1), 0)):
            claim = claimed(registry, item)
            assert (claim.entry, claim.batch_index) == (entry, row)
            registry.release(claim.claim_id, ALL_TENSORS)
            with refused("LLM_KV_CACHE_NOT_EXIST", "no cache has"):
                claimed(registry, item)
        assert registry.get(1) is entry
        assert pulled(transport, entry) == [0, 0]  # by id, any number of times

    def test_layer_by_layer_adds_up_and_a_failed_pull_does_not_count(self, registry):
        registry.allocate(SLOTS, paged=False, keys=[key(1)])
        for part in (range(1), None, range(0), range(1)):
            registry.release(claimed(registry, key(1)).claim_id, part)
        registry.release(claimed(registry, key(1)).claim_id, range(1, 10**18))  # as peers may
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            claimed(registry, key(1))

    def test_prefixes_and_registered_caches_are_pulled_by_many(self, registry):
        prefix = registry.allocate(SLOTS, paged=False, keys=[PREFIX])
        request = registry.register(SLOTS, tensors(), paged=False, keys=[key(1)])
        for item, entry in ((PREFIX, prefix), (key(1), request)):
            claims = [claimed(registry, item, holder) for holder in ("decode", "other")]
            for claim in claims:
                assert claim.entry is entry
                registry.release(claim.claim_id, ALL_TENSORS)
            assert registry.find(item) == (entry, 0)

    def test_a_claimed_request_belongs_to_one_holder(self, registry):
        registry.allocate(SLOTS, paged=False, keys=[key(1)])
        claims = []
        for _ in range(2):  # two layers at once
            claims.append(claimed(registry, key(1)))
            with refused("LLM_REPEAT_REQUEST", "being pulled by decode"):
                claimed(registry, key(1), "other")
        for claim in claims:
            registry.release(claim.claim_id, None)
        other = claimed(registry, key(1), "other")
        registry.release(claims[0].claim_id, ALL_TENSORS)  # already ended
        registry.release(other.claim_id, ALL_TENSORS, holder="decode")  # another holder's claim
        registry.find(key(1))
        registry.release_holder("decode")
        registry.release(other.claim_id, ALL_TENSORS, holder="other")
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            registry.find(key(1))

    def test_of_two_claims_of_one_holder_the_first_may_consume(self, registry):
        registry.allocate(SLOTS, paged=False, keys=[key(1)])
        first, second = (claimed(registry, key(1)) for _ in range(2))
        registry.release(first.claim_id, ALL_TENSORS)
        registry.allocate(SLOTS, paged=False, keys=[key(1)])  # reuses the key
        registry.release(second.claim_id, ALL_TENSORS)
        assert registry.find(key(1))[0].cache.cache_id == 2

    def test_a_lost_holder_has_pulled_nothing(self, registry):
        entry = registry.allocate(SLOTS, paged=False, keys=[key(1), key(2)])
        for value in (key(1), key(2)):
            claimed(registry, value)
        registry.release_holder("decode")
        registry.release_holder("decode")
        for row, value in enumerate((key(1), key(2))):
            claim = claimed(registry, value, "other")
            assert (claim.entry, claim.batch_index) == (entry, row)


class TestLifetime:
    def test_all_freed_caches_of_a_lost_holder_are_free(self, registry):
        before = free_nbytes(registry)
        for number in (1, 2, 3):
            registry.allocate(SLOTS, paged=False, keys=[key(number)])
            claimed(registry, key(number))
            registry.remove_key(key(number))
        for cache_id in (1, 3):
            registry.deallocate(cache_id)
        held = before - free_nbytes(registry)
        registry.release_holder("decode")
        assert [entry.cache.cache_id for entry, _ in registry.entries()] == [2]
        assert before - free_nbytes(registry) == held // 3

    def test_a_contiguous_cache_is_free_when_its_keys_are_gone(self, registry, transport, changes):
        registry.allocate(SLOTS, paged=False, keys=[key(1), key(2)])
        registry.deallocate(1)
        assert changes == [[1], []]  # it cannot be pulled by id
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            registry.get(1)
        claim = claimed(registry, key(1))
        assert pulled(transport, claim.entry) == [0, 0]  # but it can by key
        registry.release(claim.claim_id, ALL_TENSORS)
        del claim
        assert free_nbytes(registry) < POOL
        registry.remove_key(key(2))
        assert free_nbytes(registry) == POOL

    def test_keys_may_be_removed_before_the_cache(self, registry):
        registry.allocate(SLOTS, paged=False, keys=[key(1)])
        for _ in range(2):
            registry.remove_key(key(1))
        registry.get(1)
        registry.deallocate(1)
        assert free_nbytes(registry) == POOL

    def test_a_paged_cache_is_free_at_once_with_its_key(self, registry):
        registry.allocate(BLOCKS, paged=True, keys=[BlocksCacheKey(7)])
        registry.deallocate(1)
        assert free_nbytes(registry) == POOL
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            registry.find(BlocksCacheKey(7))
        registry.allocate(BLOCKS, paged=True, keys=[BlocksCacheKey(7)])

    @pytest.mark.parametrize("end", ["release", "fail", "holder"])
    def test_a_cache_freed_while_claimed_stays_until_the_claim_ends(self, registry, transport, end):
        remote = as_peer(transport, registry.allocate(SLOTS, paged=False, keys=[key(1)]))
        claim_id = claimed(registry, key(1)).claim_id
        registry.deallocate(1)
        registry.remove_key(key(1))
        remote.check()
        assert free_nbytes(registry) < POOL
        {
            "release": lambda: registry.release(claim_id, ALL_TENSORS),
            "fail": lambda: registry.release(claim_id, None),
            "holder": lambda: registry.release_holder("decode"),
        }[end]()
        with refused("LLM_KV_CACHE_NOT_EXIST", "deregistered"):
            remote.check()
        assert free_nbytes(registry) == POOL

    def test_keys_of_registered_caches_end_only_with_them(self, registry, transport):
        entry = registry.register(SLOTS, tensors(), paged=False, keys=[key(1)])
        registry.remove_key(key(1))
        remote = as_peer(transport, entry)
        claim = claimed(registry, key(1))
        registry.unregister(1)  # the user owns the memory, so a claim does not keep it
        with refused("LLM_KV_CACHE_NOT_EXIST", "deregistered"):
            remote.check()
        with refused("LLM_KV_CACHE_NOT_EXIST"):
            registry.find(key(1))
        registry.register(SLOTS, tensors(), paged=False, keys=[key(1)])
        registry.release(claim.claim_id, ALL_TENSORS)
        registry.find(key(1))

    def test_remove_key_accepts_an_unknown_key(self, registry):
        for value in (key(1), PADDING, CacheKey(7, 1, prefix_id=1), CacheKey(7, NO_ID, 3, 4)):
            registry.remove_key(value)
        with pytest.raises(TypeError, match="key=BlocksCacheKey"):
            registry.remove_key(BlocksCacheKey(7))

    def test_a_cache_freed_during_a_transfer_stays_until_its_end(self, registry):
        def start(transfers):
            src, dst = (registry.allocate(SLOTS, paged=True) for _ in range(2))
            plan = kvplan.plan(Transfer(Rows(SLOTS, [0, 1]), Rows(SLOTS, [2, 3])), local="dst")
            return transfers.submit(plan, src.memory, dst.memory)

        with Transfers(wrap=lambda backend: delay(backend, 60_000)) as transfers:
            task = start(transfers)
            for cache_id in (1, 2):
                registry.deallocate(cache_id)
            assert free_nbytes(registry) == POOL - 2 * (1 << 12)
            task.cancel()
        del task
        gc.collect()
        assert free_nbytes(registry) == POOL


def test_caches_without_keys_leave_nothing_behind():
    index = KeyIndex()
    tracemalloc.start()
    try:
        for cache_id in range(10_000):
            index.bind(cache_id, [PADDING], num_tensors=1, consumable=True)
            assert not index.is_used(cache_id)
            index.unbind(cache_id)
        taken = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    # Other threads of the process allocate too, so count only allocations of the index.
    own = taken.filter_traces([tracemalloc.Filter(True, getfile(KeyIndex))])
    assert sum(trace.size for trace in own.traces) < 10_000


def test_the_claims_of_one_holder_are_limited(registry):
    registry.allocate(SLOTS, paged=False, keys=[PREFIX])
    claims = [claimed(registry, PREFIX, "greedy") for _ in range(MAX_CLAIMS)]
    with refused(LLMStatusCode.LLM_LINK_BUSY, f"greedy has {MAX_CLAIMS} claims open"):
        claimed(registry, PREFIX, "greedy")
    claimed(registry, PREFIX, "modest")
    registry.release(claims[0].claim_id, ALL_TENSORS)
    claimed(registry, PREFIX, "greedy")
    registry.release_holder("greedy")
    claimed(registry, PREFIX, "greedy")
