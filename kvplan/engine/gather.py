"""One request from several peers at once: one task, one deadline, one outcome."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvplan.engine.runner import Operation, OperationRunner
from kvplan.execution.task import wait_in_thread
from kvplan.planning.gather import plan_gather
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import BlocksCacheKey, CacheIndex

if TYPE_CHECKING:
    from kvplan.execution import TensorMemory, TransferTask
    from kvplan.planning import Coalesce, Plan, Side
    from kvplan.planning.blocks import Blocks
    from kvplan.types import Cache

_KINDS = (CacheIndex, BlocksCacheKey)
_TURN_MS = 10.0
"""How long a failed source may go unseen while others move."""
_STOPPED = "stopped, as another source of the gather failed"


class GatherError(LLMException):
    """A gather that is not whole; its status is that of the first source that failed.

    Attributes:
        failed: what went wrong, by place in `sources`; `origin` and `unconfirmed` of each are of
            its own plan, and those of this error are of the first.
        stopped: sources that were stopped because of these, by place.
    """

    def __init__(
        self, message: str, failed: dict[int, LLMException], stopped: dict[int, LLMException]
    ) -> None:
        first = failed[min(failed)]
        super().__init__(
            message,
            status_code=first.status_code,
            origin=first.origin,
            unconfirmed=first.unconfirmed,
        )
        self.failed = failed
        self.stopped = stopped


class GatherTask:
    """The handle of a submitted gather: it is whole, or says which of its sources failed.

    All methods may be called from several threads, and it can be awaited under asyncio, as a
    `TransferTask`.

    Attributes:
        tasks: of the sources from which something is taken, by their place in `sources`.
    """

    def __init__(self) -> None:
        self.tasks: dict[int, TransferTask] = {}
        self._names: dict[int, str] = {}
        self._given_up = False  # all of it, not for what became of one source

    @property
    def done(self) -> bool:
        """Whether each source has an outcome, good or bad; never blocks."""
        return all(task.done for task in self.tasks.values())

    def wait(self, timeout_ms: float | None = None) -> None:
        """Wait until every byte from every source has arrived.

        When it raises nothing moves any more: as soon as one source has failed, the others are
        stopped. Blocks of the destination may be written in part then.

        Args:
            timeout_ms: milliseconds for all together, >= 0; None waits for ever.

        Raises:
            ValueError: timeout_ms < 0 or not a number.
            GatherError: LLM_TIMEOUT when the time passed; otherwise the status of a source that
                failed. It names each that failed, and each that was stopped for that.
        """
        _check_timeout(timeout_ms)
        end = None if timeout_ms is None else perf_counter() + timeout_ms / 1000
        waiting = dict(self.tasks)
        errors: dict[int, LLMException] = {}
        try:
            while waiting:
                late = end is not None and perf_counter() >= end
                index = next((it for it, task in waiting.items() if task.done or late), None)
                if index is None:
                    self._wait_a_turn(waiting, end)
                    continue
                self._given_up = self._given_up or late
                try:
                    waiting[index].wait(0 if late else None)
                except LLMException as error:
                    errors[index] = error.with_traceback(None)
                    if not self._given_up:
                        self._stop(LLMException(_STOPPED))
                del waiting[index]
        except BaseException:
            self._drop()
            raise
        if errors:
            raise self._failure(errors)

    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop what is not whole yet; when this returns, no byte is touched any more."""
        self._given_up = True
        self._stop(reason)

    def explain(self) -> str:
        """Return how far each source is, as text."""
        return "\n".join(
            f"sources[{index}] {self._names[index]}\n{task.explain()}"
            for index, task in self.tasks.items()
        )

    def __await__(self) -> Generator[Any, None, None]:
        return wait_in_thread(self).__await__()

    def _stop(self, reason: LLMException | None) -> None:
        for task in tuple(self.tasks.values()):
            task.cancel(reason)

    def _drop(self) -> None:
        """Stop what has begun, and end its operations."""
        self.cancel()
        for task in tuple(self.tasks.values()):
            with suppress(LLMException):
                task.wait()

    def _begin(self, index: int, name: str, submit: Callable[[], TransferTask]) -> None:
        """Submit the part of a source; if it cannot be, the others are stopped."""
        self._names[index] = name
        try:
            self.tasks[index] = submit()
        except LLMException as error:
            errors = {index: error.with_traceback(None)}
            self._stop(LLMException(_STOPPED))
            for other, task in self.tasks.items():
                try:
                    task.wait()
                except LLMException as stopped:
                    errors[other] = stopped.with_traceback(None)
            raise self._failure(errors) from None

    def _wait_a_turn(self, waiting: dict[int, TransferTask], end: float | None) -> None:
        """Wait for the first; not long while others may fail, too."""
        turns = [] if len(waiting) == 1 else [_TURN_MS]
        if end is not None:
            turns.append(max(0.0, (end - perf_counter()) * 1000))
        first = next(iter(waiting.values()))
        with suppress(LLMException):  # whether it has failed is seen when it is done
            first.wait(min(turns, default=None), stop=False)

    def _failure(self, errors: dict[int, LLMException]) -> GatherError:
        stopped = {it: error for it, error in errors.items() if _STOPPED in str(error)}
        failed = {it: error for it, error in sorted(errors.items()) if it not in stopped}
        parts = [f"sources[{it}] {self._names[it]}: {error}" for it, error in failed.items()]
        if stopped:
            names = ", ".join(f"sources[{it}]" for it in sorted(stopped))
            parts.append(f"{names} stopped for that")
        message = f"gather_blocks: {len(failed)} of {len(self._names)} sources failed: "
        return GatherError(message + "; ".join(parts), failed or stopped, stopped)


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
        return, or an error names the sources that failed. Metrics, logs and `on_plan` have an
        operation for each source.

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
            ValueError: as `GatherTask.wait`.
            LLMException: as `pull_blocks` and `plan_gather`, before a byte has moved.
            GatherError: as `GatherTask.wait`; or a source was lost when others had begun.
        """
        _check_timeout(timeout_ms)
        engine = self._running()
        task = GatherTask()
        try:
            self._gather(
                task,
                sources,
                dst,
                src_blocks,
                dst_blocks,
                num_tokens,
                src_token,
                dst_token,
                rank,
                coalesce,
            )
            task.wait(engine.wait_ms if timeout_ms is None else timeout_ms)
        except BaseException:  # an interrupt between the two, say
            task._drop()
            raise

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
        task = GatherTask()
        try:
            self._gather(
                task,
                sources,
                dst,
                src_blocks,
                dst_blocks,
                num_tokens,
                src_token,
                dst_token,
                rank,
                coalesce,
            )
        except BaseException:
            task._drop()
            raise
        return task

    def _gather(
        self,
        task: GatherTask,
        sources: Sequence[CacheIndex | BlocksCacheKey],
        dst: Cache,
        src_blocks: Sequence[Blocks],
        dst_blocks: Blocks,
        num_tokens: int | None,
        src_token: int,
        dst_token: int,
        rank: int | None,
        coalesce: Coalesce | bool,
    ) -> None:
        """Submit the pulls of a gather; if it raises, `task` has those that have begun."""
        engine = self._running()
        _check_sources(sources)
        operations = [Operation(engine, "gather_blocks") for _ in sources]
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
            for index, plan in enumerate(plans):
                if plan is not None:
                    name = f"{sources[index]} ({plan.src.shard or 'whole'})"
                    prepared = (plan, memories[index], ours)
                    task._begin(index, name, partial(self._submit, operations[index], prepared))


def _check_timeout(timeout_ms: float | None) -> None:
    if timeout_ms is not None and not timeout_ms >= 0:
        raise ValueError(f"timeout_ms={timeout_ms} must be >= 0 or None")


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
        name = f"sources[{index}]"
        try:
            theirs, _, memory = operation.peer(
                name, key, _KINDS, paged=True, writable=False, table="src_blocks"
            )
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_PARAM_INVALID:
                raise
            failed = {index: error.with_traceback(None)}
            raise GatherError(f"gather_blocks: {name} {key}: {error}", failed, {}) from None
        sides.append(theirs)
        memories.append(memory)
    return sides, memories, target, ours
