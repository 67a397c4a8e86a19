"""The control thread: an asyncio loop, the ZeroMQ context, and workers that may block."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

import zmq

from kvnative._signals import Mutex
from kvplan.control.zmtp import ZapAuthenticator
from kvplan.status import LLMException, LLMStatusCode, timed_out
from kvplan.system.limits import check_process, check_threads, system_error
from kvplan.system.logs import LimitedLog, Log

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Outcome: TypeAlias = tuple[BaseException] | tuple[None, _T]

MAX_WORKERS: Final = 1024
"""Default maximum number of threads for blocking calls. Threads start when needed.

Both ends of a connection wait for each other in such threads. With too few, engines that connect to
each other would all wait for a free one.
"""
MAX_SOCKETS: Final = 8192
SPARE_DESCRIPTORS: Final = 16
"""Descriptors that must be free: the loop takes 3, a ZeroMQ context 5, a socket 3."""
SPARE_THREADS: Final = 8
"""Threads that must be free, because libzmq aborts the process if it cannot start its 2.

The loop takes 1. The others are for workers, and for other parts of the process.
"""
CLOSING_S: Final = 0.5
"""Seconds that the last messages have before their connections are closed."""

STOPPING_S: Final = 2.0
"""Seconds that `ControlLoop.stop` waits at most."""


_log = Log("kvplan.control")


class Closable(Protocol):
    """An object that runs on a loop and must end before the loop does."""

    def close(self) -> None:
        """Begin to end."""

    async def wait_closed(self) -> None:
        """Wait until the object has ended."""


class PendingCall(Generic[_T]):
    """A coroutine that runs on the loop while another thread or loop waits for its outcome.

    The two threads share no Python lock. A signal that interrupts the waiting thread between taking
    and releasing one, as inside `concurrent.futures.Future.result`, would block the loop for ever.
    """

    def __init__(
        self,
        coro: Coroutine[Any, Any, _T],
        report: Callable[[_Outcome[_T]], object] | None = None,
    ) -> None:
        self._coro = coro
        self._task: asyncio.Task[_T] | None = None
        self._outcomes: SimpleQueue[_Outcome[_T]] = SimpleQueue()
        self._report = report or self._outcomes.put

    def begin(self) -> None:
        """Start the coroutine, on the loop."""
        self._task = asyncio.get_running_loop().create_task(self._coro)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Cancel the coroutine, whose caller does not wait any more. Called on the loop."""
        if self._task is None:
            self._coro.close()
        else:
            self._task.cancel()

    def end(self) -> None:
        """End the call together with the loop."""
        if self._task is None:
            self._coro.close()
        self._report((asyncio.CancelledError(),))

    def result(self, timeout_ms: float | None) -> _T:
        """Wait for the outcome."""
        try:
            outcome = self._outcomes.get(
                timeout=None if timeout_ms is None else max(0.0, timeout_ms / 1000)
            )
        except Empty:
            raise timed_out(f"no result after {timeout_ms:g} ms") from None
        if outcome[0] is None:
            return outcome[1]
        try:
            raise outcome[0]
        finally:
            del outcome  # its traceback refers to this frame

    def _done(self, task: asyncio.Task[_T]) -> None:
        self._task = None  # drop its error, whose traceback refers to the waiting frame
        if task.cancelled():
            self._report((asyncio.CancelledError(),))
        elif (error := task.exception()) is not None:
            self._report((error,))
        else:
            self._report((None, task.result()))


class RefusalLog(LimitedLog):
    """A rate-limited log of refusals, and of exceptions on a loop."""

    def __init__(self) -> None:
        super().__init__(_log)

    def note(self, peer: str, reason: str) -> None:
        """Log one refusal, or only count it."""
        self.warning("event=refused peer=%s reason=%r", peer, reason)


