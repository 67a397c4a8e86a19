"""Leases that this engine gives of its blocks, and how they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from kvnative._signals import Mutex, signals_deferred
from kvplan.engine.claims import not_exist
from kvplan.engine.runner import OperationRunner
from kvplan.engine.telemetry import logger
from kvplan.lease import BlockLease, LeaseWord
from kvplan.planning.blocks import block_indices, check_distinct
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import Cache
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.engine.registry import CacheRegistry
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.side import Side
    from kvplan.transport.protocol import Transport


_MAX_TTL_MS: Final = 1e12  # some 31 years


class Leases:
    """Those of one engine; may be used from several threads.

    Args:
        cluster_id, instance: of the engine.
        registry: of its caches.
        transports: what checks the leases for peers.

    Attributes:
        observer: called with "lease" and "release" and the lease, where that has happened.
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
        self._transports = {it.name: it for it in transports}
        self._mutex = Mutex()  # re-entrant: a signal handler may come back here
        self._last_id = 0
        self._live: dict[int, BlockLease] = {}
        self._deadlines: dict[int, int] = {}  # of those that expire: CLOCK_MONOTONIC, ns
        self._callbacks: dict[object, Callable[[BlockLease], object]] = {}
        self._ending: dict[int, BlockLease] = {}  # a peer may still be writing with them
        self.observer: Callable[[str, BlockLease], object] | None = None

    def begin(
        self,
        cache: Cache,
        blocks: Blocks,
        tag: str,
        ttl_ms: float | None,
        tokens: int | None = None,
        *,
        paged: bool,
    ) -> BlockLease:
        """See `LeaseOperations.lease_blocks` and `lease_slot`."""
        entry = self._registry.resolve(cache)
        cache_id = entry.cache.cache_id
        if entry.side is None or entry.side.paged is not paged or not entry.remote_accessible:
            kind = "paged" if paged else "contiguous"
            raise invalid(f"cache={cache} must be a {kind} cache of this engine that peers reach")
        table = block_indices("blocks" if paged else "batch_index", blocks, entry.side)
        if not table.size:
            raise invalid("blocks is empty; a lease has at least one block")
        check_distinct("blocks", table, entry.side)
        if tokens is not None:
            _check_tokens(tokens, len(table), entry.side)
        deadline_ns = 0 if ttl_ms is None else _deadline_ns(ttl_ms)
        with self._mutex:
            self._last_id += 1
            lease_id = self._last_id
        words = self._begin_words(deadline_ns)
        try:
            it = BlockLease(
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
                self._live[lease_id] = it
                if deadline_ns:
                    self._deadlines[lease_id] = deadline_ns
        except BaseException:
            self._end_words((it.transport, (it.slot, it.generation)) for it in words)
            raise
        if self._registry.living.get(cache_id) is not entry:  # freed meanwhile
            self.end_cache(cache_id)
            raise not_exist(f"cache_id={cache_id} was freed when it was leased")
        if self.observer is not None:
            self.observer("lease", it)
        return it

    def end(self, lease: BlockLease) -> None:
        """See `LeaseOperations.release`."""
        lease_id, live = lease.lease_id, self._live
        with self._mutex:
            if live.get(lease_id) is not lease and self._held(lease) is None:
                return
            if lease_id in live:
                self._ending[lease_id] = lease
                del live[lease_id]
                self._deadlines.pop(lease_id, None)
        self._end_words(lease.places())
        # Once, of several threads that release it.
        if self._ending.pop(lease_id, None) is None:
            return
        if self.observer is not None:
            self.observer("release", lease)
        for it in list(self._callbacks.values()):
            try:
                it(lease)
            except Exception:
                logger.exception("on_released: a callback has failed")

    def on_released(self, callback: Callable[[BlockLease], object]) -> Callable[[], None]:
        """See `LeaseOperations.on_released`."""
        token = object()
        self._callbacks[token] = callback

        def remove() -> None:
            self._callbacks.pop(token, None)

        return remove

    def renew(self, lease: BlockLease, ttl_ms: float) -> None:
        """See `LeaseOperations.renew`."""
        renewed_ns = _deadline_ns(ttl_ms)
        with self._mutex:
            self.standing(lease)
            if (deadline_ns := self._deadlines.get(lease.lease_id)) is None:
                raise invalid(f"{lease} was made without ttl_ms: it does not expire")
            if (late_ns := time.monotonic_ns() - deadline_ns) >= 0:
                raise not_exist(f"{lease} expired {late_ns / 1e6:.1f} ms ago: release it")
            self._deadlines[lease.lease_id] = renewed_ns
            try:
                self._renew_words(lease, renewed_ns)
            except LLMException as error:  # it has expired on one of them: on all, then
                self._deadlines[lease.lease_id] = deadline_ns
                with suppress(LLMException):
                    self._renew_words(lease, deadline_ns)
                raise not_exist(f"{lease} expired just now: release it") from error

    def standing(self, lease: BlockLease) -> BlockLease:
        """Return a lease of this engine that was not released.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID.
        """
        with self._mutex:
            if self._held(lease) is None or lease.lease_id not in self._live:
                raise not_exist(f"{lease} was released")
        return lease

    def end_cache(self, cache_id: int) -> None:
        """End those of a cache that was freed: its memory is looked after where that ends."""
        for it in self.live():
            if it.cache_id == cache_id:
                with suppress(LLMException):
                    self.end(it)

    def live(self) -> list[BlockLease]:
        """Those that have not ended, in the order in which they were made."""
        with self._mutex:
            return list(self._live.values())

    def _held(self, lease: BlockLease) -> BlockLease | None:
        """With the mutex: whether it was not released, to its end; refuses one of others."""
        if (lease.cluster_id, lease.instance) != (self._cluster_id, self._instance):
            if lease.cluster_id == self._cluster_id:
                return None  # of this engine before it was restarted: it ended with that
            raise invalid(f"{lease} is of cluster {lease.cluster_id}; only its owner can end it")
        held = self._live.get(lease.lease_id) or self._ending.get(lease.lease_id)
        if held is None and lease.lease_id <= self._last_id:
            return None
        if held is not lease and held != lease:
            raise invalid(f"{lease} is not as this engine has made it")
        return held

    def _begin_words(self, deadline_ns: int) -> tuple[LeaseWord, ...]:
        """A word for each transport that checks leases."""
        words: list[LeaseWord] = []
        refusal = not_exist("the engine has no transport")
        try:
            for name, it in self._transports.items():
                try:
                    words.append(LeaseWord(name, *it.begin_lease(deadline_ns)))
                except LLMException as error:
                    if error.status_code is not LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
                        raise
                    refusal = error
        except BaseException:
            self._end_words((it.transport, (it.slot, it.generation)) for it in words)
            raise
        if not words:
            raise refusal
        return tuple(words)

    def _renew_words(self, lease: BlockLease, deadline_ns: int) -> None:
        for transport, (slot, generation) in lease.places():
            self._transports[transport].renew_lease(slot, generation, deadline_ns)

    def _end_words(self, words: Iterable[tuple[str, tuple[int, int]]]) -> None:
        left = iter(words)
        for transport, word in left:
            try:
                self._transports[transport].end_leases((word,))
            except BaseException:  # a peer holds this one up: the others end all the same
                self._end_words(left)
                raise


def _deadline_ns(ttl_ms: object) -> int:
    if not isinstance(ttl_ms, (int, float)) or isinstance(ttl_ms, bool):
        raise TypeError(f"ttl_ms={ttl_ms!r} must be a number")
    if not 0 < ttl_ms <= _MAX_TTL_MS:
        raise invalid(f"ttl_ms={ttl_ms} must be in (0, {_MAX_TTL_MS:g}]")
    return time.monotonic_ns() + int(ttl_ms * 1e6)


def _check_tokens(tokens: int, num_blocks: int, side: Side) -> None:
    """Refuse what so many blocks of the cache cannot have."""
    if side.layout is None or "token" not in side.layout.axes:
        raise invalid(f"tokens={shown(tokens)} needs a cache whose layout says what a token is")
    most = num_blocks * side.extent("token")
    if not 1 <= check_type("tokens", tokens, int) <= most:
        raise invalid(f"tokens={tokens} must be in [1, {most}], what the blocks hold")


class LeaseOperations(OperationRunner):
    """Blocks that peers reach only as long as they are one request's: see docs/how-to/leases.md."""

    def lease_blocks(
        self,
        cache: Cache,
        blocks: Blocks,
        *,
        tag: str = "",
        ttl_ms: float | None = None,
        tokens: int | None = None,
    ) -> BlockLease:
        """Lease blocks of a paged cache, for peers to pull from or push to.

        Send the lease to them (`to_bytes`, `from_bytes`). Several leases may have one block. They
        end with `release`, or when the cache is freed.

        Args:
            cache: of this engine; peers reach it.
            blocks: in the order of the request, each once.
            tag: what messages call it, such as the id of the request: at most 64 characters.
            ttl_ms: milliseconds after which no transfer with it succeeds; by this process's clock,
                and checked where the lease is, so that no one has to be alive for it. Its blocks
                are another request's after `release` only, which waits for peers that write. Over
                ucx and hccl a thread of this process ends it then. None: it does not expire.
            tokens: of the request, from the first block on. A transfer that names no blocks of the
                lease moves so many, and none moves more. None: whole blocks.

        Raises:
            TypeError: an argument of another type.
            LLMException: LLM_PARAM_INVALID: a block out of range or given twice, a contiguous
                cache, a bad tag, or more tokens than the blocks hold; LLM_KV_CACHE_NOT_EXIST: no
                such cache; LLM_FEATURE_NOT_ENABLED: no transport of this engine checks leases;
                LLM_OUT_OF_MEMORY: there are 131,072.
        """
        with signals_deferred:
            return self._running().leases.begin(cache, blocks, tag, ttl_ms, tokens, paged=True)

    def lease_slot(
        self, cache: Cache, batch_index: int = 0, *, tag: str = "", ttl_ms: float | None = None
    ) -> BlockLease:
        """Lease a slot of a contiguous cache; all else is as for `lease_blocks`.

        Peers use it in place of the key: `pull_cache`, `push_cache`, and `pull_blocks` without
        `src_blocks`.

        Raises:
            TypeError, LLMException: as `lease_blocks`; LLM_PARAM_INVALID: a slot out of range,
                or a paged cache.
        """
        check_type("batch_index", batch_index, int)
        with signals_deferred:
            return self._running().leases.begin(cache, [batch_index], tag, ttl_ms, paged=False)

    @contextmanager
    def leased_blocks(
        self,
        cache: Cache,
        blocks: Blocks,
        *,
        tag: str = "",
        ttl_ms: float | None = None,
        tokens: int | None = None,
    ) -> Iterator[BlockLease]:
        """`lease_blocks` as a `with` block, at whose end the lease is released.

        Raises:
            TypeError, LLMException: as `lease_blocks`, and at the end as `release`.
        """
        lease = self.lease_blocks(cache, blocks, tag=tag, ttl_ms=ttl_ms, tokens=tokens)
        try:
            yield lease
        finally:
            self.release(lease)

    def release(self, lease: BlockLease) -> None:
        """End a lease: on return its blocks can be another request's at once. Idempotent.

        No transfer with it succeeds from here on, and no peer writes with it; those that are
        writing are waited for.

        Raises:
            TypeError: no BlockLease.
            LLMException: LLM_PARAM_INVALID: not a lease of this engine; LLM_TIMEOUT: a peer that
                was writing does not get on (it is stopped, say): it may still write to the blocks.
                The lease has ended; a later call returns when that peer has gone on or died.
        """
        if type(lease) is not BlockLease:
            check_type("lease", lease, BlockLease)
        with signals_deferred:
            self._running().leases.end(lease)

    def renew(self, lease: BlockLease, ttl_ms: float) -> None:
        """Let a lease that has not expired do so in `ttl_ms` milliseconds from now; peers keep it.

        Raises:
            TypeError: no BlockLease, or no number.
            LLMException: LLM_KV_CACHE_NOT_EXIST: it was released or has expired;
                LLM_PARAM_INVALID: not a lease of this engine, one made without ttl_ms, or ttl_ms
                is not > 0.
        """
        with signals_deferred:
            self._running().leases.renew(check_type("lease", lease, BlockLease), ttl_ms)

    def on_released(self, callback: Callable[[BlockLease], object]) -> Callable[[], None]:
        """Call `callback` with each lease of this engine whose blocks are free from now on.

        That is when `release` is about to return, or the cache was freed; in the thread that did
        it. It may release and lease others; what it raises is logged.

        Returns:
            A function that removes the callback.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
            TypeError: it cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"callback={callback!r} must be callable with a BlockLease")
        return self._running().leases.on_released(callback)

    def leases(self) -> list[BlockLease]:
        """Return the leases of this engine that were not released, expired ones among them.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
        """
        return self._running().leases.live()
