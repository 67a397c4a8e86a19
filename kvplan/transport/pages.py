"""A thread that prepares pages before their first use: it maps them, or makes them huge.

A peer's arena that is mapped here has no page-table entries at first, so each first use of a page
costs a fault. The thread populates pages that the owner has filled, in steps of less than 1 ms, and
sleeps half of the time. Pages that the owner has not touched stay holes, since populating them
would allocate memory. The thread scans holes again, less often if it finds no new pages.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections import deque
from contextlib import suppress
from threading import Thread, current_thread
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import ref

from kvnative._host import PageWalk
from kvnative._signals import Condition
from kvplan.status import LLMException
from kvplan.system.limits import memory_limit, start_thread
from kvplan.system.logs import Log

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvnative._host import Arena

_Item = TypeVar("_Item")
_LOG = Log("kvplan")
_TURN_S: Final = 0.02  # of work on one arena, before the next one
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 10.0
_SHARE_FOUND, _SHARE_IDLE = 5, 50
"""The shortest pause after a pass that found pages, or none, as a multiple of its duration."""
_STOPPED_S: Final = 1.0  # timeout of waiting for the thread
MAX_PREMAPPED_ARENAS: Final = 256  # pages of others are mapped at their first use


class _Task:
    """The pages of one arena."""

    def __init__(self, arena: Arena, owner: object, *, collapse: bool) -> None:
        self.arena = ref(arena)  # weak: the last user closes the mapping
        self.owner = owner
        self.nbytes = arena.nbytes
        self.walk = PageWalk(arena.nbytes, collapse=collapse)
        self._collapse = collapse
        self.due = 0.0  # on the monotonic clock; inf: no more turns
        self._wait_s = _FIRST_WAIT_S
        self._found = 0  # bytes, in this pass
        self._took_s = 0.0

    @property
    def is_over(self) -> bool:
        """True if the arena does not count against the limits any more."""
        done = self._collapse and self.walk.is_complete
        return done or self.walk.stopped or self.arena() is None

    def take_turn(self) -> None:
        """Work for one turn."""
        if (arena := self.arena()) is None:
            return
        began = time.monotonic()
        self.due = math.inf  # no second turn if this one fails
        try:
            self._found += self.walk.advance(arena, _TURN_S)
        except (NotImplementedError, ValueError) as error:  # an old kernel, or a closed arena
            _LOG.debug("pages of an arena of %d bytes are not prepared: %s", self.nbytes, error)
            return
        self.due = now = time.monotonic()  # behind the others that are due
        self._took_s += now - began
        if self.walk.is_pass_over:
            self._end_pass(now)

    def _end_pass(self, now: float) -> None:
        if self.walk.is_complete:
            self.due = math.inf
            return
        self._wait_s = _FIRST_WAIT_S if self._found else min(2 * self._wait_s, _LONGEST_WAIT_S)
        share = _SHARE_FOUND if self._found else _SHARE_IDLE
        self.due = now + max(self._wait_s, share * self._took_s)
        self._found, self._took_s = 0, 0.0
        self.walk.again()


class BackgroundPages:
    """The thread `kvplan-pages`, which runs while it has work.

    Any thread and any signal handler may call the methods.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = Condition()
        self._jobs: deque[tuple[object, Callable[[], object]]] = deque()
        self._tasks: list[_Task] = []
        self._thread: Thread | None = None
        self._turn_of: object = None  # the owner of the job or arena that the thread works on
        self._closed = False
        # Page tables take 1/512 of mapped memory, so at most 1/1024 of the limit.
        limit = memory_limit()
        self._max_nbytes = math.inf if limit is None else limit.nbytes / 2
        atexit.register(self.close)

    def submit(self, job: Callable[[], object], owner: object) -> None:
        """Let the thread call `job`, which maps arenas, unless `cancel(owner)` comes first.

        An exception from `job` is logged. `job` is not called if there are too many arenas.
        """
        with self._changed:
            self._jobs.append((owner, job))
            self._wake()

    def add(self, arena: Arena, owner: object, *, collapse: bool = False) -> None:
        """Prepare the existing pages of `arena`, and later new ones, without keeping it alive.

        `collapse` makes huge pages of an arena of this process; otherwise pages are mapped. Beyond
        `MAX_PREMAPPED_ARENAS`, or half of `memory_limit`, nothing is prepared.
        """
        with self._changed:
            _discard(self._tasks, lambda task: task.is_over)
            nbytes = sum(task.nbytes for task in self._tasks) + arena.nbytes
            if len(self._tasks) >= MAX_PREMAPPED_ARENAS or nbytes > self._max_nbytes:
                _LOG.debug(
                    "pages of an arena of %d bytes are mapped at their first use: %d arenas would "
                    "have %d bytes, and at most %d of %.0f bytes are mapped before",
                    arena.nbytes,
                    len(self._tasks) + 1,
                    nbytes,
                    MAX_PREMAPPED_ARENAS,
                    self._max_nbytes,
                )
                return
            self._tasks.append(_Task(arena, owner, collapse=collapse))
            self._wake()

    def cancel(self, owner: object) -> None:
        """Stop all work for `owner`, and wait until the thread uses none of its arenas.

        A step takes less than 1 ms, or a few ms for huge pages. Waits at most 1 s, as a job may
        take longer.
        """
        with self._changed:
            for task in list(self._tasks):
                if task.owner is owner:
                    task.walk.stop()
            _discard(self._tasks, lambda task: task.owner is owner)
            _discard(self._jobs, lambda job: job[0] is owner)
            self._changed.notify_all()
            if self._thread is not current_thread():
                self._changed.wait_for(lambda: self._turn_of is not owner, _STOPPED_S)

    def close(self) -> None:
        """Stop and join the thread; idempotent. At exit this must precede every unmapping."""
        if os.getpid() != self._pid:
            return  # the parent has the thread, and may hold the lock
        with self._changed:
            self._closed = True
            for task in self._tasks:
                task.walk.stop()
            self._tasks.clear()
            self._jobs.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join(_STOPPED_S)

    def _wake(self) -> None:
        if self._thread is None and not self._closed:
            try:
                self._thread = start_thread("kvplan-pages", self._run)
            except LLMException as error:
                _LOG.debug("pages are mapped at their first use: %s", error)
        self._changed.notify_all()

    def _run(self) -> None:
        while (step := self._next()) is not None:
            try:
                step()
            except LLMException as error:
                _LOG.debug("memory of a peer is mapped at its first use: %s", error)
            except Exception:
                _LOG.exception("pages are not prepared")
            step = None  # a job keeps its link alive

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next step and return it; None: the thread ends."""
        with self._changed:
            self._turn_of = None
            self._changed.notify_all()
            while True:
                _discard(self._tasks, lambda task: task.is_over)
                while self._jobs and not self._closed:
                    owner, job = self._jobs.popleft()
                    if len(self._tasks) < MAX_PREMAPPED_ARENAS:
                        self._turn_of = owner
                        return job
                task = min(self._tasks, key=lambda task: task.due, default=None)
                if task is None or self._closed or task.due == math.inf:
                    self._thread = None
                    return None
                now = time.monotonic()
                if task.due <= now:
                    self._turn_of = task.owner
                    return task.take_turn
                self._changed.wait(task.due - now)


def _discard(items: list[_Item] | deque[_Item], is_one: Callable[[_Item], bool]) -> None:
    """Remove items in place, since a signal handler may add and remove others meanwhile."""
    for item in list(items):
        if is_one(item):
            with suppress(ValueError):
                items.remove(item)


def background_pages() -> BackgroundPages:
    """Return the thread of this process; a forked child has its own."""
    pid = os.getpid()
    # Without a lock, which a child could inherit locked. Of several new objects, one is used.
    return _OF_PROCESS.get(pid) or _OF_PROCESS.setdefault(pid, BackgroundPages())


_OF_PROCESS: Final[dict[int, BackgroundPages]] = {}