class ControlLoop:
    """The thread that runs all channels of an engine. Other threads call into it.

    It belongs to the process that made it: in a forked child every call but `stop` raises.
    """

    def __init__(self, name: str = "kvplan-control", max_workers: int = MAX_WORKERS) -> None:
        self._name = name
        self._max_workers = max_workers
        self._pid = os.getpid()
        self._starting = Mutex()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._ending: asyncio.Task[None] | None = None
        self._calls: set[PendingCall[Any]] = set()
        self._closables: dict[Closable, None] = {}  # channels before their connections
        self._authenticator: ZapAuthenticator | None = None
        self.refusals = RefusalLog()

    def start(self) -> None:
        """Start the thread."""
        check_process(self._pid, self._name)
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                raise LLMException(f"{self._name} is already running")
            check_threads(SPARE_THREADS)
            try:
                _check_descriptors()
                self._start()
            except (OSError, RuntimeError) as error:
                raise system_error(f"{self._name} cannot start", error) from error

    def _start(self) -> None:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(partial(_log_exception, self.refusals))
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        # The context starts its threads now, while enough descriptors and threads are free.
        self._context.socket(zmq.PAIR).close()
        self._workers = ThreadPoolExecutor(self._max_workers, f"{self._name}-worker")
        # Not a bound method, which would keep this object alive.
        resources = (loop, self._context, self._workers, self._calls)
        # Not `start_thread`: an interrupt while the thread starts must find it here, to stop it.
        self._thread = threading.Thread(target=_serve, args=resources, name=self._name, daemon=True)
        self._ending = None
        self._loop = loop  # first, so that an interrupted start can be stopped
        try:
            self._thread.start()
        except RuntimeError:
            self._loop = None
            loop.close()
            self._context.destroy(linger=0)
            raise

    def run(self, coro: Coroutine[Any, Any, _T], timeout_ms: float | None = None) -> _T:
        """Run `coro` on the loop and return its result. Not for the loop's own thread."""
        try:
            loop = self._running()
            self._check_thread()
        except BaseException:
            coro.close()
            raise
        call = PendingCall(coro)
        try:
            self._calls.add(call)  # first: a thread that ends answers the calls in this set
            _schedule(loop, partial(self._begin, call), otherwise=call.end)
            return call.result(timeout_ms)
        except asyncio.CancelledError:
            raise self._stopped() from None
        except BaseException:
            _schedule(loop, call.cancel, otherwise=call.end)
            raise
        finally:
            self._calls.discard(call)

    async def run_for(self, coro: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on this loop, from a coroutine of another loop."""
        try:
            loop = self._running()
            caller = asyncio.get_running_loop()
        except BaseException:
            coro.close()
            raise
        outcome: asyncio.Future[_Outcome[_T]] = caller.create_future()

        def report(found: _Outcome[_T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and no caller waits
                caller.call_soon_threadsafe(_set_outcome, outcome, found)

        call = PendingCall(coro, report)
        try:
            self._calls.add(call)
            _schedule(loop, partial(self._begin, call), otherwise=call.end)
            found = await outcome
        except BaseException:
            _schedule(loop, call.cancel, otherwise=call.end)
            raise
        finally:
            self._calls.discard(call)
        if found[0] is None:
            return found[1]
        try:
            if isinstance(found[0], asyncio.CancelledError):
                raise self._stopped()
            raise found[0]
        finally:
            del found  # its traceback refers to this frame

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Schedule `function(*args)` on the loop, from any thread."""
        loop = self._running()
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # closed between the two calls
            raise self._stopped() from None

    async def in_worker(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Run a blocking function in a thread of the pool, from a coroutine of the loop."""
        return await self._in_pool(partial(function, *args, **kwargs))

    def start_in_worker(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> asyncio.Future[_T]:
        """Run a function in a thread of the pool, or here if the system has no thread left."""
        call = partial(function, *args, **kwargs)
        try:
            return asyncio.shield(self._in_pool(call))
        except LLMException:
            done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)
            return done

    def _in_pool(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        assert self._workers is not None
        outcome: Future[_T] = Future()
        try:
            self._workers.submit(_settle, outcome, call)
        except RuntimeError as error:
            # The call is in the pool's queue: a worker that was busy may have taken it.
            if outcome.cancel():
                raise system_error(f"{self._name} has no worker", error) from error
        return asyncio.wrap_future(outcome)

    def stop(self, disconnect: Callable[[], Awaitable[None]] | None = None) -> None:
        """End all channels and the thread. Idempotent; does nothing in a forked child.

        This waits for `STOPPING_S` at most, because a signal handler may call it while the
        interrupted code holds a lock that the thread needs. The thread then ends later and releases
        everything.
        """
        if os.getpid() != self._pid:
            return
        self._check_thread()
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        _schedule(loop, partial(self._begin_end, disconnect), otherwise=lambda: None)
        self._loop = None
        with contextlib.suppress(RuntimeError):  # its start was interrupted
            thread.join(STOPPING_S)
        if thread.is_alive():
            _log.warning("event=stops_late thread=%s waited_s=%g", self._name, STOPPING_S)

    def new_socket(self, kind: int) -> zmq.Socket[bytes]:
        """Make a ZeroMQ socket in the loop's context."""
        if self._context is None:
            raise self._stopped()
        _check_descriptors()
        return self._context.socket(kind)

    def register(self, closable: Closable) -> None:
        """Remember to close an object before the loop ends. Called on the loop's thread."""
        self._closables[closable] = None

    def unregister(self, closed: Closable) -> None:
        """Forget an object that has ended. Called on the loop's thread."""
        self._closables.pop(closed, None)

    def start_authenticator(self) -> None:
        """Authenticate clients from now on, for servers with a key. Called on the loop."""
        if self._authenticator is None:
            self._authenticator = ZapAuthenticator(self.new_socket(zmq.ROUTER))

    def _begin(self, call: PendingCall[Any]) -> None:
        if self._ending is None:
            call.begin()
        else:
            call.end()

    def _begin_end(self, disconnect: Callable[[], Awaitable[None]] | None) -> None:
        if self._ending is None:  # several threads may stop it
            loop = asyncio.get_running_loop()
            self._ending = loop.create_task(self._end(disconnect))
            self._ending.add_done_callback(lambda _: loop.stop())

    async def _end(self, disconnect: Callable[[], Awaitable[None]] | None) -> None:
        if disconnect is not None:
            try:
                async with asyncio.timeout(2 * CLOSING_S):
                    await disconnect()
            except Exception:
                _log.exception("event=disconnect_failed thread=%s", self._name)
        ending = list(self._closables)
        for closable in ending:
            closable.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSING_S):
                await asyncio.gather(*(closable.wait_closed() for closable in ending))
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None
        ours = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not ours]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSING_S)

    def _running(self) -> asyncio.AbstractEventLoop:
        check_process(self._pid, self._name)
        if (loop := self._loop) is None:
            raise self._stopped()
        return loop

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise LLMException(f"{self._name} would wait for itself")

    def _stopped(self) -> LLMException:
        started = self._thread is not None
        code = LLMStatusCode.LLM_ENGINE_FINALIZED if started else LLMStatusCode.LLM_FAILED
        return LLMException(f"{self._name} is not running", status_code=code)


