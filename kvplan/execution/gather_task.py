"""The handle of one transfer that has several tasks, mostly one for each peer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from kvnative._backend import KVN_OK
from kvnative._signals import Mutex, signals_deferred
from kvplan.execution.awaitable import AwaitableTask
from kvplan.execution.completion import completion_thread, run_aside
from kvplan.execution.task import StoppedError
from kvplan.status import LLMException, timed_out, without_frames
from kvplan.validation import check_timeout

if TYPE_CHECKING:
    from kvplan.execution.compute_events import ComputeStream
    from kvplan.execution.task import TransferTask


class GatherError(LLMException):
    """A failed gather, or transfer with several peers; has the status of the first failed source.

    Attributes:
        failed: the errors of sources by place. `origin` and `unconfirmed` of each refer to its own
            plan; those of this error are of the first failed source.
        stopped: the errors of sources that were stopped because others failed, by place.
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


class GatherTask(AwaitableTask):
    """The handle of a submitted gather, or transfer with several peers.

    All methods are thread-safe. Like a `TransferTask`, the handle can be awaited under asyncio.

    Attributes:
        tasks: the tasks by place, without those of sources from which nothing moves.
    """

    def __init__(
        self, operation: str, on_outcome: Callable[[BaseException | None], None] | None = None
    ) -> None:
        super().__init__()
        self._operation = operation
        self._on_outcome = on_outcome  # notifies peers once, which may be slow
        self.tasks: dict[int, TransferTask] = {}
        self._names: dict[int, str] = {}
        self._given_up = False  # by a timeout or `cancel`, not because a source failed
        self._num_unsettled: int | None = None  # tasks without an outcome, once they are followed
        self._mutex = Mutex()

    @property
    def done(self) -> bool:
        """True once every source has an outcome. Never blocks."""
        return all(task.done for task in self.tasks.values())

    def wait_done(self, timeout_ms: float) -> bool:
        """Wait at most `timeout_ms`, and return `done`. Does not raise the outcome."""
        end = perf_counter() + float(timeout_ms) / 1000
        tasks = list(self.tasks.values())
        return all(task.wait_done(_left_ms(end)) for task in tasks)

    def wait(self, timeout_ms: float | None = None) -> None:
        """Wait until all bytes of all sources have arrived and the peers were notified.

        If one source fails, the others are stopped: after an error nothing moves, and blocks of
        the destination may be written in part. An interrupt (Ctrl-C) ends the call, but not the
        transfer. During a verification or notification after the last byte, the transfer fails.

        Args:
            timeout_ms: milliseconds for all sources together, >= 0; None waits forever.

        Raises:
            TypeError, ValueError: timeout_ms is not a number, < 0 or NaN.
            GatherError: LLM_TIMEOUT if the time has passed, otherwise the status of a failed
                source. Names each source that failed or was stopped.
            LLMException: LLM_TIMEOUT if the bytes moved or failed in time, but a verification or
                the answer of a peer is missing: `wait` can be called again;
                all bytes have arrived, but a peer could not be notified; or
                LLM_OUT_OF_MEMORY: the system has no thread left, and the transfer was stopped.
        """
        check_timeout(timeout_ms)
        end = inf if timeout_ms is None else perf_counter() + float(timeout_ms) / 1000
        try:
            self._follow()
            if not self.wait_done(_left_ms(end)):  # copies, too
                with signals_deferred:
                    self._given_up = True
                    for task in self.tasks.values():
                        with suppress(LLMException):
                            task.wait(0)
            is_late = timeout_ms is not None and not self._given_up and not self._settles_by(end)
            errors = {} if is_late else self._errors()
        except LLMException:  # no thread is left
            self.drop()
            raise
        if is_late:
            raise self._goes_on(timeout_ms)
        failure: LLMException | None = self._failure(errors) if errors else None
        try:
            if self._on_outcome is not None:
                self._on_outcome(failure)
        except LLMException as error:
            failure = error.with_traceback(None)
        self._note_settled()
        if failure is not None:
            raise without_frames(failure)

    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop sources that have not ended; after this call no byte is read or written."""
        with signals_deferred:
            self._given_up = True
            self._stop(reason)

    def explain(self) -> str:
        """Return the progress of each source as text."""
        return "\n".join(
            f"sources[{index}] {self._names[index]}\n{task.explain()}"
            for index, task in self.tasks.items()
        )

    def block_stream(self, stream: ComputeStream) -> None:
        """Let later work of `stream` wait for the copies from all sources.

        After an error the stream waits only for some.

        Raises:
            NativeError, TypeError, LLMException: see `TransferTask.block_stream`.
        """
        for task in list(self.tasks.values()):
            task.block_stream(stream)

    def begin(
        self, index: int, name: str, submit: Callable[..., TransferTask], *args: object
    ) -> None:
        """Submit the part of a source by `submit(*args)`; on an error stop the other sources.

        Raises:
            GatherError: the part could not be submitted.
        """
        self._names[index] = name
        try:
            self.tasks[index] = submit(*args)
        except LLMException as error:
            self._stop(StoppedError())
            raise self._failure(self._errors() | {index: error.with_traceback(None)}) from None

    def settle_by(self, track: Callable[[GatherTask], None]) -> None:
        """Call `track` with this task, so that it is settled when it ends, even if dropped."""
        track(self)

    def drop(self) -> None:
        """Stop the sources that have begun, and end their operations."""
        self.cancel()
        self._errors()
        if self._on_outcome is not None:
            self._on_outcome(KeyboardInterrupt())  # sends nothing to the peers

    def _follow(self) -> None:
        if self._num_unsettled is not None:
            return
        if self.tasks:
            completion_thread()  # first, since it fails without a free thread
        with signals_deferred:
            with self._mutex:
                if self._num_unsettled is not None:
                    return  # type: ignore[unreachable]  # set by another thread
                self._num_unsettled = len(self.tasks)
            for task in list(self.tasks.values()):
                task.when_settled(partial(self._note_source, task))
            if not self.tasks:
                self._conclude()

    def _note_source(self, task: TransferTask) -> None:
        """Count an outcome; stop the other sources if this one has failed."""
        with self._mutex:
            self._num_unsettled = num_left = (self._num_unsettled or 0) - 1
        if num_left == 0:
            self._conclude()
        elif not self._given_up:
            try:
                task.wait()
            except LLMException:
                run_aside(self._stop, StoppedError())

    def _conclude(self) -> None:
        """Settle after the last source has ended; in another thread if that notifies peers."""
        if self._on_outcome is not None:
            run_aside(self._settle)
        else:
            self._settle()

    def _stop(self, reason: LLMException | None) -> None:
        for task in list(self.tasks.values()):
            task.cancel(reason)

    def _errors(self) -> dict[int, LLMException]:
        """Return the errors of all sources by place, once each has an outcome."""
        errors: dict[int, LLMException] = {}
        for index, task in list(self.tasks.items()):
            try:
                task.wait()
            except LLMException as error:
                errors[index] = error.with_traceback(None)
        return errors

    def _goes_on(self, timeout_ms: float | None) -> LLMException:
        """Return the error of a wait that ended between the last byte and the outcome."""
        failed = sum(task.native.report.status != KVN_OK for task in self.tasks.values())
        what = "every byte had arrived; the transfer goes on"
        if failed:
            what = f"{failed} of {len(self._names)} sources had failed; `wait` again for the errors"
        return timed_out(f"{self._operation}: {timeout_ms} ms passed when {what}")

    def _failure(self, errors: dict[int, LLMException]) -> GatherError:
        failed: dict[int, LLMException] = {}
        stopped: dict[int, LLMException] = {}
        for at, error in sorted(errors.items()):
            (stopped if isinstance(error, StoppedError) else failed)[at] = error
        parts = [f"sources[{at}] {self._names[at]}: {error}" for at, error in failed.items()]
        if stopped:
            names = ", ".join(f"sources[{at}]" for at in stopped)
            parts.append(f"{names} stopped because of that")
        message = f"{self._operation}: {len(failed)} of {len(self._names)} sources failed: "
        return GatherError(message + "; ".join(parts), failed or stopped, stopped)


def _left_ms(end: float) -> float:
    """Return the milliseconds until `end`; 0 after it."""
    return max(0.0, end - perf_counter()) * 1000
