"""A thread for what may block and nobody needs to wait for, such as taking connections down."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kvplan.logs import Log

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG = Log("kvplan")


class Aside:
    """Does one thing after the other.

    `do` may be called from anywhere, a finalizer that interrupts a holder of locks too.
    """

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=_run, args=(self._todo,), name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], object]) -> None:
        """Have `job()` called later, unless closed; what it raises is logged."""
        if not self._is_closed:  # else it would be held for ever
            self._todo.put(job)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was given so far is done; returns whether it was in time."""
        done = threading.Event()
        self._todo.put(done.set)
        return done.wait(timeout_s)

    def close(self) -> None:
        """End the thread once all is done; what comes later is not done any more."""
        self._is_closed = True
        self._todo.put(None)


def _run(todo: SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := todo.get()) is not None:
        try:
            job()
        except Exception:
            _LOG.exception("event=aside_failed thread=%s", threading.current_thread().name)
        del job  # it holds what it was about
