"""A queue that a program reads when it likes, and whose descriptor its own event loop can watch."""

from __future__ import annotations

import asyncio
import os
import select
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from time import perf_counter
from typing import Generic, TypeVar

from kvplan.status import LLMException

_T = TypeVar("_T")


class PollableQueue(Generic[_T]):
    """What has arrived and nobody has read yet, oldest first; of several readers each item has one.

    Reading never blocks: a `for` loop ends when nothing is left, and can be begun again. After
    `finalize` what had arrived can still be read; then `async for` ends, and `wait` returns at
    once.

    No lock: a signal handler may read while the code that it interrupted does.
    """

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._closed = False
        self._pid = os.getpid()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._polled = self._fd

    def __len__(self) -> int:
        """How many are there."""
        self._receive()
        return len(self._items)

    @property
    def closed(self) -> bool:
        """Whether the engine was finalized: nothing arrives any more."""
        return self._closed

    def fileno(self) -> int:
        """Return a descriptor that polls readable while something is there, or after `finalize`.

        For `select`, `epoll` and event loops: watch it, and read this object when it is readable,
        not the descriptor. It may be readable once too often, never too seldom; it is closed with
        this object.

        Raises:
            LLMException: LLM_FAILED: in a forked child.
        """
        self._check_process()
        return self._polled

    def wait(self, timeout_ms: float | None = None) -> bool:
        """Wait until something is there; returns whether it is.

        Args:
            timeout_ms: milliseconds, >= 0; None waits until something comes, or `finalize`.

        Raises:
            ValueError: timeout_ms < 0 or not a number.
            LLMException: LLM_FAILED: in a forked child.
        """
        if timeout_ms is not None and not timeout_ms >= 0:
            raise ValueError(f"timeout_ms={timeout_ms} must be >= 0 or None")
        self._check_process()
        end = None if timeout_ms is None else perf_counter() + timeout_ms / 1000
        poll = select.poll()
        poll.register(self._polled, select.POLLIN)
        while not len(self) and not self._closed:
            left = None if end is None else (end - perf_counter()) * 1000
            if left is not None and left <= 0:
                break
            poll.poll(left)
            self._settle()
        return bool(self._items)

    def __iter__(self) -> Iterator[_T]:
        """Take what is there, one after another, until nothing is left."""
        if os.getpid() != self._pid:
            self._check_process()
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
        """Take what is there and what comes, until the engine is finalized."""
        while True:
            for item in self:
                yield item
            if self._closed and not self._items:
                return
            await self._arrival()

    async def _arrival(self) -> None:
        """Return when the descriptor is readable; watched no longer, or it would keep a loop busy.

        Raises:
            LLMException: LLM_FAILED: in a forked child.
        """
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        fd = os.dup(self.fileno())  # a loop watches a descriptor for one reader only
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
        """Take no more; those who wait are woken."""
        self._closed = True
        if os.getpid() == self._pid:
            os.eventfd_write(self._fd, 1)

    def _receive(self) -> None:
        """Put in what has arrived elsewhere, where there is such a way."""

    def _take(self) -> _T:
        if not self._items:
            self._receive()
        return self._items.popleft()

    def _settle(self) -> None:
        """Make the descriptor say what is so; a `put` in between is seen here, or says it again."""
        try:
            with suppress(BlockingIOError):
                os.eventfd_read(self._fd)
        finally:
            if self._items or self._closed:
                os.eventfd_write(self._fd, 1)

    def _check_process(self) -> None:
        if (pid := os.getpid()) != self._pid:
            raise LLMException(
                f"what arrives is for process {self._pid}; this is its forked child {pid}"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} to read{', closed' if self._closed else ''}>"

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._fd)
