"""Operations between caches of this process: copy and swap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvplan.engine import operations
from kvplan.engine.running import Running
from kvplan.planning.planner import DEFAULT_COALESCE

if TYPE_CHECKING:
    from kvplan.execution import TransferTask
    from kvplan.planning import Coalesce, Plan
    from kvplan.types import Cache


class LocalOperations(Running):
    """Each operation three times: executed, only planned, and submitted.

    Each may raise the following.

    Raises:
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID: a slot, block, offset or size out of range, or a cache of
            the wrong kind or placement; LLM_KV_CACHE_NOT_EXIST: no such cache; LLM_TIMEOUT: the
            time has passed; LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
    """

    def copy_cache(
        self,
        src: Cache,
        dst: Cache,
        src_batch_index: int = 0,
        dst_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> None:
        """Copy a slot into another, of one cache or two, wherever they are placed.

        Args:
            src, dst: the caches; only their ids matter, if they have one.
            src_batch_index, dst_batch_index: the slots.
            offset: bytes into the row at which to begin, on both sides.
            size: bytes to copy; -1: the rest of the source row.
            timeout_ms: milliseconds that it may take; None: as long as it takes.
            coalesce: how slices become segments.
        """
        self._execute(
            operations.copy_cache,
            timeout_ms,
            src,
            dst,
            src_batch_index,
            dst_batch_index,
            offset,
            size,
            coalesce,
        )

    def plan_copy_cache(
        self,
        src: Cache,
        dst: Cache,
        src_batch_index: int = 0,
        dst_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> Plan:
        """Plan `copy_cache`; nothing moves."""
        return self._plan(
            operations.copy_cache,
            src,
            dst,
            src_batch_index,
            dst_batch_index,
            offset,
            size,
            coalesce,
        )

    def submit_copy_cache(
        self,
        src: Cache,
        dst: Cache,
        src_batch_index: int = 0,
        dst_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> TransferTask:
        """Begin `copy_cache` and return its task."""
        return self._submit(
            operations.copy_cache,
            src,
            dst,
            src_batch_index,
            dst_batch_index,
            offset,
            size,
            coalesce,
        )

    def copy_blocks(
        self,
        cache: Cache,
        blocks: Mapping[int, Sequence[int]],
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> None:
        """Copy blocks of a paged cache, each to any number of others of it.

        Args:
            cache: only its id matters, if it has one.
            blocks: source block -> the blocks that it is copied to. Empty: nothing to do (its twins
                refuse that: a plan copies something).
            timeout_ms: milliseconds that it may take; None: as long as it takes.
            coalesce: how slices become segments.
        """
        if blocks == {}:
            self._running()
            return
        self._execute(operations.copy_blocks, timeout_ms, cache, blocks, coalesce)

    def plan_copy_blocks(
        self,
        cache: Cache,
        blocks: Mapping[int, Sequence[int]],
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> Plan:
        """Plan `copy_blocks`; nothing moves."""
        return self._plan(operations.copy_blocks, cache, blocks, coalesce)

    def submit_copy_blocks(
        self,
        cache: Cache,
        blocks: Mapping[int, Sequence[int]],
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> TransferTask:
        """Begin `copy_blocks` and return its task."""
        return self._submit(operations.copy_blocks, cache, blocks, coalesce)

    def swap_blocks(
        self,
        src: Cache,
        dst: Cache,
        src_to_dst: Mapping[int, int],
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> None:
        """Copy blocks from a host cache to a device cache (in), or the other way round (out).

        Args:
            src, dst: paged caches, one of each placement; only their ids matter, if they have one.
            src_to_dst: source block -> destination block.
            timeout_ms: milliseconds that it may take; None: as long as it takes.
            coalesce: how slices become segments.
        """
        self._execute(operations.swap_blocks, timeout_ms, src, dst, src_to_dst, coalesce)

    def plan_swap_blocks(
        self,
        src: Cache,
        dst: Cache,
        src_to_dst: Mapping[int, int],
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> Plan:
        """Plan `swap_blocks`; nothing moves."""
        return self._plan(operations.swap_blocks, src, dst, src_to_dst, coalesce)

    def submit_swap_blocks(
        self,
        src: Cache,
        dst: Cache,
        src_to_dst: Mapping[int, int],
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> TransferTask:
        """Begin `swap_blocks` and return its task."""
        return self._submit(operations.swap_blocks, src, dst, src_to_dst, coalesce)
