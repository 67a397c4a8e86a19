"""The producer's book: leases of requests that have finished, until their consumers are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvnative._signals import Mutex
from kvplan.lease import BlockLease, tag_of
from kvplan.serving.messages import Handle, peer_log
from kvplan.serving.tables import Blocks, CacheGroup, GroupLease, groups_of, tables_of
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.logs import Log
from kvplan.types import Cache
from kvplan.validation import shown

logger = Log("kvplan.serving")

MAX_REMEMBERED: Final = 4096  # requests and transfers that have ended
MAX_EARLY: Final = 1024  # transfers of one reader that has ended before they are entered


class Leasing(Protocol):
    """What the book needs of a kvplan engine."""

    def lease_blocks(
        self, cache: Cache, blocks: Sequence[int], *, tag: str = "", ttl_ms: float | None = None
    ) -> BlockLease:
        """As `LlmDataDist.lease_blocks`."""

    def renew(self, lease: BlockLease, ttl_ms: float) -> object:
        """As `LlmDataDist.renew`."""

    def release(self, lease: BlockLease) -> None:
        """As `LlmDataDist.release`."""


@dataclass
class _Held:
    """A finished request whose blocks are kept.

    Attributes:
        name: for logs.
        done: cluster ids of the readers that have ended.
    """

    name: str
    leases: tuple[GroupLease, ...]
    digest: bytes
    deadline: float
    transfer: str
    done: set[int] = field(default_factory=set)


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
        on_ending: Called with a transfer before its blocks are free. Returns True if they are not
            read; False: `end_again` is called later.

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
        on_ending: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._engine = engine
        self._groups = groups_of(cache)
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._on_freed = on_freed
        self._on_ending = on_ending
        self._mutex = Mutex()
        self._held: dict[Handle, _Held] = {}
        self._ending: dict[Handle, _Held] = {}  # a peer may still use their blocks
        self._freed: set[Handle] = set()
        self._transfers: dict[str, Handle] = {}  # of requests that are held
        self._ended: dict[Handle | str, str] = {}  # requests and transfers, and how; oldest first
        # `finish` before `enter`: digest and number of readers, by reader and transfer.
        self._early: dict[int, dict[str, tuple[bytes, int]]] = {}
        self.expired: int = 0

    def __len__(self) -> int:
        """How many requests hold blocks."""
        return len(self._held) + len(self._ending)

    def enter(
        self,
        request: str,
        blocks: Blocks,
        digest: bytes,
        transfer: str = "",
        *,
        handle: Handle | None = None,
    ) -> Handle:
        """Lease the blocks of a request that has finished; if that fails, they are free at once.

        Args:
            request: what logs and leases call it.
            blocks: in the order of its tokens; of several groups, a table for each.
            digest: of what was computed.
            transfer: what consumers may have asked for already; empty: nothing.
            handle: that all workers enter it under; None: a new one.

        Returns:
            The handle, which `take_freed` returns once the blocks are free.

        Raises:
            LLMException: LLM_PARAM_INVALID: a request was entered under this handle before.
        """
        handle = handle or Handle.new()
        early: dict[int, tuple[bytes, int]] = {}
        failure = ""
        with self._mutex:
            if handle in self._held or handle in self._ending or handle in self._ended:
                raise invalid(f"handle={handle} is of a request that was entered before: make one")
            try:
                leases = self._lease(blocks, tag_of(request))
            except LLMException as error:
                failure = f"could not be leased: {error}"
                self._remember(handle, failure)
                self._ending[handle] = _Held(request, (), digest, 0.0, transfer)
            else:
                deadline = self._clock() + self._ttl_ms / 1000
                self._held[handle] = _Held(request, leases, digest, deadline, transfer)
                if transfer and self._transfers.setdefault(transfer, handle) == handle:
                    self._ended.pop(transfer, None)
                    early = self._take_early(transfer)
                elif transfer:
                    logger.warning(
                        "request %s: transfer %s is of another request, which keeps the name",
                        request,
                        shown(transfer),
                    )
        if failure:
            logger.warning("request %s is not kept: it %s", request, failure)
            if transfer:
                self.end_transfer(transfer, failure)
            self._end(handle)
        for reader, (said, readers) in early.items():
            self.finish(handle, said, reader, readers)
        return handle

    def leases_of(
        self, handle: Handle | None, digest: bytes, transfer: str = ""
    ) -> tuple[Handle, tuple[GroupLease, ...]]:
        """Return handle and leases of a request, for a consumer that means the same tokens.

        Args:
            handle, digest: of the reference.
            transfer: what is asked for instead of a handle, if it is not empty.

        Raises:
            NotYetError: no request of this handle, or of this name, was entered, as far as is
                remembered.
            LLMException: LLM_KV_CACHE_NOT_EXIST: it has ended, or was of other tokens.
        """
        with self._mutex:
            if transfer:
                handle = self._transfers.get(transfer)
            held = None if handle is None else self._held.get(handle)
            how = self._ended.get(transfer or handle or "")
        if held is None or handle is None:
            if how is None:
                raise NotYetError
            raise _gone(f"{transfer or handle} {how}")
        if held.digest != digest:  # the name of the request is not the asker's to know
            raise _gone(f"{transfer or handle} was of other tokens")
        return handle, held.leases

    def end_transfer(self, transfer: str, how: str) -> None:
        """Remember that a transfer has ended, and how, for consumers that ask later."""
        with self._mutex:
            self._transfers.pop(transfer, None)
            self._take_early(transfer)
            self._remember(transfer, how)

    def renew(self, handles: Iterable[Handle]) -> None:
        """Let leases last `ttl_ms` from now; those that have ended stay so."""
        for handle in handles:
            with self._mutex:
                if (held := self._held.get(handle)) is None:
                    continue
                try:
                    for of_group in held.leases:
                        self._engine.renew(of_group.lease, self._ttl_ms)
                except LLMException:  # one has expired: `expire` frees them
                    continue
                held.deadline = self._clock() + self._ttl_ms / 1000

    def finish(
        self, handle: Handle | None, digest: bytes, reader: int, readers: int, transfer: str = ""
    ) -> None:
        """One of `readers` needs the blocks no more; after the last they are free.

        Args:
            handle: None: the reader knows only the transfer.
        """
        with self._mutex:
            if handle is None:
                handle = self._transfers.get(transfer)
                if handle is None:
                    if transfer and transfer not in self._ended:  # it is still being computed
                        early = self._early.setdefault(reader, {})
                        early[transfer] = digest, readers
                        if len(early) > MAX_EARLY:
                            del early[next(iter(early))]
                    return
            held = self._held.get(handle)
            if held is None or held.digest != digest:
                return
            held.done.add(reader)
            if len(held.done) < readers:
                return
        self._free(handle, "all its readers were done")

    def abort(self, handle: Handle) -> None:
        """Free the blocks of a request, whoever reads them; an unknown one is fine."""
        self._free(handle, "its producer has aborted it")

    def expire(self) -> None:
        """Free the blocks of leases whose time has passed, and of those that peers held up."""
        now = self._clock()
        with self._mutex:
            late = [handle for handle, held in self._held.items() if held.deadline <= now]
            ending = list(self._ending)
        for handle in ending:
            self._end(handle)
        for handle in late:
            if (held := self._held.get(handle)) is not None:
                self.expired += 1
                logger.warning(
                    "request %s was not fetched in %g ms: its blocks are free",
                    held.name,
                    self._ttl_ms,
                )
            self._free(handle, f"it was not fetched in {self._ttl_ms:g} ms")

    def end_again(self, transfer: str) -> None:
        """Free the blocks of requests that have ended, if nothing of their transfer is read now."""
        for handle, held in list(self._ending.items()):
            if held.transfer == transfer:
                self._end(handle)

    def forget_readers(self, linked: Collection[int]) -> None:
        """Forget the early `finish` of readers that are not linked any more."""
        with self._mutex:
            for reader in self._early.keys() - set(linked):
                del self._early[reader]

    @property
    def has_early(self) -> bool:
        """True if readers have finished requests that are not entered yet."""
        return bool(self._early)

    @property
    def has_freed(self) -> bool:
        """Whether `take_freed` has something to return."""
        return bool(self._freed)

    def take_freed(self) -> set[Handle]:
        """Return the requests whose blocks have become free since the last call."""
        with self._mutex:
            freed, self._freed = self._freed, set()
        return freed

    def _free(self, handle: Handle, why: str) -> None:
        with self._mutex:
            if (held := self._held.pop(handle, None)) is not None:
                how = f"has ended: {why}, and its blocks may be another's"
                self._remember(handle, how)
                if self._transfers.get(held.transfer) == handle:
                    self.end_transfer(held.transfer, how)
                self._ending[handle] = held
        self._end(handle)

    def _end(self, handle: Handle) -> None:
        """Report a request that has ended, unless a peer still uses its blocks."""
        if (held := self._ending.get(handle)) is None:
            return
        # No lease of this side is looked at by a push: what it read later would have arrived.
        is_free = not held.transfer or self._on_ending(held.transfer)
        for of_group in held.leases:
            is_free &= self._release(held.name, of_group.lease)
        if is_free:
            with self._mutex:
                if self._ending.pop(handle, None) is None:  # another thread was first
                    return
                self._freed.add(handle)
            self._on_freed()

    def _remember(self, what: Handle | str, how: str) -> None:
        """With the lock."""
        self._ended[what] = how
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _take_early(self, transfer: str) -> dict[int, tuple[bytes, int]]:
        """With the lock: return and forget digest and number of readers, by early reader."""
        found = {}
        for reader, early in list(self._early.items()):
            if transfer in early:
                found[reader] = early.pop(transfer)
                if not early:
                    del self._early[reader]
        return found

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
                peer_log.warning("blocks of request %s stay in use: %s", request, error)
                return False
            if error.status_code is not LLMStatusCode.LLM_ENGINE_FINALIZED:
                logger.warning("request %s: %s", request, error)
        return True


def _gone(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
