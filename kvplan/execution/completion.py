"""The completion of tasks: a queue and a thread of the process settle tasks as they end."""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections import deque
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
_MAX_ASIDE: Final = 32  # threads of a process
_IDLE_S: Final = 0.5  # after which a thread without a call ends


class AwaitableTask(ABC):
    """A handle with one outcome, which can be waited for, awaited, or notified by calls."""

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
        """Let the thread of the process settle this task when it ends. Idempotent."""

    def result(self, timeout_ms: float | None = None) -> None:
        """Return None when every byte has arrived, as a future does; otherwise raise as `wait`.

        Raises:
            ValueError: timeout_ms < 0 or not a number.
            LLMException: as `wait`.
        """
        self.wait(timeout_ms)

    def __await__(self) -> Generator[Any, None, None]:
        return self.coroutine().__await__()

    async def coroutine(self) -> None:
        """Await the task, for `asyncio.create_task` and task groups.

        It costs no thread: one thread learns of the end of all tasks that are awaited.

        Raises:
            LLMException: when it is awaited: as `wait`, or LLM_OUT_OF_MEMORY: the system has no
                thread left.
        """
        import asyncio  # loaded only if a task is awaited

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
                await self._cancelled(loop)
                raise
            finally:
                with suppress(ValueError):  # it was called
                    self._calls.remove(call)
        self.wait()

    async def _cancelled(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel, and await the end: a stopped peer delays that, and must not block the loop."""
        import asyncio

        run_aside(self.cancel)
        while not self._is_settled:
            ended = loop.create_future()
            self.when_settled(partial(_wake, ended))
            with suppress(asyncio.CancelledError):  # until then bytes may be touched
                await ended

    def when_settled(self, call: Callable[[], object]) -> None:
        """Call `call()` once `wait` does not block any more: now, or later in another thread.

        Args:
            call: Neither blocks nor raises.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: the system has no thread left.
        """
        if not self._is_settled:
            self._follow()
        self._calls.append(call)
        if self._is_settled:  # after it was added, so that one of both sees it
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
    with suppress(RuntimeError):  # the loop was closed
        ended.get_loop().call_soon_threadsafe(_end, ended)


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():  # otherwise it was cancelled
        ended.set_result(None)


class NativeTask(AwaitableTask):
    """An awaitable task of the native layer."""

    native: Task | LayeredTask
    is_followed = False  # the thread settles it


class _Aside:
    """Threads for calls that may take a while; a call waits only while all of them are busy."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._calls: deque[Callable[[], object]] = deque()
        self._num_threads = self._num_idle = 0

    def call(self, call: Callable[[], object]) -> None:
        with self._changed:
            self._calls.append(call)
            if len(self._calls) <= self._num_idle or self._num_threads >= _MAX_ASIDE:
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
        # A frame of its own: what the call held is not kept while the thread waits.
        call = self._take(_IDLE_S)
        if call is None:
            return False
        _call_safely(call)
        return True

    def _take(self, idle_s: float) -> Callable[[], object] | None:
        """Return a call; None: none came in `idle_s` seconds, and the thread is not counted."""
        with self._changed:
            if idle_s:
                self._num_idle += 1
                self._changed.wait_for(lambda: bool(self._calls), idle_s)
                self._num_idle -= 1
                if not self._calls:
                    self._num_threads -= 1
            return self._calls.popleft() if self._calls else None


def run_aside(call: Callable[..., object], *args: object) -> None:
    """Run a call that may take long aside, or here if the system has no more threads."""
    _process.aside.call(partial(call, *args))


class Report(Protocol):
    """A receiver of settled tasks."""

    def put(self, item: Any, /) -> None:
        """Receive a task, in any thread."""


class Tracker:
    """Settles tasks as they end, even if no thread waits for them."""

    def __init__(self) -> None:
        self._flying: dict[_Flying, None] = {}
        # Weak: a task whose layers cannot become ready any more has to end.
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
        """Settle `task` when it is done: now, or later.

        `report` receives the task then. `aside`: settling may take long, and gets its own thread.
        """
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
        if self._cancelled:  # after it was added, so that one of both sees it
            task.cancel(self._cancelled)

    def _watch(self, task: NativeTask, flying: _Flying) -> None:
        queue, native = completion_thread().queue, task.native
        # No call comes between these, so an interrupt cannot: what is held here ends.
        self._flying[flying] = None
        queue.watch(native, flying)
        task.is_followed = True

    def watch(self, task: NativeTask) -> None:
        """Let `cancel` also stop `task`, which waits for its layers; `track` follows then.

        The failure of a layer is detected as well.
        """
        self._open.add(ref(task, self._open.discard))
        with suppress(LLMException):  # without a thread, the caller finds it
            completion_thread().queue.watch(task.native, _Open(task))
            task.is_followed = True
        if self._cancelled:
            task.cancel(self._cancelled)

    def cancel(self, reason: LLMException) -> None:
        """Stop all tasks, now and later, with `reason`; on return they move no byte any more."""
        self._cancelled = reason
        for held in list(self._open):
            if (task := held()) is not None:
                task.cancel(reason)  # which tracks it
        # Tasks that have not begun first: they would begin when earlier ones end.
        for flying in reversed(list(self._flying)):
            flying.task.cancel(reason)

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until all tasks are settled, and the thread holds none."""
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
    """A task in flight, its report, and whether settling it may take long."""

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
            _settle(self.task, self._report)
        finally:
            self._tracker._forget(self)


def _settle(task: AwaitableTask, report: Report | None) -> None:
    try:
        task.wait()
    except LLMException:  # `wait` raises it again
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
        """See `_Flying.on_end`."""
        task = self._task()
        # Finding the end lets the tracker take over, which removes this entry.
        if task is not None and not _has_ended(task):
            return
        if completion_thread().queue.forget(self._native, self) and task is not None:
            _settle(task, None)


def _has_ended(task: NativeTask) -> bool:
    """Return whether the task is done; if the queue has reported its end, wait for that moment."""
    if task.native.ended:
        task.native.wait()
    return task.done


class Readable(Protocol):
    """A descriptor, and the action when it becomes readable."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def on_readable(self) -> None:
        """Read from the descriptor."""


class CompletionThread:
    """The thread that reads the completion queue, and descriptors of others.

    Attributes:
        queue: The queue of the process.
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
        self._rounds: list[Event] = []  # set at the end of the next round
        self._thread = start_thread("kvplan-completions", self._run)

    def add_reader(self, reader: Readable) -> None:
        """Call `on_readable` when the descriptor is readable; the reader is held weakly."""
        self._readers[reader.fileno()] = reader
        self._epoll.register(reader.fileno(), select.EPOLLIN)

    def remove_reader(self, fd: int) -> None:
        """Forget a descriptor, before it is closed."""
        self._readers.pop(fd, None)
        with suppress(OSError):  # it was not even added
            self._epoll.unregister(fd)

    def wait_for_round(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the thread has handled what it took before."""
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
    except BaseException:  # of one task; others depend on this thread
        _logger.exception("operation=completion")


class _OfThisProcess:
    """The thread and tracker of this process, started on demand; a forked child has its own."""

    def __init__(self) -> None:
        self._inherited: list[
            CompletionThread
        ] = []  # kept: a child must not finalize objects of its parent
        self._thread: CompletionThread | None = None
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        if self._thread is not None:
            self._inherited.append(self._thread)
        self._starting = Mutex()
        self._thread = None
        self.tracker: Tracker = Tracker()
        self.aside = _Aside()

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
    """Return the thread of this process; LLM_OUT_OF_MEMORY: it cannot be started."""
    return _process.thread()


def tracker() -> Tracker:
    """Return the tracker for tasks without an engine."""
    return _process.tracker
