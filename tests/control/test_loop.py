"""The control thread: calls from other threads, interrupts, forks, and leaks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvplan.control.auth import Keys
from kvplan.control.connecting import Server, connect
from kvplan.control.loop import MAX_SOCKETS, ControlLoop
from kvplan.control.messages import Sync
from kvplan.status import LLMException, LLMStatusCode
from tests.control.conversation import DEADLINE_S, LOCAL, Conversation, Recorder, call
from tests.support import lone_user
from tests.support.refusals import refused

ROUNDS = 250


def test_results_and_errors_are_returned(loop: ControlLoop) -> None:
    async def give(value: int) -> int:
        return value

    async def fail(error: Exception) -> None:
        raise error

    assert loop.run(give(3)) == 3
    for error in (ValueError("no"), TimeoutError("its own"), LLMException("no")):
        with pytest.raises(type(error), match=str(error.args[0])):
            loop.run(fail(error), timeout_ms=1000 * DEADLINE_S)


def test_a_deadline_cancels_the_running_coroutine(loop: ControlLoop) -> None:
    """A coroutine whose deadline ends before it runs has nothing to cancel: try a longer one."""
    running, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    for timeout_ms in (20, 600, 10_000):
        began = time.monotonic()
        with refused(LLMStatusCode.LLM_TIMEOUT, f"no result after {timeout_ms} ms"):
            loop.run(wait(), timeout_ms=timeout_ms)
        assert timeout_ms / 1000 <= time.monotonic() - began < DEADLINE_S
        if running.is_set():
            break
    assert cancelled.wait(DEADLINE_S)


def test_a_coroutine_of_another_loop_gets_results_and_errors(loop: ControlLoop) -> None:
    async def give(value: int) -> int:
        return value

    async def fail() -> None:
        raise ValueError("no")

    async def run() -> list[int]:
        with pytest.raises(ValueError, match="no"):
            await loop.run_for(fail())
        return await asyncio.gather(*(loop.run_for(give(number)) for number in range(3)))

    assert asyncio.run(run()) == [0, 1, 2]


def test_cancelling_the_caller_cancels_the_running_coroutine(loop: ControlLoop) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def run() -> None:
        waiting = asyncio.create_task(loop.run_for(wait()))
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(cancelled.wait, DEADLINE_S)

    asyncio.run(run())


def test_a_waiting_coroutine_learns_of_the_end() -> None:
    loop = ControlLoop("short")

    async def run() -> None:
        with refused(LLMStatusCode.LLM_FAILED, "short is not running"):
            await loop.run_for(asyncio.sleep(0))
        loop.start()
        begun = threading.Event()

        async def wait() -> None:
            begun.set()
            await asyncio.Event().wait()

        waiting = asyncio.create_task(loop.run_for(wait()))
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        await asyncio.to_thread(loop.stop)
        for ended in (waiting, loop.run_for(asyncio.sleep(0))):
            with refused(LLMStatusCode.LLM_ENGINE_FINALIZED, "short is not running"):
                await ended

    asyncio.run(run())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt, even if a shell has started the tests with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_keyboard_interrupt_cancels_the_running_coroutine(loop: ControlLoop) -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        loop.run(wait())
    assert cancelled.wait(DEADLINE_S)


def test_workers_may_block_while_the_loop_runs(loop: ControlLoop) -> None:
    released = threading.Event()

    async def block() -> bool:
        return await loop.in_worker(released.wait, timeout=DEADLINE_S)

    async def both() -> bool:
        blocked = asyncio.create_task(block())
        await asyncio.sleep(0)
        released.set()
        return await blocked

    assert loop.run(both())


def test_functions_without_a_thread_run_in_the_loop() -> None:
    """Other calls are refused, and do not run later, when there is a thread."""
    program = """
        from threading import current_thread
        from kvplan import LLMException
        from kvplan.control.loop import ControlLoop
        from tests.support.lone_user import allow_threads, become

        async def start(function, *args):
            return await loop.start_in_worker(function, *args)

        async def in_worker(function, *args):
            return await loop.in_worker(function, *args)

        become()
        loop = ControlLoop("lone")
        loop.start()
        allow_threads(1)
        assert loop.run(start(current_thread)).name == "lone"
        try:
            loop.run(start(int, "x"))
        except ValueError:
            pass
        else:
            raise AssertionError("an error was lost")
        ran = []
        loop.run(start(ran.append, "started"))
        try:
            loop.run(in_worker(ran.append, "refused"))
        except LLMException as error:
            assert error.status_code.name == "LLM_OUT_OF_MEMORY", error
        else:
            raise AssertionError("there was a thread")
        allow_threads(None)
        # The only worker takes what is left of the earlier calls first.
        assert loop.run(start(current_thread)).name.startswith("lone-worker")
        assert ran == ["started"]
        loop.stop()
    """
    lone_user.run(program)


class NoThreadLeft(ThreadPoolExecutor):
    """A pool that fails to start a thread, as its only worker has just become free."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        super().submit(function, *args, **kwargs).result(DEADLINE_S)
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("way", ["start_in_worker", "in_worker"])
def test_a_call_that_a_worker_takes_as_no_thread_can_start_is_made_once(way: str) -> None:
    loop, calls = ControlLoop("lone"), list[str]()
    loop.start()
    pool, loop._workers = loop._workers, NoThreadLeft(1)

    def call_once() -> int:
        calls.append(threading.current_thread().name)
        return len(calls)

    async def started() -> int:
        return await getattr(loop, way)(call_once)

    assert loop.run(started()) == 1
    assert len(calls) == 1
    loop._workers.shutdown()
    loop._workers = pool
    loop.stop()


