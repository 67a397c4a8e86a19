"""A cache of an engine as a value, and the memory that it is made of."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvnative._signals import Mutex
from kvplan.engine.memory import CacheMemory, check_again, memory_at, offered_ranges
from kvplan.links.local_engine import MAX_PUBLISHED_NBYTES, published_nbytes
from kvplan.planning.side import Side, side
from kvplan.status import LLMException, invalid
from kvplan.transport.registrations import Offer, offer
from kvplan.types import BlocksCacheKey, Cache

if TYPE_CHECKING:
    from kvplan.device.device import Device
    from kvplan.transport.protocol import Transport


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class CacheEntry:
    """A cache of this engine.

    Attributes:
        cache: its id, description and addresses.
        paged: whether it is addressed by blocks; None: ad-hoc memory, which is used either way.
        memory: its tensors; whoever uses them holds this, and so they stay.
        blocks_key: of a paged cache, if it has one.
        remote_accessible: whether peers may reach it.
        owned: whether it was allocated here; False: registered, the memory is the user's.
        metadata: what a peer needs to reach it, by the name of the transport; empty where that
            does not reach such memory.
        created: seconds since the epoch.
        copies: how the engine's device copies; None: there is none, or it has but one way.
        side: as a plan sees it; None: `paged` is not known.
    """

    cache: Cache
    paged: bool | None
    memory: CacheMemory
    blocks_key: BlocksCacheKey | None
    remote_accessible: bool
    owned: bool
    metadata: Mapping[str, bytes] = field(repr=False)
    created: float
    side: Side | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known = None if self.paged is None else side("cache", self.cache, paged=self.paged)
        object.__setattr__(self, "side", known)


def ad_hoc(cache: Cache, device: Device | None) -> CacheEntry:
    """A cache that is named by its addresses alone, which nobody vouches for.

    Raises:
        LLMException: LLM_PARAM_INVALID: no addresses, or not mapped where the placement says.
    """
    memory = memory_at(cache.cache_desc, cache.tensor_addrs, device=device)
    return CacheEntry(cache, None, memory, None, False, False, {}, time.time())


def check_publishable(entry: CacheEntry) -> None:
    """Refuse a cache that no message can describe to a peer, which would never see it.

    Raises:
        LLMException: LLM_PARAM_INVALID: too many tensors.
    """
    desc = entry.cache.cache_desc
    for transport in entry.metadata:
        nbytes = published_nbytes(entry, transport)
        if nbytes > MAX_PUBLISHED_NBYTES:
            most = desc.num_tensors * MAX_PUBLISHED_NBYTES // nbytes
            raise invalid(
                f"num_tensors={desc.num_tensors} take {nbytes} bytes to publish to a peer; at most "
                f"{MAX_PUBLISHED_NBYTES} can be published, which about {most} such tensors take"
            )


@dataclass(frozen=True, eq=False, slots=True)
class HeldCache:
    """A cache that lives, by its id, a key or a claim.

    Attributes:
        entry: the cache.
        offer: what peers may reach of it.
    """

    entry: CacheEntry
    offer: Offer

    def renewed(self, transports: Sequence[Transport]) -> HeldCache:
        """The same cache of the user's memory, in registrations of its own.

        Raises:
            LLMException: LLM_PARAM_INVALID: its memory is not there any more; or the transport's.
        """
        entry = self.entry
        cache, memory = entry.cache, entry.memory
        try:
            check_again(memory)
        except LLMException as error:
            raise LLMException(
                f"cache {cache.cache_id}: {error.args[0]}", status_code=error.status_code
            ) from None
        ranges = offered_ranges(memory) if entry.remote_accessible else ()
        offered = offer(transports, ranges, memory.writable)
        # It is published to peers because it is another Cache.
        again = replace(entry, cache=replace(cache), metadata=offered.metadata)
        return HeldCache(again, offered)


def renew_all(held: Iterable[HeldCache], transports: Sequence[Transport]) -> list[HeldCache]:
    """All of them `renewed`, or none."""
    with ExitStack() as undo:
        renewed = []
        for it in held:
            renewed.append(it.renewed(transports))
            undo.callback(renewed[-1].offer.deregister)
        undo.pop_all()
    return renewed


def end_all(held: Iterable[HeldCache]) -> None:
    """End the registrations of caches that nothing names any more.

    The caller still holds them: memory goes back to its pool after no peer can reach it.
    """
    with ExitStack() as all_of_them:
        for it in held:
            all_of_them.callback(it.offer.deregister)


class PendingDeregistrations:
    """Caches of the user's memory that nothing names any more, and that have not ended yet.

    To end one waits for what is being sent of it; until then the memory must stay, whichever of
    several calls its user waits for.
    """

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._held: set[HeldCache] = set()
        self._left: set[HeldCache] = set()  # of calls that were interrupted

    def add(self, held: Iterable[HeldCache]) -> None:
        """Before nothing names them any more; `end` must follow."""
        with self._mutex:
            self._held.update(held)

    def of(self, cache_id: int) -> list[HeldCache]:
        """Return those that were the cache of this id, and those that no call ends any more."""
        with self._mutex:
            left, self._left = self._left, set()
            # A copy: a signal handler may end caches in between.
            held = list(self._held)
            return [it for it in held if it.entry.cache.cache_id == cache_id or it in left]

    def leave(self, held: Collection[HeldCache]) -> None:
        """Have the next call end them: this one was interrupted."""
        with self._mutex:
            self._left.update(held)

    def all(self) -> list[HeldCache]:
        """Return all of them."""
        return list(self._held)

    def end(self, held: Collection[HeldCache]) -> None:
        """As `end_all`; others may be at it already."""
        try:
            end_all(held)
        finally:
            with self._mutex:
                self._held.difference_update(held)


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to pull by a key; ended by `CacheRegistry.release`."""

    claim_id: int
    entry: CacheEntry
    batch_index: int
