"""Methods of an engine that lease blocks: see docs/how-to/leases.md."""

from __future__ import annotations

from collections.abc import Callable
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
        """Lease blocks of a paged cache, or a slot of another one, for peers to pull or to push to.

        Send the lease to them (`to_bytes`, `from_bytes`). Several leases may have one block. They
        end with `release`, or when the cache is freed.

        Args:
            cache: of this engine; peers reach it.
            blocks: in the order of the request, each once; of a contiguous cache the slot alone, as
                `[slot]`.
            tag: what messages call it, such as the id of the request: at most 64 characters.
            ttl_ms: milliseconds after which no transfer with it succeeds; by this process's clock,
                and checked where the lease is, so that no one has to be alive for it. A thread of
                this engine then waits for peers that write, and calls `on_released`: from there on
                its blocks can be another request's. None: it does not expire.
            tokens: of the request, from the first block on. A transfer that names no blocks of the
                lease moves so many, and none moves more. None: whole blocks.

        Raises:
            TypeError: an argument of another type.
            LLMException: LLM_PARAM_INVALID: a block out of range or given twice, several slots,
                a bad tag, or more tokens than the blocks hold; LLM_KV_CACHE_NOT_EXIST: no
                such cache; LLM_FEATURE_NOT_ENABLED: no transport of this engine checks leases;
                LLM_OUT_OF_MEMORY: there are 131,072.
        """
        with signals_deferred:
            return self._running().leases.begin(cache, blocks, tag, ttl_ms, tokens)

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

    def renew(self, lease: BlockLease, ttl_ms: float) -> float:
        """Let a lease that has not expired do so in `ttl_ms` milliseconds from now; peers keep it.

        Returns:
            When the lease expires, in seconds of `time.monotonic()`.

        Raises:
            TypeError: no BlockLease, or no number.
            LLMException: LLM_KV_CACHE_NOT_EXIST: it was released or has expired;
                LLM_PARAM_INVALID: not a lease of this engine, one made without ttl_ms, or ttl_ms
                is not > 0.
        """
        with signals_deferred:
            return self._running().leases.renew(check_type("lease", lease, BlockLease), ttl_ms)

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
