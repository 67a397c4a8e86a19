"""A cluster key admits only its holders."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.connecting import Server, connect
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Find, Sync, Synced, encode
from kvplan.control.zmtp import GREETING_NBYTES, UNUSED_AT, greeting
from kvplan.status import LLMException, LLMStatusCode
from tests.control.conversation import DEADLINE_S, LOCAL, Recorder
from tests.control.recording_proxy import RecordingProxy
from tests.support.refusals import refused

KEY = ClusterKey.generate()
HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""The events of the end of a handshake."""


@pytest.fixture
def far() -> Recorder:
    return Recorder()


@pytest.fixture
def endpoint(far_loop: ControlLoop, far: Recorder) -> Endpoint:
    return far_loop.run(Server.listen(far_loop, LOCAL, far, Keys(KEY))).endpoint


def refusal(loop: ControlLoop, endpoint: Endpoint, key: ClusterKey | None) -> str:
    with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
        loop.run(connect(loop, endpoint, Recorder(), Keys(key), DEADLINE_S))
    return str(error.value.args[0])


def test_a_wrong_key_is_refused_at_once(
    loop: ControlLoop, endpoint: Endpoint, far: Recorder
) -> None:
    greeted = refusal(loop, endpoint, ClusterKey.generate())
    assert greeted.startswith(
        f"{endpoint}: authenticate: the peer has disconnected; it may have another"
    )
    assert greeted.endswith("give both ends the same kvplan.cluster_key_file")
    assert far.heard.empty()


def test_no_key_is_refused_and_named(loop: ControlLoop, endpoint: Endpoint, far: Recorder) -> None:
    assert refusal(loop, endpoint, None) == (
        f"{endpoint}: handshake: it uses a cluster key; this side does not"
    )
    assert far.heard.empty()


def test_a_server_without_a_key_is_refused(loop: ControlLoop, far_loop: ControlLoop) -> None:
    endpoint = far_loop.run(Server.listen(far_loop, LOCAL, Recorder(), Keys())).endpoint
    assert refusal(loop, endpoint, KEY) == (
        f"{endpoint}: authenticate: it uses no cluster key; this side does; "
        "give both ends the same kvplan.cluster_key_file"
    )


def test_a_client_with_only_the_public_key_is_refused(endpoint: Endpoint, far: Recorder) -> None:
    """The server's public key lets a client speak CURVE, but the client's own key is checked, too.

    A cookie of a peer that has the key does not help.
    """
    public, secret = zmq.curve_keypair()
    between = Forger(endpoint)
    with zmq.Context() as context, context.socket(zmq.PAIR) as client:
        client.linger = 0
        client.curve_publickey, client.curve_secretkey = public, secret
        client.curve_serverkey = KEY.public
        with client.get_monitor_socket() as monitor:
            client.connect(f"tcp://{between.endpoint}")
            client.send(encode(Sync(), seq=1))
            failed = False
            while not failed and monitor.poll(1000 * DEADLINE_S):
                event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
                failed = event == zmq.Event.HANDSHAKE_FAILED_AUTH
            client.disable_monitor()
    assert failed
    assert far.heard.empty()
    between.finish()


@pytest.mark.parametrize("unused", [bytes(31), b"\1" * 31], ids=["none", "wrong"])
def test_a_client_without_a_cookie_costs_no_handshake(
    far_loop: ControlLoop, endpoint: Endpoint, far: Recorder, unused: bytes
) -> None:
    """The server checks the cookie even if the first command of CURVE arrives with the greeting."""
    with socket.create_connection((endpoint.host, endpoint.port), timeout=DEADLINE_S) as visitor:
        greeted = greeting(encrypted=True, unused=unused)
        visitor.sendall(greeted + b"\x04\xc8\x05HELLO" + bytes(194))
        heard = b""
        with suppress(ConnectionResetError):
            while chunk := visitor.recv(1 << 16):
                heard += chunk
    assert len(heard) == len(greeted), "its greeting, and nothing of ZeroMQ"
    assert far_loop.refusals.count == 1
    assert far.heard.empty()


class Forger(RecordingProxy):
    """A proxy that puts the cookie of a peer with the key into the greeting of one without it."""

    def passed_on(self, chunk: bytes) -> bytes:
        before = len(b"".join(self.recorded[:-1]))
        if before >= GREETING_NBYTES or before + len(chunk) < GREETING_NBYTES:
            return chunk
        cookie = KEY.cookie(bytes(self.heard[UNUSED_AT:GREETING_NBYTES]))
        return chunk[: UNUSED_AT - before] + cookie + chunk[GREETING_NBYTES - before :]


