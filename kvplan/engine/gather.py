"""One request from several peers at once: one task, one deadline, one outcome."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvplan.engine.runner import Operation, OperationRunner
from kvplan.execution.task import wait_in_thread
from kvplan.planning.gather import plan_gather
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.status import LLMException, invalid
from kvplan.types import BlocksCacheKey, CacheIndex

if TYPE_CHECKING:
    from kvplan.execution import TensorMemory, TransferTask
    from kvplan.planning import Coalesce, Plan, Side
    from kvplan.planning.blocks import Blocks
    from kvplan.types import Cache

_KINDS = (CacheIndex, BlocksCacheKey)


class GatherTask:
    """The handle of a submitted gather: it is whole, or says which of its sources failed.

    All methods may be called from several threads, and it can be awaited under asyncio, as a
    `TransferTask`.

    Attributes:
        tasks: of the sources from which something is taken, by their place in `sources`.
    """

    def __init__(self, tasks: dict[int, TransferTask], names: dict[int, str]) -> None:
        self.tasks = tasks
        self._names = names

    @property
    def done(self) -> bool:
        """Whether each source has an outcome, good or bad; never blocks."""
        return all(task.done for task in self.tasks.values())

    def wait(self, timeout_ms: float | None = None) -> None:
        """Wait until every byte from every source has arrived.

        When it raises nothing moves any more: what one source failed at, the others are stopped
        for. Blocks of the destination may be written in part then.

        Args:
            timeout_ms: milliseconds for all together, >= 0; None waits for ever.

        Raises:
            ValueError: timeout_ms < 0 or not a number.
            LLMException: LLM_TIMEOUT when the time passed; otherwise the status of the first
                source that failed. The message names each that is not whole.
        """
        end = None if timeout_ms is None else perf_counter() + timeout_ms / 1000
        failed: dict[int, LLMException] = {}
        left = timeout_ms
        for index, task in self.tasks.items():
            try:
                task.wait(left)
            except LLMException as error:
                if not failed:
                    self.cancel()
                failed[index] = error
            except BaseException:
                self.cancel()
                raise
            if end is not None:
                left = max(0.0, (end - perf_counter()) * 1000)
        if failed:
            raise self._failure(failed)

    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop what is not whole yet; when this returns, no byte is touched any more."""
        for task in self.tasks.values():
            task.cancel(reason)

    def explain(self) -> str:
        """Return how far each source is, as text."""
        return "\n".join(
            f"sources[{index}] {self._names[index]}\n{task.explain()}"
            for index, task in self.tasks.items()
        )

    def __await__(self) -> Generator[Any, None, None]:
        return wait_in_thread(self).__await__()

    def _failure(self, failed: dict[int, LLMException]) -> LLMException:
        first = next(iter(failed.values()))
        parts = "; ".join(
            f"sources[{index}] {self._names[index]}: {error}" for index, error in failed.items()
        )
        return LLMException(
            f"gather_blocks: {len(failed)} of {len(self.tasks)} sources did not arrive whole: "
            f"{parts}",
            status_code=first.status_code,
            unconfirmed=first.unconfirmed,
        )


