"""The key of a user: one for all engines, made at first use, refused if others may read it."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvplan.control.auth import ClusterKey, Keys, describe_user_key, user_key
from kvplan.control.connecting import Server, connect
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Body, Sync, Synced
from kvplan.status import LLMStatusCode
from tests.control.conversation import DEADLINE_S, Recorder, call
from tests.support.peer import Peer
from tests.support.refusals import refused

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user who has never used kvplan."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return home


@pytest.fixture
def file(home: Path) -> Path:
    """The file of this user's key, which exists."""
    user_key()
    return home / ".local/state/kvplan/user.key"


def refusal() -> str:
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as error:
        user_key()
    assert "or give kvplan.cluster_key_file" in str(error.value)
    return str(error.value)


def test_the_key_is_made_once_and_private(home: Path) -> None:
    file = home / ".local/state/kvplan/user.key"
    assert describe_user_key() == (str(file), False, "", "")
    assert not any(home.iterdir())
    key = user_key()
    assert ClusterKey.load(file) == key == user_key()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [path.name for path in file.parent.iterdir()] == ["user.key"]
    assert describe_user_key() == (str(file), True, "", "")


def test_a_given_state_home_is_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert user_key() == ClusterKey.load(tmp_path / "state/kvplan/user.key")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert user_key() == ClusterKey.load(home / ".local/state/kvplan/user.key")


def test_processes_that_start_at_once_have_one_key(home: Path) -> None:
    with ExitStack() as held:
        peers = [held.enter_context(closing(Peer())) for _ in range(6)]
        for peer in peers:
            peer.run("from kvplan.control.auth import user_key")
        for peer in peers:
            peer.send("result = user_key().public")
        assert {peer.answer() for peer in peers} == {user_key().public}


def test_a_file_or_directory_that_others_may_use_is_refused(file: Path) -> None:
    file.chmod(0o640)
    assert f"{file}: its mode is 0640, so others may use it; chmod 600" in refusal()
    assert "its mode is 0640" in describe_user_key().why_not
    file.chmod(0o600)
    file.parent.chmod(0o755)
    assert f"{file.parent} has mode 0755" in refusal()
    assert "has mode 0755" in describe_user_key().why_not


def test_a_peer_that_needs_a_refused_key_is_named(loop: ControlLoop, file: Path) -> None:
    file.chmod(0o640)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint(*listening.getsockname())
        connecting = connect(loop, endpoint, Recorder(), Keys(user=user_key), DEADLINE_S)
        reason = f"^{endpoint}: authenticate: user's key: cluster key {file}: its mode is 0640"
        with refused(LLMStatusCode.LLM_LINK_FAILED, reason):
            loop.run(connecting)


def test_a_link_to_no_file_is_refused_and_not_replaced(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.parent / "nowhere")
    assert f"{file}: No such file" in refusal()
    state = describe_user_key()
    assert state.is_made
    assert "No such file" in state.why_not
    assert file.is_symlink()


@needs_root
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, -1)
    assert f"{file}: it belongs to user 12345, not to user 0" in refusal()


@needs_root
def test_the_home_of_another_user_is_left_alone(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With sudo, the owner could not read files that root makes there."""
    os.chown(home, 12345, -1)
    key = user_key()
    assert not any(home.iterdir())
    assert ClusterKey.load(tmp_path / "kvplan/user.key") == key
    assert f"reason='{home} is not of user 0'" in caplog.text


def test_without_a_home_it_is_in_the_folder_of_sockets(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "nowhere")
    key = user_key()
    assert ClusterKey.load(tmp_path / "kvplan/user.key") == key
    assert describe_user_key().why_not_home == "this user has no home directory"


def test_the_key_is_for_this_host_only(loop: ControlLoop) -> None:
    key, other = ClusterKey.generate(), ClusterKey.generate()
    inside = ("127.0.0.1:1", "127.8.9.10:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "ipc:///a/b")
    for address in (*inside, "10.0.0.1:1", "[fd00::1]:1", "[::ffff:10.0.0.1]:1"):
        endpoint = Endpoint.parse(address)
        expected = key if address in inside else None
        assert loop.run(Keys(user=lambda: key).at(loop, endpoint)) is expected
        assert loop.run(Keys(other, lambda: key).at(loop, endpoint)) is other


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_with_a_name_takes_the_key_of_its_address(
    loop: ControlLoop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    address: str,
) -> None:
    """A wildcard is open to other hosts, of which the log warns, and has the key inside."""
    key = ClusterKey.generate()
    kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    found = [(*kind, (address, 0))]
    with monkeypatch.context() as names:
        names.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        listening = Server.listen(
            loop, Endpoint("one.example", 0), Recorder(), Keys(user=lambda: key)
        )
        server = loop.run(listening)
    port = server.endpoint.port
    assert ("event=listen_open" in caplog.text) is (address == "0.0.0.0")

    def ask(keys: Keys) -> Body:
        at = Endpoint("127.0.0.1", port)
        channel = loop.run(connect(loop, at, Recorder(), keys, DEADLINE_S))
        return loop.run(channel.request(Sync(), DEADLINE_S))

    assert ask(Keys(user=lambda: key)) == Synced(1)
    (channel,) = server.channels
    assert call(loop, channel.streams, bytes(16)).private
    with refused(LLMStatusCode.LLM_LINK_FAILED, "handshake"):
        ask(Keys())
