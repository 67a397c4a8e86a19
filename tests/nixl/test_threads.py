"""Other threads between two steps of a call."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.nixl import _bindings as bindings
from kvplan.nixl import nixl_agent
from kvplan.nixl.metadata import Regions
from tests.nixl.peer import Peer
from tests.support import forked
from tests.support.interrupts import Interrupts

ROOT = Path(__file__).parents[2]
KIB, MIB = 1 << 10, 1 << 20


def test_two_threads_that_ask_at_the_same_time_find_the_end_of_a_transfer_once() -> None:
    """Each thread finds that the transfer has ended before the other has noted so."""
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


def test_memory_that_is_registered_during_a_search_is_found_from_then_on() -> None:
    """A signal handler, in place of another thread, runs at each place of the search."""
    one, two = (0, 4096, 64, 0), (0, 8192, 64, 0)
    rows = [np.array([region[1:]], np.uint64) for region in (one, two)]
    interrupts = Interrupts("/kvplan/nixl/metadata.py")
    goes_on = True
    before = signal.getsignal(signal.SIGINT)
    try:
        while goes_on:
            regions = Regions("this agent", [one])
            signal.signal(signal.SIGINT, lambda *_: regions.add([two]))  # noqa: B023
            goes_on = interrupts.call(lambda: regions.check("local", bindings.DRAM_SEG, rows[0]))  # noqa: B023
            if goes_on:
                regions.check("local", bindings.DRAM_SEG, rows[1])
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupts.place > 3


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
    states.append(agent.transfer(handle))  # the second post happens in any case
    assert states == ["PROC", *["DONE"] * (1 if interrupted else 2)]
    agent.agent.close()


def test_nothing_is_kept_of_agents_that_were_connected_in_the_background() -> None:
    agent, others = nixl_agent("here"), [nixl_agent(f"there-{number}") for number in range(3)]
    for other in others:
        name = agent.add_remote_agent(other.get_agent_metadata())
        agent.make_connection(name)
        agent.remove_remote_agent(name)
    for each in (agent, *others):
        each.agent.close()  # it waits for the threads
    assert agent.agent._connector.states() == {}


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
    """Another thread or a signal handler releases the transfer."""
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


def test_an_agent_that_is_slow_to_leave_does_not_stop_the_polls_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, other = nixl_agent("here"), nixl_agent("other")
    agent.add_remote_agent(other.get_agent_metadata())
    agent.make_connection("other")
    connections, leaving, polled = (
        agent.agent.engine.connections,
        threading.Event(),
        threading.Event(),
    )
    disconnect = connections.disconnect

    def slow(*arguments: Any) -> None:
        leaving.set()
        polled.wait(20)
        disconnect(*arguments)

    monkeypatch.setattr(connections, "disconnect", slow)
    with ThreadPoolExecutor(2) as threads:
        removed = threads.submit(agent.remove_remote_agent, "other")
        assert leaving.wait(20)
        found = threads.submit(agent.get_new_notifs)
        try:
            assert found.result(10) == {}
            assert not removed.done()
        finally:
            polled.set()
        removed.result()
    assert not agent.check_remote_metadata("other")
    for each in (agent, other):
        each.agent.close()


@pytest.mark.parametrize("meanwhile", ["", "restarted", "released"])
def test_no_byte_moves_after_an_agent_is_removed_while_a_transfer_with_it_is_posted(
    monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """The post takes longer than the wait for the link.

    The same holds if metadata of a new agent comes, or if a third thread is releasing the transfer.
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


def test_threads_that_wait_for_messages_take_none_of_each_others() -> None:
    """Each thread polls for its own messages until it has found all of them."""
    agent, number, deadline = nixl_agent("alone"), 200, time.monotonic() + 20
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def found(tag: bytes) -> int:
        times = 0
        while times < number and time.monotonic() < deadline:
            agent.send_notif("alone", tag)
            while not agent.check_remote_xfer_done("alone", tag) and time.monotonic() < deadline:
                pass
            times += 1
        return times if time.monotonic() < deadline else 0

    try:
        with ThreadPoolExecutor(3) as threads:
            assert [*threads.map(found, (b"one", b"two", b"three"))] == [number] * 3
    finally:
        sys.setswitchinterval(before)
    agent.agent.close()


def test_a_process_that_is_linked_after_its_agent_was_replaced_is_not_used() -> None:
    """The process stopped before its link was complete, and continued after its replacement."""
    ours, theirs = np.zeros(KIB, np.uint8), np.full(KIB, 7, np.uint8)
    here, new, old = nixl_agent("here"), nixl_agent("there"), Peer(KIB)
    try:
        for agent, memory in ((here, ours), (new, theirs)):
            agent.register_memory([(memory.ctypes.data, KIB, 0, "")], "DRAM")
        engine, deadline = here.agent.engine, time.monotonic() + 20
        old.stop()
        here.add_remote_agent(old.metadata)
        while not engine.datadist.links():
            assert time.monotonic() < deadline
        here.add_remote_agent(new.get_agent_metadata())
        old.resume()
        while not engine.connections.is_linked("there"):
            assert time.monotonic() < deadline
        lists = (
            here.get_xfer_descs([(memory.ctypes.data, KIB, 0)], "DRAM") for memory in (ours, theirs)
        )
        handle = here.initialize_xfer("READ", *lists, "there")
        state = here.transfer(handle)
        while state == "PROC":
            state = here.check_xfer_state(handle)
        assert (state, set(ours.tolist())) == ("DONE", {7})
    finally:
        here.agent.close()
        new.agent.close()
        old.close()


@pytest.mark.parametrize("call", ["update_notifs", "check_remote_xfer_done"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_handler_loses_no_messages(call: str, raises: bool) -> None:
    """The handler runs when messages were taken, and before they are in `notifs`."""
    agent = nixl_agent("alone")
    agent.send_notif("alone", b"first")
    take, calls = agent.agent.getNotifs, list[int]()

    def handle(*_: object) -> None:
        agent.update_notifs()
        if raises:
            raise KeyboardInterrupt

    def interrupted(known: Any) -> Any:
        found = take(known)
        calls.append(0)
        if len(calls) == 1:
            agent.send_notif("alone", b"second")
            signal.raise_signal(signal.SIGUSR1)
        return found

    agent.agent.getNotifs = interrupted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with suppress(KeyboardInterrupt):
            agent.update_notifs() if call == "update_notifs" else (
                agent.check_remote_xfer_done("alone", b"another")
            )
    finally:
        signal.signal(signal.SIGUSR1, before)
        agent.agent.close()
    assert agent.notifs == {"alone": [b"first", b"second"]}


@pytest.mark.parametrize("call", ["update_notifs", "check_remote_xfer_done"])
def test_a_child_that_is_forked_while_messages_are_taken_is_refused(call: str) -> None:
    agent, begun, goes_on = nixl_agent("alone"), threading.Event(), threading.Event()
    take = agent.agent.getNotifs

    def held(known: Any) -> Any:
        begun.set()
        assert goes_on.wait(20)
        return take(known)

    agent.agent.getNotifs = held  # type: ignore[method-assign]
    taking = threading.Thread(target=agent.update_notifs)
    taking.start()
    assert begun.wait(20)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        arguments = () if call == "update_notifs" else ("alone", b"tag")
        try:
            getattr(agent, call)(*arguments)
        except bindings.nixlBackendError:
            os._exit(0)
        finally:
            os._exit(1)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        goes_on.set()
        taking.join()
        agent.agent.close()
