"""The registry compared with a model: live caches, the view of peers, free pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvplan import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMStatusCode
from kvplan.engine.memory import tensor_arrays
from kvplan.engine.options import Options
from kvplan.engine.pools import PoolConfig
from kvplan.engine.registry import CacheRegistry
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.metadata import Metadata
from kvplan.types import Placement

from .caches import as_peer, tried

PAGE = 1 << 10
PAGES = 10
TENSORS = 2


@dataclass(eq=False)
class Model:
    """A live cache, or one whose memory is still used."""

    cache_id: int
    paged: bool
    pages: int  # 0: registered
    by_id: bool = True
    keys: set[Any] = field(default_factory=set)
    claims: set[int] = field(default_factory=set)
    in_flight: list[Any] = field(default_factory=list)  # objects that transfers hold

    @property
    def lives(self) -> bool:
        return self.by_id or bool(self.keys) or bool(self.claims)


def fill(entry: Any) -> None:
    for i, array in enumerate(tensor_arrays(entry.cache.cache_desc, entry.memory)):
        array[:] = (10 * entry.cache.cache_id + i) % 256


class RegistryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.transport = LocalTransport(max_registrations=64)
        self.offered: dict[int, Any] = {}
        options = Options(mem_pool_config=PoolConfig(PAGES * PAGE, page_shift=10))
        self.registry = CacheRegistry((self.transport,), options, self.changed)
        self.caches: list[Model] = []
        self.bound: dict[Any, Model] = {}
        self.pulled: dict[Any, set[int]] = {}
        self.claims: dict[int, tuple[Any, Model, str]] = {}
        self.attempts = 0

    def changed(self) -> None:
        self.offered = self.registry.survey(dict)

    def teardown(self) -> None:
        self.registry.close()
        assert self.transport.metadata() == self.transport.metadata([])
        self.transport.close()

    keys_of_requests = st.lists(st.integers(0, 4), max_size=3)

    def made(self, entry: Any, keys: list[Any], pages: int) -> None:
        model = Model(self.attempts, entry.paged, pages, keys=set(keys))
        assert entry.cache.cache_id == self.attempts
        fill(entry)
        self.caches.append(model)
        self.bound |= dict.fromkeys(keys, model)
        self.pulled |= {key: set() for key in keys}

    def make(self, paged: bool, pages: int, numbers: list[int], owned: bool) -> None:
        desc = CacheDesc(TENSORS, (4, pages * PAGE // 4 // TENSORS), DataType.DT_UINT8)
        keys: list[Any] = [CacheKey(1, number) for number in numbers]
        if paged:
            keys = [BlocksCacheKey(1, number) for number in numbers[:1]]
        taken = len(set(keys)) < len(keys) or any(key in self.bound for key in keys)
        self.attempts += 1
        if owned:
            entry, status = tried(lambda: self.registry.allocate(desc, paged=paged, keys=keys))
        else:
            arrays = [np.zeros(desc.shape, np.uint8) for _ in range(TENSORS)]
            entry, status = tried(
                lambda: self.registry.register(desc, arrays, paged=paged, keys=keys)
            )
        if entry is not None:
            self.made(entry, keys, pages if owned else 0)
            assert not taken
        elif status is LLMStatusCode.LLM_OUT_OF_MEMORY:
            assert owned
            assert pages > 1 or not self.free_pages()  # one page fits into any hole
        else:
            assert (status, taken) == (LLMStatusCode.LLM_PARAM_INVALID, True)

    @rule(paged=st.booleans(), pages=st.integers(1, 4), numbers=keys_of_requests)
    def allocate(self, paged: bool, pages: int, numbers: list[int]) -> None:
        self.make(paged, pages, numbers, owned=True)

    @rule(paged=st.booleans(), numbers=keys_of_requests)
    def register(self, paged: bool, numbers: list[int]) -> None:
        self.make(paged, 1, numbers, owned=False)

    def some(self, data: Any, wanted: Any) -> Model | None:
        found = [cache for cache in self.caches if wanted(cache)]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def deallocate(self, data: Any) -> None:
        if model := self.some(data, lambda value: value.pages):
            self.registry.deallocate(model.cache_id)
            model.by_id = False
            if model.paged:
                self.forget_keys(model)

    @rule(data=st.data())
    def unregister(self, data: Any) -> None:
        if model := self.some(data, lambda value: not value.pages):
            self.registry.unregister(model.cache_id)
            model.by_id = False
            self.forget_keys(model)
            model.claims.clear()

    def forget_keys(self, model: Model) -> None:
        for key in model.keys:
            del self.bound[key]
        model.keys.clear()

    @rule(number=st.integers(0, 4))
    def remove_key(self, number: int) -> None:
        key = CacheKey(3, number)
        self.registry.remove_key(key)
        model = self.bound.get(CacheKey(1, number))
        if model is not None and model.pages:
            del self.bound[CacheKey(1, number)]
            model.keys.discard(CacheKey(1, number))

    @rule(number=st.integers(0, 4), holder=st.sampled_from("ab"))
    def claim(self, number: int, holder: str) -> None:
        item = CacheKey(1, number)
        model = self.bound.get(item)
        others = {
            who for key, owner, who in self.claims.values() if (key, owner) == (item, model)
        } - {holder}
        claim, status = tried(lambda: self.registry.claim(CacheKey(8, number), holder))
        if model is None:
            assert status is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            return
        if model.pages and others:
            assert status is LLMStatusCode.LLM_REPEAT_REQUEST
            return
        assert claim is not None
        assert claim.entry.cache.cache_id == model.cache_id
        self.claims[claim.claim_id] = (item, model, holder)
        model.claims.add(claim.claim_id)

    @rule(data=st.data(), tensors=st.sampled_from([None, range(1), range(1, 2), range(2)]))
    def release(self, data: Any, tensors: range | None) -> None:
        if not self.claims:
            return
        claim_id = data.draw(st.sampled_from(sorted(self.claims)))
        item, model, _ = self.claims.pop(claim_id)
        self.registry.release(claim_id, tensors)
        model.claims.discard(claim_id)
        if model.pages and self.bound.get(item) is model:
            self.pulled[item] |= set(tensors or ())
            if len(self.pulled[item]) == TENSORS:
                del self.bound[item]
                model.keys.discard(item)

    @rule(holder=st.sampled_from("ab"))
    def release_holder(self, holder: str) -> None:
        self.registry.release_holder(holder)
        for claim_id, (_, model, who) in list(self.claims.items()):
            if who == holder:
                del self.claims[claim_id]
                model.claims.discard(claim_id)

    @rule(data=st.data())
    def start_transfer(self, data: Any) -> None:
        if model := self.some(data, lambda value: value.by_id):
            entry = self.registry.get(model.cache_id)
            model.in_flight += tensor_arrays(entry.cache.cache_desc, entry.memory)

    @rule(data=st.data())
    def end_transfers(self, data: Any) -> None:
        if model := self.some(data, lambda value: value.in_flight):
            model.in_flight.clear()

    def free_pages(self) -> int:
        self.caches = [cache for cache in self.caches if cache.lives or cache.in_flight]
        return PAGES - sum(cache.pages for cache in self.caches)

    @invariant()
    def only_freed_pages_are_free(self) -> None:
        assert self.registry.pools.free_nbytes() == {Placement.DEVICE: self.free_pages() * PAGE}

    @invariant()
    def peers_see_living_caches(self) -> None:
        ids = {cache.cache_id for cache in self.caches if cache.by_id}
        assert self.registry.survey(dict).keys() == self.offered.keys() == ids
        living = {item.cache.cache_id: by_id for item, by_id in self.registry.entries()}
        kept = [cache for cache in self.caches if cache.by_id or (cache.lives and cache.pages)]
        assert living == {cache.cache_id: cache.by_id for cache in kept}
        assert list(living) == sorted(living)
        for entry in self.offered.values():
            as_peer(self.transport, entry).check()

    @invariant()
    def addresses_find_living_caches(self) -> None:
        """Check after each change, so that an outdated index is found."""
        extents = self.registry.address_index().extents
        living = [self.registry.get(cache.cache_id) for cache in self.caches if cache.by_id]
        assert len(extents) == TENSORS * len(living)
        assert {id(extent.cache) for extent in extents} == {*map(id, living)}

    @invariant()
    def only_living_caches_are_registered(self) -> None:
        ranges = len(Metadata.from_bytes(self.transport.metadata()).ranges)
        owned = [cache for cache in self.caches if cache.lives and cache.pages]
        registered = [cache for cache in self.caches if cache.by_id and not cache.pages]
        assert len(owned) + len(registered) <= ranges <= len(owned) + TENSORS * len(registered)

    @invariant()
    def no_byte_has_two_owners(self) -> None:
        for model in self.caches:
            arrays = list(model.in_flight[-TENSORS:])
            if model.by_id:
                entry = self.registry.get(model.cache_id)
                arrays += tensor_arrays(entry.cache.cache_desc, entry.memory)
            for i, array in enumerate(arrays):
                assert (array == (10 * model.cache_id + i % TENSORS) % 256).all()


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(stateful_step_count=40)
