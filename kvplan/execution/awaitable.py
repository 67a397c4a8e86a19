"""Handles of tasks with one outcome, for threads and for asyncio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kvplan.status import LLMException

if TYPE_CHECKING:
    import asyncio

    from kvnative._layered import LayeredTask
    from kvnative._task import Task


class AwaitableTask(ABC):
    """A handle whose one outcome can be waited for, awaited, or passed to a callback."""

    def __init__(self) -> None:
        self._is_settled = False
        self._calls: list[Callable[[], object]] = []

    @property
    @abstractmethod
    def done(self) -> bool:
        """True once no more bytes move. Never blocks."""

    @property
    def settled(self) -> bool:
        """True once `wait` would not block: the steps after the last byte are over, too."""
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
            ValueError: timeout_ms is < 0 or NaN.
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

        loop = asyncio.get_running_loop()
        if not self._is_settled:
            self._follow()  # may settle this task
        if not self._is_settled:
            ended: asyncio.Future[None] = loop.create_future()
            call = partial(_wake, ended)
            self.when_settled(call)
            try:
                await ended
            except asyncio.CancelledError:
                await self._cancelled(loop)
                raise
            finally:
                with suppress(ValueError):  # called already
                    self._calls.remove(call)
        self.wait()

    async def _cancelled(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel without blocking the loop, and await the end, which a stopped peer may delay."""
        import asyncio

        from kvplan.execution.completion import run_aside  # here: that module imports this one

        run_aside(self.cancel)
        while not self._is_settled:
            ended = loop.create_future()
            self.when_settled(partial(_wake, ended))
            with suppress(asyncio.CancelledError):  # bytes may be touched until the end
                await ended

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

    def _note_settled(self) -> None:
        self._is_settled = True
        while self._calls:
            try:
                call = self._calls.pop()
            except IndexError:  # another thread was first
                return
            call()


def _wake(ended: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop was closed
        ended.get_loop().call_soon_threadsafe(_end, ended)


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():  # otherwise it was cancelled
        ended.set_result(None)


class NativeTask(AwaitableTask):
    """An awaitable task of the native layer."""

    native: Task | LayeredTask
    is_followed = False  # True: the completion thread settles this task
    settles_aside = False  # True: the steps after the last byte may be slow
