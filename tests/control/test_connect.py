"""Listening and connecting: every kind of address, and errors that name the failure."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.connecting import Server, connect, warn_unauthenticated
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Sync, Synced
from kvplan.status import LLMException, LLMStatusCode
from tests.control.conversation import DEADLINE_S, LOCAL, Conversation, Recorder, call
from tests.support.interrupts import Interrupts
from tests.support.refusals import refused


def listen(loop: ControlLoop, endpoint: str, key: ClusterKey | None = None) -> Server:
    return loop.run(Server.listen(loop, Endpoint.parse(endpoint), Recorder(), Keys(key)))


def ask(loop: ControlLoop, endpoint: Endpoint, key: ClusterKey | None = None) -> object:
    async def run() -> object:
        channel = await connect(loop, endpoint, Recorder(), Keys(key), DEADLINE_S)
        answer = await channel.request(Sync(), DEADLINE_S)
        channel.close()
        return answer

    return loop.run(run())


def refusal(loop: ControlLoop, endpoint: Endpoint, timeout_s: float = DEADLINE_S) -> str:
    with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
        loop.run(connect(loop, endpoint, Recorder(), Keys(), timeout_s))
    return str(error.value.args[0])


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_a_free_port_is_taken_and_reported(loop: ControlLoop, address: str) -> None:
    server = listen(loop, address)
    assert server.endpoint.port > 0
    assert ask(loop, server.endpoint) == Synced(1)


def test_a_name_is_resolved(loop: ControlLoop) -> None:
    server = listen(loop, "127.0.0.1:0")
    assert ask(loop, Endpoint("localhost", server.endpoint.port)) == Synced(1)


def test_a_path_is_private_and_goes_with_the_server(loop: ControlLoop, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    server = listen(loop, f"ipc://{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ask(loop, server.endpoint) == Synced(1)
    call(loop, server.close)
    assert not path.exists()


def test_the_path_of_a_dead_server_is_taken_over_and_of_a_live_one_not(
    loop: ControlLoop, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listen(loop, f"ipc://{path}")
    with pytest.raises(LLMException, match="Address already in use"):
        listen(loop, f"ipc://{path}")
    assert ask(loop, Endpoint(path=str(path))) == Synced(1)


def test_the_path_of_a_file_is_left_alone(loop: ControlLoop, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(LLMException, match="Address already in use"):
        listen(loop, f"ipc://{path}")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("kind", ["SOCK_DGRAM", "SOCK_SEQPACKET", "SOCK_STREAM"])
def test_the_path_of_another_program_is_left_alone(
    loop: ControlLoop, tmp_path: Path, kind: str
) -> None:
    """Even if it takes no connection of this kind, or its queue is full: nothing waits for it."""
    path = tmp_path / "socket"
    with ExitStack() as opened, ThreadPoolExecutor(1) as threads:
        other = opened.enter_context(socket.socket(socket.AF_UNIX, getattr(socket, kind)))
        other.bind(str(path))
        if kind != "SOCK_DGRAM":
            other.listen(0)
        while kind == "SOCK_STREAM":
            waiting = opened.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            if waiting.connect_ex(str(path)):
                break
        inode = path.stat().st_ino
        listening = threads.submit(listen, loop, f"ipc://{path}")
        try:
            with pytest.raises(LLMException, match="Address already in use"):
                listening.result(DEADLINE_S)
            assert path.stat().st_ino == inode
        finally:
            opened.close()  # ends a call that waits


def test_a_listen_that_fails_is_reported_with_the_reason(loop: ControlLoop) -> None:
    taken = listen(loop, "127.0.0.1:0").endpoint
    for endpoint, reason in {
        str(taken): "Address already in use",
        "192.0.2.1:0": "Cannot assign requested address",
        "no-such-host.invalid:0": "",
        "ipc:///no/such/directory/socket": "No such file or directory",
    }.items():
        with pytest.raises(LLMException, match="cannot listen on") as error:
            listen(loop, endpoint, ClusterKey.generate())
        assert endpoint in str(error.value)
        assert reason in str(error.value)


def test_an_address_that_another_process_takes_meanwhile_is_refused() -> None:
    """The process takes it at any moment of the call, also between `bind` and `listen`."""

    async def in_worker(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    control: Any = SimpleNamespace(
        refusals=None, in_worker=in_worker, register=lambda _: None, unregister=lambda _: None
    )
    refusals = []

    async def listen_at(port: int) -> None:
        try:
            server = await Server.listen(control, Endpoint("127.0.0.1", port), Recorder(), Keys())
        except LLMException as error:
            refusals.append(str(error))
        else:
            server.close()

    def listen_first(*_: object) -> None:
        with suppress(OSError):  # the other call was faster
            other.listen()

    moments, is_one = Interrupts("kvplan/control/connecting.py"), True
    before = signal.signal(signal.SIGINT, listen_first)
    try:
        while is_one:
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", 0))
                port = other.getsockname()[1]
                is_one = moments.call(lambda port=port: asyncio.run(listen_at(port)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert 1 < len(refusals) < moments.place
    assert all("Address already in use" in text for text in refusals), refusals


def test_a_closed_server_frees_its_port_at_once(loop: ControlLoop) -> None:
    server = listen(loop, "127.0.0.1:0")
    ask(loop, server.endpoint)
    call(loop, server.close)
    assert "connect: Connection refused" in refusal(loop, server.endpoint)
    assert listen(loop, str(server.endpoint)).endpoint == server.endpoint


def test_listening_that_is_given_up_leaves_nothing(loop: ControlLoop, tmp_path: Path) -> None:
    path = tmp_path / "socket"

    asked, given_up = threading.Event(), threading.Event()

    def slow_key() -> ClusterKey:
        asked.set()
        assert given_up.wait(DEADLINE_S)
        return ClusterKey.generate()

    async def give_up() -> None:
        endpoint, keys = Endpoint(path=str(path)), Keys(user=slow_key)
        begun = asyncio.create_task(Server.listen(loop, endpoint, Recorder(), keys))
        await loop.in_worker(asked.wait, DEADLINE_S)
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun

    loop.run(give_up())
    given_up.set()
    assert not path.exists()
    listen(loop, f"ipc://{path}")


def test_listening_on_all_addresses_without_a_key_is_logged(
    loop: ControlLoop, caplog: pytest.LogCaptureFixture
) -> None:
    listen(loop, "0.0.0.0:0", ClusterKey.generate())
    listen(loop, "localhost:0")
    assert caplog.messages == []
    listen(loop, "0.0.0.0:0")
    assert caplog.messages == ["event=listen_open endpoint=0.0.0.0:0"]


def test_a_warning_of_unauthenticated_clients_names_the_caller() -> None:
    for harmless in ("localhost:0", "[::1]:0", "ipc:///tmp/unused", "no-such-host.invalid:0"):
        warn_unauthenticated(Endpoint.parse(harmless), stacklevel=1)
    with pytest.warns(
        RuntimeWarning, match=r"without a cluster key: .* read and overwrite .*keygen"
    ) as caught:
        warn_unauthenticated(Endpoint.parse("0.0.0.0:0"), stacklevel=1)
    assert caught[0].filename == __file__


def test_refused_connections_say_so_at_once(loop: ControlLoop, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = Endpoint("127.0.0.1", unused.getsockname()[1])
        begun = time.monotonic()
        assert refusal(loop, closed) == f"{closed}: connect: Connection refused"
    missing = Endpoint(path=str(tmp_path / "missing"))
    assert refusal(loop, missing) == f"{missing}: connect: No such file or directory"
    assert refusal(loop, Endpoint("no-such-host.invalid", 1)).split(": ")[1] == "resolve"
    assert time.monotonic() - begun < DEADLINE_S / 2


@pytest.fixture
def mute() -> Iterator[tuple[socket.socket, Endpoint]]:
    """A listener that is not an engine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening, Endpoint(*listening.getsockname())


