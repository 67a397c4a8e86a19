"""What another thread finds between two steps of a call."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.nixl import _bindings as bindings
from kvplan.nixl import nixl_agent
from tests.support import forked
from tests.support.interrupts import Interrupts

ROOT = Path(__file__).parents[2]
KIB, MIB = 1 << 10, 1 << 20


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
        thread.start()  # it waits for this post
        return Task()

    monkeypatch.setattr(agent.agent.engine.datadist, "submit", submit)
    ended = pytest.raises(bindings.nixlInvalidParamError, match="was released")
    with nullcontext() if by_thread else ended:
        agent.transfer(handle)
    if by_thread:
        thread.join()
        assert told == [True]
    assert stopped.is_set()
    with ended:
        agent.check_xfer_state(handle)
    agent.agent.close()


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
    done = forked.python(code, imported=("tests.nixl.test_threads",))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_an_agent_whose_link_cannot_be_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, other = nixl_agent("here"), nixl_agent("other")
    agent.add_remote_agent(other.get_agent_metadata())
    agent.make_connection("other")
    connections = agent.agent.engine.connections
    late = LLMException("busy", status_code=LLMStatusCode.LLM_TIMEOUT)
    monkeypatch.setattr(connections, "disconnect", Mock(side_effect=late))
    agent.remove_remote_agent("other")
    with pytest.raises(bindings.nixlNotFoundError):
        connections.linked_cluster("other")  # a new agent may have the name
    for each in (agent, other):
        each.agent.close()


@pytest.mark.parametrize("meanwhile", ["", "restarted", "released"])
def test_no_byte_moves_after_an_agent_is_removed_while_a_transfer_with_it_is_posted(
    monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """The post takes longer than the link is waited for.

    Also if metadata of a new agent comes, or if a third thread is releasing the transfer.
    """
    agent, peer = nixl_agent("here"), nixl_agent("there")
    memory, source = np.zeros(2 * MIB, np.uint8), np.full(2 * MIB, 5, np.uint8)
    ours = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM").trim()
    theirs = peer.register_memory([(source.ctypes.data, source.nbytes, 0, "")], "DRAM").trim()
    agent.add_remote_agent(peer.get_agent_metadata())
    peer.add_remote_agent(agent.get_agent_metadata())
    agent.make_connection("there")
    peer.make_connection("here")  # so that the link stays
    handle = agent.initialize_xfer("READ", ours, theirs, "there")
    engine, begun, goes_on = agent.agent.engine, threading.Event(), threading.Event()
    begin = engine.begin

    def held(*ranges: Any, **options: Any) -> Any:
        begun.set()
        assert goes_on.wait(20)
        return begin(*ranges, **options)

    disconnect, gone = engine.connections.disconnect, threading.Event()

    def disconnected(*arguments: Any) -> None:
        try:
            disconnect(*arguments)
        finally:
            gone.set()

    monkeypatch.setattr(engine, "begin", held)
    monkeypatch.setattr(engine.connections, "disconnect", disconnected)
    transfer, releasing = agent.agent._transfers[handle._handle], threading.Event()

    class Posting(AbstractContextManager[None]):
        def __enter__(self, mutex: Any = transfer.posting) -> None:
            if begun.is_set():
                releasing.set()
            mutex.__enter__()

        def __exit__(self, *error: Any, mutex: Any = transfer.posting) -> None:
            mutex.__exit__(*error)

    transfer.posting = Posting()
    replacement = nixl_agent("there")
    news = replacement.get_agent_metadata()
    with ThreadPoolExecutor(3) as threads:
        posted = threads.submit(agent.transfer, handle)
        assert begun.wait(20)
        if meanwhile == "released":
            released = threads.submit(agent.release_xfer_handle, handle)
            assert releasing.wait(20)
        removed = threads.submit(
            *(agent.remove_remote_agent, "there")
            if meanwhile != "restarted"
            else (agent.add_remote_agent, news)
        )
        assert gone.wait(20)
        assert not removed.done(), "a post that has found the agent may still begin"
        goes_on.set()
        removed.result()
        memory[:] = 7
        posted.exception()
        if meanwhile == "released":
            released.result()
    assert (memory == 7).all()
    for each in (agent, peer, replacement):
        each.agent.close()
