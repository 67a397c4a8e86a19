"""Executing plans: bind, lower, submit, and hand back a task."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from threading import RLock
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from kvnative._executor import Backend, Executor, NativeError, ThreadPool, host_backend
from kvnative._lower import Descriptors
from kvplan.execution.binding import bind
from kvplan.execution.layer_task import LayerTask
from kvplan.execution.memory import Direction, HostMemory, Memory, TensorMemory, as_memory
from kvplan.execution.outcome import outcome
from kvplan.execution.task import TransferTask
from kvplan.planning.plan import Plan
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.validation import check_type


class Transfers:
    """A thread pool, and the executors that submit plans over it.

    Args:
        threads: copying threads; None for the number of usable cores.
        wrap: called with each backend, returns the one to use: a place for the wrappers of
            `kvnative._executor` (faults, delays, limits, traces).
    """

    def __init__(
        self, threads: int | None = None, wrap: Callable[[Backend], Backend] | None = None
    ) -> None:
        self._pool = ThreadPool(threads)
        self._wrap = wrap or (lambda backend: backend)
        self._host = Executor(self._wrap(host_backend(self._pool)))
        self._mutex = RLock()  # of what follows; `wrap` may submit
        self._closed = False
        self._executors: WeakKeyDictionary[TensorMemory, dict[Backend, Executor]] = (
            WeakKeyDictionary()
        )

    @property
    def threads(self) -> int:
        """Number of copying threads."""
        return self._pool.threads

    def submit(
        self,
        plan: Plan,
        src: Memory,
        dst: Memory,
        on_outcome: Callable[[LLMException | None], None] | None = None,
    ) -> TransferTask:
        """Start `plan` from `src` to `dst` and return at once (small transfers: done).

        Args:
            src, dst: TensorMemory, a `Cache` with addresses, or a sequence of arrays.
            on_outcome: as for `TransferTask`; not called if this raises.

        Raises:
            TypeError: an argument of another type.
            LLMException: LLM_PARAM_INVALID if memory and plan do not fit; the memory's own status
                if it is no longer valid; LLM_ENGINE_FINALIZED after `close`; LLM_FAILED in a forked
                child. Nothing was copied then.
        """
        executor, descriptors, memories = self._prepare(plan, src, dst)
        try:
            task = executor.submit(descriptors, keep=(plan, *memories))
        except NativeError as error:
            raise self._unusable(error) from error
        return TransferTask(plan, task, memories, on_outcome)

    def stage(
        self,
        plan: Plan,
        src: Memory,
        dst: Memory,
        on_outcome: Callable[[LLMException | None], None] | None = None,
        on_last: Callable[[LayerTask], None] | None = None,
    ) -> LayerTask:
        """Prepare `plan`; each layer moves when `LayerTask.ready` is called for it.

        Arguments and errors as for `submit`. Both memories must stay what they are until the
        outcome.

        Args:
            on_last: as for `LayerTask`; not called if this raises.
        """
        executor, descriptors, memories = self._prepare(plan, src, dst)
        stage_size = plan.tensors_per_layer * len(plan.segments)
        try:
            task = executor.stage(descriptors, stage_size, keep=(plan, *memories))
        except NativeError as error:
            raise self._unusable(error) from error
        try:
            return LayerTask(plan, task, memories, on_outcome, on_last)
        except BaseException:
            task.cancel()  # nobody could: without a handle it would stay until the end
            raise

    def execute(
        self, plan: Plan, src: Memory, dst: Memory, timeout_ms: float | None = None
    ) -> None:
        """Submit `plan` and wait, the calling thread copying too.

        Arguments and errors as for `submit` and `TransferTask.wait`.
        """
        executor, descriptors, memories = self._prepare(plan, src, dst)
        try:
            report = executor.run(descriptors, timeout_ms, keep=(plan, *memories))
        except NativeError as error:
            raise self._unusable(error) from error
        failure = outcome(plan, report, memories)
        if failure is not None:
            raise failure

    def _prepare(
        self, plan: Plan, src: Memory, dst: Memory
    ) -> tuple[Executor, Descriptors, tuple[TensorMemory, TensorMemory]]:
        check_type("plan", plan, Plan)
        source, target = as_memory("src", src), as_memory("dst", dst)
        try:
            getter = self._executor(source, "get", target)
            putter = self._executor(target, "put", source)
        except NativeError as error:
            raise self._unusable(error) from error
        if getter is not None and putter is not None:
            raise invalid(
                "src and dst are both memory of other processes; one of them must be this one's"
            )
        one_space = source.in_process and target.in_process
        descriptors = bind(plan, source, target, one_space=one_space)
        return getter or putter or self._host, descriptors, (source, target)

    def _executor(
        self, memory: TensorMemory, direction: Direction, other: TensorMemory
    ) -> Executor | None:
        """The executor that `memory` needs for this transfer; None: any that `other` needs."""
        if isinstance(memory, HostMemory):
            return None
        backend = memory.backend(self._pool, direction, other)
        if backend is None:
            return None
        with self._mutex:
            if self._closed:
                raise self._unusable(NativeError("the transfers are closed"))
            executors = self._executors.setdefault(memory, {})
            if backend not in executors:
                executors[backend] = Executor(self._wrap(backend))
            return executors[backend]

    def _unusable(self, error: NativeError) -> LLMException:
        finalized = LLMStatusCode.LLM_ENGINE_FINALIZED
        code = finalized if self._closed else LLMStatusCode.LLM_FAILED
        return LLMException(str(error), status_code=code)

    def close(self, *, cancel: bool = False) -> None:
        """Wait for what is in flight (or cancel it), and take no more; idempotent.

        A `LayerTask` that still waits for a layer is cancelled in either case.
        """
        with self._mutex:
            self._closed = True
            executors = [it for kept in self._executors.values() for it in kept.values()]
        for executor in (*executors, self._host):
            executor.close(cancel)

    def __repr__(self) -> str:
        return f"<Transfers of {self.threads} threads{', closed' if self._closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def default_transfers() -> Transfers:
    """Return this process's own `Transfers`, made when first asked for (a forked child's: anew)."""
    return _transfers_of(os.getpid())


@cache
def _transfers_of(_pid: int) -> Transfers:
    return Transfers()


def submit(plan: Plan, src: Memory, dst: Memory) -> TransferTask:
    """`Transfers.submit` of the process's own transfers."""
    return default_transfers().submit(plan, src, dst)


def execute(plan: Plan, src: Memory, dst: Memory, timeout_ms: float | None = None) -> None:
    """`Transfers.execute` of the process's own transfers."""
    default_transfers().execute(plan, src, dst, timeout_ms)
