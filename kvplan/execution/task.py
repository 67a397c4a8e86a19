"""A transfer in flight."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from threading import RLock
from typing import TYPE_CHECKING, Any

from kvnative._executor import KVN_OK, KVN_PENDING, NativeError
from kvplan.execution.outcome import outcome
from kvplan.inspection.units import nbytes_text
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvnative._executor import Report, StagedTask, Task
    from kvplan.execution.memory import TensorMemory
    from kvplan.planning.plan import Plan


class TransferTask:
    """The handle of a submitted plan.

    The plan, its descriptors and both memories live until the outcome, whether or not the handle
    does. Dropping the handle does not stop the transfer; `cancel` does. All methods may be called
    from several threads; a forked child has no part in its parent's task, and gets a NativeError.

    A task can be awaited under asyncio, which is `wait` without blocking the event loop: the result
    is None, or it raises. A cancelled await cancels the transfer.

    Args:
        on_outcome: called once, with what went wrong or None, by whoever finds the outcome first:
            before anyone is told.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task | StagedTask,
        memories: tuple[TensorMemory, TensorMemory],
        on_outcome: Callable[[LLMException | None], None] | None = None,
    ) -> None:
        self.plan = plan
        self._task = task
        self._memories = memories
        self._on_outcome = on_outcome
        self._concluded = False
        self._error: LLMException | None = None
        self._lost: LLMException | None = None  # why a memory went under it, where that was found
        self._reason: LLMException | None = None  # why it was cancelled, where that was told
        self._mutex = RLock()  # re-entrant: a signal handler may wait for the task too
        self._pid = os.getpid()  # elsewhere the lock may be held for ever

    @property
    def done(self) -> bool:
        """Whether there is an outcome, good or bad; never blocks."""
        return self._task.done

    def wait(self, timeout_ms: float | None = None, *, stop: bool = True) -> None:
        """Wait until every byte has arrived.

        Args:
            timeout_ms: milliseconds, >= 0; None waits for ever.
            stop: what happens when they pass. True stops the transfer: it does not go on behind the
                caller's back. False lets it go on: it can be waited for again.

        Raises:
            ValueError: timeout_ms < 0 or not a number.
            LLMException: LLM_TIMEOUT when the time passed; the status of the failure otherwise.
                `unconfirmed` says which descriptors may not have arrived, `origin` what failed.
        """
        report = self._task.wait(timeout_ms, stop)
        if report.status == KVN_PENDING:
            raise self._goes_on(timeout_ms, report)
        self._conclude()

    def _goes_on(self, timeout_ms: float | None, report: Report) -> LLMException:
        plan = self.plan
        return LLMException(
            f"{plan.operation} {plan.kind}: {timeout_ms} ms passed when {report.bytes_done} of "
            f"{plan.nbytes} bytes were moved{self._missing()}; the transfer goes on",
            status_code=LLMStatusCode.LLM_TIMEOUT,
            unconfirmed=report.unconfirmed,
        )

    def _missing(self) -> str:
        """What the transfer still waits for besides the copying, as part of a message."""
        return ""

    def __await__(self) -> Generator[Any, None, None]:
        # Where nobody awaits, asyncio need not be there.
        from kvplan.execution.awaiting import wait_in_thread

        return wait_in_thread(self).__await__()

    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop the transfer; when this returns, no byte is touched any more.

        A finished transfer stays as it is; waiting for a cancelled one raises LLM_FAILED.

        Args:
            reason: what was wrong: its message and status are what is raised and logged then. Of
                several the first counts.
        """
        self._reason = self._reason or reason
        self._task.cancel()

    def _conclude(self) -> None:
        if os.getpid() == self._pid:
            self._find_outcome()
        elif not self._concluded:
            raise NativeError(
                f"the task belongs to process {self._pid}, which had not found its outcome when "
                f"process {os.getpid()} was forked from it"
            )
        if self._error is not None:
            # Without the frames, and what they hold, of those who were told before.
            raise self._error.with_traceback(None)

    def _find_outcome(self) -> None:
        with self._mutex:
            if self._concluded:
                return
            report = self._task.report
            missing = "" if report.status == KVN_OK else self._missing()
            self._error = outcome(
                self.plan, report, self._memories, missing, self._lost, self._reason
            )
            # Only now: what interrupts the checks must not leave a success behind.
            self._concluded = True
            on_outcome, self._on_outcome = self._on_outcome, None
            if on_outcome is not None:
                on_outcome(self._error)

    def explain(self) -> str:
        """Return how far each layer came, as text: confirmed descriptors, and what failed."""
        if not self._task.done:
            return f"{self.plan!r} in flight"
        error = None
        try:
            self._conclude()
        except LLMException as raised:
            error = raised
        lines = []
        first = 0
        for layer in self.plan.layers:
            last = first + len(layer.tensors) * len(self.plan.segments)
            spans = error.unconfirmed if error else ()
            missing = sum(max(0, min(last, b) - max(first, a)) for a, b in spans)
            size = nbytes_text(len(layer.tensors) * self.plan.nbytes_per_tensor)
            confirmed = last - first - missing
            lines.append(f"layer {layer.src_layer}  {confirmed}/{last - first} desc  {size}")
            first = last
        lines.append(str(error) if error else LLMStatusCode.LLM_SUCCESS.name)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self.done else 'in flight'}: {self.plan!r}>"
