"""Submitted transfers come to their outcome whether or not somebody waits for it."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import RLock, Thread
from typing import TYPE_CHECKING, Final
from weakref import ref

from kvplan.status import LLMException

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.execution import TransferTask

_SHORTEST_TURN_MS: Final = 0.1  # of waiting for one task while others may end
_LONGEST_TURN_MS: Final = 2.0


class CompletionThread:
    """A thread, begun with the first task that is not done at once, that waits for each in turn.

    A task that is done behind one that is not is found by whoever waits for it, or in its turn.

    Args:
        name: of the thread.
    """

    _settles_at_once = True  # what is done already: by whoever submits it

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
        if self._settles_at_once and task.done:
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


class PromptCompletionThread(CompletionThread):
    """As its base, and a task is settled at once, whatever others are in flight.

    For tasks whose end somebody else waits for. It looks at all of them every few milliseconds at
    least, and waits for the oldest meanwhile.
    """

    _settles_at_once = False  # the program must not wait for a peer's answer where it submits

    def _run(self) -> None:
        flying: list[TransferTask] = []
        task: TransferTask | None
        it: TransferTask | None
        turn_ms = _SHORTEST_TURN_MS
        ending = False
        while flying or not ending:
            for task in self._new(block=not flying):
                if task is None:
                    ending = True
                else:
                    flying.append(task)
                    turn_ms = _SHORTEST_TURN_MS
            left: list[TransferTask] = []
            for it in flying:
                if it.done:
                    self._settle_aside(it)
                else:
                    left.append(it)
            turn_ms = _SHORTEST_TURN_MS if len(left) < len(flying) else turn_ms
            flying = left
            if flying:
                flying[0].wait_done(turn_ms)
                turn_ms = min(2 * turn_ms, _LONGEST_TURN_MS)
            task = it = None  # what they hold is not kept while this waits

    def _new(self, *, block: bool) -> Iterator[TransferTask | None]:
        with suppress(Empty):
            yield self._turn.get(block)
            while True:
                yield self._turn.get_nowait()

    def _settle_aside(self, task: TransferTask) -> None:
        """Settle in a thread of its own: a peer that is slow to answer must delay no other."""
        try:
            Thread(target=self._settle_one, args=(task,), name=self._name, daemon=True).start()
        except RuntimeError:  # no more threads
            self._settle_one(task)

    def _settle_one(self, task: TransferTask) -> None:
        _settle(task)
        self._tasks.pop(task, None)


def _settle(task: TransferTask) -> None:
    with suppress(LLMException):  # raised to those who wait for it
        task.wait()
