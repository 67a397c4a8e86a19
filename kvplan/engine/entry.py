"""Entries of the registry, and the registrations of their memory with the transports."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from kvnative._signals import Mutex
from kvplan.engine.memory import check_again, memory_at, offered_ranges
from kvplan.links.local_engine import CacheEntry
from kvplan.links.publisher import MAX_PUBLISHED_NBYTES, published_nbytes
from kvplan.status import LLMException, invalid, within
from kvplan.transport.transport import Offered, Transport, offer
from kvplan.types import Cache

if TYPE_CHECKING:
    from kvplan.device.device import Device


def ad_hoc(cache: Cache, device: Device | None) -> CacheEntry:
    """Return an entry for a cache known only by addresses; each transfer checks the memory."""
    memory = memory_at(cache.cache_desc, cache.tensor_addrs, device=device)
    return CacheEntry(cache, None, memory, None, False, False, Offered({}, ()), time.time())


def check_publishable(entry: CacheEntry) -> None:
    """Refuse a cache whose description is too large for a message to a peer."""
    num_tensors = entry.cache.cache_desc.num_tensors
    nbytes = published_nbytes(entry, entry.offered.metadata)
    if nbytes > MAX_PUBLISHED_NBYTES:
        most = num_tensors * MAX_PUBLISHED_NBYTES // nbytes
        raise invalid(
            f"num_tensors={num_tensors} take {nbytes} bytes in messages to peers; at most "
            f"{MAX_PUBLISHED_NBYTES} are allowed, enough for about {most} such tensors"
        )


def renew_all(entries: Iterable[CacheEntry], transports: Sequence[Transport]) -> list[CacheEntry]:
    """Return registered caches with new registrations; an error ends those made before it."""
    with ExitStack() as undo:
        renewed = []
        for entry in entries:
            renewed.append(_renewed(entry, transports))
            undo.callback(renewed[-1].offered.deregister)
        undo.pop_all()
    return renewed


def _renewed(entry: CacheEntry, transports: Sequence[Transport]) -> CacheEntry:
    cache, memory = entry.cache, entry.memory
    try:
        check_again(memory)
    except LLMException as error:
        raise within(f"cache {cache.cache_id}", error) from None
    ranges = offered_ranges(memory) if entry.remote_accessible else ()
    # A new Cache object: the publisher detects changes by identity.
    return replace(entry, cache=replace(cache), offered=offer(transports, ranges, memory.writable))


def end_all(entries: Iterable[CacheEntry]) -> None:
    """End the registrations of unused caches.

    The caller holds the caches until then, so that no peer reaches memory that returns to its pool.
    """
    with ExitStack() as stack:
        for entry in entries:
            stack.callback(entry.offered.deregister)


class PendingDeregistrations:
    """Unregistered and renewed caches whose old registrations have not ended yet.

    Ending a registration waits for data that is being sent. The memory must stay until then, even
    if several calls end the same cache.
    """

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._held: set[CacheEntry] = set()
        self._left: set[CacheEntry] = set()  # by calls that were interrupted

    def add(self, held: Iterable[CacheEntry]) -> None:
        """Add caches that no call finds any more; `end` or `leave` must follow."""
        with self._mutex:
            self._held.update(held)

    def of(self, cache_id: int) -> list[CacheEntry]:
        """Return the caches with this id, and those that interrupted calls left."""
        with self._mutex:
            left, self._left = self._left, set()
            # A copy: a signal handler may end caches meanwhile.
            held = list(self._held)
            return [entry for entry in held if entry.cache.cache_id == cache_id or entry in left]

    def leave(self, held: Collection[CacheEntry]) -> None:
        """Leave caches to the next call, because this one was interrupted."""
        with self._mutex:
            self._left.update(held)

    def all(self) -> list[CacheEntry]:
        """Return all pending caches."""
        return list(self._held)

    def end(self, held: Collection[CacheEntry]) -> None:
        """End caches as `end_all` does; other calls may end the same ones."""
        try:
            end_all(held)
        finally:
            with self._mutex:
                self._held.difference_update(held)
