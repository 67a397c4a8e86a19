"""A gather in flight: its parts, one for each source, and what became of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING

from kvnative._signals import Mutex
from kvplan.engine.operation import Operation
from kvplan.execution.awaitable import AwaitableTask
from kvplan.execution.completion import run_aside
from kvplan.status import LLMException, invalid
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.execution import ComputeEvent, ComputeStream, LayerTask, TransferTask
    from kvplan.links import PeerLink

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


class GatherNotices:
    """What the peers of a gather are told at its end: each once, however many sources it has."""

    def __init__(
        self,
        engine: Engine,
        operation: str,
        notify: bytes | None,
        notify_failure: bytes | None,
        tag: str = "",
    ) -> None:
        self._new = partial(
            Operation, engine, "notify", notify=notify, notify_failure=notify_failure, tag=tag
        )
        self._operation = operation
        self._operations: dict[PeerLink, Operation] = {}  # begun: the links stay until they end
        self._mutex = Mutex()
        self._error: LLMException | None = None
        self.any: bool = self._new().notifies

    def add(self, link: PeerLink) -> None:
        """The peer of `link` has a source."""
        if self.any and link not in self._operations:
            notice = self._operations[link] = self._new().__enter__()
            notice.hold(link)

    def finish(self, error: BaseException | None) -> None:
        """Tell them how it ended, if they were not told yet; waits for those who tell them now."""
        with self._mutex:
            for link in list(self._operations):
                try:
                    self._operations.pop(link).finish(error)
                except LLMException as failure:
                    self._error = self._error or LLMException(
                        f"{self._operation}: {str(failure.args[0]).removeprefix('notify: ')}",
                        status_code=failure.status_code,
                    )
        if error is None and self._error is not None:
            raise self._error


class GatherTask(AwaitableTask):
    """The handle of a submitted gather: it is whole, or says which of its sources failed.

    All methods may be called from several threads, and it can be awaited under asyncio, as a
    `TransferTask`.

    Attributes:
        tasks: of the sources from which something is taken, by their place in `sources`.
    """

    def __init__(self, operation: str, notices: GatherNotices) -> None:
        super().__init__()
        self._operation = operation
        self.notices = notices
        self.tasks: dict[int, TransferTask] = {}
        self._names: dict[int, str] = {}
        self._given_up = False  # all of it, not for what became of one source
        self._num_unsettled: int | None = None  # of the tasks, once they are followed
        self._mutex = Mutex()

    @property
    def done(self) -> bool:
        """Whether each source has an outcome, good or bad; never blocks."""
        return all(task.done for task in self.tasks.values())

    def wait_done(self, timeout_ms: float) -> bool:
        """Wait until `done`, or the time has passed; returns whether it is. Raises no outcome."""
        end = perf_counter() + timeout_ms / 1000
        return all(
            task.wait_done(max(0.0, (end - perf_counter()) * 1000))
            for task in list(self.tasks.values())
        )

    def wait(self, timeout_ms: float | None = None) -> None:
        """Wait until every byte from every source has arrived, and the peers were told so.

        When it raises nothing moves any more: as soon as one source has failed, the others are
        stopped. Blocks of the destination may be written in part then.

        Args:
            timeout_ms: milliseconds for all together, >= 0; None waits for ever.

        Raises:
            ValueError: timeout_ms < 0 or not a number.
            GatherError: LLM_TIMEOUT when the time passed; otherwise the status of a source that
                failed. It names each that failed, and each that was stopped for that.
            LLMException: every byte has arrived, and a peer could not be notified.
        """
        check_timeout(timeout_ms)
        end = None if timeout_ms is None else perf_counter() + timeout_ms / 1000
        waiting = dict(self.tasks)
        settled: SimpleQueue[int] = SimpleQueue()
        errors: dict[int, LLMException] = {}
        try:
            for index, task in self.tasks.items():
                task.when_settled(partial(settled.put, index))
            while waiting:
                place, is_late = _next_settled(waiting, settled, end)
                self._given_up = self._given_up or is_late
                try:
                    waiting.pop(place).wait(0 if is_late else None)
                except LLMException as error:
                    errors[place] = error.with_traceback(None)
                    if not self._given_up:
                        self._stop(LLMException(_STOPPED))
        except BaseException:
            self.drop()
            raise
        failure: LLMException | None = self._failure(errors) if errors else None
        try:
            self.notices.finish(failure)
        except LLMException as error:
            failure = error
        self._note_settled()
        if failure is not None:
            raise failure

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

    def block_stream(self, stream: ComputeStream) -> None:
        """Let what is issued to `stream` from here on come after the copies from all sources.

        As `TransferTask.block_stream` of each; if one raises, the stream waits for some of them.

        Raises:
            NativeError, TypeError, LLMException: as `TransferTask.block_stream`.
        """
        for task in list(self.tasks.values()):
            task.block_stream(stream)

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
        """A source is settled: the others are stopped if it has failed, or all are."""
        with self._mutex:
            self._num_unsettled = num_left = (self._num_unsettled or 0) - 1
        if num_left == 0:
            self._conclude()
        elif not self._given_up:
            try:
                task.wait()
            except LLMException:
                run_aside(self._stop, LLMException(_STOPPED))

    def _conclude(self) -> None:
        """Nothing moves any more, and it takes no longer than the peers' answers."""
        if self.notices.any:
            run_aside(self._settle)
        else:
            self._settle()

    def _settle(self) -> None:
        with suppress(LLMException):  # raised to those who wait for it
            self.wait()

    def _stop(self, reason: LLMException | None) -> None:
        for task in list(self.tasks.values()):
            task.cancel(reason)

    def drop(self) -> None:
        """Stop what has begun, and end its operations."""
        self.cancel()
        for task in list(self.tasks.values()):
            with suppress(LLMException):
                task.wait()
        self.notices.finish(KeyboardInterrupt())  # of which nobody is told

    def begin(self, index: int, name: str, submit: Callable[[], TransferTask]) -> None:
        """Submit the part of a source; if it cannot be, the others are stopped.

        Raises:
            GatherError: it cannot.
        """
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

    def _failure(self, errors: dict[int, LLMException]) -> GatherError:
        stopped = {it: error for it, error in errors.items() if _STOPPED in str(error)}
        failed = {it: error for it, error in sorted(errors.items()) if it not in stopped}
        parts = [f"sources[{it}] {self._names[it]}: {error}" for it, error in failed.items()]
        if stopped:
            names = ", ".join(f"sources[{it}]" for it in sorted(stopped))
            parts.append(f"{names} stopped for that")
        message = f"{self._operation}: {len(failed)} of {len(self._names)} sources failed: "
        return GatherError(message + "; ".join(parts), failed or stopped, stopped)


