"""An action at the n-th suspension of the coroutines of an event loop.

An `await` may end by a cancellation, or after the peer has ended. A test that tries every n has
tried every await, without naming any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from kvplan.control.loop import ControlLoop


class Suspensions(AbstractContextManager["Suspensions"]):
    """Counts the suspensions of tasks that begin on a loop, and calls `then` at one of them.

    Args:
        control: the loop.
        number: of that suspension, from 1.
        then: called once, on the loop, before the task waits.
    """

    def __init__(self, control: ControlLoop, number: int, then: Callable[[], object]) -> None:
        self._control, self._left, self._then = control, number, then

    @property
    def is_over(self) -> bool:
        """True if there were as many suspensions."""
        return self._left <= 0

    def __enter__(self) -> Suspensions:
        self._install(self._task)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._install(None)

    def _install(self, factory: Callable[..., Any] | None) -> None:
        if (loop := self._control._loop) is not None:
            loop.set_task_factory(factory)

    def _task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_Counted(coro, self._count), loop=loop, **options)

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine that calls `count` at each suspension.

    No other coroutine awaits it: one that is cancelled before it begins would leave it unawaited.
    """

    def __init__(self, coro: Coroutine[Any, Any, Any], count: Callable[[], None]) -> None:
        self._coro, self._count = coro, count

    def send(self, value: Any) -> Any:
        waits_for = self._coro.send(value)
        self._count()
        return waits_for

    def throw(self, *error: Any) -> Any:
        waits_for = self._coro.throw(*error)
        self._count()
        return waits_for

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()
