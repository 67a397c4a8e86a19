"""Leases of this engine: their start, deadlines and end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from kvnative._signals import Condition, Mutex
from kvplan.engine.telemetry import logger
from kvplan.lease import BlockLease, LeaseEnd, LeaseWord
from kvplan.planning.blocks import block_indices, check_distinct
from kvplan.planning.tokens import room
from kvplan.status import LLMException, invalid, not_exist
from kvplan.system.limits import start_thread
from kvplan.transport.lease_expiry import Deadlines, seconds_left
from kvplan.transport.transport import LeaseWords
from kvplan.types import Cache
from kvplan.validation import as_int, shown

if TYPE_CHECKING:
    from kvplan.engine.registry import CacheRegistry
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.side import Side
    from kvplan.transport.transport import Transport


_MAX_TTL_MS: Final = 1e12  # almost 32 years
_RETRY_NS: Final = 1_000_000_000  # between two waits for a peer that may still write
_STOPPED_S: Final = 1.0  # time that `stop` waits for the thread
MAX_FOLLOWING: Final = 1 << 15  # blocks of a lease that fit into one message to peers
_RELEASED: Final = LeaseEnd.RELEASED  # faster than a lookup in the enumeration
OnReleased = Callable[[BlockLease, LeaseEnd], object]


class Leases:
    """The leases of one engine; thread-safe.

    A lease is live, then ending (a peer may still write with it), then ended, which is reported
    once. One thread, started when first needed, ends leases at their deadlines and retries the end
    of leases that a peer has delayed.

    Args:
        cluster_id, instance: identity of the engine.
        registry: its caches.
        transports: enforce the leases on peers.

    Attributes:
        observer: called with the lease and None after it begins or moves, and with the lease and
            the reason after it ends.
    """

    def __init__(
        self,
        cluster_id: int,
        instance: bytes,
        registry: CacheRegistry,
        transports: Sequence[Transport],
    ) -> None:
        self._cluster_id = cluster_id
        self._instance = instance
        self._registry = registry
        self._words = LeaseWords(transports)
        self._mutex = Mutex()  # re-entrant: a signal handler may enter again
        self._changed = Condition(self._mutex)
        self._move_mutex = Mutex()
        self._moving: set[int] = set()  # live leases whose new words take effect after a move
        self._thread: threading.Thread | None = None
        self._closed = False
        self._last_id = 0
        self._live: dict[int, BlockLease] = {}
        self._ending: dict[int, tuple[BlockLease, LeaseEnd]] = {}
        self._held_up: set[int] = set()  # leases in `_ending` that a peer delays
        # Expiry of live leases, and next retry of ending ones: CLOCK_MONOTONIC.
        self._deadlines: Deadlines[int] = Deadlines()
        self._callbacks: dict[object, OnReleased] = {}
        self.observer: Callable[[BlockLease, LeaseEnd | None], object] | None = None

    def begin(
        self,
        cache: Cache,
        blocks: Blocks,
        tag: str,
        ttl_ms: float | None,
        tokens: int | None = None,
    ) -> BlockLease:
        """See `LeaseOperations.lease_blocks`."""
        entry = self._registry.resolve(cache)
        cache_id = entry.cache.cache_id
        if entry.side is None or not entry.remote_accessible:
            raise invalid(f"cache={cache} must be a cache of this engine that peers can reach")
        paged = entry.side.paged
        table = block_indices("blocks", blocks, entry.side)
        if not table.size:
            raise invalid("blocks is empty; a lease has at least one block")
        if not paged and (len(table) > 1 or tokens is not None):
            raise invalid(
                f"blocks={shown(blocks)} and tokens={tokens} of a contiguous cache must be one "
                "slot ([slot]) and None"
            )
        check_distinct("blocks", table, entry.side)
        if tokens is not None:
            tokens = _check_tokens(tokens, len(table), entry.side)
        deadline_ns = 0 if ttl_ms is None else _deadline_ns(ttl_ms)
        with self._mutex:
            if deadline_ns:
                self._start_thread()
            self._last_id += 1
            lease_id = self._last_id
        words = self._words.begin(deadline_ns)
        try:
            lease = BlockLease(
                self._cluster_id,
                self._instance,
                cache_id,
                lease_id,
                tuple(table.tolist()),
                paged,
                tag,
                words,
                tokens,
            )
            with self._mutex:
                self._live[lease_id] = lease
                if deadline_ns:
                    self._wake_at(lease_id, deadline_ns)
        except BaseException:
            self._words.drop(words)
            raise
        if cache_id not in self._registry.living:  # `remap` replaces the entry of a living cache
            self.end_cache(cache_id)
            raise not_exist(f"cache_id={cache_id} was freed while it was being leased")
        if self.observer is not None:
            self.observer(lease, None)
        return lease

    def end(self, lease: BlockLease) -> None:
        """See `LeaseOperations.release`."""
        lease_id = lease.lease_id
        with self._mutex:
            held = self._live.get(lease_id)
            if held is not lease and (held := self._held(lease)) is None:
                return
            self._move_to_ending(lease_id, _RELEASED)
        try:
            self._words.end(held)
        except BaseException:
            self._try_again([lease_id])
            raise
        self._conclude(lease_id)

    def move(
        self,
        where: Cache | BlockLease,
        moves: Mapping[int, int],
        copy: Callable[[], object] | None,
        *,
        follow: bool,
    ) -> list[BlockLease]:
        """See `LeaseOperations.moved`; peers learn the result when it is published."""
        with self._move_mutex:
            with self._mutex:
                leases, blocks = self._affected(where, moves, follow=follow)
                if not follow:
                    for lease in leases:
                        self._move_to_ending(lease.lease_id, LeaseEnd.MOVED)
            if follow:
                return self._follow(leases, blocks, copy)
            lease_ids = [lease.lease_id for lease in leases]
            try:
                self._words.end_together(leases)
            except BaseException:
                self._try_again(lease_ids)
                raise
            for lease_id in lease_ids:
                self._conclude(lease_id)
            if copy is not None:
                copy()
            return leases

    def _affected(
        self, where: Cache | BlockLease, moves: Mapping[int, int], *, follow: bool
    ) -> tuple[list[BlockLease], list[tuple[int, ...]]]:
        """Return the live leases with a moved block, and their new blocks. Needs the mutex."""
        now_ns = time.monotonic_ns()
        if isinstance(where, BlockLease):
            entry = self._registry.get(self.standing(where).cache_id)
            candidates = [self.standing(where)]
        else:
            entry = self._registry.resolve(where)
            candidates = [
                lease
                for lease_id, lease in self._live.items()
                if lease.cache_id == entry.cache.cache_id and self._is_live(lease_id, now_ns)
            ]
        if entry.side is None:
            raise invalid(f"cache={where} must be a cache of this engine that peers can reach")
        side = entry.side
        old = block_indices("moves", [*moves], side).tolist()
        new = block_indices("moves", [*moves.values()], side).tolist()
        moves = dict(zip(old, new, strict=True))
        leases = [lease for lease in candidates if not moves.keys().isdisjoint(lease.blocks)]
        tables = [tuple([moves.get(block, block) for block in lease.blocks]) for lease in leases]
        for lease, table in zip(leases, tables, strict=True) if follow else ():
            if len({*table}) < len(table):
                raise invalid(f"moves={shown(moves)} would let {lease} name a block twice")
            if len(table) > MAX_FOLLOWING:
                raise invalid(
                    f"{lease} has {len(table)} blocks; peers follow leases of at most "
                    f"{MAX_FOLLOWING}: call with follow=False, and lease the blocks again"
                )
        return leases, tables

    def _follow(
        self,
        leases: Sequence[BlockLease],
        tables: Sequence[tuple[int, ...]],
        copy: Callable[[], object] | None,
    ) -> list[BlockLease]:
        """Give leases their new blocks, or the old ones if `copy` or a writing peer fails."""
        begun: list[tuple[LeaseWord, ...]] = []
        lease_ids = [lease.lease_id for lease in leases]
        try:
            begun.extend(
                self._words.begin(self._deadlines.get(lease_id) or 0) for lease_id in lease_ids
            )
        except BaseException:
            for words in begun:
                self._words.drop(words)
            raise
        with self._mutex:
            self._moving.update(lease_ids)
        try:
            self._words.end_together(leases)
            if copy is not None:
                copy()
        except BaseException:
            tables = [lease.blocks for lease in leases]
            raise
        finally:
            placed = [*map(self._place, leases, tables, begun)]
        return [lease for lease in placed if lease is not None]

    def _place(
        self, lease: BlockLease, blocks: tuple[int, ...], words: tuple[LeaseWord, ...]
    ) -> BlockLease | None:
        """Give a lease other blocks and words, and return its new value; None: it has ended."""
        lease_id = lease.lease_id
        latest = replace(lease, blocks=blocks, words=words, moves=lease.moves + 1)
        with self._mutex:
            self._moving.discard(lease_id)
            if is_live := self._live.get(lease_id) is lease:
                self._live[lease_id] = self._registry.moved_leases[lease_id] = latest
                if (deadline_ns := self._deadlines.get(lease_id)) is not None:
                    with suppress(LLMException):  # expired just now
                        self._words.renew(latest, deadline_ns)
        if not is_live:
            self._words.end(latest)
            return None
        if self.observer is not None:
            self.observer(latest, None)
        return latest

    def on_released(self, callback: OnReleased) -> Callable[[], None]:
        """See `LeaseOperations.on_released`."""
        token = object()
        self._callbacks[token] = callback

        def remove() -> None:
            self._callbacks.pop(token, None)

        return remove

    def renew(self, lease: BlockLease, ttl_ms: float) -> float:
        """See `LeaseOperations.renew`."""
        renewed_ns = _deadline_ns(ttl_ms)
        with self._mutex:
            lease = self.standing(lease)
            if (deadline_ns := self._deadlines.get(lease.lease_id)) is None:
                raise invalid(f"{lease} was made without ttl_ms: it does not expire")
            if lease.lease_id not in self._moving:  # otherwise the new words get this deadline
                try:
                    self._words.renew(lease, renewed_ns)
                except LLMException as error:  # expired on one transport: undo the others
                    with suppress(LLMException):
                        self._words.renew(lease, deadline_ns)
                    raise not_exist(f"{lease} expired just now") from error
            self._wake_at(lease.lease_id, renewed_ns)
        return renewed_ns / 1e9

    def standing(self, lease: BlockLease) -> BlockLease:
        """Return the latest value of a lease of this engine that has not ended."""
        with self._mutex:
            held = self._held(lease)
            if held is None or not self._is_live(lease.lease_id, time.monotonic_ns()):
                raise not_exist(f"{lease} was released or has expired")
        return held

    def end_cache(self, cache_id: int) -> None:
        """End the leases of a freed cache; a lease that a peer delays ends later."""
        with self._mutex:
            ended = [lease_id for lease_id, held in self._live.items() if held.cache_id == cache_id]
            for lease_id in ended:
                self._move_to_ending(lease_id, LeaseEnd.CACHE_FREED)
        self._end_all(ended)

    def live(self) -> list[BlockLease]:
        """Return the leases that have not ended, the oldest first."""
        now_ns = time.monotonic_ns()
        with self._mutex:
            return [
                held for lease_id, held in self._live.items() if self._is_live(lease_id, now_ns)
            ]

    def stop(self) -> None:
        """Stop the thread; the remaining leases end with their transports."""
        with self._mutex:
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOPPED_S)

    def close(self) -> None:
        """Report the leases that a peer still delays, after their transports have closed."""
        for lease_id in list(self._ending):
            self._conclude(lease_id)

    def _start_thread(self) -> None:
        """Start the thread that ends leases, if it does not run. Needs the mutex."""
        if self._thread is not None or self._closed:
            return
        self._thread = start_thread(f"kvplan-leases-{self._cluster_id}", self._run)

    def _wake_at(self, lease_id: int, deadline_ns: int) -> None:
        """Set the time at which the thread ends a lease or retries. Needs the mutex."""
        if self._deadlines.set(lease_id, deadline_ns):
            self._changed.notify()

    def _is_live(self, lease_id: int, now_ns: int) -> bool:
        """Return whether a lease is live and before its deadline. Needs the mutex."""
        deadline_ns = self._deadlines.get(lease_id)
        return lease_id in self._live and (deadline_ns is None or now_ns < deadline_ns)

    def _run(self) -> None:
        """End leases at their deadlines, and retry delayed ends, until `stop`."""
        while (late := self._wait_for_late()) is not None:
            self._end_all(late)

    def _wait_for_late(self) -> list[int] | None:
        """Wait for leases that expire or are due again; return their ids, or None on `stop`."""
        with self._mutex:
            while not self._closed:
                now_ns, late = time.monotonic_ns(), []
                while (lease_id := self._deadlines.pop_late(now_ns)) is not None:
                    self._move_to_ending(lease_id, LeaseEnd.EXPIRED)
                    late.append(lease_id)
                if late:
                    return late
                next_ns = self._deadlines.next_ns()
                self._changed.wait(None if next_ns is None else seconds_left(next_ns))
        return None

    def _move_to_ending(self, lease_id: int, end: LeaseEnd) -> None:
        """Move a live lease to the ending ones. Needs the mutex."""
        if (lease := self._live.get(lease_id)) is None:
            return
        self._registry.moved_leases.pop(lease_id, None)
        deadline_ns = self._deadlines.pop(lease_id, None)
        if deadline_ns is not None and deadline_ns <= time.monotonic_ns():
            end = LeaseEnd.EXPIRED  # it had expired before this call
        self._ending[lease_id] = lease, end
        del self._live[lease_id]

    def _end_all(self, lease_ids: Iterable[int]) -> None:
        """End several ending leases together, to wait only once for a stopped peer."""
        ended = [held for lease_id in lease_ids if (held := self._ending.get(lease_id)) is not None]
        ended_ids = [lease.lease_id for lease, _ in ended]
        try:
            self._words.end_together([lease for lease, _ in ended])
        except Exception as error:
            if not self._held_up.issuperset(ended_ids):
                logger.warning("event=leases_held_up leases=%s reason=%s", ended_ids[:8], error)
            self._try_again(ended_ids)
            return
        for lease_id in ended_ids:
            self._conclude(lease_id)

    def _try_again(self, lease_ids: Iterable[int]) -> None:
        """Retry the end of leases later, because a peer may still write with them."""
        again_ns = time.monotonic_ns() + _RETRY_NS
        # If the thread cannot start, the program may call `release` again.
        with self._mutex, suppress(LLMException):
            for lease_id in lease_ids:
                self._held_up.add(lease_id)
                self._wake_at(lease_id, again_ns)
            self._start_thread()

    def _conclude(self, lease_id: int) -> None:
        """Report the end of a lease once, after its last writer has finished."""
        if (ended := self._ending.pop(lease_id, None)) is None:
            return
        if self._held_up:
            self._held_up.discard(lease_id)
        if self.observer is not None:
            self.observer(*ended)
        callbacks = self._callbacks
        for callback in list(callbacks.values()) if callbacks else ():
            try:
                callback(*ended)
            except BaseException as error:
                logger.exception("on_released: a callback has failed")
                is_exit = not isinstance(error, Exception)
                if is_exit and threading.current_thread() is not self._thread:
                    raise

    def _held(self, lease: BlockLease) -> BlockLease | None:
        """Return this engine's value of a lease; None: ended. Refuses others. Needs the mutex."""
        if (lease.cluster_id, lease.instance) != (self._cluster_id, self._instance):
            if lease.cluster_id == self._cluster_id:
                return None  # made before a restart of this engine, which ended all leases
            raise invalid(f"{lease} is of cluster {lease.cluster_id}; only its owner can end it")
        ending = self._ending.get(lease.lease_id)
        held = self._live.get(lease.lease_id) or (ending and ending[0])
        if held is None and lease.lease_id <= self._last_id:
            return None
        if held is not lease and held != lease and not (held and held.replaces(lease)):
            raise invalid(f"{lease} differs from the lease that this engine made")
        return held


def _deadline_ns(ttl_ms: Any) -> int:
    """Return the time `ttl_ms` milliseconds from now: CLOCK_MONOTONIC."""
    is_number = isinstance(ttl_ms, Real)
    if isinstance(ttl_ms, bool) or not is_number:
        raise TypeError(f"ttl_ms={ttl_ms!r} must be a number")
    if not 0 < ttl_ms <= _MAX_TTL_MS:
        raise invalid(f"ttl_ms={shown(ttl_ms)} must be in (0, {_MAX_TTL_MS:g}]")
    return time.monotonic_ns() + int(float(ttl_ms) * 1e6)


def _check_tokens(tokens: int, num_blocks: int, side: Side) -> int:
    """Return `tokens`; refuse more than the blocks hold."""
    if side.layout is None or "token" not in side.layout.axes:
        raise invalid(f"tokens={shown(tokens)} needs a cache whose layout has an axis of tokens")
    most = room(side, num_blocks, 0)
    number = as_int("tokens", tokens)
    if not 1 <= number <= most:
        raise invalid(f"tokens={number} must be in [1, {most}], as many as the blocks hold")
    return number