class LayerGatherTask(GatherTask):
    """The handle of a transfer of several caches or peers that moves layer by layer.

    Each pair of caches has a `LayerTask`, in `tasks`. Layers are counted as in the caches of this
    process: in the source, or of a pull in the destination.
    """

    tasks: dict[int, LayerTask]  # type: ignore[assignment]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have to be ready, in ascending order."""
        return tuple(sorted({layer for task in self.tasks.values() for layer in _own_layers(task)}))

    def ready(self, layer: int, event: ComputeEvent | None = None) -> None:
        """Say that a layer holds its final values; see `LayerTask.ready`.

        Raises:
            TypeError: no integer; no event.
            LLMException: as `LayerTask.ready`.
        """
        having = [task for task in self.tasks.values() if layer in _own_layers(task)]
        if not having:
            raise invalid(f"layer={shown(layer)} is not one of the layers {self.layers}")
        for task in having:
            task.ready(task.layers[_own_layers(task).index(layer)], event)


def _own_layers(task: LayerTask) -> range:
    """The layers of a plan as this process counts them."""
    part = task.plan.part
    return part.dst_layers if part.local == "dst" else part.src_layers


def _next_settled(
    waiting: dict[int, TransferTask], settled: SimpleQueue[int], end: float | None
) -> tuple[int, bool]:
    """Return the place of a source that is settled; True: one that is not when `end` has come."""
    place = -1
    while place not in waiting:  # it was late
        left_s = None if end is None else max(0.0, end - perf_counter())
        if len(waiting) == 1:  # this thread helps
            ((place, last),) = waiting.items()
            return place, not last.wait_done(inf if left_s is None else left_s * 1000)
        try:
            place = settled.get(timeout=left_s)
        except Empty:
            return min(waiting), True
    return place, False


def check_timeout(timeout_ms: float | None) -> None:
    """Refuse what is no time."""
    if timeout_ms is not None and not timeout_ms >= 0:
        raise ValueError(f"timeout_ms={timeout_ms} must be >= 0 or None")
