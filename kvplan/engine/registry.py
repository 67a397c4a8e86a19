"""The registry of caches: makes them, offers them to peers, finds and frees them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import call, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from kvnative._signals import Mutex, signals_deferred
from kvplan.engine.claims import AnyKey, BoundKey, KeyIndex, check_fit, check_keys
from kvplan.engine.entry import (
    PendingDeregistrations,
    ad_hoc,
    check_publishable,
    end_all,
    renew_all,
)
from kvplan.engine.memory import CacheMemory, memory_of_span, memory_of_tensors, offered_ranges
from kvplan.engine.options import Options
from kvplan.engine.pools import Pools, Span
from kvplan.execution.memory import take_back
from kvplan.links.address_index import AddressIndex, Extent
from kvplan.links.local_engine import CacheEntry, Claim
from kvplan.status import LLMException, finalized, invalid, not_exist
from kvplan.transport.transport import Transport, offer
from kvplan.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, Placement
from kvplan.validation import INT64_MAX, check_type, check_width, shown

if TYPE_CHECKING:
    from kvplan.device.device import Device
    from kvplan.lease import BlockLease
    from kvplan.transport.protocol import Registrable

_T = TypeVar("_T")


class CacheRegistry:
    """All caches of one engine; thread-safe.

    An allocated cache lives until its id, its last key and its last claim are gone; without the id,
    peers reach it only by key. Its memory returns to its pool after the last transfer and the last
    array. A registered cache ends when it is unregistered; its memory belongs to the user.

    Args:
        transports: offer the caches to peers.
        options: the pools, and the largest number of tensors of a registered cache.
        on_change: called after a cache is added, renewed or freed, in the thread that does so.
        device: holds caches with Placement.DEVICE; None: the host holds all caches.

    Attributes:
        owner: the value of `Cache.owner` of each cache.
        moved_leases: see `OfferedCaches`.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        options: Options,
        on_change: Callable[[], None],
        device: Device | None = None,
    ) -> None:
        self._transports = tuple(transports)
        self._device = device
        self._max_tensors = options.max_tensors
        self._on_change = on_change
        configs = {
            Placement.DEVICE: options.mem_pool_config,
            Placement.HOST: options.host_mem_pool_config,
        }
        self.pools = Pools(
            self._transports,
            configs,
            device,
            prefault=options.prefault,
            allow_overcommit=options.allow_overcommit,
            pages=options.pages,
            numa_node=options.numa_node if isinstance(options.numa_node, int) else None,
        )
        # Re-entrant: a finalizer of the garbage collector or a signal handler may enter again. So
        # loops run over copies, and an entry that was just seen may be gone.
        self._mutex = Mutex()
        self.owner = secrets.token_bytes(8)
        self.moved_leases: dict[int, BlockLease] = {}
        self._closed = False
        self._last_id = 0
        self._held: dict[int, CacheEntry] = {}
        self._pending = PendingDeregistrations()
        # Caches whose id was not freed. `get` reads the dict without the lock.
        self._entries: dict[int, CacheEntry] = {}
        self._keys = KeyIndex()
        self._by_address: AddressIndex[CacheEntry] | None = None  # None: outdated

    def allocate(self, desc: CacheDesc, *, paged: bool, keys: Sequence[AnyKey] = ()) -> CacheEntry:
        """Make a cache in memory of the placement's pool, or without a pool in its own memory.

        Fresh memory is zeroed; pages of a pool keep their previous content.

        Args:
            desc: description of the cache; its tensors follow each other in memory.
            paged: True if blocks address the cache.
            keys: at most one BlocksCacheKey for a paged cache. Otherwise a CacheKey for each row,
                from the first row on; a padding key skips a row.
        """
        check_type("cache_desc", desc, CacheDesc)
        check_keys(keys, paged)
        cache_id = self._next_id(desc, keys)
        span = self.pools.take(desc.placement, desc.nbytes)
        memory, view = memory_of_span(desc, span), span.view(desc.nbytes)
        return self._publish(cache_id, desc, memory, (view,), paged, keys, span)

    def register(
        self,
        desc: CacheDesc,
        tensors: Sequence[Any],
        *,
        paged: bool,
        keys: Sequence[AnyKey] = (),
        remote_accessible: bool = True,
        writable: bool | None = None,
        name: str = "",
    ) -> CacheEntry:
        """Register the user's memory as a cache; see `CacheOperations.register_cache`.

        Args:
            paged: True if blocks address the cache.
            keys: as for `allocate`.
            writable: True if transfers may write to the cache. None: True for addresses and for
                writable arrays.
            name: name of the memory in plans at both ends; empty: its id.
        """
        check_type("cache_desc", desc, CacheDesc)
        check_keys(keys, paged)
        check_type("remote_accessible", remote_accessible, bool)
        if writable is not None:
            check_type("writable", writable, bool)
        cache_id = self._next_id(desc, keys)
        if desc.num_tensors > self._max_tensors:
            raise invalid(
                f"num_tensors={desc.num_tensors}; at most max_tensors={self._max_tensors} can be "
                "registered"
            )
        memory = memory_of_tensors(desc, tensors, writable=writable, device=self._device)
        ranges = offered_ranges(memory) if remote_accessible else ()
        return self._publish(cache_id, desc, memory, ranges, paged, keys, name=name)

    def deallocate(self, cache_id: int) -> None:
        """See `CacheOperations.deallocate_cache`; an unknown or freed id has no effect."""
        with self._mutex:
            if (entry := self._entry_of(cache_id, owned=True)) is None:
                return
            if self._entries.pop(cache_id, None) is None:
                return
            self._by_address = None
            if entry.paged:
                self._keys.unbind(cache_id)
            unused = self._pop_unused(cache_id)
        end_all(unused)
        self._on_change()

    def unregister(self, cache_id: int) -> None:
        """See `CacheOperations.unregister_cache`. The registrations have ended on return."""
        ended: list[CacheEntry] = []
        try:
            with signals_deferred, self._mutex:
                there = self._entry_of(cache_id, owned=False) is not None
                if there and self._entries.pop(cache_id, None) is not None:
                    self._by_address = None
                    self._keys.unbind(cache_id)
                    self._pending.add([self._held.pop(cache_id)])
                # Also earlier registrations of the cache, and those that another call is ending.
                ended = self._pending.of(cache_id)
            for entry in ended:
                why = f"this engine has unregistered cache {entry.cache.cache_id} meanwhile"
                take_back(entry.memory, why)
        except BaseException:  # an interrupt
            self._pending.leave(ended)
            raise
        if ended:
            with signals_deferred:
                self._pending.end(ended)
                self._on_change()

    def renew(self, cache_ids: Iterable[int]) -> None:
        """Register caches again with the transports; an unknown id has no effect."""
        with self._mutex:
            held = [self._held[cache_id] for cache_id in cache_ids if cache_id in self._held]
        with signals_deferred:
            self._renew(held)

    def _renew(self, held: Sequence[CacheEntry]) -> None:
        renewed = renew_all(held, self._transports)
        ended = []
        with self._mutex:
            for before, now in zip(held, renewed, strict=True):
                cache_id = now.cache.cache_id
                if lives := self._held.get(cache_id) is before:
                    self._held[cache_id] = now
                    if cache_id in self._entries:
                        self._entries[cache_id] = now
                        self._by_address = None
                ended.append(before if lives else now)
            self._pending.add(ended)
        self._pending.end(ended)
        self._on_change()

    def remove_key(self, key: CacheKey) -> None:
        """Remove a key of an allocated cache; the last key of a freed cache frees its memory.

        An unknown key has no effect; keys of registered caches stay.
        """
        check_type("key", key, CacheKey)
        with self._mutex:
            try:
                bound = self._keys.find(key)
            except LLMException:
                return
            if not self._held[bound.cache_id].owned:
                return
            self._keys.remove(bound)
            unused = self._pop_unused(bound.cache_id)
        end_all(unused)

    def get(self, cache_id: int) -> CacheEntry:
        """Return the cache with this id."""
        try:
            return self._entries[cache_id]
        except KeyError:
            with self._mutex:
                known = shown(sorted(self._entries))
            raise not_exist(f"cache_id={cache_id} does not exist; known are {known}") from None

    def resolve(self, cache: Cache, argument: str = "cache") -> CacheEntry:
        """Return the entry of a cache: by its id, or without an id by its addresses.

        Args:
            cache: a cache of this engine, or memory of this process.
            argument: the name of the cache in error messages.
        """
        if type(cache) is not Cache:
            check_type(argument, cache, Cache)
        entry = self._entries.get(cache.cache_id)
        if entry is not None and entry.cache is cache:  # almost always
            return entry
        if cache.cache_id == -1:
            return ad_hoc(cache, self._device)
        self.check_owner(cache, argument)
        entry = self.get(cache.cache_id)
        own = entry.cache
        for name, given, here in (
            ("cache_desc", cache.cache_desc, own.cache_desc),
            ("tensor_addrs", cache.tensor_addrs or own.tensor_addrs, own.tensor_addrs),
        ):
            if given != here:
                raise invalid(
                    f"{argument}={shown(cache)}: cache {own.cache_id} of this engine has "
                    f"{name}={shown(here)}; give the Cache that the engine returned"
                )
        return entry

    def check_owner(self, cache: Cache, argument: str) -> None:
        """Refuse a cache of another engine, where the same id means another cache."""
        if cache.owner not in (b"", self.owner):
            raise not_exist(
                f"{argument}={shown(cache)} was made by another engine, or by this one before it "
                "was finalized; give a Cache that this engine returned"
            )

    @property
    def living(self) -> dict[int, CacheEntry]:
        """The caches that were not freed, by id; always the same dict, read-only for callers."""
        return self._entries

    def address_index(self) -> AddressIndex[CacheEntry]:
        """Return an index, by address, of the caches that were not freed."""
        index = self._by_address
        if index is None:
            with self._mutex:
                extents = [
                    Extent(address, entry.cache.cache_desc.tensor_nbytes, entry, tensor)
                    for entry in list(self._entries.values())
                    for tensor, address in enumerate(entry.cache.tensor_addrs)
                ]
                index = self._by_address = AddressIndex("this engine", extents)
        return index

    def entries(self) -> list[tuple[CacheEntry, bool]]:
        """Return all caches in order of id, each with True if its id is still valid."""
        with self._mutex:
            living = [entry for _, entry in sorted(self._held.items(), key=itemgetter(0))]
            return [(entry, entry.cache.cache_id in self._entries) for entry in living]

    def survey(self, look: Callable[[Mapping[int, CacheEntry]], _T]) -> _T:
        """See `OfferedCaches.survey`."""
        with self._mutex:
            now = tuple(self._entries.items())
            return look({i: entry for i, entry in now if entry.remote_accessible})

    def find(self, key: AnyKey) -> tuple[CacheEntry, int]:
        """See `OfferedCaches.find`."""
        with self._mutex:
            bound = self._keys.find(key)
            return self._reached(key, bound), bound.batch_index

    def claim(self, key: CacheKey, holder: Hashable) -> Claim:
        """See `OfferedCaches.claim`."""
        check_type("key", key, CacheKey)
        with self._mutex:
            entry = self._reached(key, self._keys.find(key))
            claim_id, bound = self._keys.claim(key, holder)
            return Claim(claim_id, entry, bound.batch_index)

    def release(
        self,
        claim_id: int,
        tensors: range | None,
        *,
        holder: Hashable = None,
        run: Callable[[Callable[[], None]], object] = call,
    ) -> None:
        """See `OfferedCaches.release`; `holder` None: the claim may have any holder."""
        check_type("claim_id", claim_id, int)
        with self._mutex:
            if holder is not None and self._keys.holder_of(claim_id) != holder:
                return
            cache_id = self._keys.release(claim_id, tensors)
            unused = [] if cache_id is None else self._pop_unused(cache_id)
        if unused:
            run(partial(end_all, unused))

    def release_holder(
        self, holder: Hashable, *, run: Callable[[Callable[[], None]], object] = call
    ) -> None:
        """See `OfferedCaches.release_holder`."""
        with self._mutex:
            unused = []
            for claim_id in self._keys.claims_of(holder):
                cache_id = self._keys.release(claim_id, None)
                assert cache_id is not None
                unused += self._pop_unused(cache_id)
        if unused:
            run(partial(end_all, unused))

    def close(self) -> None:
        """Remove all caches; idempotent. Memory stays while a transfer or an array has it."""
        with self._mutex:
            self._closed = True
            held = [*self._held.values(), *self._pending.all()]
            self._held.clear()
            self._entries.clear()
            self._by_address = None
            self._keys = KeyIndex()
        for entry in held:
            if not entry.owned:
                take_back(entry.memory, "this engine was finalized meanwhile")
        self._pending.end(held)
        self.pools.close()

    def _next_id(self, desc: CacheDesc, keys: Sequence[AnyKey]) -> int:
        """Return a new id. Failed attempts count: ranks that make equal calls get equal ids."""
        with self._mutex:
            if self._closed:
                raise finalized()
            self._last_id += 1
            cache_id = self._last_id
        check_fit(keys, desc)
        return cache_id

    def _publish(
        self,
        cache_id: int,
        desc: CacheDesc,
        memory: CacheMemory,
        ranges: Sequence[Registrable],  # empty: peers cannot reach the cache
        paged: bool,
        keys: Sequence[AnyKey],
        span: Span | None = None,  # None: the memory is the user's
        name: str = "",
    ) -> CacheEntry:
        """Offer the memory to peers and add the cache: both, or neither."""
        # Without the lock: registering a lot of memory is slow, and links must not wait for it.
        owned = span is not None
        with ExitStack() as undo:
            offered = offer(self._transports, ranges, memory.writable, keep=span)
            undo.callback(offered.deregister)
            entry = CacheEntry(
                cache=Cache(desc, cache_id, tuple(memory.addresses.tolist()), self.owner),
                paged=paged,
                memory=memory,
                blocks_key=next((key for key in keys if isinstance(key, BlocksCacheKey)), None),
                remote_accessible=bool(ranges),
                owned=owned,
                offered=offered,
                created=time.time(),
                name=name,
            )
            check_publishable(entry)
            with self._mutex:
                if self._closed:
                    raise finalized()
                self._keys.bind(cache_id, keys, num_tensors=desc.num_tensors, consumable=owned)
                self._held[cache_id] = entry
                self._entries[cache_id] = entry
                self._by_address = None
                undo.pop_all()
        self._on_change()
        return entry

    def _entry_of(self, cache_id: int, *, owned: bool) -> CacheEntry | None:
        check_width("cache_id", cache_id, -(2**63), INT64_MAX)
        entry = self._entries.get(cache_id)
        if entry is not None and entry.owned is not owned:
            was, ends = ("allocated", "deallocate") if entry.owned else ("registered", "unregister")
            raise invalid(f"cache_id={cache_id} was {was}; {ends} it instead")
        return entry

    def _reached(self, key: AnyKey, bound: BoundKey) -> CacheEntry:
        entry = self._held[bound.cache_id]
        if not entry.remote_accessible:
            raise not_exist(f"the cache of {key} is not remote accessible")
        return entry

    def _pop_unused(self, cache_id: int) -> list[CacheEntry]:
        if cache_id in self._entries or self._keys.is_used(cache_id):
            return []
        held = self._held.pop(cache_id, None)  # None: it was unregistered under a claim
        return [] if held is None else [held]
