"""Connecting with remote engines in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread, current_thread
from typing import Any, NamedTuple

from kvnative._signals import Mutex
from kvplan.status import busy, finalized
from kvplan.system.limits import start_thread
from kvplan.system.logs import Log


class _Task(NamedTuple):
    # Of the engine: task waiting, running, after success, after failure; None: no state.
    states: Sequence[Any]
    run: Callable[[], bool]  # returns True on success


class Connector:
    """Threads that connect and disconnect in the background, and exist while there are tasks.

    The threads are daemons: the process can end without `finalize`. At most `capacity` tasks may
    wait.
    """

    def __init__(self, threads: int, capacity: int, name: str, log: Log) -> None:
        self._max_threads, self._capacity, self._name = threads, capacity, name
        self._log = log
        self._mutex = Mutex()
        self._closed = False
        self._threads: set[Thread] = set()
        self._queues: dict[str, deque[_Task]] = {}  # by remote engine, for those with a task
        self._ready: deque[str] = deque()  # remote engines with a task, but without a thread
        self._waiting = 0
        self._states: dict[str, Any] = {}

    def submit(self, remote_engine: str, states: Sequence[Any], run: Callable[[], bool]) -> None:
        """Queue a task behind those of the same remote engine; see `_Task`."""
        with self._mutex:
            if self._closed:
                raise finalized()
            if self._waiting >= self._capacity:
                raise busy(
                    f"{self._waiting} asynchronous connects are waiting; at most {self._capacity} "
                    "may (connect_pool.task_queue_capacity)"
                )
            queue = self._queues.get(remote_engine)
            if queue is None:
                # First: if no thread starts, a queue would keep later tasks waiting forever.
                if len(self._threads) < self._max_threads:
                    self._threads.add(start_thread(self._name, self._work))
                queue = self._queues[remote_engine] = deque()
                self._ready.append(remote_engine)
            task = _Task(states, run)
            queue.append(task)
            self._waiting += 1
            self._note(remote_engine, task.states[0])

    def states(self) -> dict[str, Any]:
        """Return the state of the last task of each remote engine."""
        with self._mutex:
            return dict(self._states)

    def stop(self) -> None:
        """Drop the waiting tasks, and refuse new ones."""
        with self._mutex:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()

    def join(self) -> None:
        """Wait for the tasks that are running."""
        with self._mutex:
            threads = tuple(self._threads)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._ready:
                    self._threads.discard(current_thread())
                    return
                remote_engine = self._ready.popleft()
            self._work_for(remote_engine)

    def _work_for(self, remote_engine: str) -> None:
        """Run the tasks of a remote engine until its queue is empty."""
        while True:
            with self._mutex:
                queue = self._queues[remote_engine]
                if not queue:
                    del self._queues[remote_engine]
                    return
                task = queue.popleft()
                self._waiting -= 1
                if not queue:
                    self._note(remote_engine, task.states[1])
            has_succeeded = False
            try:
                has_succeeded = task.run()
            except Exception:  # a bug of this package must not stop other tasks
                self._log.exception("connecting with %s in the background", remote_engine)
            with self._mutex:
                if not queue:  # otherwise the state is that of a later task
                    self._note(remote_engine, task.states[2 if has_succeeded else 3])

    def _note(self, remote_engine: str, state: Any) -> None:
        if state is None:
            self._states.pop(remote_engine, None)
        else:
            self._states[remote_engine] = state