def test_a_silent_listener_is_a_timeout_of_the_handshake(
    loop: ControlLoop, mute: tuple[socket.socket, Endpoint]
) -> None:
    assert refusal(loop, mute[1], 0.1) == f"{mute[1]}: handshake: no answer within 100 ms"


def test_a_listener_of_another_protocol_is_recognized(
    loop: ControlLoop, far_loop: ControlLoop, mute: tuple[socket.socket, Endpoint]
) -> None:
    listening, endpoint = mute

    def answer() -> None:
        stream, _ = listening.accept()
        with stream:
            stream.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            stream.recv(1)

    async def serve() -> None:
        await far_loop.in_worker(answer)

    serving = asyncio.run_coroutine_threadsafe(serve(), call(far_loop, asyncio.get_running_loop))
    assert refusal(loop, endpoint) == f"{endpoint}: handshake: it does not speak ZMTP"
    serving.result(DEADLINE_S)


def test_giving_up_leaves_nothing_behind(
    loop: ControlLoop, mute: tuple[socket.socket, Endpoint]
) -> None:
    ask(loop, listen(loop, "127.0.0.1:0").endpoint)  # libzmq keeps descriptors of its first socket
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(5):
        refusal(loop, mute[1], 0.02)
    deadline = time.monotonic() + DEADLINE_S
    while len(os.listdir("/proc/self/fd")) > files:  # noqa: PTH208
        assert time.monotonic() < deadline


