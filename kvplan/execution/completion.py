"""The completion of tasks: one queue and one thread of the process settle tasks as they end."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Event, current_thread
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary, ref

import msgspec

from kvnative._backend import NativeError
from kvnative._completions import CompletionQueue
from kvnative._signals import Condition, Mutex
from kvnative._task import AnyTask
from kvplan.execution.awaitable import AwaitableTask, NativeTask
from kvplan.status import LLMException
from kvplan.system.limits import start_thread, system_error
from kvplan.system.logs import Log

_logger: Final = Log("kvplan")
_MAX_ASIDE: Final = 32  # threads of a process
_IDLE_S: Final = 0.5  # a thread without a call ends after this time


class _Aside:
    """Threads for calls that may take a while; a call waits only while all of them are busy."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._calls: deque[Callable[[], object]] = deque()
        self._num_threads = self._num_idle = 0

    def call(self, call: Callable[[], object], *, now: bool = False) -> None:
        with self._changed:
            self._calls.insert(0 if now else len(self._calls), call)
            is_full = self._num_threads >= _MAX_ASIDE and not now
            if len(self._calls) <= self._num_idle or is_full:
                self._changed.notify()
                return
            self._num_threads += 1
        try:
            start_thread("kvplan-aside", self._run)
        except LLMException:
            with self._changed:
                self._num_threads -= 1
            while (waiting := self._take(0)) is not None:
                _call_safely(waiting)

    def _run(self) -> None:
        while self._take_and_call():
            pass

    def _take_and_call(self) -> bool:
        # A separate frame, so that the waiting thread keeps no object of a call alive.
        call = self._take(_IDLE_S)
        if call is None:
            return False
        _call_safely(call)
        return True

    def _take(self, idle_s: float) -> Callable[[], object] | None:
        """Return a call; None: none came in `idle_s` seconds, so the thread must end."""
        with self._changed:
            if idle_s:
                self._num_idle += 1
                self._changed.wait_for(lambda: bool(self._calls), idle_s)
                self._num_idle -= 1
                if not self._calls:
                    self._num_threads -= 1
            return self._calls.popleft() if self._calls else None


def run_aside(call: Callable[..., object], *args: object) -> None:
    """Run a slow call in another thread, or here if the system has no more threads."""
    _process.aside.call(partial(call, *args))


def run_aside_now(call: Callable[[], object]) -> None:
    """Run a slow call in another thread, before earlier ones, even if all threads are busy."""
    _process.aside.call(call, now=True)


class Report(Protocol):
    """A receiver of settled tasks."""

    def put(self, item: Any, /) -> None:
        """Receive a task, in any thread."""


