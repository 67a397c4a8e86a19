"""Handles of tasks with one outcome, for threads and for asyncio."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import TIMEOUT_MAX, Event
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvplan.status import LLMException

if TYPE_CHECKING:
    import asyncio

    from kvnative._layered import LayeredTask
    from kvnative._task import Task


class AwaitableTask(ABC):
    """A handle whose one outcome can be waited for, awaited, or passed to a callback."""

    settles_aside = False  # True: the steps after the last byte may be slow

    def __init__(self) -> None:
        self._is_settled = False
        self._is_hurried = False  # True: the pool of `run_aside` does not delay the steps
        self._calls: list[Callable[[], object]] = []
        self._pid = os.getpid()  # in a child no thread takes the steps, and locks may be held

    @property
    @abstractmethod
    def done(self) -> bool:
        """True once no more bytes move. Never blocks."""

    @property
    def settled(self) -> bool:
        """True once `wait` would not block: the steps after the last byte are over, too."""
        if not self._is_settled:
            with suppress(LLMException):  # no thread is left: `wait` finds the end
                self._follow()
        return self._is_settled

    @abstractmethod
    def wait(self, timeout_ms: float | None = None) -> None:
        """Wait until every byte has arrived."""

    @abstractmethod
    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop the transfer."""

    @abstractmethod
    def _follow(self) -> None:
        """Let the completion thread settle this task when it ends. Idempotent."""

    def result(self, timeout_ms: float | None = None) -> None:
        """Wait as `wait` does, under the name used by futures.

        Raises:
            TypeError, ValueError: timeout_ms is not a number, < 0 or NaN.
            LLMException: see `wait`.
        """
        self.wait(timeout_ms)

    def __await__(self) -> Generator[Any, None, None]:
        return self.coroutine().__await__()

    async def coroutine(self) -> None:
        """Await the task, for `asyncio.create_task` and task groups.

        One thread watches all awaited tasks.

        Raises:
            LLMException: see `wait`; LLM_OUT_OF_MEMORY: the system has no thread left.
        """
        import asyncio  # loaded only if a task is awaited

        from kvplan.execution.completion import run_aside  # here: that module imports this one

        loop = asyncio.get_running_loop()
        if not self._is_settled:
            ended = asyncio.Event()
            call = partial(_wake, loop, ended)
            with self._calling(call):
                try:
                    await ended.wait()
                except asyncio.CancelledError:
                    run_aside(self.cancel)  # a stopped peer may delay the end
                    while not self._is_settled:
                        with suppress(asyncio.CancelledError):  # bytes move until the end
                            await ended.wait()
                    raise
        self.wait()

    def when_settled(self, call: Callable[[], object]) -> None:
        """Call `call()` once `wait` would not block: now, or later in any thread.

        Args:
            call: must neither block nor raise.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: the system has no thread left.
        """
        if not self._is_settled:
            self._follow()
        self._calls.append(call)
        if self._is_settled:  # after adding the call: this thread or the settling one calls it
            self._note_settled()

    def _settles_by(self, end: float) -> bool:
        """Wait until `end` for slow steps after the last byte; return False if they go on."""
        if self._is_settled or not self.settles_aside or os.getpid() != self._pid:
            return True
        from kvplan.execution.completion import run_aside_now  # here: that module imports this one

        settled = Event()
        # Without a free thread, the caller takes the steps.
        with suppress(LLMException), self._calling(settled.set):
            if not self._is_hurried:  # stopped peers may hold all threads of the pool
                self._is_hurried = True
                run_aside_now(self._settle)
            return settled.wait(min(max(0.0, end - perf_counter()), TIMEOUT_MAX))
        return True

    @contextmanager
    def _calling(self, call: Callable[[], object]) -> Iterator[None]:
        """Call `call()` if the task settles within the block."""
        self.when_settled(call)
        try:
            yield
        finally:
            with suppress(ValueError):  # called already
                self._calls.remove(call)

    def _settle(self) -> None:
        with suppress(LLMException):  # `wait` raises the error to its callers
            self.wait()

    def _note_settled(self) -> None:
        self._is_settled = True
        while self._calls:
            try:
                call = self._calls.pop()
            except IndexError:  # another thread was first
                return
            call()


def _wake(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(ended.set)


class NativeTask(AwaitableTask):
    """An awaitable task of the native layer."""

    native: Task | LayeredTask
    is_followed = False  # True: the completion thread settles this task
