"""The producer's book: leases of requests that have finished, until their consumers are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvnative._signals import Mutex
from kvplan.lease import BlockLease, tag_of
from kvplan.logs import Log
from kvplan.serving.tables import Blocks, CacheGroup, GroupLease, groups_of, tables_of
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import Cache

logger = Log("kvplan.serving")

_MOST_REMEMBERED: Final = 4096  # transfers that have ended, or that readers do not need
_ENDED: Final = "has ended: its blocks may be another's"


class Leasing(Protocol):
    """What the book needs of a kvplan engine."""

    def lease_blocks(
        self, cache: Cache, blocks: Sequence[int], *, tag: str = "", ttl_ms: float | None = None
    ) -> BlockLease:
        """As `LlmDataDist.lease_blocks`."""

    def renew(self, lease: BlockLease, ttl_ms: float) -> None:
        """As `LlmDataDist.renew`."""

    def release(self, lease: BlockLease) -> None:
        """As `LlmDataDist.release`."""


@dataclass
class _Held:
    """A finished request whose blocks are kept."""

    request: str
    leases: tuple[GroupLease, ...]
    digest: bytes
    deadline: float
    transfer: str = ""
    done: set[int] = field(default_factory=set)  # cluster ids of readers


class NotYetError(Exception):
    """The request has not been entered; it may be soon."""


class LeaseBook:
    """Requests that have finished, with a lease of their blocks in each cache; of any thread.

    A request's blocks are free when all its readers are done, when nobody has renewed its leases
    for `ttl_ms`, or on `abort`: once they have ended then, `take_freed` returns it, one time.

    Args:
        engine: gives the leases.
        cache: what they are of; of several, their groups.
        ttl_ms: milliseconds that a lease lasts if nobody renews it.
        clock: seconds that never go back.
        on_freed: called when `take_freed` has something to return.
        on_ending: called with a transfer before its blocks are free; on return they are not read.

    Attributes:
        expired: how many requests nobody fetched, and nobody renewed, in time.
    """

    def __init__(
        self,
        engine: Leasing,
        cache: Cache | Sequence[CacheGroup],
        ttl_ms: float,
        clock: Callable[[], float] = time.monotonic,
        on_freed: Callable[[], None] = lambda: None,
        on_ending: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._groups = groups_of(cache)
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._on_freed = on_freed
        self._on_ending = on_ending
        self._mutex = Mutex()
        self._held: dict[int, _Held] = {}
        self._stuck: dict[int, _Held] = {}  # a peer may still be writing to them
        self._freed: set[str] = set()
        self._last = -1
        self._transfers: dict[str, int] = {}  # sequences of those that are held
        self._ended: dict[str, str] = {}  # transfers, and how, the oldest first
        # `finish` before `enter`: digest and number of readers, by reader.
        self._early: dict[str, dict[int, tuple[bytes, int]]] = {}
        self.expired: int = 0

    def __len__(self) -> int:
        """How many requests hold blocks."""
        return len(self._held) + len(self._stuck)

    def enter(
        self,
        sequence: int,
        request: str,
        blocks: Blocks,
        digest: bytes,
        transfer: str = "",
    ) -> None:
        """Lease the blocks of a request that has finished; if that fails, they are free at once.

        Args:
            sequence: of the reference; greater than all before.
            request: what `take_freed` calls it.
            blocks: in the order of its tokens; of several groups, a table for each.
            digest: of what was computed.
            transfer: what consumers may have asked for already; empty: nothing.
        """
        try:
            leases = self._lease(blocks, tag_of(request))
        except LLMException as error:
            logger.warning("request %s cannot be leased, and is not kept: %s", request, error)
            with self._mutex:
                self._last = max(self._last, sequence)
            if transfer:
                self._on_ending(transfer)
                self.end_transfer(transfer, f"could not be leased: {error}")
            self._report(request)
            return
        with self._mutex:
            deadline = self._clock() + self._ttl_ms / 1000
            self._held[sequence] = _Held(request, leases, digest, deadline, transfer)
            self._last = max(self._last, sequence)
            if transfer:
                self._transfers[transfer] = sequence
            early = self._early.pop(transfer, {})
        for reader, (said, readers) in early.items():
            self.finish(sequence, said, reader, readers)

    def leases_of(
        self, sequence: int, digest: bytes, transfer: str = ""
    ) -> tuple[int, tuple[GroupLease, ...]]:
        """Return sequence and leases of a request, for a consumer that means the same tokens.

        Args:
            sequence, digest: of the reference.
            transfer: what is asked for instead of a sequence, if it is not empty.

        Raises:
            NotYetError: no request as late as this, or of this name, was entered.
            LLMException: LLM_KV_CACHE_NOT_EXIST: it has ended, or was of other tokens.
        """
        with self._mutex:
            if transfer:
                sequence = self._transfers.get(transfer, -1)
                if sequence < 0 and transfer not in self._ended:
                    raise NotYetError
            held = self._held.get(sequence)
            if held is None and sequence > self._last:
                raise NotYetError
            how = self._ended.get(transfer, _ENDED)
        name = transfer or f"request {sequence}"
        if held is None:
            raise _gone(f"{name} {how}")
        if held.digest != digest:
            raise _gone(f"{name} is {held.request}, which was of other tokens")
        return sequence, held.leases

    def end_transfer(self, transfer: str, how: str) -> None:
        """Remember that a transfer has ended, and how, for consumers that ask later."""
        with self._mutex:
            self._transfers.pop(transfer, None)
            self._early.pop(transfer, None)
            self._ended[transfer] = how
            if len(self._ended) > _MOST_REMEMBERED:
                del self._ended[next(iter(self._ended))]

    def renew(self, sequences: Iterable[int]) -> None:
        """Let leases last `ttl_ms` from now; those that have ended stay so."""
        for sequence in sequences:
            with self._mutex:
                if (held := self._held.get(sequence)) is None:
                    continue
                try:
                    for it in held.leases:
                        self._engine.renew(it.lease, self._ttl_ms)
                except LLMException:  # one has expired: `expire` frees them
                    continue
                held.deadline = self._clock() + self._ttl_ms / 1000

    def finish(
        self, sequence: int, digest: bytes, reader: int, readers: int, transfer: str = ""
    ) -> None:
        """One of `readers` needs the blocks no more; after the last they are free."""
        with self._mutex:
            if transfer:
                sequence = self._transfers.get(transfer, -1)
                if sequence < 0 and transfer not in self._ended:  # it is still being computed
                    self._early.setdefault(transfer, {})[reader] = digest, readers
                    if len(self._early) > _MOST_REMEMBERED:
                        del self._early[next(iter(self._early))]
            held = self._held.get(sequence)
            if held is None or held.digest != digest:
                return
            held.done.add(reader)
            if len(held.done) < readers:
                return
        self._free(sequence)

    def abort(self, request: str) -> None:
        """Free the blocks of a request, whoever reads them; an unknown one is fine."""
        with self._mutex:
            found = [it for it, held in self._held.items() if held.request == request]
        for sequence in found:
            self._free(sequence)

    def expire(self) -> None:
        """Free the blocks of leases whose time has passed, and of those that peers held up."""
        now = self._clock()
        with self._mutex:
            late = [it for it, held in self._held.items() if held.deadline <= now]
            late += self._stuck
        for sequence in late:
            if (held := self._held.get(sequence)) is not None:
                self.expired += 1
                logger.warning(
                    "request %s was not fetched in %g ms: its blocks are free",
                    held.request,
                    self._ttl_ms,
                )
            self._free(sequence)

    @property
    def has_freed(self) -> bool:
        """Whether `take_freed` has something to return."""
        return bool(self._freed)

    def take_freed(self) -> set[str]:
        """Return the requests whose blocks have become free since the last call."""
        with self._mutex:
            freed, self._freed = self._freed, set()
        return freed

    def _free(self, sequence: int) -> None:
        with self._mutex:
            held = self._held.pop(sequence, None) or self._stuck.pop(sequence, None)
        if held is None:
            return
        if held.transfer:
            # No lease of this side is looked at by a push: what it read later would have arrived.
            self._on_ending(held.transfer)
        ended = [self._release(held.request, it.lease) for it in held.leases]
        if not all(ended):
            with self._mutex:
                self._stuck[sequence] = held
            return
        if held.transfer:
            self.end_transfer(held.transfer, _ENDED)
        self._report(held.request)

    def _lease(self, blocks: Blocks, tag: str) -> tuple[GroupLease, ...]:
        """Lease the blocks of a request in all caches, or in none."""
        tables = tables_of(blocks, len(self._groups))
        leases: list[GroupLease] = []
        try:
            for group, table in zip(self._groups, tables, strict=True):
                lease = self._engine.lease_blocks(
                    group.cache, table.blocks, tag=tag, ttl_ms=self._ttl_ms
                )
                first = table.skipped and table.skipped * group.block_tokens
                leases.append(GroupLease(lease, first))
        except LLMException:
            for it in leases:  # nobody was given them: nothing is in flight
                self._release(tag, it.lease)
            raise
        return tuple(leases)

    def _release(self, request: str, lease: BlockLease) -> bool:
        """End a lease, which may have ended; returns whether nobody writes to its blocks."""
        try:
            self._engine.release(lease)
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_TIMEOUT:
                logger.warning("blocks of request %s stay in use: %s", request, error)
                return False
            if error.status_code is not LLMStatusCode.LLM_ENGINE_FINALIZED:
                logger.warning("request %s: %s", request, error)
        return True

    def _report(self, request: str) -> None:
        with self._mutex:
            self._freed.add(request)
        self._on_freed()


def _gone(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
