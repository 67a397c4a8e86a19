"""A coroutine that another thread waits for, which may be interrupted at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from kvplan.status import LLMException, LLMStatusCode

_T = TypeVar("_T")


class Awaited(Generic[_T]):
    """Takes a coroutine to the loop and its outcome back.

    The two threads share no lock of Python's: a signal that strikes the waiting one between taking
    and releasing it, as inside `concurrent.futures.Future.result`, would block the loop for ever.
    """

    def __init__(self, coro: Coroutine[Any, Any, _T]) -> None:
        self._coro = coro
        self._task: asyncio.Task[_T] | None = None
        self._outcomes: SimpleQueue[tuple[BaseException] | tuple[None, _T]] = SimpleQueue()

    def begin(self) -> None:
        """Start the coroutine; on the loop."""
        self._task = asyncio.get_running_loop().create_task(self._coro)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Nobody waits any more; on the loop, after `begin` if at all."""
        if self._task is None:
            self._coro.close()
        else:
            self._task.cancel()

    def end(self) -> None:
        """The loop ends, or has ended, and runs the coroutine no further."""
        if self._task is None:
            self._coro.close()
        self._outcomes.put((asyncio.CancelledError(),))

    def result(self, timeout_ms: float | None) -> _T:
        """Wait for the outcome.

        Raises:
            LLMException: LLM_TIMEOUT after `timeout_ms`.
            asyncio.CancelledError: it was cancelled, or the loop has ended.
            BaseException: what the coroutine raised.
        """
        try:
            outcome = self._outcomes.get(
                timeout=None if timeout_ms is None else max(0.0, timeout_ms / 1000)
            )
        except Empty:
            raise LLMException(
                f"no result after {timeout_ms:g} ms", status_code=LLMStatusCode.LLM_TIMEOUT
            ) from None
        if outcome[0] is None:
            return outcome[1]
        try:
            raise outcome[0]
        finally:
            del outcome  # its traceback refers to this frame

    def _done(self, task: asyncio.Task[_T]) -> None:
        self._task = None  # with its error, whose traceback refers to who waits
        if task.cancelled():
            self._outcomes.put((asyncio.CancelledError(),))
        elif (error := task.exception()) is not None:
            self._outcomes.put((error,))
        else:
            self._outcomes.put((None, task.result()))
