"""Operations between caches of this process: copy and swap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvplan.engine.runner import Operation, OperationRunner, Prepared
from kvplan.planning.blocks import are_whole
from kvplan.planning.planner import (
    plan_copy_blocks,
    plan_copy_cache,
    plan_swap_blocks,
)
from kvplan.planning.segments import DEFAULT_COALESCE

if TYPE_CHECKING:
    from kvplan.execution import ComputeEvent, TransferTask
    from kvplan.planning import Coalesce, Plan
    from kvplan.planning.blocks import BlockPairs
    from kvplan.types import Cache


class LocalOperations(OperationRunner):
    """Each operation three times: executed, only planned, and submitted.

    Each may raise the following.
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
        reinterpret: bool = False,
        tag: str = "",
    ) -> None:
        """Copy a slot into another, of one cache or two, wherever they are placed.

        Args:
            src, dst: the caches.
            src_batch_index, dst_batch_index: the slots.
            offset: bytes into the row at which to begin, on both sides.
            size: bytes to copy; -1: the rest of the source row.
            timeout_ms: milliseconds that it may take; None: as long as it takes.
            coalesce: how slices become segments.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.
            tag: what logs and recordings call the transfer, such as the id of the request: at most
                128 printable characters.

        Raises:
            TypeError: an argument of another type.
            ValueError: timeout_ms is < 0 or not a number; a number outside its C type.
            LLMException: LLM_PARAM_INVALID: a slot, offset or size out of range, a paged cache,
                caches that cannot match, or bytes that are read and written by the same copy;
                LLM_KV_CACHE_NOT_EXIST: no such cache; LLM_TIMEOUT: the time has passed;
                LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        with Operation(self._running(), "copy_cache", tag=tag) as operation:
            while not operation.done:
                prepared = _copy_cache(
                    operation,
                    src,
                    dst,
                    src_batch_index,
                    dst_batch_index,
                    offset,
                    size,
                    coalesce,
                    reinterpret,
                )
                self._execute(operation, prepared, timeout_ms)

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
        reinterpret: bool = False,
    ) -> Plan:
        """Plan `copy_cache`; nothing moves.

        Raises:
            TypeError, ValueError, LLMException: as `copy_cache`, before anything moves.
        """
        operation = Operation(self._running(), "copy_cache")
        return _copy_cache(
            operation,
            src,
            dst,
            src_batch_index,
            dst_batch_index,
            offset,
            size,
            coalesce,
            reinterpret,
        )[0]

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
        reinterpret: bool = False,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> TransferTask:
        """Begin `copy_cache` and return its task.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves
                before that work is done. None: nothing to come after.

        Raises:
            TypeError, ValueError: as `copy_cache`.
            LLMException: as `copy_cache`, before anything moves; LLM_LINK_BUSY: nobody takes
                the tasks that have ended from `completions()`. What fails later the task
                raises.
        """
        with Operation(self._running(), "copy_cache", tag=tag, after=after) as operation:
            prepared = _copy_cache(
                operation,
                src,
                dst,
                src_batch_index,
                dst_batch_index,
                offset,
                size,
                coalesce,
                reinterpret,
            )
            return self._submit(operation, prepared)

    def copy_blocks(
        self,
        cache: Cache,
        blocks: Mapping[int, Sequence[int]] | BlockPairs,
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        tag: str = "",
    ) -> None:
        """Copy blocks of a paged cache, each to any number of others of it.

        Args:
            cache: a cache of this engine.
            blocks: source block -> the blocks that it is copied to; or pairs of source and
                destination block, or an array or tensor of two such columns.
            timeout_ms: milliseconds that it may take; None: as long as it takes.
            coalesce: how slices become segments.
            tag: what logs and recordings call the transfer, such as the id of the request: at most
                128 printable characters.

        Raises:
            TypeError: an argument of another type.
            ValueError: timeout_ms is < 0 or not a number; a number outside its C type.
            LLMException: LLM_PARAM_INVALID: a block out of range, a destination named twice, a
                block that is read and written, or a contiguous cache; LLM_KV_CACHE_NOT_EXIST:
                no such cache; LLM_TIMEOUT: the time has passed; LLM_FAILED: not initialized;
                LLM_ENGINE_FINALIZED.
        """
        with Operation(self._running(), "copy_blocks", tag=tag) as operation:
            while not operation.done:
                prepared = _copy_blocks(operation, cache, blocks, coalesce)
                self._execute(operation, prepared, timeout_ms)

    def plan_copy_blocks(
        self,
        cache: Cache,
        blocks: Mapping[int, Sequence[int]] | BlockPairs,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> Plan:
        """Plan `copy_blocks`; nothing moves.

        Raises:
            TypeError, ValueError, LLMException: as `copy_blocks`, before anything moves.
        """
        operation = Operation(self._running(), "copy_blocks")
        return _copy_blocks(operation, cache, blocks, coalesce)[0]

    def submit_copy_blocks(
        self,
        cache: Cache,
        blocks: Mapping[int, Sequence[int]] | BlockPairs,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> TransferTask:
        """Begin `copy_blocks` and return its task.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves
                before that work is done. None: nothing to come after.

        Raises:
            TypeError, ValueError: as `copy_blocks`.
            LLMException: as `copy_blocks`, before anything moves; LLM_LINK_BUSY: nobody takes
                the tasks that have ended from `completions()`. What fails later the task
                raises.
        """
        with Operation(self._running(), "copy_blocks", tag=tag, after=after) as operation:
            prepared = _copy_blocks(operation, cache, blocks, coalesce)
            return self._submit(operation, prepared)

    def swap_blocks(
        self,
        src: Cache,
        dst: Cache,
        src_to_dst: Mapping[int, int] | BlockPairs,
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        tag: str = "",
    ) -> None:
        """Copy blocks from a host cache to a device cache (in), or the other way round (out).

        Args:
            src, dst: paged caches, one of each placement.
            src_to_dst: source block -> destination block; or pairs, as of `copy_blocks`.
            timeout_ms: milliseconds that it may take; None: as long as it takes.
            coalesce: how slices become segments.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.
            tag: what logs and recordings call the transfer, such as the id of the request: at most
                128 printable characters.

        Raises:
            TypeError: an argument of another type.
            ValueError: timeout_ms is < 0 or not a number; a number outside its C type.
            LLMException: LLM_PARAM_INVALID: a block out of range, a destination named twice, no
                block, a contiguous cache, caches that cannot match, or two of the same
                placement; LLM_KV_CACHE_NOT_EXIST: no such cache; LLM_TIMEOUT: the time has
                passed; LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        with Operation(self._running(), "swap_blocks", tag=tag) as operation:
            while not operation.done:
                prepared = _swap_blocks(operation, src, dst, src_to_dst, coalesce, reinterpret)
                self._execute(operation, prepared, timeout_ms)

    def plan_swap_blocks(
        self,
        src: Cache,
        dst: Cache,
        src_to_dst: Mapping[int, int] | BlockPairs,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
    ) -> Plan:
        """Plan `swap_blocks`; nothing moves.

        Raises:
            TypeError, ValueError, LLMException: as `swap_blocks`, before anything moves.
        """
        operation = Operation(self._running(), "swap_blocks")
        return _swap_blocks(operation, src, dst, src_to_dst, coalesce, reinterpret)[0]

    def submit_swap_blocks(
        self,
        src: Cache,
        dst: Cache,
        src_to_dst: Mapping[int, int] | BlockPairs,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> TransferTask:
        """Begin `swap_blocks` and return its task.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves
                before that work is done. None: nothing to come after.

        Raises:
            TypeError, ValueError: as `swap_blocks`.
            LLMException: as `swap_blocks`, before anything moves; LLM_LINK_BUSY: nobody takes
                the tasks that have ended from `completions()`. What fails later the task
                raises.
        """
        with Operation(self._running(), "swap_blocks", tag=tag, after=after) as operation:
            prepared = _swap_blocks(operation, src, dst, src_to_dst, coalesce, reinterpret)
            return self._submit(operation, prepared)


def _copy_cache(
    operation: Operation,
    src: Cache,
    dst: Cache,
    src_batch_index: int,
    dst_batch_index: int,
    offset: int,
    size: int,
    coalesce: Coalesce | bool,
    reinterpret: bool,
) -> Prepared:
    """A local slot into another."""
    source, src_memory = operation.own("src", src, paged=False)
    target, dst_memory = operation.own("dst", dst, paged=False)
    if operation.moves and size == -1 and type(size) is int and are_whole(None, coalesce, offset):
        bound = operation.engine.transfers.rows.bind(
            "copy_cache", "C2C", source, target, src_memory, dst_memory, (src_batch_index,),
            (dst_batch_index,),
        )  # fmt: skip
        if bound is not None:
            return bound[0], src_memory, dst_memory, bound[1]
    plan = plan_copy_cache(
        source,
        target,
        src_batch_index=src_batch_index,
        dst_batch_index=dst_batch_index,
        offset=offset,
        size=size,
        coalesce=coalesce,
        reinterpret=reinterpret or operation.engine.reinterpret,
    )
    return plan, src_memory, dst_memory, None


def _copy_blocks(
    operation: Operation,
    cache: Cache,
    blocks: Mapping[int, Sequence[int]] | BlockPairs,
    coalesce: Coalesce | bool,
) -> Prepared:
    """Blocks of one cache to others of it."""
    own, memory = operation.own("cache", cache, paged=True)
    if operation.moves and type(blocks) is dict and are_whole(None, coalesce):
        to = blocks.values()
        if {*map(type, to)} <= {list, tuple} and all(to):  # else a source might not be checked
            read = [it for it, written in blocks.items() for _ in written]
            bound = operation.engine.transfers.rows.bind(
                "copy_blocks", "B2B", own, own, memory, memory, read, [*chain(*to)]
            )
            if bound is not None:
                return bound[0], memory, memory, bound[1]
    plan = plan_copy_blocks(own, blocks, coalesce=coalesce)
    return plan, memory, memory, None


def _swap_blocks(
    operation: Operation,
    src: Cache,
    dst: Cache,
    src_to_dst: Mapping[int, int] | BlockPairs,
    coalesce: Coalesce | bool,
    reinterpret: bool,
) -> Prepared:
    """Local blocks of a host cache to a device cache, or the other way round."""
    source, src_memory = operation.own("src", src, paged=True)
    target, dst_memory = operation.own("dst", dst, paged=True)
    plan = plan_swap_blocks(
        source,
        target,
        src_to_dst,
        coalesce=coalesce,
        reinterpret=reinterpret or operation.engine.reinterpret,
    )
    return plan, src_memory, dst_memory, None
