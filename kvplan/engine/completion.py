"""Submitted transfers come to their outcome whether or not somebody waits for it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Final
from weakref import ref

from kvnative._signals import Mutex, signals_deferred
from kvplan.engine.pollable_queue import PollableQueue
from kvplan.execution.task import TransferTask
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system_limits import start_thread

if TYPE_CHECKING:
    from kvplan.engine.gather_task import GatherTask

_SHORTEST_TURN_MS: Final = 0.1  # of waiting for one task while others may end
_LONGEST_TURN_MS: Final = 2.0

MAX_UNTAKEN: Final = 65536
"""Tasks that have ended and that nobody has taken; further ones are not submitted."""


class CompletionThread:
    """A thread, begun with the first task that is not done at once, that waits for each in turn.

    A task that is done behind one that is not is found by whoever waits for it, or in its turn.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: dict[TransferTask, None] = {}  # in flight
        # Weakly: a task with a layer that nobody can say is ready any more has to end.
        self._open: set[ref[TransferTask]] = set()
        self._cancelled: LLMException | None = None
        self._turn: SimpleQueue[TransferTask | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._mutex = Mutex()

    def track(self, task: TransferTask) -> None:
        """Settle `task` when it is done: now, or later."""
        self._open.discard(ref(task))
        if task.done:
            _settle(task)
            return
        with self._mutex:
            if self._thread is None:
                try:
                    thread = start_thread(self._name, self._run)
                except LLMException:  # the process may have no more threads, or is about to end
                    _settle(task)
                    return
                self._thread = thread
            # Nothing is called between these: no interrupt comes between them, so that what is held
            # here has its turn.
            self._tasks[task] = None
            self._turn.put(task)
        if self._cancelled:  # after it was put in: one of both sees it
            task.cancel(self._cancelled)

    def watch(self, task: TransferTask) -> None:
        """Let `cancel` stop `task` too, which waits for its layers; `track` follows then."""
        self._open.add(ref(task, self._open.discard))
        if self._cancelled:
            task.cancel(self._cancelled)
            self.track(task)

    def cancel(self, reason: LLMException) -> None:
        """Stop all tasks in flight, and those that come; on return they move no byte any more.

        Args:
            reason: what they raise then.
        """
        self._cancelled = reason
        for it in list(self._open):
            if (task := it()) is not None:
                task.cancel(reason)
                self.track(task)
        for flying in list(self._tasks):
            flying.cancel(reason)

    def settle_ended(self) -> None:
        """Let tasks that wait for layers come to their outcome if they have ended before."""
        _find_ended(self._open)

    def close(self, timeout_s: float) -> None:
        """End the thread when it has seen all tasks, and wait `timeout_s` seconds for that."""
        with self._mutex:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._turn.put(None)
            thread.join(timeout_s)

    def _run(self) -> None:
        while self._see_one():
            pass

    def _see_one(self) -> bool:
        # A frame for each: what it held is not kept while the thread waits for the next.
        task = self._turn.get()
        if task is None:
            return False
        _settle(task)
        self._tasks.pop(task, None)
        return True


class Completions(PollableQueue["TransferTask | GatherTask"]):
    """The submitted tasks of one engine that have ended, in that order; `wait` of each says how.

    While 65536 have ended and nobody has taken them, no other can be submitted. A task here keeps
    what it refers to, its plan above all, but no block of a cache.
    """


class PromptCompletionThread:
    """A thread that settles each task as soon as it is done, whatever others are in flight.

    It looks at all of them every few milliseconds at least, and waits for the oldest meanwhile.

    Args:
        name: of the thread.

    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._watched: set[_Watched] = set()  # in flight
        self._open: set[ref[TransferTask]] = set()  # weakly, as in `CompletionThread`
        self._arrivals: SimpleQueue[_Watched | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._cancelled: LLMException | None = None
        self._mutex = Mutex()
        self._completions: Completions | None = None

    def open_completions(self) -> Completions:
        """Return where tasks are reported that are submitted from now on."""
        with signals_deferred, self._mutex:
            if self._completions is None:
                self._completions = Completions()
            return self._completions

    def report(self) -> Completions | None:
        """Return where a task is reported that is about to be submitted; None: nobody has asked.

        Raises:
            LLMException: LLM_LINK_BUSY: too many that have ended were not taken.
        """
        if (completions := self._completions) is not None and len(completions) >= MAX_UNTAKEN:
            raise LLMException(
                f"{len(completions)} tasks have ended and nobody has taken them from "
                f"completions(); at most {MAX_UNTAKEN} can",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )
        return completions

    def track(
        self,
        task: TransferTask | GatherTask,
        *,
        report: Completions | None = None,
        aside: bool = True,
    ) -> None:
        """Settle `task` when it is done; never in the calling thread, unless there is no other.

        Args:
            report: where it is put then.
            aside: whether that may take a while, and so has a thread of its own.
        """
        if isinstance(task, TransferTask):
            self._open.discard(ref(task))
        watched = _Watched(task, report, aside)
        with self._mutex:
            if self._thread is None:
                try:
                    thread = start_thread(self._name, self._run)
                except LLMException:  # the process may have no more threads, or is about to end
                    self._settle(watched)
                    return
                self._thread = thread
            self._watched.add(watched)
            self._arrivals.put(watched)
        if self._cancelled:  # after it was put in: one of both sees it
            task.cancel(self._cancelled)

    def watch(self, task: TransferTask) -> None:
        """Let `cancel` stop `task` too, which waits for its layers; `track` follows then."""
        self._open.add(ref(task, self._open.discard))
        if self._cancelled:
            task.cancel(self._cancelled)

    def cancel(self, reason: LLMException) -> None:
        """Stop all tasks in flight, and those that come; on return they move no byte any more.

        Args:
            reason: what they raise then.
        """
        self._cancelled = reason
        for it in list(self._open):
            if (task := it()) is not None:
                task.cancel(reason)  # which tracks it
        for watched in list(self._watched):
            watched.task.cancel(reason)

    def settle_ended(self) -> None:
        """As `CompletionThread.settle_ended`."""
        _find_ended(self._open)

    def close(self, timeout_s: float) -> None:
        """End the thread when it has seen all tasks, and wait `timeout_s` seconds for that."""
        with self._mutex:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._arrivals.put(None)
            thread.join(timeout_s)
        if self._completions is not None:
            self._completions.close()

    def _run(self) -> None:
        flying: list[_Watched] = []
        turn_ms, ending = _SHORTEST_TURN_MS, False
        while flying or not ending:
            new = self._take_new(block=not flying)
            ending = ending or None in new
            flying += [it for it in new if it is not None]
            moved = bool(new)
            new.clear()  # what is done is not kept while this waits
            moved = self._settle_done(flying) or moved
            turn_ms = _SHORTEST_TURN_MS if moved else min(2 * turn_ms, _LONGEST_TURN_MS)
            if flying:
                flying[0].task.wait_done(turn_ms)

    def _settle_done(self, flying: list[_Watched]) -> bool:
        """Settle those that are done, and take them out; returns whether there were any."""
        done = [it for it in flying if it.task.done]
        for watched in done:
            flying.remove(watched)
            self._settle(watched, may_start=True)
        return bool(done)

    def _take_new(self, *, block: bool) -> list[_Watched | None]:
        new: list[_Watched | None] = []
        with suppress(Empty):
            new.append(self._arrivals.get(block))
            while True:
                new.append(self._arrivals.get_nowait())
        return new

    def _settle(self, watched: _Watched, *, may_start: bool = False) -> None:
        if may_start and watched.aside:  # a peer that is slow to answer must delay no other
            with suppress(LLMException):  # no more threads
                start_thread(self._name, self._settle, watched)
                return
        _settle(watched.task)
        self._watched.discard(watched)
        if watched.report is not None:
            watched.report.put(watched.task)


@dataclass(frozen=True, eq=False)
class _Watched:
    """A task in flight, where it is reported, and whether to settle it may take a while."""

    task: TransferTask | GatherTask
    report: Completions | None
    aside: bool


def _find_ended(tasks: set[ref[TransferTask]]) -> None:
    for it in list(tasks):
        if (task := it()) is not None:
            _ = task.done  # which tracks it then


def _settle(task: TransferTask | GatherTask) -> None:
    with suppress(LLMException):  # raised to those who wait for it
        task.wait()
