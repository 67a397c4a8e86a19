"""Submitted transfers come to their outcome whether or not somebody waits for it."""

from __future__ import annotations

from contextlib import suppress
from queue import SimpleQueue
from threading import RLock, Thread
from typing import TYPE_CHECKING
from weakref import ref

from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.execution import TransferTask


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
        self._mutex = RLock()

    def track(self, task: TransferTask) -> None:
        """Settle `task` when it is done: now, or later."""
        self._open.discard(ref(task))
        if task.done:
            _settle(task)
            return
        with self._mutex:
            if self._thread is None:
                thread = Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the process may have no more threads, or is about to end
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
        for it in tuple(self._open):
            if (task := it()) is not None:
                task.cancel(reason)
                self.track(task)
        for flying in tuple(self._tasks):
            flying.cancel(reason)

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


def _settle(task: TransferTask) -> None:
    with suppress(LLMException):  # raised to those who wait for it
        task.wait()
