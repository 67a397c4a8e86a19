"""How a process learns what has ended: one queue, one thread that reads it, and who is told."""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from threading import Event, current_thread
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakValueDictionary, ref

from kvnative._executor import CompletionQueue, NativeError
from kvnative._signals import Condition, Mutex
from kvplan.logs import Log
from kvplan.status import LLMException
from kvplan.system_limits import start_thread, system_error

if TYPE_CHECKING:
    import asyncio

    from kvnative._executor import LayeredTask, Task

_logger: Final = Log("kvplan")


class AwaitableTask(ABC):
    """A handle that comes to one outcome: waited for, awaited, or with calls at its end."""

    def __init__(self) -> None:
        self._is_settled = False
        self._calls: list[Callable[[], object]] = []

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether no byte moves any more; never blocks."""

    @abstractmethod
    def wait(self, timeout_ms: float | None = None) -> None:
        """Wait until every byte has arrived."""

    @abstractmethod
    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop the transfer."""

    @abstractmethod
    def _follow(self) -> None:
        """Have the process's thread settle this task when it ends, if that is not so already."""

    def result(self, timeout_ms: float | None = None) -> None:
        """Return None when every byte has arrived, as a future does: otherwise as `wait`.

        Raises:
            ValueError: timeout_ms < 0 or not a number.
            LLMException: as `wait`.
        """
        self.wait(timeout_ms)

    def __await__(self) -> Generator[Any, None, None]:
        return self.coroutine().__await__()

    async def coroutine(self) -> None:
        """Await the task, for `asyncio.create_task` and task groups.

        It costs no thread: of all tasks that are awaited one thread learns that they have ended.

        Raises:
            LLMException: when it is awaited: as `wait`, or LLM_OUT_OF_MEMORY: the system has no
                thread left.
        """
        import asyncio  # where nobody awaits, it need not be there

        loop = asyncio.get_running_loop()
        if not self._is_settled:
            self._follow()  # which may find it done
        if not self._is_settled:
            ended: asyncio.Future[None] = loop.create_future()
            call = partial(_wake, ended)
            self.when_settled(call)
            try:
                await ended
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                with suppress(ValueError):  # it was called
                    self._calls.remove(call)
        self.wait()

    def when_settled(self, call: Callable[[], object]) -> None:
        """Have `call()` called once `wait` returns or raises at once: now, or by another thread.

        Args:
            call: it neither blocks nor raises.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: the system has no thread left.
        """
        if not self._is_settled:
            self._follow()
        self._calls.append(call)
        if self._is_settled:  # after it was put in: one of both sees it
            self._make_calls()

    def _note_settled(self) -> None:
        self._is_settled = True
        self._make_calls()

    def _make_calls(self) -> None:
        while self._calls:
            try:
                call = self._calls.pop()
            except IndexError:  # another thread was first
                return
            call()


