"""The listening thread of an agent, which gives and takes metadata."""

from __future__ import annotations

import gc
import os
import resource
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplan.nixl import nixl_agent, nixl_agent_config
from kvplan.nixl.metadata import MAGIC, ask, receive, send
from kvplan.nixl.transfers import nixlAgent
from kvplan.nixl.values import nixlAgentConfig
from tests.support import lone_user
from tests.support.held import QUEUE, Held

KIB = 1 << 10


def listening_agent(name: str = "listening") -> nixl_agent:
    return nixl_agent(name, nixl_agent_config(True, enable_listen_thread=True, listen_port=0))


def until(holds: Callable[[], bool]) -> None:
    """Wait for an event of another thread; the deadline is reached only if it never happens."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        select.select([], [], [], 0.001)


def test_a_silent_client_does_not_stop_a_listening_thread() -> None:
    agent = listening_agent()
    address = agent.agent._listener._socket.getsockname()
    with socket.create_connection(address), socket.create_connection(address) as client:
        client.settimeout(30)
        send(client, b"get")
        assert receive(client).startswith(MAGIC)
    agent.agent.close()


def test_a_listening_thread_goes_on_after_requests_that_it_refuses() -> None:
    """Errors of each kind: other bytes, other metadata, its own name, no text, no request."""
    agent = listening_agent()
    address = agent.agent._listener._socket.getsockname()
    own = agent.get_agent_metadata()
    for request in (b"put 7", b"put " + MAGIC, b"put " + own, b"drop \xff", b"nothing", b""):
        ask(*address, request)
    assert ask(*address, b"get", has_answer=True) == own
    agent.agent.close()


def test_a_listening_thread_that_cannot_start_leaves_no_socket_open() -> None:
    program = """
        import os
        from kvplan import LLMException
        from kvplan.nixl.metadata import Listener
        from tests.support.lone_user import allow_threads, become

        become()
        allow_threads(1)
        before = os.listdir("/proc/self/fd")
        try:
            Listener("127.0.0.1", 0, None)
        except LLMException as error:  # which still has the frames of the call
            assert error.status_code.name == "LLM_OUT_OF_MEMORY", error
            assert os.listdir("/proc/self/fd") == before
        else:
            raise AssertionError("a thread has started")
    """
    lone_user.run(program)


def test_an_agent_with_an_occupied_port_leaves_nothing_open() -> None:
    nixl_agent("first").agent.close()  # first, for objects that this process keeps in any case
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = Held.now()
        conf = nixl_agent_config(
            True, enable_listen_thread=True, listen_port=taken.getsockname()[1]
        )
        with pytest.raises(OSError, match="in use") as error:
            nixl_agent("refused", conf)
        assert {what for _, what in before.new().descriptors} <= QUEUE
        before.check_new_threads(set())
    assert error.value.__traceback__ is not None


def test_metadata_of_some_memory_is_given_to_a_listening_thread() -> None:
    """Once the agent is closed, nothing is left of the thread."""
    before = Held.now()
    listening = listening_agent()
    port = listening.agent._listener._socket.getsockname()[1]
    giving, memory = nixl_agent("giving"), np.zeros(2 * KIB, np.uint8)
    first, second = memory.ctypes.data, memory.ctypes.data + KIB
    given, kept = (giving.register_memory([(at, KIB, 0, "")], "DRAM") for at in (first, second))
    giving.send_partial_agent_metadata(given, True, ip_addr="127.0.0.1", port=port)
    until(lambda: listening.check_remote_metadata("giving"))
    assert listening.check_remote_metadata("giving", given.trim())
    assert not listening.check_remote_metadata("giving", kept.trim())
    for each in (giving, listening):
        each.agent.close()
    until(lambda: not any("socket" in what for _, what in before.new().descriptors))


@pytest.mark.parametrize("given", [(), (False,), (True,)])
def test_the_address_of_an_agent_is_sent_only_if_it_is_asked_for(given: tuple[bool, ...]) -> None:
    agent, memory = nixl_agent("giving"), np.zeros(KIB, np.uint8)
    held = agent.register_memory([(memory.ctypes.data, KIB, 0, "")], "DRAM")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        agent.send_partial_agent_metadata(held, *given, ip_addr=address[0], port=address[1])
        server.settimeout(30)
        connection, _ = server.accept()
        with connection:
            sent = receive(connection)
    assert sent == b"put " + agent.get_partial_agent_metadata(held, any(given))
    assert agent.get_partial_agent_metadata(held, True) != agent.get_partial_agent_metadata(held)
    agent.agent.close()


class _AskedAtOnce(nixlAgent):
    """An agent whose listening thread gets requests before the constructor goes on."""

    requests: tuple[bytes, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_listener" and value is not None:
            host, port = value._socket.getsockname()
            for request in self.requests:
                ask(host, port, request)
            assert ask(host, port, b"get", has_answer=True).startswith(MAGIC)
        super().__setattr__(name, value)


def test_requests_are_answered_while_an_agent_is_made() -> None:
    other = nixl_agent("other")
    metadata = other.get_agent_metadata()
    _AskedAtOnce.requests = (b"put " + metadata, b"drop other")
    agent = _AskedAtOnce("asked", nixlAgentConfig(useListenThread=True, listenPort=0))
    assert agent._remotes == {}
    for each in (agent, other.agent):
        each.close()


def test_an_agent_that_is_dropped_frees_its_port_at_once() -> None:
    """The port is free without a garbage collection, as in NIXL."""
    gc.disable()
    try:
        agent = listening_agent("dropped")
        address = agent.agent._listener._socket.getsockname()
        found = weakref.ref(agent.agent)
        del agent
        assert found() is None
        with socket.create_server(address):
            pass
        until(lambda: "kvplan-nixl-listen" not in [each.name for each in threading.enumerate()])
    finally:
        gc.enable()


class _Seen:
    """A listening socket that notes when it accepts no client."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket, self.refused = listening, threading.Event()

    def accept(self) -> Any:
        try:
            return self._socket.accept()
        except OSError:
            self.refused.set()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def test_an_agent_at_a_path_gives_its_metadata_only_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPLAN_LISTEN_IP_INFO", f"ipc://{tmp_path}/agent")
    agent = listening_agent()
    assert agent.agent._listener._socket.getsockname()[0] == "127.0.0.1"
    agent.agent.close()