def test_a_started_function_continues_though_its_caller_is_cancelled() -> None:
    """The only worker is busy, so the function has not begun when its caller is cancelled."""
    goes_on, ended = threading.Event(), threading.Event()
    loop = ControlLoop("busy", max_workers=1)
    loop.start()

    async def cancelled() -> None:
        loop.start_in_worker(goes_on.wait, DEADLINE_S)
        waiting = asyncio.ensure_future(loop.start_in_worker(ended.set))
        waiting.cancel()
        await asyncio.sleep(0)

    loop.run(cancelled())
    goes_on.set()
    assert ended.wait(DEADLINE_S)
    loop.stop()


def test_the_thread_ends_though_a_worker_is_blocked() -> None:
    """A worker may wait for a peer that does not answer. Calls behind it are not begun."""
    begun, goes_on = threading.Event(), threading.Event()
    loop = ControlLoop("leaving", max_workers=1)
    loop.start()
    thread, workers, ran = loop._thread, loop._workers, list[str]()
    assert thread is not None
    assert workers is not None

    def block() -> None:
        begun.set()
        goes_on.wait()

    async def start() -> None:
        loop.start_in_worker(block)
        loop.start_in_worker(ran.append, "behind")

    loop.run(start())
    assert begun.wait(DEADLINE_S)
    try:
        loop.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    finally:
        goes_on.set()
        workers.shutdown()
    assert ran == []


def test_the_loop_cannot_wait_for_itself(loop: ControlLoop) -> None:
    async def nested() -> None:
        loop.run(asyncio.sleep(0))

    with pytest.raises(LLMException, match="would wait for itself"):
        loop.run(nested())
    with pytest.raises(LLMException, match="would wait for itself"):
        call(loop, loop.stop)


def test_interrupts_at_any_moment_leave_the_loop_running() -> None:
    run_apart("""
import asyncio, random, signal
from kvplan.control.loop import ControlLoop

signal.signal(signal.SIGALRM, signal.default_int_handler)
loop = ControlLoop()
loop.start()
for _ in range(2000):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 5e-4))
        while True:
            loop.run(asyncio.sleep(0))
    except KeyboardInterrupt:
        pass
assert loop.run(asyncio.sleep(0, "well"), timeout_ms=5000) == "well"
loop.stop()
""")