def _wake(ended: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop was closed: nobody awaits any more
        ended.get_loop().call_soon_threadsafe(_end, ended)


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():  # else cancelled
        ended.set_result(None)


class NativeTask(AwaitableTask):
    """An awaitable task that is one of the native layer."""

    native: Task | LayeredTask
    is_followed = False  # the thread settles it


def run_aside(call: Callable[..., object], *args: object) -> None:
    """Call what may take a while in a thread of its own; here if there is no more."""
    try:
        start_thread("kvplan-aside", call, *args)
    except LLMException:
        call(*args)


class Report(Protocol):
    """Where tasks are put that are settled."""

    def put(self, item: Any, /) -> None:
        """Take one, by any thread."""


class Tracker:
    """Has tasks come to their outcome as they end, whether or not somebody waits for them."""

    def __init__(self) -> None:
        self._flying: dict[_Flying, None] = {}
        # Weakly: a task with a layer that nobody can say is ready any more has to end.
        self._open: set[ref[NativeTask]] = set()
        self._cancelled: LLMException | None = None
        self._closing = False
        self._changed = Condition()

    def track(
        self,
        task: AwaitableTask,
        report: Report | None = None,
        *,
        aside: bool = False,
    ) -> None:
        """Settle `task` when it is done: now, or later."""
        if task.done and not aside:
            _settle(task, report)
            return
        flying = _Flying(self, task, report, aside)
        try:
            if isinstance(task, NativeTask):
                self._open.discard(ref(task))
                self._watch(task, flying)
            else:
                self._flying[flying] = None
                task.when_settled(flying.settle)
        except LLMException:  # the process may have no more threads, or is about to end
            flying.settle()
        except BaseException:
            self._flying.pop(flying, None)
            raise
        if self._cancelled:  # after it was put in: one of both sees it
            task.cancel(self._cancelled)

    def _watch(self, task: NativeTask, flying: _Flying) -> None:
        queue, native = completion_thread().queue, task.native
        # Nothing is called between these: no interrupt comes between them, so that what is held
        # here ends.
        self._flying[flying] = None
        queue.watch(native, flying)
        task.is_followed = True

    def watch(self, task: NativeTask) -> None:
        """Let `cancel` stop `task` too, which waits for its layers; `track` follows then.

        If a layer has failed, that is found out.
        """
        self._open.add(ref(task, self._open.discard))
        with suppress(LLMException):  # no more threads: then by who looks at it
            completion_thread().queue.watch(task.native, _Open(task))
            task.is_followed = True
        if self._cancelled:
            task.cancel(self._cancelled)

    def cancel(self, reason: LLMException) -> None:
        """Stop all tasks in flight, and those that come; on return they move no byte any more."""
        self._cancelled = reason
        for held in list(self._open):
            if (task := held()) is not None:
                task.cancel(reason)  # which tracks it
        # What has not begun first, or it would begin when what is before it ends.
        for flying in reversed(list(self._flying)):
            flying.task.cancel(reason)

    def close(self, timeout_s: float) -> None:
        """Wait until all tasks are settled and the thread holds none of them, or `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._flying, timeout_s)
        if (thread := _process.begun_thread()) is not None:
            thread.wait_for_round(timeout_s)

    def _forget(self, flying: _Flying) -> None:
        self._flying.pop(flying, None)
        if self._closing:
            with self._changed:
                self._changed.notify_all()


class _Flying:
    """A task in flight, whom it is reported to, and whether to settle it may take a while."""

    def __init__(
        self,
        tracker: Tracker,
        task: AwaitableTask,
        report: Report | None,
        aside: bool,
    ) -> None:
        self._tracker = tracker
        self.task = task
        self._report = report
        self._aside = aside

    def on_end(self) -> None:
        """The task has ended, or a layer of it has failed; by the thread of completions."""
        task = self.task
        if (
            not isinstance(task, NativeTask)
            or not _has_ended(task)
            or not completion_thread().queue.forget(task.native, self)
        ):
            return
        if self._aside:  # a peer that is slow to answer must delay no other
            run_aside(self.settle)
        else:
            self.settle()

    def settle(self) -> None:
        try:
            _settle(self.task, self._report)
        finally:
            self._tracker._forget(self)


def _settle(task: AwaitableTask, report: Report | None) -> None:
    try:
        task.wait()
    except LLMException:  # raised to those who wait for it
        pass
    finally:
        if report is not None:
            report.put(task)


class _Open:
    """A task that waits for its layers."""

    def __init__(self, task: NativeTask) -> None:
        self._task = ref(task)
        self._native = task.native

    def on_end(self) -> None:
        """As of what is in flight."""
        task = self._task()
        # To find its end is to have it tracked, if anything does: then this is not there any more.
        if task is not None and not _has_ended(task):
            return
        if completion_thread().queue.forget(self._native, self) and task is not None:
            _settle(task, None)


def _has_ended(task: NativeTask) -> bool:
    """Whether it is done; it may be about to be, if the queue has told its end."""
    if task.native.ended:
        task.native.wait()
    return task.done


class Readable(Protocol):
    """A descriptor, and what is done when something can be read there."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def on_readable(self) -> None:
        """Read it."""


class CompletionThread:
    """The thread that reads the queue of what has ended, and descriptors of others beside it.

    Attributes:
        queue: of the process.
    """

    def __init__(self) -> None:
        self._readers: WeakValueDictionary[int, Readable] = WeakValueDictionary()
        try:
            self.queue: CompletionQueue = CompletionQueue()
            self._epoll = select.epoll()
        except (NativeError, OSError) as error:
            raise system_error("could not create the queue of completions", error) from error
        self._fd = self.queue.fileno()
        self._epoll.register(self._fd, select.EPOLLIN)
        self._rounds: list[Event] = []  # set at the end of the next one
        self._thread = start_thread("kvplan-completions", self._run)

    def add_reader(self, reader: Readable) -> None:
        """Call `on_readable` when something can be read there; the thread holds it weakly."""
        self._readers[reader.fileno()] = reader
        self._epoll.register(reader.fileno(), select.EPOLLIN)

    def remove_reader(self, fd: int) -> None:
        """Before the descriptor is closed."""
        self._readers.pop(fd, None)
        with suppress(OSError):  # it was not even added
            self._epoll.unregister(fd)

    def wait_for_round(self, timeout_s: float) -> None:
        """Wait until what the thread has taken before is done with, or `timeout_s` seconds."""
        if self._thread is current_thread():
            return
        over = Event()
        self._rounds.append(over)
        os.eventfd_write(self._fd, 1)
        over.wait(timeout_s)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                # A frame for each: what it held is not kept while the thread waits.
                if fd == self._fd:
                    self._read_queue()
                else:
                    self._read(fd)
            while self._rounds:
                self._rounds.pop().set()

    def _read_queue(self) -> None:
        for ending in self.queue.take():
            _call_safely(ending.on_end)

    def _read(self, fd: int) -> None:
        reader = self._readers.get(fd)
        if reader is not None:
            _call_safely(reader.on_readable)


def _call_safely(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException:  # it is one task's; others depend on this thread
        _logger.exception("operation=completion")


class _OfThisProcess:
    """Its thread and tracker, begun when they are needed; a forked child has its own."""

    def __init__(self) -> None:
        self._inherited: list[CompletionThread] = []  # a child collects nothing of its parent's
        self._thread: CompletionThread | None = None
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        if self._thread is not None:
            self._inherited.append(self._thread)
        self._starting = Mutex()
        self._thread = None
        self.tracker: Tracker = Tracker()

    def begun_thread(self) -> CompletionThread | None:
        return self._thread

    def thread(self) -> CompletionThread:
        if (thread := self._thread) is not None:
            return thread
        with self._starting:
            if self._thread is None:
                self._thread = CompletionThread()
            return self._thread


_process: Final = _OfThisProcess()


def completion_thread() -> CompletionThread:
    """Return the thread of this process."""
    return _process.thread()


def tracker() -> Tracker:
    """Return what settles the tasks of this process that no engine does."""
    return _process.tracker
