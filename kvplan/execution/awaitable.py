"""The handle of a task with one outcome: waited for, awaited, or notified by calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kvplan.status import LLMException

if TYPE_CHECKING:
    import asyncio

    from kvnative._executor import LayeredTask, Task


class AwaitableTask(ABC):
    """A handle with one outcome, which can be waited for, awaited, or notified by calls."""

    def __init__(self) -> None:
        self._is_settled = False
        self._calls: list[Callable[[], object]] = []

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if no byte moves any more. Never blocks."""

    @property
    def settled(self) -> bool:
        """True once `wait` does not block: what follows the last byte is over, too."""
        return self._is_settled

    @abstractmethod
    def wait(self, timeout_ms: float | None = None) -> None:
        """Wait until every byte has arrived."""

    @abstractmethod
    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop the transfer."""

    @abstractmethod
    def _follow(self) -> None:
        """Let the thread of the process settle this task when it ends. Idempotent."""

    def result(self, timeout_ms: float | None = None) -> None:
        """Return None when every byte has arrived, as a future does; otherwise raise as `wait`.

        Raises:
            ValueError: timeout_ms < 0 or not a number.
            LLMException: as `wait`.
        """
        self.wait(timeout_ms)

    def __await__(self) -> Generator[Any, None, None]:
        return self.coroutine().__await__()

    async def coroutine(self) -> None:
        """Await the task, for `asyncio.create_task` and task groups.

        It costs no thread: one thread learns of the end of all tasks that are awaited.

        Raises:
            LLMException: when it is awaited: as `wait`, or LLM_OUT_OF_MEMORY: the system has no
                thread left.
        """
        import asyncio  # loaded only if a task is awaited

        loop = asyncio.get_running_loop()
        if not self._is_settled:
            self._follow()  # which may find it done
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
                with suppress(ValueError):  # it was called
                    self._calls.remove(call)
        self.wait()

    async def _cancelled(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel, and await the end: a stopped peer delays that, and must not block the loop."""
        import asyncio

        from kvplan.execution.completion import run_aside  # it settles tasks

        run_aside(self.cancel)
        while not self._is_settled:
            ended = loop.create_future()
            self.when_settled(partial(_wake, ended))
            with suppress(asyncio.CancelledError):  # until then bytes may be touched
                await ended

    def when_settled(self, call: Callable[[], object]) -> None:
        """Call `call()` once `wait` does not block any more: now, or later in another thread.

        Args:
            call: Neither blocks nor raises.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: the system has no thread left.
        """
        if not self._is_settled:
            self._follow()
        self._calls.append(call)
        if self._is_settled:  # after it was added, so that one of both sees it
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
    is_followed = False  # the thread settles it
    settles_aside = False  # what follows the last byte may take long
