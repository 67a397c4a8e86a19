"""The book of a producer: leases of finished requests, until their consumers are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvnative._signals import Mutex
from kvplan.lease import BlockLease, tag_of
from kvplan.serving.absent import Absent
from kvplan.serving.messages import Handle, peer_log
from kvplan.serving.tables import Blocks, CacheGroup, GroupLease, groups_of, tables_of
from kvplan.status import LLMException, LLMStatusCode, invalid, not_exist
from kvplan.system.logs import Log
from kvplan.types import Cache
from kvplan.validation import check_type, shown

logger = Log("kvplan.serving")

MAX_REMEMBERED: Final = 4096  # ended requests and transfers
MAX_EARLY: Final = 1024  # requests that one reader has finished before they were entered


class Leasing(Protocol):
    """The methods of a kvplan engine that the book uses."""

    def lease_blocks(
        self, cache: Cache, blocks: Sequence[int], *, tag: str = "", ttl_ms: float | None = None
    ) -> BlockLease:
        """See `LlmDataDist.lease_blocks`."""

    def renew(self, lease: BlockLease, ttl_ms: float) -> object:
        """See `LlmDataDist.renew`."""

    def release(self, lease: BlockLease) -> None:
        """See `LlmDataDist.release`."""


@dataclass
class _Held:
    """A finished request whose blocks are kept."""

    name: str  # for logs
    leases: tuple[GroupLease, ...]
    digest: bytes
    deadline: float
    transfer: str
    done: set[int] = field(default_factory=set)  # cluster ids of readers


class NotYetError(Exception):
    """The request has not been entered yet."""


class LeaseBook:
    """Finished requests, with a lease of their blocks in each cache. Thread-safe.

    The blocks of a request are freed when all its readers are done, when its leases were not
    renewed for `ttl_ms`, or on `abort`. Then `take_freed` returns the request, once.

    Args:
        engine: the engine that leases blocks.
        cache: the cache of the blocks; for several caches, their groups.
        ttl_ms: milliseconds until a lease expires unless it is renewed.
        clock: a monotonic clock, in seconds.
        on_freed: called when `take_freed` has something to return.
        on_ending: called with a transfer before its blocks are free. Returns False if they are
            still being read; then `end_again` must follow.

    Attributes:
        expired: number of requests that expired.
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
        self._ending: dict[Handle, _Held] = {}  # peers may still use their blocks
        self._freed: set[Handle] = set()
        self._transfers: dict[str, Handle] = {}  # by name, of held requests
        self._ended: dict[Handle | str, str] = {}  # reasons by request or transfer, oldest first
        # `finish` before `enter`: digest and number of readers, by reader and handle or transfer.
        self._early: dict[int, dict[Handle | str, tuple[bytes, int]]] = {}
        self._absent = Absent()
        self.expired: int = 0

    def __len__(self) -> int:
        """Return the number of requests that hold blocks."""
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
        """Lease the blocks of a finished request; free them if that fails.

        Args:
            request: name for logs and leases.
            blocks: blocks in the order of the tokens; for several groups, a table for each.
            digest: digest of the tokens.
            transfer: name by which consumers may have asked already; empty: none.
            handle: the handle that all workers use; None: a new one.

        Returns:
            The handle, which `take_freed` returns once the blocks are free.

        Raises:
            LLMException: LLM_PARAM_INVALID: the handle was used before.
            TypeError: an argument of the wrong type. The call can be repeated.
        """
        check_type("request", request, str)
        check_type("digest", digest, bytes)
        check_type("transfer", transfer, str)
        handle = Handle.new() if handle is None else check_type("handle", handle, Handle)
        failure = ""
        with self._mutex:
            if handle in self._held or handle in self._ending or handle in self._ended:
                raise invalid(f"handle={handle} was used before; each request needs a new one")
            try:
                leases = self._lease(blocks, tag_of(request))
            except LLMException as error:
                early = self._take_early(handle)
                failure = f"could not be leased: {error}"
                self._remember(handle, failure)
                self._ending[handle] = _Held(request, (), digest, 0.0, transfer)
                if transfer and transfer not in self._transfers:
                    self.end_transfer(transfer, failure)
            else:
                early = self._take_early(handle)
                deadline = self._clock() + self._ttl_ms / 1000
                self._held[handle] = _Held(request, leases, digest, deadline, transfer)
                if transfer and self._transfers.setdefault(transfer, handle) == handle:
                    self._ended.pop(transfer, None)
                    early |= self._take_early(transfer)
                elif transfer:
                    logger.warning(
                        "request %s: another request has the name %s, and keeps it",
                        request,
                        shown(transfer),
                    )
        if failure:
            logger.warning("request %s: its blocks %s", request, failure)
            self._end(handle)
        for reader, (its_digest, readers) in early.items():
            self.finish(handle, its_digest, reader, readers)
        return handle

    def leases_of(
        self, handle: Handle | None, digest: bytes, transfer: str = ""
    ) -> tuple[Handle, tuple[GroupLease, ...]]:
        """Return handle and leases of a request, for a consumer with the same tokens.

        Args:
            handle, digest: from the reference.
            transfer: unless empty, the name to look up instead of the handle.

        Raises:
            NotYetError: the handle or name is unknown.
            LLMException: LLM_KV_CACHE_NOT_EXIST: the request has ended, or has other tokens.
        """
        with self._mutex:
            if transfer:
                handle = self._transfers.get(transfer)
            held = None if handle is None else self._held.get(handle)
            how = self._ended.get(transfer or handle or "")
        if held is None or handle is None:
            if how is None:
                raise NotYetError
            raise not_exist(f"{transfer or handle} {how}")
        if held.digest != digest:  # the reason does not reveal the name of the request
            raise not_exist(f"{transfer or handle} has other tokens")
        return handle, held.leases

    def end_transfer(self, transfer: str, how: str) -> None:
        """Remember how a transfer has ended, for consumers that ask later."""
        with self._mutex:
            self._transfers.pop(transfer, None)
            self._take_early(transfer)
            self._remember(transfer, how)

    def renew(self, handles: Iterable[Handle]) -> None:
        """Renew leases for `ttl_ms` from now, unless they have ended."""
        for handle in handles:
            with self._mutex:
                if (held := self._held.get(handle)) is None:
                    continue
                try:
                    for group_lease in held.leases:
                        self._engine.renew(group_lease.lease, self._ttl_ms)
                except LLMException:  # a lease has expired; `expire` frees the others
                    continue
                held.deadline = self._clock() + self._ttl_ms / 1000

    def finish(
        self, handle: Handle | None, digest: bytes, reader: int, readers: int, transfer: str = ""
    ) -> None:
        """Note that one of `readers` is done; the last one frees the blocks.

        Args:
            handle: None if the reader knows only the transfer.
        """
        name = handle or transfer
        with self._mutex:
            self._absent.heard(reader)
            handle = handle or self._transfers.get(transfer)
            held = None if handle is None else self._held.get(handle)
            if handle is None or held is None:
                if name and name not in self._ended:  # still being computed
                    early = self._early.setdefault(reader, {})
                    early[name] = digest, readers
                    if len(early) > MAX_EARLY:
                        del early[next(iter(early))]
                return
            if held.digest != digest:
                return
            held.done.add(reader)
            if len(held.done) < readers:
                return
        self._free(handle, "all its readers were done")

    def abort(self, handle: Handle) -> None:
        """End a request, even while readers use its blocks. Ignores unknown handles."""
        self._free(handle, "its producer has aborted it")

    def expire(self) -> None:
        """Free the blocks of expired leases, and retry those that peers have delayed."""
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
                    "request %s was not fetched in %g ms: freed its blocks", held.name, self._ttl_ms
                )
            self._free(handle, f"it was not fetched in {self._ttl_ms:g} ms")

    def end_again(self, transfer: str) -> None:
        """Free the blocks of ended requests of a transfer, if they are not read any more."""
        for handle, held in list(self._ending.items()):
            if held.transfer == transfer:
                self._end(handle)

    def forget_readers(self, linked: Collection[int]) -> None:
        """Forget early `finish` calls of readers that were not linked at the last call either."""
        with self._mutex:
            for reader in self._absent.gone(self._early, linked):
                del self._early[reader]

    @property
    def has_early(self) -> bool:
        """True if readers have finished requests that are not entered yet."""
        return bool(self._early)

    @property
    def has_freed(self) -> bool:
        """True if `take_freed` has something to return."""
        return bool(self._freed)

    def take_freed(self) -> set[Handle]:
        """Return the requests whose blocks have become free since the last call."""
        with self._mutex:
            freed, self._freed = self._freed, set()
        return freed

    def _free(self, handle: Handle, why: str) -> None:
        with self._mutex:
            if (held := self._held.pop(handle, None)) is not None:
                how = f"has ended: {why}, and its blocks may be reused"
                self._remember(handle, how)
                if self._transfers.get(held.transfer) == handle:
                    self.end_transfer(held.transfer, how)
                self._ending[handle] = held
        self._end(handle)

    def _end(self, handle: Handle) -> None:
        """Free the blocks of an ended request, unless a peer still uses them."""
        if (held := self._ending.get(handle)) is None:
            return
        # A push does not check leases of this side, so it must have ended before blocks are reused.
        is_free = not held.transfer or self._on_ending(held.transfer)
        for group_lease in held.leases:
            is_free &= self._release(held.name, group_lease.lease)
        if is_free:
            with self._mutex:
                if self._ending.pop(handle, None) is None:  # another thread was first
                    return
                self._freed.add(handle)
            self._on_freed()

    def _remember(self, what: Handle | str, how: str) -> None:
        """Remember how a request or transfer ended; the lock is held."""
        self._ended[what] = how
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _take_early(self, name: Handle | str) -> dict[int, tuple[bytes, int]]:
        """Remove and return early `finish` calls of a request, by reader; the lock is held."""
        found = {}
        for reader, early in list(self._early.items()):
            if name in early:
                found[reader] = early.pop(name)
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
        except BaseException:
            for group_lease in leases:  # no peer has them
                self._release(tag, group_lease.lease)
            raise
        return tuple(leases)

    def _release(self, request: str, lease: BlockLease) -> bool:
        """Release a lease, unless it has ended; return False if a peer still uses its blocks."""
        try:
            self._engine.release(lease)
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_TIMEOUT:
                peer_log.warning("blocks of request %s are still in use: %s", request, error)
                return False
            if error.status_code is not LLMStatusCode.LLM_ENGINE_FINALIZED:
                logger.warning("request %s: %s", request, error)
        return True
