"""Queues that a program or its event loop polls, and the queue of its ended tasks."""

from __future__ import annotations

import asyncio
import os
import select
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

from kvnative._signals import Mutex, signals_deferred
from kvplan.execution.completion import Tracker
from kvplan.status import busy
from kvplan.system.limits import check_process
from kvplan.validation import check_timeout

if TYPE_CHECKING:
    from kvplan.execution import GatherTask, TransferTask


_T = TypeVar("_T")


class PollableQueue(Generic[_T]):
    """A queue of unread items, oldest first; each item goes to one reader.

    Reading never blocks: a `for` loop ends when the queue is empty, and can be started again. After
    `finalize` the remaining items can still be read; then `async for` ends, and `wait` returns at
    once.
    """

    # Without a lock: a signal handler may read while the interrupted code reads.

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._closed = False
        self._pid = os.getpid()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._polled = self._fd

    def __len__(self) -> int:
        """Return the number of unread items."""
        self._receive()
        return len(self._items)

    @property
    def closed(self) -> bool:
        """True after the engine was finalized; nothing arrives any more."""
        return self._closed

    def fileno(self) -> int:
        """Return a descriptor that polls readable while items are unread, or after `finalize`.

        Pass it to `select`, `epoll` or an event loop. When it is readable, read this object, not
        the descriptor; the queue may still be empty. The descriptor is closed with this object.

        Raises:
            LLMException: LLM_FAILED: in a forked child.
        """
        check_process(self._pid, "the queue")
        return self._polled

    def wait(self, timeout_ms: float | None = None) -> bool:
        """Wait for an item; return False if none has come.

        Args:
            timeout_ms: milliseconds, >= 0; None: until an item arrives or `finalize`.

        Raises:
            TypeError, ValueError: timeout_ms is not a number, < 0 or NaN.
            LLMException: LLM_FAILED: in a forked child.
        """
        check_timeout(timeout_ms)
        check_process(self._pid, "the queue")
        end = None if timeout_ms is None else perf_counter() + timeout_ms / 1000
        poll = select.poll()
        poll.register(self._polled, select.POLLIN)
        while not len(self) and not self._closed:
            left = None if end is None else (end - perf_counter()) * 1000
            if left is not None and left <= 0:
                break
            poll.poll(left and min(left, 2**31 - 1))  # longer waits in turns
            self._settle()
        return bool(self._items)

    def __iter__(self) -> Iterator[_T]:
        """Yield the unread items until the queue is empty."""
        if os.getpid() != self._pid:
            check_process(self._pid, "the queue")
        while True:
            try:
                item = self._take()
            except IndexError:
                return
            finally:
                if not self._items:
                    self._settle()
            yield item

    async def __aiter__(self) -> AsyncIterator[_T]:
        """Yield unread and future items until the engine is finalized."""
        while True:
            for item in self:
                yield item
            if self._closed and not self._items:
                return
            await self._arrival()

    async def _arrival(self) -> None:
        """Wait until the descriptor is readable, and watch it only until then."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        fd = os.dup(self.fileno())  # a loop has at most one reader for a descriptor
        try:
            loop.add_reader(fd, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(fd)
        finally:
            os.close(fd)

    def put(self, item: _T) -> None:
        """Add an item, from any thread."""
        self._items.append(item)
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """End the queue and wake all waiting readers."""
        self._closed = True
        if os.getpid() == self._pid:
            os.eventfd_write(self._fd, 1)

    def _receive(self) -> None:
        """Move items that arrived elsewhere into the queue; for subclasses that have such items."""

    def _take(self) -> _T:
        if not self._items:
            self._receive()
        return self._items.popleft()

    def _settle(self) -> None:
        """Set the descriptor to the state of the queue; a concurrent `put` sets it again."""
        try:
            with suppress(BlockingIOError):
                os.eventfd_read(self._fd)
        finally:
            if self._items or self._closed:
                os.eventfd_write(self._fd, 1)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} to read{', closed' if self._closed else ''}>"

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._fd)


_Ended: TypeAlias = "TransferTask | GatherTask"

MAX_UNTAKEN: Final = 65536
"""Ended tasks that wait in `completions()`; further tasks are refused."""


class Completions(PollableQueue["_Ended"]):
    """Submitted tasks of one engine in the order of their end; `wait` of a task gives its outcome.

    While 65536 wait here, no other task can be submitted. Each keeps its plan.
    """

    def check_room(self) -> None:
        """Refuse another task while too many wait here.

        Raises:
            LLMException: LLM_LINK_BUSY: `completions()` is not read.
        """
        if len(self) >= MAX_UNTAKEN:
            raise busy(
                f"{len(self)} ended tasks wait in completions(); at most {MAX_UNTAKEN} can: read "
                "them"
            )


class EngineTracker(Tracker):
    """The tracker of one engine.

    Attributes:
        completions: the queue of ended tasks; None: the program has not asked for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mutex = Mutex()
        self.completions: Completions | None = None

    def open_completions(self) -> Completions:
        """Return the queue that reports tasks submitted from now on."""
        with signals_deferred, self._mutex:
            if self.completions is None:
                self.completions = Completions()
            return self.completions

    def close(self, timeout_s: float) -> None:
        """Wait for all tasks as `Tracker.close` does; then nothing more is reported."""
        super().close(timeout_s)
        if self.completions is not None:
            self.completions.close()
