"""The control thread: an asyncio loop, the ZeroMQ context, and workers that may block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import zmq

from kvplan.control.gatekeeper import Gatekeeper
from kvplan.control.refusals import Refusals
from kvplan.status import LLMException, LLMStatusCode

_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_WORKERS: Final = 8
MAX_SOCKETS: Final = 8192
SPARE_DESCRIPTORS: Final = 16
"""That must be left: asyncio's loop takes 3, a ZeroMQ context with its threads 9, a socket 3."""
CLOSING_S: Final = 0.5
"""Seconds that last messages have to leave before their connections are cut."""

_log = logging.getLogger("kvplan.control")


class Closable(Protocol):
    """What lives on a loop and must end before it does."""

    def close(self) -> None:
        """Begin to end."""

    async def wait_closed(self) -> None:
        """Wait until all of it is gone."""


class ControlLoop:
    """One thread that runs all conversations of an engine; other threads call into it.

    It belongs to the process that started it: in a forked child every call is refused.
    """

    def __init__(self, name: str = "kvplan-control") -> None:
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._living: dict[Closable, None] = {}  # in order, so that farewells leave first
        self._gatekeeper: Gatekeeper | None = None
        self.refusals = Refusals()

    def start(self) -> None:
        """Start the thread.

        Raises:
            LLMException: LLM_FAILED, it runs already, too few descriptors are left, or in a forked
                child.
        """
        self._check_process()
        with self._lock:
            if self._loop is not None:
                raise LLMException(f"{self._name} runs already")
            try:
                _check_descriptors()
            except OSError as error:
                raise LLMException(f"{self._name} cannot start: {error.strerror}") from error
            loop = asyncio.new_event_loop()
            loop.set_exception_handler(_log_exception)
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
            # Starts its threads now, while there is room for what they open.
            self._context.socket(zmq.PAIR).close()
            self._workers = ThreadPoolExecutor(MAX_WORKERS, f"{self._name}-worker")
            self._thread = threading.Thread(target=_serve, args=(loop,), name=self._name)
            self._thread.daemon = True
            self._thread.start()
            self._loop = loop

    def run(self, coro: Coroutine[Any, Any, _T], timeout_ms: float | None = None) -> _T:
        """Run `coro` on the loop and return its result; for all threads but the loop's own.

        Args:
            coro: is cancelled where the caller gives up: by timeout, or KeyboardInterrupt.
            timeout_ms: milliseconds; None waits as long as it takes.

        Raises:
            LLMException: LLM_TIMEOUT after `timeout_ms`; LLM_ENGINE_FINALIZED where the loop has
                stopped, or stops meanwhile; LLM_FAILED where it was never started, or belongs to
                another process.
        """
        try:
            loop = self._running()
            self._check_thread()
            future = self._hand_over(coro, loop)
        except BaseException:
            # An interrupt may strike when the loop has it already: it is the loop's then.
            if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
                coro.close()
            raise
        try:
            return future.result(None if timeout_ms is None else timeout_ms / 1000)
        except concurrent.futures.CancelledError:
            raise self._stopped() from None
        except TimeoutError:
            if future.done():  # the coroutine's own, not ours
                raise
            raise LLMException(
                f"no result after {timeout_ms:g} ms", status_code=LLMStatusCode.LLM_TIMEOUT
            ) from None
        finally:
            future.cancel()

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Have `function(*args)` called on the loop, from any thread.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED or LLM_FAILED, as for `run`.
        """
        try:
            self._running().call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            if isinstance(error, LLMException):
                raise
            raise self._stopped() from None  # closed between the two calls

    async def in_worker(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Run what may block in a thread of the pool, on behalf of a coroutine of the loop."""
        loop = self._running()
        return await loop.run_in_executor(self._workers, partial(function, *args, **kwargs))

    def stop(self) -> None:
        """End all conversations and the thread; bounded, idempotent, nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._check_thread()
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
            context, workers = self._context, self._workers
        if loop is None or thread is None or context is None or workers is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        # A worker may be held up by a peer; its transport's deadline ends it, not this call.
        workers.shutdown(wait=False, cancel_futures=True)
        context.destroy(linger=0)

    def new_socket(self, kind: int) -> zmq.Socket[bytes]:
        """Make a ZeroMQ socket, of the loop's context.

        Raises:
            OSError: too few descriptors are left: libzmq ends the process where it gets none.
            LLMException: LLM_ENGINE_FINALIZED: the loop has stopped.
        """
        if self._context is None:
            raise self._stopped()
        _check_descriptors()
        return self._context.socket(kind)

    def keep(self, living: Closable) -> None:
        """Remember to close `living` before the loop ends; on the loop's thread."""
        self._living[living] = None

    def forget(self, closed: Closable) -> None:
        """`closed` has ended by itself; on the loop's thread."""
        self._living.pop(closed, None)

    def start_gatekeeper(self) -> None:
        """Have clients' keys checked from now on, as servers with a key need; on the loop."""
        if self._gatekeeper is None:
            self._gatekeeper = Gatekeeper(self.new_socket(zmq.ROUTER))

    async def _end(self) -> None:
        endings = list(self._living)
        for living in endings:
            living.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSING_S):
                await asyncio.gather(*(living.wait_closed() for living in endings))
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
        ours = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not ours]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSING_S)

    def _hand_over(
        self, coro: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop
    ) -> concurrent.futures.Future[_T]:
        try:
            return asyncio.run_coroutine_threadsafe(coro, loop)
        except RuntimeError:
            raise self._stopped() from None  # closed since it was looked at

    def _running(self) -> asyncio.AbstractEventLoop:
        self._check_process()
        if (loop := self._loop) is None:
            raise self._stopped()
        return loop

    def _check_process(self) -> None:
        if (pid := os.getpid()) != self._pid:
            raise LLMException(
                f"{self._name} belongs to process {self._pid}; this is its forked child {pid}, "
                "which must make its own"
            )

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise LLMException(f"{self._name} would wait for itself")

    def _stopped(self) -> LLMException:
        if self._context is None:
            return LLMException(f"{self._name} does not run")
        return LLMException(
            f"{self._name} does not run any more; what it belonged to is finalized",
            status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
        )


def _check_descriptors() -> None:
    """Raise OSError if few are left: libzmq aborts the process where it cannot open its own."""
    with contextlib.ExitStack() as held:
        for _ in range(SPARE_DESCRIPTORS):
            held.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _log_exception(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    _log.error("event=exception message=%r", context["message"], exc_info=context.get("exception"))