class GatherOperations(OperationRunner):
    """Pulls of one request from several peers, of which each has a part of the model's cache."""

    def gather_blocks(
        self,
        sources: Sequence[CacheIndex | BlocksCacheKey],
        dst: Cache,
        src_blocks: Sequence[Blocks],
        dst_blocks: Blocks,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        rank: int | None = None,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> None:
        """Pull one request into blocks of a local paged cache, from several peers at once.

        Each byte comes from exactly one source; which, `plan_gather` says. All of it has arrived on
        return, or an error names the sources that failed.

        Args:
            sources: remote paged caches; their shards say which layers and heads they have.
            dst: the local paged cache; only its id matters, if it has one.
            src_blocks: for each source, the blocks of the request there.
            dst_blocks: local blocks.
            num_tokens: tokens of the request that are moved; None: whole blocks.
            src_token, dst_token: tokens of the block tables to skip, on each side.
            rank: of this engine among those that pull the same, to spread replicas; see
                `plan_gather`.
            timeout_ms: milliseconds that all may take together; None: SyncKvCacheWaitTime.
            coalesce: how slices become segments.

        Raises:
            TypeError: an argument of another type.
            LLMException: as `pull_blocks` and `plan_gather`, before a byte has moved; as
                `GatherTask.wait`.
        """
        engine = self._running()
        task = self.submit_gather_blocks(
            sources,
            dst,
            src_blocks,
            dst_blocks,
            num_tokens=num_tokens,
            src_token=src_token,
            dst_token=dst_token,
            rank=rank,
            coalesce=coalesce,
        )
        task.wait(engine.wait_ms if timeout_ms is None else timeout_ms)

    def plan_gather_blocks(
        self,
        sources: Sequence[CacheIndex | BlocksCacheKey],
        dst: Cache,
        src_blocks: Sequence[Blocks],
        dst_blocks: Blocks,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        rank: int | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> list[Plan | None]:
        """Plan `gather_blocks` with the peers' own descriptions; nothing moves."""
        engine = self._running()
        _check_sources(sources)
        operations = [Operation(engine, "gather_blocks") for _ in sources]
        sides, _, target, _ = _found(operations, sources, dst)
        return plan_gather(
            sides,
            target,
            src_blocks,
            dst_blocks,
            num_tokens=num_tokens,
            src_token=src_token,
            dst_token=dst_token,
            rank=rank,
            coalesce=coalesce,
        )

    def submit_gather_blocks(
        self,
        sources: Sequence[CacheIndex | BlocksCacheKey],
        dst: Cache,
        src_blocks: Sequence[Blocks],
        dst_blocks: Blocks,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        rank: int | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> GatherTask:
        """Begin `gather_blocks` and return its task; nothing moves if one of the sources cannot."""
        engine = self._running()
        _check_sources(sources)
        operations = [Operation(engine, "gather_blocks") for _ in sources]
        tasks: dict[int, TransferTask] = {}
        names: dict[int, str] = {}
        with ExitStack() as stack:
            for operation in operations:
                stack.enter_context(operation)
            sides, memories, target, ours = _found(operations, sources, dst)
            plans = plan_gather(
                sides,
                target,
                src_blocks,
                dst_blocks,
                num_tokens=num_tokens,
                src_token=src_token,
                dst_token=dst_token,
                rank=rank,
                coalesce=coalesce,
            )
            try:
                for index, plan in enumerate(plans):
                    if plan is not None:
                        prepared = (plan, memories[index], ours)
                        names[index] = f"{sources[index]} ({plan.src.shard or 'whole'})"
                        tasks[index] = self._submit(operations[index], prepared)
            except BaseException:
                for task in tasks.values():
                    task.cancel()
                raise
        return GatherTask(tasks, names)


def _check_sources(sources: Any) -> None:
    if isinstance(sources, str | bytes) or not isinstance(sources, Sequence):
        raise TypeError(f"sources must be a sequence of keys, not {type(sources).__name__}")
    if not sources:
        raise invalid("sources is empty; at least one is needed")


def _found(
    operations: list[Operation], sources: Sequence[CacheIndex | BlocksCacheKey], dst: Cache
) -> tuple[list[Side], list[TensorMemory], Side, TensorMemory]:
    """The caches of the peers and the one of this process, each with its memory."""
    sides, memories = [], []
    target, ours = operations[0].own("dst", dst, paged=True)
    for index, (operation, key) in enumerate(zip(operations, sources, strict=True)):
        operation.cache_id = operations[0].cache_id
        theirs, _, memory = operation.peer(
            f"sources[{index}]", key, _KINDS, paged=True, writable=False, table="src_blocks"
        )
        sides.append(theirs)
        memories.append(memory)
    return sides, memories, target, ours
