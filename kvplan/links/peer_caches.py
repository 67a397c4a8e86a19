"""The part of a link that knows the caches of its peer and their memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvplan.control.messages import Found, PassedOver, Table
from kvplan.links.address_index import AddressIndex
from kvplan.links.lifecycle import LinkLifecycle
from kvplan.links.peer_table import PeerCache, PeerTable, find_by_address, no_cache_at, not_reached
from kvplan.planning.side import Side
from kvplan.status import LLMException, LLMStatusCode, invalid, not_exist
from kvplan.types import BlocksCacheKey, CacheKeyByIdAndIndex
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.execution.memory import TensorMemory
    from kvplan.lease import BlockLease
    from kvplan.transport.link import PeerMemory, TransportLink

_cache_id: Final = attrgetter("cache_id")
_MAX_JOINED: Final = 64  # cached results of `joined_memory`


class PeerCaches(LinkLifecycle, ABC):
    """The caches of a link's peer, and their memory.

    Attributes:
        instance: Id of the run of the peer's engine.
        transports: Names of the transports of the link, the preferred first.
        moved_leases: Live leases whose blocks the peer has moved, by id.
        passed_over: Preferred transports, and why they are not used, or not for all memory.
        transport_links: Connections by name of transport; empty before they are made.
        pairs: Pairs of a local cache and a cache of the peer, cached by users of the link. A change
            of the peer's caches replaces the dict.
    """

    def __init__(self, cluster_id: int) -> None:
        super().__init__(cluster_id)
        self.instance = b""
        self.transports: tuple[str, ...] = ()
        self.passed_over: tuple[PassedOver, ...] = ()
        self.transport_links: dict[str, TransportLink] = {}
        self._table = PeerTable(cluster_id)
        self.moved_leases = self._table.leases
        self.pairs: dict[Any, Any] = {}
        self._sides: dict[int, tuple[PeerCache, Side]] = {}
        self._memories: dict[tuple[int, bool], tuple[PeerCache, PeerMemory]] = {}
        self._joined: dict[
            tuple[tuple[int, ...], bool, bool], tuple[tuple[PeerCache, ...], PeerMemory]
        ] = {}

    @abstractmethod
    def sync(self, wait_ms: float | None = None) -> None:
        """Synchronize with the peer's cache table; `wait_ms` None: within SyncKvCacheWaitTime."""

    def cache(
        self,
        index: CacheKeyByIdAndIndex | BlocksCacheKey | BlockLease,
        *,
        writable: bool = False,
        speculative: bool = False,
        wait_ms: float | None = None,
    ) -> PeerCache:
        """Return the cache that `index` names, after a `sync` if it is unknown or may be freed."""
        is_key = isinstance(index, BlocksCacheKey)
        if isinstance(index, BlocksCacheKey):
            offered, wanted = self._table.by_model, index.model_id
        else:
            offered, wanted = self._table.by_id, index.cache_id
        found = offered.get(wanted)
        if found is None or (
            self._may_be_freed(found, speculative=speculative)
            if is_key
            # The index names this cache even if it was freed; the transfer may detect that itself.
            else writable and self.asks_before_writes
        ):
            self.sync(wait_ms)
            found = offered.get(wanted)
        if found is not None:
            return found
        needs = "" if offered else ": peers see only caches with remote_accessible=True"
        raise not_exist(
            f"cluster {self.cluster_id} offers no cache with {'model' if is_key else 'cache'}_id="
            f"{wanted}; it offers {shown(sorted(offered))}{needs}"
        )

    def caches(self) -> tuple[PeerCache, ...]:
        """Return all published caches of the peer."""
        return self._table.caches()

    def address_index(
        self, *, writable: bool, ask: bool = False, wait_ms: float | None = None
    ) -> AddressIndex[PeerCache]:
        """Return the index of the peer's caches by address."""
        if ask or (writable and self.asks_before_writes):
            self.sync(wait_ms)
        return self._table.address_index(writable=writable)

    def _may_be_freed(self, cache: PeerCache, *, speculative: bool = False) -> bool:
        """Return True if the peer may have freed the cache and used its key for another."""
        links = self.transport_links.values()
        if self.asks_before_writes:
            return True
        if any(link.detects_freed == "before" for link in links):
            return not speculative
        try:
            self.memory(cache, writable=False).check()
        except LLMException as error:
            return error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        return False

    def latest(self, lease: BlockLease) -> BlockLease:
        """Return the latest value of `lease` that the peer has published, or `lease` itself."""
        latest = self._table.leases.get(lease.lease_id)
        is_later = latest is not None and latest.replaces(lease)
        return latest if latest is not None and is_later else lease

    def leased(
        self, lease: BlockLease, *, writable: bool = False, wait_ms: float | None = None
    ) -> PeerCache:
        """Return the cache that `lease` names."""
        if lease.instance != self.instance:
            raise not_exist(f"{lease} has ended: cluster {self.cluster_id} was restarted since")
        found = None if writable else self._table.by_id.get(lease.cache_id)
        return found or self.cache(lease, writable=writable, wait_ms=wait_ms)

    def memory(self, cache: PeerCache, *, writable: bool) -> PeerMemory:
        """Return the tensors of `cache` as a side of a transfer."""
        key = (cache.cache_id, writable)
        held = self._memories.get(key)
        if held is not None and held[0] is cache:
            return held[1]
        name, link = self._way_to(cache)
        memory = link.memory(
            cache.addresses,
            cache.desc.tensor_nbytes,
            writable=writable,
            metadata=cache.metadata(name),
        )
        self._memories[key] = (cache, memory)
        # The control thread may have dropped memories just before this store: then drop this one.
        if self._table.by_id.get(cache.cache_id) is not cache or not self.is_live:
            self._memories.pop(key, None)
        return memory

    def joined_memory(
        self, caches: Sequence[PeerCache], *, writable: bool, any_holder: bool = False
    ) -> PeerMemory:
        """Return the tensors of several caches, in order, as one side of a transfer."""
        if len(caches) == 1:
            return self.memory(caches[0], writable=writable)
        key = (tuple(map(_cache_id, caches)), writable, any_holder)
        held = self._joined.get(key)
        if held is not None and all(map(is_, held[0], caches)):
            return held[1]
        name, link = self._way_to(*caches)
        memory = link.memory(
            np.concatenate([np.array(cache.addresses, dtype=np.uint64) for cache in caches]),
            np.repeat(
                np.array([cache.desc.tensor_nbytes for cache in caches], dtype=np.uint64),
                [len(cache.addresses) for cache in caches],
            ),
            writable=writable,
            metadata=[cache.metadata(name) for cache in caches for _ in cache.addresses],
            any_holder=any_holder,
        )
        if len(self._joined) >= _MAX_JOINED:
            self._joined.clear()
        self._joined[key] = (tuple(caches), memory)
        if (
            any(self._table.by_id.get(cache.cache_id) is not cache for cache in caches)
            or not self.is_live
        ):
            self._joined.pop(key, None)  # as in `memory`
        return memory

    def side(self, cache: PeerCache) -> Side:
        """Return `cache` as a side of a plan, with a description of the way to it."""
        known = self._sides.get(cache.cache_id)
        if known is None or known[0] is not cache:
            side = replace(cache.side, way=self._described(self._find_way(cache)))
            known = self._sides[cache.cache_id] = cache, side
            if self._table.by_id.get(cache.cache_id) is not cache:  # not published, or replaced
                self._sides.pop(cache.cache_id, None)
        return known[1]

    def tensors(
        self, addresses: Sequence[int], stride: int, *, paged: bool, wait_ms: float | None = None
    ) -> tuple[Side, TensorMemory]:
        """Return the peer's tensors at `addresses`, to be written in rows of `stride` bytes.

        The result has the rows that fit before the end of each tensor. This calls `sync` if no
        known cache has the addresses, or if that cache may be freed.
        """
        known = find_by_address(self._table.caches(), addresses)
        if known is None or self._may_be_freed(known.cache):
            self.sync(wait_ms)
            known = find_by_address(self._table.caches(), addresses)
        if known is None:
            raise no_cache_at(self._table.caches(), str(self), addresses)
        cache, left = known
        transport, link = self._way_to(cache)
        if (count := min(left) // stride) == 0:
            short = left.index(min(left))
            raise invalid(
                f"addresses[{short}]={addresses[short]:#x} is {min(left)} bytes before the end of "
                f"its tensor of cache {cache.cache_id} of {self}; a row has stride={stride} bytes"
            )
        name = f"addresses in cache {cache.cache_id} of {self}"
        side = Side(
            len(addresses),
            count,
            stride,
            paged,
            cache.desc.placement,
            name=name,
            way=self._described((transport, link)),
        )
        memory = link.memory(
            addresses, side.tensor_nbytes, writable=True, metadata=cache.metadata(transport)
        )
        return side, memory

    def _way_to(self, *caches: PeerCache) -> tuple[str, TransportLink]:
        """Return the first transport of the link that reaches all `caches`."""
        if not self.transport_links:
            raise self.refusal()
        if (way := self._find_way(*caches)) is None:
            cache = next((cache for cache in caches if not cache.offers), caches[0])
            raise not_reached(cache, self.transport)
        return way

    def _find_way(self, *caches: PeerCache) -> tuple[str, TransportLink] | None:
        links = self.transport_links
        for name, link in links.items():
            metadata = [cache.metadata(name) for cache in caches]
            # A transport without an alternative is taken: its error says what it does not reach.
            if all(metadata) and (len(links) == 1 or not any(map(link.unreached, metadata))):
                return name, link
        return None

    @property
    def asks_before_writes(self) -> bool:
        """True if only the peer knows, before a write, whether the memory was freed."""
        links = self.transport_links.values()
        return not links or any(link.detects_freed == "after" for link in links)

    @property
    def needs_peer(self) -> bool:
        """True if a transfer may have to wait for the peer; False if this process alone copies."""
        for link in self.transport_links.values():
            if link.detects_freed != "check":
                return True
        return not self.transport_links

    def forget(self) -> None:
        """Drop cached facts about the peer's memory. Later calls locate it again."""
        self.pairs = {}
        self._memories.clear()
        self._joined.clear()
        self._sides.clear()

    def apply(self, table: Table) -> None:
        """Apply a table that the peer has published."""
        changed = self._table.apply(table)
        self.pairs = {}
        self._joined.clear()
        for cache_id in changed:
            self._sides.pop(cache_id, None)
            for writable in (False, True):
                self._memories.pop((cache_id, writable), None)
        self.prepare(changed)

    def prepare(self, cache_ids: Iterable[int] | None = None) -> None:
        """Let transports prepare the memory of the given caches; None means all."""
        if not self.transport_links or not self.is_live:
            return
        offered = self._table.by_id
        for cache_id in list(offered) if cache_ids is None else cache_ids:
            cache = offered.get(cache_id)
            if cache is not None and cache.offers:
                for link in self.transport_links.values():
                    link.prepare(partial(self._reach, cache))

    def _reach(self, cache: PeerCache) -> None:
        if self._table.by_id.get(cache.cache_id) is cache:
            self.memory(cache, writable=False)

    @property
    def way(self) -> str:
        """The way that bytes take over the link, for display; empty until transports connect."""
        return "; ".join(link.way for link in self.transport_links.values())

    @property
    def transport(self) -> str:
        """The names of the transports of the link; empty before both ends agree."""
        return "+".join(self.transports)

    def _described(self, way: tuple[str, TransportLink] | None) -> str:
        """Describe a way to memory, with the reasons against preferred transports."""
        if way is None:
            return f"{self.transport}: {self.way}"
        transport, link = way
        better = (each for each in self.passed_over if each.tried and each.transport != transport)
        return f"{transport}: {link.way}{''.join(f' (not {each})' for each in better)}"

    def _cache_of(self, found: Found) -> PeerCache:
        """Return the cache of a reply, or the equal object of the table."""
        cache = PeerCache.of(self.cluster_id, found.entry)
        known = self._table.by_id.get(cache.cache_id)
        return known if known == cache else cache