def test_a_recorded_conversation_cannot_be_replayed(
    loop: ControlLoop, endpoint: Endpoint, far: Recorder
) -> None:
    proxy = RecordingProxy(endpoint)

    async def talk() -> object:
        channel = await connect(loop, proxy.endpoint, Recorder(), Keys(KEY), DEADLINE_S)
        answer = await channel.request(Find(12345, 0, 0), DEADLINE_S)
        channel.close("greeted")
        return answer

    assert loop.run(talk()) == Synced(1)
    assert [far.next() for _ in range(2)] == [("request", Find(12345, 0, 0)), ("lost", "greeted")]
    recorded = proxy.finish()
    assert len(recorded) > 500
    address = endpoint.host, endpoint.port
    with socket.create_connection(address, DEADLINE_S) as replay, suppress(ConnectionResetError):
        replay.sendall(recorded)
        while replay.recv(1 << 16):
            pass
    assert far.heard.empty()


def test_messages_are_not_readable_on_the_wire(loop: ControlLoop, endpoint: Endpoint) -> None:
    proxy = RecordingProxy(endpoint)

    async def talk() -> None:
        channel = await connect(loop, proxy.endpoint, Recorder(), Keys(KEY), DEADLINE_S)
        await channel.request(Sync(), DEADLINE_S)
        channel.close("a secret word")

    loop.run(talk())
    recorded = proxy.finish()
    assert b"secret word" not in recorded
    assert b"Sync" not in recorded


class TestKeyFile:
    def test_is_private_and_read_back(self, tmp_path: Path) -> None:
        path = tmp_path / "key"
        KEY.save(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert ClusterKey.load(path) == KEY
        assert KEY.secret.hex() not in repr(KEY)

    def test_may_be_named_by_the_home_of_its_user(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        KEY.save(tmp_path / "key")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert ClusterKey.load("~/key") == KEY
        with pytest.raises(LLMException, match="cluster key ~unknown-user/key: Could not"):
            ClusterKey.load("~unknown-user/key")

    def test_is_never_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "key"
        KEY.save(path)
        with pytest.raises(FileExistsError):
            ClusterKey.generate().save(path)
        assert [*path.parent.iterdir()] == [path]
        assert ClusterKey.load(path) == KEY

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
    def test_is_refused_when_others_may_use_it(self, tmp_path: Path, mode: int) -> None:
        path = tmp_path / "key"
        KEY.save(path)
        path.chmod(mode)
        with pytest.raises(LLMException, match=rf"key: its mode is 0{mode:o}.*chmod 600"):
            ClusterKey.load(path)

    def test_is_refused_when_it_belongs_to_another_user(self, tmp_path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        path = tmp_path / "key"
        KEY.save(path)
        os.chown(path, 12345, -1)
        with pytest.raises(LLMException, match="belongs to user 12345"):
            ClusterKey.load(path)

    @pytest.mark.parametrize("text", ["", "noise", "kvplan-cluster-key 1 00\n", "\xff" * 300])
    def test_is_refused_when_it_is_something_else(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "key"
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(LLMException, match="not made by kvplan keygen"):
            ClusterKey.load(path)

    @pytest.mark.parametrize("secret", [bytes(32), b"\1" + bytes(31), bytes(range(7)) + bytes(25)])
    def test_is_refused_when_it_is_not_random(self, tmp_path: Path, secret: bytes) -> None:
        path = tmp_path / "key"
        path.write_text(f"kvplan-cluster-key 1 {secret.hex()}\n")
        path.chmod(0o600)
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "it is not random: its 32 bytes have "):
            ClusterKey.load(path)

    def test_is_refused_when_it_is_not_a_key(self, tmp_path: Path) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        for path, reason in {
            tmp_path / "missing": "No such file",
            tmp_path: "not a regular file",
            fifo: "not a regular file",
        }.items():
            with refused(LLMStatusCode.LLM_PARAM_INVALID, reason):
                ClusterKey.load(path)


def test_no_client_is_admitted_without_an_authenticator() -> None:
    """A client with the key is refused, too: the library gets no answer."""
    name = f"ipc://@kvplan-test-{os.getpid()}-unanswered"
    with zmq.Context() as context, ExitStack() as opened:
        server, client = (opened.enter_context(context.socket(zmq.PAIR)) for _ in range(2))
        events = opened.enter_context(server.get_monitor_socket())
        for end, listening in ((server, True), (client, False)):
            end.linger = 0
            KEY.apply(end, listening=listening)
        server.bind(name)
        client.connect(name)
        while True:
            assert events.poll(DEADLINE_S * 1000)
            event = recv_monitor_message(events)["event"]
            if event & HANDSHAKES:
                break
        server.disable_monitor()
    assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