def test_an_agent_that_peers_reach_at_another_address_listens_at_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a port mapping, no interface of this host has the advertised address."""
    monkeypatch.setenv("KVPLAN_LISTEN_IP_INFO", "127.0.0.2:0")
    monkeypatch.setenv("KVPLAN_ADVERTISE", "192.0.2.7")
    agent = listening_agent()
    assert agent.agent._listener._socket.getsockname()[0] == "127.0.0.2"
    assert agent.agent.engine.datadist.listen_address.startswith("192.0.2.7:")
    agent.agent.close()


def test_a_forked_child_that_drops_the_agent_leaves_its_parents_port_open() -> None:
    agent = listening_agent()
    listener = agent.agent._listener
    with socket.create_connection(listener._socket.getsockname()) as client:
        pid = os.fork()
        if pid == 0:
            listener.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        send(client, b"get")
        assert receive(client) == agent.get_agent_metadata()
    with socket.create_connection(listener._socket.getsockname()):
        pass
    agent.agent.close()


def test_a_lack_of_descriptors_does_not_end_the_thread() -> None:
    agent = listening_agent()
    listener = agent.agent._listener
    address = listener._socket.getsockname()
    listener._socket = seen = _Seen(listener._socket)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket() for _ in range(3)]

    def ask(client: socket.socket) -> None:
        client.connect(address)
        send(client, b"get")

    def answer_to(client: socket.socket) -> bytes:
        answer = receive(client)
        assert client.recv(1) == b"", "the thread has closed its end"
        return answer

    ask(clients[0])
    answers = [answer_to(clients[0])]
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        ask(clients[1])  # an accept that waits already has its descriptor; a later one has none
        assert seen.refused.wait(20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    answers.append(answer_to(clients[1]))
    ask(clients[2])
    answers.append(answer_to(clients[2]))
    assert answers == [agent.get_agent_metadata()] * 3
    for client in clients:
        client.close()
    agent.agent.close()


def test_a_message_that_comes_byte_by_byte_times_out() -> None:
    """A thread that serves one client after the other would wait for hours."""
    here, there = socket.socketpair()

    def trickle() -> None:
        with suppress(OSError):
            there.sendall((1 << 26).to_bytes(4, "little"))
            while True:
                there.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with here, pytest.raises(TimeoutError, match="of 67108864 bytes have arrived in time"):
        receive(here, 0.1)
    thread.join()
    there.close()


def test_a_client_that_stops_in_a_message_is_refused_by_what_has_arrived() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall((9).to_bytes(4, "little") + b"get")
        with pytest.raises(TimeoutError, match="3 of 9 bytes have arrived in time"):
            receive(here, 0.05)