def test_the_stopping_thread_may_hold_a_lock_that_the_loop_waits_for() -> None:
    run_apart("""
import os, signal, threading
from kvplan.control.loop import ControlLoop
from kvplan.status import LLMException

before = len(os.listdir("/proc/self/fd"))
mutex, waits, disconnecting = threading.RLock(), threading.Event(), threading.Event()
loop = ControlLoop()
loop.start()

def block():
    waits.set()
    with mutex:
        pass

async def disconnect():
    disconnecting.set()

class Stopped(Exception):
    pass

def stop(*_):
    loop.stop(disconnect)
    raise Stopped

signal.signal(signal.SIGUSR1, stop)
try:
    with mutex:
        loop.call_soon(block)
        waits.wait()
        signal.raise_signal(signal.SIGUSR1)
except Stopped:
    pass
assert disconnecting.wait(60)
for thread in threading.enumerate():
    if thread.name == "kvplan-control":
        thread.join(60)
after = len(os.listdir("/proc/self/fd"))
assert after <= before, (before, after)
loop.start()
loop.stop()
""")


def test_a_forked_child_is_refused_and_harms_nothing(conversation: Conversation) -> None:
    conversation.far_channel()
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            conversation.loop.run(asyncio.sleep(0))
        except LLMException as error:
            failed = "forked child" not in str(error)
        conversation.loop.stop()
        os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0
    assert conversation.request(Sync())


def run_apart(script: str) -> None:
    """Run `script` in another process, which is killed if a call hangs."""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=30)


@pytest.fixture
def footprint() -> Iterator[None]:
    """Check that the process has the same threads and files as before."""

    def counts() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(
            list(Path("/proc/self/fd").iterdir())
        )

    before = counts()
    yield
    deadline = time.monotonic() + DEADLINE_S
    while any(now > then for now, then in zip(counts(), before, strict=True)):
        assert time.monotonic() < deadline, f"threads, files: {before} before, {counts()} after"


def test_rounds_of_connecting_and_closing_leave_nothing_behind(footprint: None) -> None:
    near, far = ControlLoop("near"), ControlLoop("far")
    near.start()
    far.start()
    conversation = Conversation(near, far, None)
    conversation.far_channel().bound = object()  # otherwise it is dropped if the rounds take 10 s

    async def rounds() -> None:
        for number in range(ROUNDS):
            endpoint = conversation.server.endpoint
            channel = await connect(near, endpoint, conversation.near, Keys(), DEADLINE_S)
            await channel.request(Sync(), DEADLINE_S)
            channel.close(str(number))

    near.run(rounds())
    while conversation.far.next() != ("lost", str(ROUNDS - 1)):
        pass
    # The first channel has no link, so it is closed, too, if the rounds take long enough.
    assert len(conversation.server.channels) <= 1
    near.stop()
    far.stop()


def test_rounds_of_starting_and_stopping_leave_nothing_behind(footprint: None) -> None:
    for _ in range(50):
        loop = ControlLoop("round")
        loop.start()
        server = loop.run(Server.listen(loop, LOCAL, Recorder(), Keys()))
        loop.stop()
        assert server.channels == ()


@pytest.mark.parametrize("spare", range(18))
def test_without_descriptors_a_start_is_refused_and_the_process_lives(spare: int) -> None:
    script = f"""
import os, resource
from kvplan.control.loop import ControlLoop
from kvplan.status import LLMException

ControlLoop().start()  # what is opened once is open now
highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + {spare}, highest + {spare}))
try:
    ControlLoop().start()
except LLMException as error:
    assert "Too many open files: RLIMIT_NOFILE" in str(error), error
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=DEADLINE_S)


def test_a_loop_has_room_for_thousands_of_channels(loop: ControlLoop) -> None:
    """By default, libzmq allows 1,023 sockets."""
    assert loop._context is not None
    assert loop._context.get(zmq.MAX_SOCKETS) == MAX_SOCKETS > 1023
