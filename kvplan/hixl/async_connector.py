"""Connecting and disconnecting in the background: tasks of one remote engine one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Thread, current_thread
from typing import NamedTuple

from kvnative._signals import Mutex
from kvplan.hixl.values import AsyncConnectStatus
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system_limits import start_thread

_log = Log("kvplan.hixl")

_WAITING = {
    True: AsyncConnectStatus.CONNECT_PENDING,
    False: AsyncConnectStatus.DISCONNECT_PENDING,
}
_RUNNING = {True: AsyncConnectStatus.CONNECTING, False: AsyncConnectStatus.DISCONNECTING}
_ENDED = {
    (True, True): AsyncConnectStatus.CONNECTED,
    (True, False): AsyncConnectStatus.CONNECT_FAILED,
    (False, True): AsyncConnectStatus.NOT_CONNECT,
    (False, False): AsyncConnectStatus.NOT_CONNECT,
}


class _Task(NamedTuple):
    connects: bool
    run: Callable[[], bool]  # returns whether it did what it was asked


class AsyncConnector:
    """Runs such tasks in a few threads, which are there while there are tasks.

    They keep no process from ending: one that ends without `finalize` does not wait for them.

    Args:
        threads: how many.
        capacity: how many tasks may wait.
        name: of the threads.
    """

    def __init__(self, threads: int, capacity: int, name: str) -> None:
        self._most, self._capacity, self._name = threads, capacity, name
        self._mutex = Mutex()
        self._closed = False
        self._threads: set[Thread] = set()
        self._queues: dict[str, deque[_Task]] = {}  # of the remote engines that have a task
        self._ready: deque[str] = deque()  # those that no thread is at
        self._waiting = 0
        self._states: dict[str, AsyncConnectStatus] = {}

    def submit(self, remote_engine: str, *, connects: bool, run: Callable[[], bool]) -> None:
        """Run a task after those of the same remote engine.

        Raises:
            LLMException: LLM_LINK_BUSY: too many wait; LLM_ENGINE_FINALIZED.
        """
        with self._mutex:
            if self._closed:
                raise LLMException(
                    "the engine is finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
                )
            if self._waiting >= self._capacity:
                raise LLMException(
                    f"{self._waiting} asynchronous connects wait; at most {self._capacity} may "
                    "(connect_pool.task_queue_capacity)",
                    status_code=LLMStatusCode.LLM_LINK_BUSY,
                )
            queue = self._queues.get(remote_engine)
            if queue is None:
                queue = self._queues[remote_engine] = deque()
                self._ready.append(remote_engine)
                if len(self._threads) < self._most:
                    self._threads.add(start_thread(self._name, self._work))
            queue.append(_Task(connects, run))
            self._waiting += 1
            self._states[remote_engine] = _WAITING[connects]

    def states(self) -> dict[str, AsyncConnectStatus]:
        """That of the last task of each remote engine."""
        with self._mutex:
            return dict(self._states)

    def stop(self) -> None:
        """Begin no more tasks."""
        with self._mutex:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()

    def join(self) -> None:
        """Wait until those that were running have ended."""
        with self._mutex:
            threads = tuple(self._threads)
        for it in threads:
            it.join()

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._ready:
                    self._threads.discard(current_thread())
                    return
                remote_engine = self._ready.popleft()
            self._work_for(remote_engine)

    def _work_for(self, remote_engine: str) -> None:
        """Run the tasks of a remote engine until it has none."""
        while True:
            with self._mutex:
                queue = self._queues[remote_engine]
                if not queue:
                    del self._queues[remote_engine]
                    return
                task = queue.popleft()
                self._waiting -= 1
                if not queue:
                    self._states[remote_engine] = _RUNNING[task.connects]
            done = False
            try:
                done = task.run()
            except Exception:  # a mistake of ours; other tasks go on
                _log.exception("connecting with %s in the background", remote_engine)
            with self._mutex:
                if not queue:  # else a later task's is what is asked for
                    self._states[remote_engine] = _ENDED[task.connects, done]
