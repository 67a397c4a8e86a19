"""What another thread finds between two steps of a call."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from kvplan.nixl import _bindings as bindings
from kvplan.nixl import nixl_agent
from tests.support.interrupts import Interrupts

ROOT = Path(__file__).parents[2]
KIB = 1 << 10


def test_two_threads_that_ask_at_the_same_time_find_the_end_of_a_transfer_once() -> None:
    """Each finds that the transfer has ended before the other has noted so."""
    agent, memory = nixl_agent("alone"), np.zeros(3 * KIB, np.uint8)
    ours = agent.register_memory([(memory.ctypes.data, 3 * KIB, 0, "")], "DRAM").trim()
    handle = agent.initialize_xfer("READ", ours, ours, "alone", b"once")
    asked, logged = threading.Barrier(2), list[int]()

    class Ended:
        def has_ended(self) -> bool:
            asked.wait(20)
            return True

        def error(self, *_: object) -> None:
            logged.append(threading.get_ident())

    transfer = agent.agent._transfers[handle._handle]
    transfer.request, transfer.status = Ended(), bindings.nixl_status_t.NIXL_IN_PROG
    with ThreadPoolExecutor(2) as threads:
        states = [*threads.map(agent.check_xfer_state, [handle] * 2)]
    assert states == ["DONE"] * 2
    assert (agent.get_new_notifs(), len(logged)) == ({"alone": [b"once"]}, 1)
    agent.agent.close()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_transfer_that_is_being_posted_again_is_not_done(
    monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    agent, memory = nixl_agent("alone"), np.zeros(KIB, np.uint8)
    ours = agent.register_memory([(memory.ctypes.data, KIB, 0, "")], "DRAM").trim()
    handle = agent.initialize_xfer("READ", ours, ours, "alone")
    assert agent.transfer(handle) == "DONE"
    post, states = agent.agent._post, []

    def observed(transfer: object) -> None:
        states.append(agent.check_xfer_state(handle))
        if interrupted:
            raise KeyboardInterrupt
        post(transfer)

    monkeypatch.setattr(agent.agent, "_post", observed)
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        states.append(agent.transfer(handle))
    monkeypatch.undo()
    states.append(agent.transfer(handle))  # in any case again
    assert states == ["PROC", *["DONE"] * (1 if interrupted else 2)]
    agent.agent.close()


def test_a_message_to_itself_that_comes_while_others_are_read_is_kept() -> None:
    agent = nixl_agent("alone")
    found: list[object] = []

    class ReadMeanwhile(list[bytes]):
        def append(self, message: bytes) -> None:
            found.append(agent.get_new_notifs())
            super().append(message)

    agent.agent._looped = ReadMeanwhile()
    for message in (b"one", b"two"):
        agent.send_notif("alone", message)
    assert [*found, agent.get_new_notifs()] == [{}, {"alone": [b"one"]}, {"alone": [b"two"]}]
    agent.agent.close()


@pytest.mark.parametrize("by_thread", [False, True])
def test_a_transfer_that_is_released_while_it_is_posted_is_stopped(
    monkeypatch: pytest.MonkeyPatch, by_thread: bool
) -> None:
    """By another thread, or by a signal handler."""
    agent, memory = nixl_agent("alone"), np.zeros(2 * KIB, np.uint8)
    ours = agent.register_memory([(memory.ctypes.data, 2 * KIB, 0, "")], "DRAM").trim()
    handle = agent.initialize_xfer("READ", ours, ours, "alone")
    stopped, told = threading.Event(), list[bool]()

    class Task:
        done = settled = False

        def cancel(self, reason: object) -> None:
            stopped.set()

        def wait_done(self, timeout_ms: float) -> bool:
            return False

    def release() -> None:
        agent.release_xfer_handle(handle)
        told.append(stopped.is_set())

    thread = threading.Thread(target=release)

    def submit(*_: object, **__: object) -> Task:
        if not by_thread:
            release()
            return Task()
        thread.start()
        while handle._handle in agent.agent._transfers:
            pass
        return Task()

    monkeypatch.setattr(agent.agent.engine.datadist, "submit", submit)
    with pytest.raises(bindings.nixlInvalidParamError, match="was released"):
        agent.transfer(handle)
    assert stopped.is_set()
    if by_thread:
        thread.join()
        assert told == [True]
    agent.agent.close()


def test_a_transfer_with_an_agent_that_is_removed_while_it_is_posted_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, other = nixl_agent("alone"), nixl_agent("other")
    memory = np.zeros((2, 128 * KIB), np.uint8)
    ours, theirs = (
        each.register_memory([(row.ctypes.data, row.nbytes, 0, "")], "DRAM").trim()
        for each, row in zip((agent, other), memory, strict=True)
    )
    agent.add_remote_agent(other.get_agent_metadata())
    agent.make_connection("other")
    handle = agent.initialize_xfer("READ", ours, theirs, "other")
    stopped = threading.Event()

    class Task:
        done = settled = False

        def cancel(self, reason: object) -> None:
            stopped.set()

        def wait_done(self, timeout_ms: float) -> bool:
            return False

    def submit(*_: object, **__: object) -> Task:
        thread = threading.Thread(target=agent.remove_remote_agent, args=["other"])
        thread.start()
        thread.join()
        return Task()

    monkeypatch.setattr(agent.agent.engine.datadist, "submit", submit)
    agent.transfer(handle)
    assert stopped.is_set()
    for each in (agent, other):
        each.agent.close()


def posted_and_interrupted() -> int:
    """Interrupt a post at each place, and release it: no task goes on."""
    agent, memory = nixl_agent("alone"), np.zeros(2 * KIB, np.uint8)
    ours = agent.register_memory([(memory.ctypes.data, 2 * KIB, 0, "")], "DRAM").trim()
    begun = list[bool]()

    class Task:
        done = settled = False

        def __init__(self) -> None:
            begun.append(True)

        def cancel(self, reason: object) -> None:
            begun.pop()

        def wait_done(self, timeout_ms: float) -> bool:
            return False

    agent.agent.engine.datadist.submit = lambda *_, **__: Task()
    interrupts, goes_on = Interrupts("/kvplan/"), True
    while goes_on:
        handle = agent.initialize_xfer("READ", ours, ours, "alone")
        goes_on = interrupts.call(lambda: agent.transfer(handle))  # noqa: B023 - called at once
        agent.release_xfer_handle(handle)
        assert begun == [], interrupts.place
    agent.agent.close()
    return interrupts.place


def test_a_post_that_was_interrupted_is_stopped_by_its_release() -> None:
    code = "from tests.nixl.test_threads import posted_and_interrupted as run; print(run())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