def _settle(outcome: Future[_T], call: Callable[[], _T]) -> None:
    """Make a call in a worker, unless its outcome is cancelled."""
    if outcome.set_running_or_notify_cancel():
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)
            del outcome  # its error refers to this frame


def _check_descriptors() -> None:
    """Raise OSError if too few descriptors are free, which would make libzmq abort the process."""
    held = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        while len(held) < SPARE_DESCRIPTORS:
            held.append(os.dup(held[0]))  # a quarter of the cost of opening it again
    finally:
        for descriptor in held:
            os.close(descriptor)


def _serve(
    loop: asyncio.AbstractEventLoop,
    context: zmq.Context[zmq.Socket[bytes]],
    workers: ThreadPoolExecutor,
    calls: set[PendingCall[Any]],
) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
        # From here on nothing can be scheduled, and callbacks scheduled before do not run.
        with contextlib.suppress(KeyError):
            while True:
                calls.pop().end()
        # Do not join workers: one may wait for a peer until the deadline of its transport.
        workers.shutdown(wait=False, cancel_futures=True)
        context.destroy(linger=0)


def _schedule(
    loop: asyncio.AbstractEventLoop,
    function: Callable[[], object],
    *,
    otherwise: Callable[[], object],
) -> None:
    """Schedule `function` on the loop, or call `otherwise` here if the loop has ended."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        otherwise()


def _set_outcome(future: asyncio.Future[_Outcome[_T]], outcome: _Outcome[_T]) -> None:
    if not future.done():  # it may be cancelled
        future.set_result(outcome)


def _log_exception(
    log: LimitedLog, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    log.error("event=exception message=%r", context["message"], exc_info=context.get("exception"))