class Tracker:
    """The tasks in flight; each is settled when it ends, even if no thread waits for it."""

    def __init__(self) -> None:
        self._tracked: dict[_Tracked, None] = {}
        # Weak, so that a dropped task ends: its layers can no longer become ready.
        self._open: set[ref[NativeTask]] = set()
        self._cancelled: LLMException | None = None
        self._closing = False
        self._changed = Condition()

    def track(
        self, task: AwaitableTask, report: Report | None = None, *, aside: bool = False
    ) -> None:
        """Settle `task` when it is done, now or later, and then put it into `report`.

        `aside`: settling may be slow, so it runs in another thread.
        """
        if task.done and not aside:
            self._settle(task, report)
            return
        tracked = _Tracked(self, task, report, aside)
        try:
            if isinstance(task, NativeTask):
                self._open.discard(ref(task))
                self._watch(task, tracked)
            else:
                self._tracked[tracked] = None
                task.when_settled(tracked.settle)
        except LLMException:  # the process may have no more threads, or is about to end
            tracked.settle()
        except BaseException:
            self._tracked.pop(tracked, None)
            raise
        if self._cancelled:  # after adding the task: this thread or `cancel` cancels it
            task.cancel(self._cancelled)

    def _watch(self, task: NativeTask, tracked: _Tracked) -> None:
        queue, native = completion_thread().queue, task.native
        # In this order, with no call in between, so that an interrupt loses no watched task.
        self._tracked[tracked] = None
        queue.watch(native, tracked)
        task.is_followed = True

    def watch(self, task: NativeTask) -> None:
        """Let `cancel` stop a task that waits for its layers, and detect the failure of a layer."""
        self._open.add(ref(task, self._open.discard))
        with suppress(LLMException):  # without a thread, the caller finds the failure
            thread = _process.thread or _process.begin()
            thread.queue.watch(task.native, _Open(self, ref(task), task.native))
            task.is_followed = True
        if self._cancelled:
            task.cancel(self._cancelled)

    def cancel(self, reason: LLMException) -> None:
        """Stop all current and future tasks with `reason`; after this call no byte moves."""
        self._cancelled = reason
        for held in list(self._open):
            if (task := held()) is not None:
                task.cancel(reason)  # may call `track`
        # In reverse, because tasks that have not begun would begin when earlier ones end.
        for tracked in reversed(list(self._tracked)):
            tracked.task.cancel(reason)

    def close(self, timeout_s: float) -> None:
        """Wait for all tasks to settle, then for the thread to drop them; `timeout_s` per wait."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._tracked, timeout_s)
        if (thread := _process.thread) is not None:
            thread.wait_for_round(timeout_s)

    def _settle(self, task: AwaitableTask, report: Report | None) -> None:
        if self._cancelled and isinstance(task, NativeTask):
            task.cancel(self._cancelled)  # an executor that ends gives no reason
        try:
            task.wait()
        except LLMException:  # `wait` raises it again
            pass
        finally:
            if report is not None:
                report.put(task)

    def _forget(self, tracked: _Tracked) -> None:
        self._tracked.pop(tracked, None)
        if self._closing:
            with self._changed:
                self._changed.notify_all()


class _Tracked:
    """A task in flight, its report, and whether settling it may be slow."""

    def __init__(
        self, tracker: Tracker, task: AwaitableTask, report: Report | None, aside: bool
    ) -> None:
        self._tracker = tracker
        self.task = task
        self._report = report
        self._aside = aside

    def on_end(self) -> None:
        """Handle the end of the task, or the failure of a layer, in the completion thread."""
        task = self.task
        if (
            not isinstance(task, NativeTask)
            or not _has_ended(task)
            or not completion_thread().queue.forget(task.native, self)
        ):
            return
        if self._aside:  # a slow peer must not delay others
            run_aside(self.settle)
        else:
            self.settle()

    def settle(self) -> None:
        try:
            self._tracker._settle(self.task, self._report)
        finally:
            self._tracker._forget(self)


class _Open(msgspec.Struct, eq=False):
    """A task that waits for its layers."""

    tracker: Tracker
    task: ref[NativeTask]
    native: AnyTask

    def on_end(self) -> None:
        """See `_Tracked.on_end`."""
        task = self.task()
        # `done` of an ended task lets the tracker take over, which removes this entry.
        if task is not None and not _has_ended(task):
            return
        if completion_thread().queue.forget(self.native, self) and task is not None:
            self.tracker._settle(task, None)


def _has_ended(task: NativeTask) -> bool:
    """Return whether the task is done; wait for that if the queue has reported its end."""
    if task.native.ended:
        task.native.wait()
    return task.done


class Readable(Protocol):
    """An object that reads from a descriptor when the descriptor is readable."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def on_readable(self) -> None:
        """Read from the descriptor."""


class CompletionThread:
    """The thread that reads the completion queue and the descriptors of readers.

    Attributes:
        queue: the completion queue of the process.
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
        self._rounds: list[Event] = []  # set at the end of a round
        self._thread = start_thread("kvplan-completions", self._run)

    def add_reader(self, reader: Readable) -> None:
        """Call `on_readable` when the descriptor is readable; the reader is held weakly."""
        self._readers[reader.fileno()] = reader
        self._epoll.register(reader.fileno(), select.EPOLLIN)

    def remove_reader(self, fd: int) -> None:
        """Forget a descriptor, before it is closed."""
        self._readers.pop(fd, None)
        with suppress(OSError):  # not added
            self._epoll.unregister(fd)

    def wait_for_round(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the thread has handled everything that it took so far."""
        if self._thread is current_thread():
            return
        over = Event()
        self._rounds.append(over)
        os.eventfd_write(self._fd, 1)
        over.wait(timeout_s)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                # A frame for each, so that the waiting thread keeps no objects alive.
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
    except BaseException:  # of one task; other tasks need this thread
        _logger.exception("operation=completion")


class _ProcessState:
    """The threads and the tracker of this process; a forked child has its own."""

    def __init__(self) -> None:
        # Kept, because a child must not finalize objects of its parent.
        self._inherited: list[CompletionThread] = []
        self.thread: CompletionThread | None = None
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        if self.thread is not None:
            self._inherited.append(self.thread)
        self._starting = Mutex()
        self.thread = None
        self.tracker: Tracker = Tracker()
        self.aside = _Aside()

    def begin(self) -> CompletionThread:
        with self._starting:
            if self.thread is None:
                self.thread = CompletionThread()
            return self.thread


_process: Final = _ProcessState()


def completion_thread() -> CompletionThread:
    """Return the completion thread of this process; LLM_OUT_OF_MEMORY: it cannot be started."""
    return _process.thread or _process.begin()


def tracker() -> Tracker:
    """Return the tracker for tasks without an engine."""
    return _process.tracker
