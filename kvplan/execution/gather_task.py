"""The handle of one transfer that has several tasks, mostly one for each peer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from kvnative._signals import Mutex
from kvplan.execution.awaitable import AwaitableTask
from kvplan.execution.completion import run_aside
from kvplan.execution.task import StoppedError
from kvplan.status import LLMException, invalid
from kvplan.validation import as_int, check_timeout, shown

if TYPE_CHECKING:
    from kvplan.execution.compute_events import ComputeEvent, ComputeStream
    from kvplan.execution.layer_task import LayerTask
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
        end = perf_counter() + timeout_ms / 1000
        return all(task.wait_done(_left_ms(end)) for task in list(self.tasks.values()))

    def wait(self, timeout_ms: float | None = None) -> None:
        """Wait until all bytes of all sources have arrived and the peers were notified.

        If one source fails, the others are stopped: after an error nothing moves, and blocks of
        the destination may be written in part.

        Args:
            timeout_ms: milliseconds for all sources together, >= 0; None waits forever.

        Raises:
            ValueError: timeout_ms is < 0 or NaN.
            GatherError: LLM_TIMEOUT if the time has passed, otherwise the status of a failed
                source. Names each source that failed or was stopped.
            LLMException: all bytes have arrived, but a peer could not be notified; or
                LLM_OUT_OF_MEMORY: the system has no thread left, and the transfer was stopped.
        """
        check_timeout(timeout_ms)
        end = inf if timeout_ms is None else perf_counter() + timeout_ms / 1000
        try:
            self._follow()
            for task in self.tasks.values():
                if not task.wait_done(_left_ms(end)):  # this thread helps to copy
                    self._given_up = True
                    with suppress(LLMException):
                        task.wait(0)
            errors = self._errors()
        except BaseException:
            self.drop()
            raise
        failure: LLMException | None = self._failure(errors) if errors else None
        try:
            if self._on_outcome is not None:
                self._on_outcome(failure)
        except LLMException as error:
            failure = error
        self._note_settled()
        if failure is not None:
            raise failure

    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop sources that have not ended; after this call no byte is read or written."""
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

    def begin(self, index: int, name: str, submit: Callable[[], TransferTask]) -> None:
        """Submit the part of a source; on an error stop the other sources.

        Raises:
            GatherError: the part could not be submitted.
        """
        self._names[index] = name
        try:
            self.tasks[index] = submit()
        except LLMException as error:
            self._stop(StoppedError())
            raise self._failure(self._errors() | {index: error.with_traceback(None)}) from None

    def drop(self) -> None:
        """Stop the sources that have begun, and end their operations."""
        self.cancel()
        self._errors()
        if self._on_outcome is not None:
            self._on_outcome(KeyboardInterrupt())  # sends nothing to the peers

    def _follow(self) -> None:
        with self._mutex:
            if self._num_unsettled is not None:
                return
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

    def _settle(self) -> None:
        with suppress(LLMException):  # `wait` raises the error to its callers
            self.wait()

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


class LayerGatherTask(GatherTask):
    """The handle of a transfer of several caches or peers that moves layer by layer.

    Each pair of caches has a `LayerTask` in `tasks`. Layers have the numbers of this process's
    cache: the source or, for a pull, the destination.
    """

    tasks: dict[int, LayerTask]  # type: ignore[assignment]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that must become ready, in ascending order."""
        return tuple(sorted({layer for task in self.tasks.values() for layer in _own_layers(task)}))

    def ready(self, layer: int, event: ComputeEvent | None = None) -> None:
        """Submit a layer that holds its final values; see `LayerTask.ready`.

        Raises:
            TypeError, LLMException: see `LayerTask.ready`.
        """
        if type(layer) is not int:
            layer = as_int("layer", layer)
        tasks = [task for task in self.tasks.values() if layer in _own_layers(task)]
        if not tasks:
            raise invalid(f"layer={shown(layer)} is not one of the layers {self.layers}")
        for task in tasks:
            task.ready(task.layers[_own_layers(task).index(layer)], event)


def _own_layers(task: LayerTask) -> range:
    """Return the layers of a task in the numbers of this process's cache."""
    part = task.plan.part
    return part.dst_layers if part.local == "dst" else part.src_layers


def _left_ms(end: float) -> float:
    """Return the milliseconds until `end`, at least 0."""
    return max(0.0, (end - perf_counter()) * 1000)
