"""Methods of an engine that lease blocks: see docs/how-to/leases.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvnative._signals import signals_deferred
from kvplan.engine.leases import OnReleased
from kvplan.engine.runner import OperationRunner
from kvplan.lease import BlockLease
from kvplan.types import Cache
from kvplan.validation import check_type

if TYPE_CHECKING:
    from kvplan.planning.blocks import Blocks


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
                and checked where the lease is, so that no one has to be alive for it. A thread of
                this engine then waits for peers that write, and calls `on_released`: from there on
                its blocks can be another request's. None: it does not expire.
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
                The lease has ended; `on_released` is called, and a later call returns, when that
                peer has gone on or died.
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

    def lease_deadline(self, lease: BlockLease) -> float | None:
        """Return when a lease expires, in seconds of `time.monotonic()`; None: never.

        Raises:
            TypeError: no BlockLease.
            LLMException: LLM_KV_CACHE_NOT_EXIST: it was released or has expired;
                LLM_PARAM_INVALID: not a lease of this engine; LLM_FAILED: not initialized, or in a
                forked child; LLM_ENGINE_FINALIZED.
        """
        return self._running().leases.deadline(check_type("lease", lease, BlockLease))

    def on_released(self, callback: OnReleased) -> Callable[[], None]:
        """Call `callback(lease, end)` when the blocks of a lease of this engine are free.

        `end` is a `LeaseEnd`. Released leases are reported when `release` is about to return, those
        of a cache when the cache was freed, in the thread that did it; expired leases, and those
        that a peer has held up, in a thread of the engine. The callback may lease and release;
        exceptions are logged.

        Returns:
            A function that removes the callback.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
            TypeError: it cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"callback={callback!r} must be callable with (BlockLease, LeaseEnd)")
        return self._running().leases.on_released(callback)

    def leases(self) -> list[BlockLease]:
        """Return the leases of this engine that have not ended, the oldest first.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
        """
        return self._running().leases.live()
