"""The end of the control thread: its callers, its peers, and the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest

from kvplan.control.auth import Keys
from kvplan.control.connecting import connect
from kvplan.control.loop import ControlLoop
from kvplan.status import LLMException
from tests.control.conversation import DEADLINE_S, Conversation, ListeningProcess, Recorder

Disconnect = Callable[[], Awaitable[None]]


def test_nothing_runs_before_the_start_or_after_the_end() -> None:
    loop = ControlLoop("short")
    for _ in range(2):
        with pytest.raises(LLMException, match="short is not running"):
            loop.run(asyncio.sleep(0))
        with pytest.raises(LLMException, match="short is not running"):
            loop.call_soon(print)
        loop.start()
        with pytest.raises(LLMException, match="short is already running"):
            loop.start()
        loop.run(asyncio.sleep(0))
        loop.stop()
        loop.stop()


def test_waiting_callers_learn_of_the_end() -> None:
    loop = ControlLoop("short")
    loop.start()
    waits = threading.Event()

    async def wait() -> None:
        waits.set()
        await asyncio.Event().wait()

    def stop() -> None:
        waits.wait(DEADLINE_S)
        loop.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(LLMException, match="short is not running"):
        loop.run(wait())
    stopping.join(DEADLINE_S)


def stop_and(loop: ControlLoop, then: Callable[[Disconnect], object]) -> int:
    """Stop the loop, let a thread call `then` meanwhile, and return how often it disconnected."""
    disconnected: list[float] = []
    scheduled = threading.Event()  # what the thread does on the loop

    async def disconnect() -> None:
        disconnected.append(time.monotonic())
        while not scheduled.is_set():
            await asyncio.sleep(0)
        for _ in range(5):  # turns of the loop, in which that may begin
            await asyncio.sleep(0)

    def at_the_end_of_schedule(call: Callable[[], object]) -> None:
        def look(frame: FrameType, event: str, argument: object) -> None:
            if frame.f_code.co_name == "_schedule" and event == "return":
                sys.setprofile(None)
                call()

        sys.setprofile(look)

    def meet() -> None:
        at_the_end_of_schedule(scheduled.set)
        then(disconnect)

    def begin_to_meet() -> None:
        meeting.append(threads.submit(meet))
        scheduled.wait(DEADLINE_S)

    meeting: list[Future[None]] = []
    with ThreadPoolExecutor(1) as threads:
        at_the_end_of_schedule(begin_to_meet)
        loop.stop(disconnect)
        meeting[0].result(DEADLINE_S)
    return len(disconnected)


def test_two_threads_that_stop_at_once_disconnect_once(loop: ControlLoop) -> None:
    assert stop_and(loop, loop.stop) == 1


def test_a_call_at_the_same_time_as_a_stop_does_not_begin(loop: ControlLoop) -> None:
    """A call would open sockets that nothing closes any more."""
    begun: list[float] = []

    async def begin() -> None:
        begun.append(time.monotonic())

    def run(_: Disconnect) -> None:
        with pytest.raises(LLMException, match="test-control is not running"):
            loop.run(begin())

    assert stop_and(loop, run) == 1
    assert begun == []


def test_calls_during_the_stop_fail_with_that_reason(loop: ControlLoop) -> None:
    begun = threading.Barrier(5)

    def keep_calling() -> str:
        begun.wait(DEADLINE_S)
        while True:
            try:
                loop.run(asyncio.sleep(0))
            except LLMException as error:
                return str(error)

    for _ in range(20):
        with ThreadPoolExecutor(4) as callers:
            calls = [callers.submit(keep_calling) for _ in range(4)]
            begun.wait(DEADLINE_S)
            loop.run(asyncio.sleep(0))
            loop.stop()
            for made_call in calls:
                assert "test-control is not running" in made_call.result(DEADLINE_S)
        loop.start()


def test_stopping_sends_a_disconnect(conversation: Conversation) -> None:
    conversation.far_channel()
    conversation.loop.stop()
    assert conversation.far.next() == ("lost", "closed by the peer")


def test_stopping_does_not_wait_for_a_peer_that_does_not_read(
    process: ListeningProcess, loop: ControlLoop
) -> None:
    channel = loop.run(connect(loop, process.endpoint, Recorder(), Keys(), DEADLINE_S))
    process.stop()

    async def fill() -> None:
        while channel.connection.try_send(bytes(1 << 20)):
            await asyncio.sleep(0)

    loop.run(fill())
    begun = time.monotonic()
    loop.stop()
    assert time.monotonic() - begun < DEADLINE_S / 2


def test_an_exit_without_stopping_does_not_hang() -> None:
    script = (
        "from tests.control.conversation import *\n"
        "near, far = ControlLoop('near'), ControlLoop('far')\n"
        "near.start(); far.start()\n"
        "conversation = Conversation(near, far, None)\n"
        "conversation.request(Sync())\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=DEADLINE_S)