# Connects to each given name as soon as it has a listener, and reports whether it could.
INTRUDER = """
import socket, sys, time
held = []
for line in sys.stdin:
    address, deadline = bytes.fromhex(line), time.monotonic() + 0.05
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].setblocking(False)
    held[-1].connect_ex(address)
    print("tries", flush=True)
    while failed := held[-1].connect_ex(address):
        if time.monotonic() > deadline:
            break
    print("too late" if failed else "connected", flush=True)
"""


class Intruder:
    """A process of this user that is the first to connect to sockets that a thread binds."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._thread: int | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-c", INTRUDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        sys.addaudithook(self._hear)  # cannot be removed: does nothing after `close`

    def watch(self) -> None:
        """Connect to sockets that the calling thread binds from now on."""
        self._thread = threading.get_ident()

    def close(self) -> None:
        self._thread = None
        self._process.kill()
        self._process.communicate()

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.bind" and threading.get_ident() == self._thread:
            assert self._process.stdin is not None
            self._process.stdin.write(arguments[1].encode().hex() + "\n")
            self._process.stdin.flush()
            while self.next() != "tries":
                pass

    def next(self) -> str:
        assert self._process.stdout is not None
        self.heard.append(self._process.stdout.readline().strip())
        assert self.heard[-1]
        return self.heard[-1]


@pytest.fixture
def intruder() -> Iterator[Intruder]:
    intruder = Intruder()
    yield intruder
    intruder.close()


def test_another_process_of_the_user_does_not_get_a_connections_private_end(
    loop: ControlLoop, far_loop: ControlLoop, intruder: Intruder
) -> None:
    """Other processes can read its name in /proc, and may connect first."""
    server = far_loop.run(Server.listen(far_loop, LOCAL, Recorder(), Keys()))
    call(loop, intruder.watch)
    deadline = time.monotonic() + DEADLINE_S
    while intruder.heard.count("connected") < 3:
        assert time.monotonic() < deadline, intruder.heard
        assert ask(loop, server.endpoint) == Synced(1)
        while intruder.next() == "tries":
            pass


def test_many_silent_connections_stay_only_for_a_while(far_loop: ControlLoop) -> None:
    """With a low limit of open files there is room for few connections, and others are dropped."""
    script = (
        "import resource, select, socket\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
        "from tests.control.test_connect import *\n"
        "loop = ControlLoop(); loop.start(); server = listen(loop, '127.0.0.1:0')\n"
        "address = (server.endpoint.host, server.endpoint.port)\n"
        "connections = [socket.create_connection(address) for _ in range(40)]\n"
        "assert ask(loop, server.endpoint) == Synced(1)\n"
        "assert len(server.channels) <= 1, server.channels\n"
        "left = select.poll()\n"
        "for connection in connections: left.register(connection, select.POLLHUP)\n"
        "gone = lambda: len(left.poll(0)); deadline = time.monotonic() + DEADLINE_S\n"
        "while gone() < 24: assert time.monotonic() < deadline\n"
        "[connection.close() for connection in connections]; loop.stop()\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True)


def test_sixty_four_channels_at_once(loop: ControlLoop, far_loop: ControlLoop) -> None:
    server = far_loop.run(Server.listen(far_loop, LOCAL, Recorder(), Keys()))

    async def talk() -> set[object]:
        channels = await asyncio.gather(
            *(connect(loop, server.endpoint, Recorder(), Keys(), DEADLINE_S) for _ in range(64))
        )
        return set(await asyncio.gather(*(c.request(Sync(), DEADLINE_S) for c in channels)))

    assert loop.run(talk()) == {Synced(1)}


def test_a_closed_server_ends_its_conversations(conversation: Conversation) -> None:
    conversation.far_channel()
    call(conversation.far_loop, conversation.server.close)
    assert conversation.near.next() == ("lost", "the server is closed")
    assert conversation.server.channels == ()


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_a_name_that_no_host_can_have_is_not_resolved(loop: ControlLoop, host: str) -> None:
    endpoint = Endpoint.parse(f"{host}:26000")
    assert refusal(loop, endpoint).startswith(f"{endpoint}: resolve: ")
    with refused(LLMStatusCode.LLM_FAILED, f"cannot listen on {endpoint}: "):
        listen(loop, str(endpoint))
    warn_unauthenticated(endpoint, stacklevel=1)


def test_an_address_that_never_answers_leaves_time_for_the_next(
    loop: ControlLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = listen(loop, "127.0.0.1:0")
    port = server.endpoint.port
    kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    found = [(*kind, ("127.0.0.2", port)), (*kind, ("127.0.0.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with ExitStack() as opened:
        silent = opened.enter_context(socket.create_server(found[0][4], backlog=0))
        opened.enter_context(socket.create_connection(silent.getsockname()))  # its queue is full
        endpoint = Endpoint("two.example", port)
        channel = loop.run(connect(loop, endpoint, Recorder(), Keys(), timeout_s=2))
        assert loop.run(channel.request(Sync(), DEADLINE_S)) == Synced(1)
        call(loop, channel.close)
        call(loop, server.close)
        assert re.search(
            r"connect: no answer within \d+ ms; Connection refused$",
            refusal(loop, endpoint, timeout_s=0.2),
        )


def test_an_address_that_the_system_does_not_support_leaves_the_others(
    loop: ControlLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An IPv6 address on a host without IPv6 is an example."""
    server = listen(loop, "127.0.0.1:0")
    port = server.endpoint.port
    kind = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    other, usable = (200, *kind, ("::1", port)), (socket.AF_INET, *kind, ("127.0.0.1", port))
    found = [other, usable]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert ask(loop, Endpoint("two.example", port)) == Synced(1)
    call(loop, server.close)
    for order in ([other, usable], [usable, other]):
        found[:] = order
        reason = refusal(loop, Endpoint("two.example", port))
        assert "Address family not supported" in reason
        assert "Connection refused" in reason


def test_an_address_that_refuses_leaves_its_time_to_the_next(
    loop: ControlLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = listen(loop, "127.0.0.1:0")
    port = server.endpoint.port
    kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    found = [(*kind, ("127.0.0.2", port)), (*kind, ("127.0.0.1", port))]
    shares = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    limit = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda s: [shares.append(s), limit(s)][1])
    channel = loop.run(connect(loop, Endpoint("two.example", port), Recorder(), Keys(), 600))
    assert 299 < shares[0] <= 300
    assert 300 < shares[1] <= 600
    call(loop, channel.close)
