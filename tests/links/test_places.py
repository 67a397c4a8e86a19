"""Only the same engine, which proves that it is, may take the place of a live link."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, Self

import pytest

from kvplan.links import ClusterInfo, LinkState
from kvplan.transport.local import LocalTransport
from kvplan.transport.tcp.transport import TcpTransport
from tests.links.end import End
from tests.links.peer import Peer

MakeEnd = Callable[..., End]
MakePeer = Callable[..., Peer]
QUICK = {"heartbeat_interval_ms": 50, "heartbeat_timeout_ms": 1000}
PATIENT = {"heartbeat_interval_ms": 20_000, "heartbeat_timeout_ms": 60_000}

BECOME = """
end.close()
end = End(2, transports=[TcpTransport() if over_tcp else LocalTransport()], keyless=keyless)
result = end.address
"""
TAKE_PLACE = """
if instance:
    end.show_instance(instance)
(it,) = end.links.link([cluster], timeout_ms)
result = (it.status.name, str(it.error), end.log.wait_for_line("state="))
"""


class Cable:
    """A proxy for connections to an end. Once it is cut, neither side hears from the other."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.cluster = ClusterInfo(1, f"127.0.0.1:{self._listening.getsockname()[1]}")
        self._open: list[socket.socket] = [self._listening]
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Pass on no more bytes of existing connections."""
        self._is_cut = True

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                self._open += near, far
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                if not self._is_cut:
                    target.sendall(chunk)
            if not self._is_cut:
                target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for item in self._open:
            with suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    """Two processes of cluster 2, which each test gives new ends."""
    with ExitStack() as held:
        made = Peer(2), Peer(2)
        for item in made:
            held.callback(item.close)
        yield made


def become(peer: Peer, *, over_tcp: bool = False, keyless: bool = False) -> None:
    peer.address = peer.run(BECOME, over_tcp=over_tcp, keyless=keyless)


def take_place(
    peer: Peer, cluster: ClusterInfo, instance: str = "", timeout_ms: int = 20_000
) -> Any:
    """Let a peer link as engine `instance`; return the status, the error, and a line of its log."""
    return peer.run(TAKE_PLACE, cluster=cluster, instance=instance, timeout_ms=timeout_ms)


def take_place_soon(peer: Peer, cluster: ClusterInfo, instance: str) -> Any:
    """Call `take_place` with the shortest timeout in which this machine gets an answer."""
    for timeout_ms in (300, 3000, 20_000):
        taken = take_place(peer, cluster, instance, timeout_ms)
        if taken[0] != "LLM_LINK_FAILED":
            break
    return taken


@pytest.mark.parametrize("begins", ["one", "peer"])
@pytest.mark.parametrize(
    ("over_tcp", "keyless"),
    [(False, False), (True, False), (True, True)],
    ids=["local", "tcp with a key", "tcp without a key"],
)
def test_the_instance_of_an_engine_alone_does_not_take_its_place(
    make_end: MakeEnd,
    peers: tuple[Peer, Peer],
    caplog: pytest.LogCaptureFixture,
    *,
    over_tcp: bool,
    keyless: bool,
    begins: str,
) -> None:
    peer, impostor = peers
    for process in peers:
        become(process, over_tcp=over_tcp, keyless=keyless)
    transport = TcpTransport() if over_tcp else LocalTransport()
    end = make_end(1, transports=[transport], keyless=keyless, **PATIENT)
    end.link(peer.cluster) if begins == "one" else peer.link(end.cluster)
    link = end.links.get(2)
    status, error, line = take_place(impostor, end.cluster, end.status(2).instance)
    assert status == "LLM_ALREADY_LINK"
    assert "cluster 1 is linked with another process of cluster 2, which is alive" in error
    assert line.startswith("INFO ")  # the outcome of the call is the warning at that end
    (refused,) = (record for record in caplog.records if "event=refused" in record.getMessage())
    assert refused.levelname == "WARNING"
    assert end.links.get(2) is link
    assert (end.state(2), peer.state(1)) == (LinkState.LINKED, "LINKED")


def test_an_engine_that_lost_its_side_proves_that_it_is_the_same(
    make_end: MakeEnd, peers: tuple[Peer, Peer]
) -> None:
    end, (other, _) = make_end(1, **PATIENT), peers
    become(other)
    with Cable(end.address) as cable:
        lost = make_end(2, **QUICK)
        lost.link(cable.cluster)
        first = end.links.get(2)
        cable.cut()
        lost.wait_for(1, "BROKEN")
        assert end.state(2) is LinkState.LINKED
        taken = take_place_soon(other, end.cluster, end.status(2).instance)
        assert taken[0] == "LLM_ALREADY_LINK"
        lost.link(end.cluster)
    assert end.links.get(2) is not first
    assert "the peer has linked again" in end.wait_for(2, "BROKEN")
    assert end.wait_for(2, "LINKED").startswith("INFO ")


def test_an_engine_that_forgot_its_side_waits_until_the_peer_finds_it_dead(
    make_end: MakeEnd,
) -> None:
    end = make_end(1, **QUICK)
    with Cable(end.address) as cable:
        lost = make_end(2)
        lost.link(cable.cluster)
        cable.cut()
        lost.links.unlink([1], 1000, force=True).raise_for_status()
        lost.link(end.cluster, timeout_ms=20_000)
    assert "nothing heard for" in end.wait_for(2, "BROKEN")
    end.wait_for(2, "LINKED")


def test_a_stopped_peer_keeps_its_place_until_its_heartbeat_is_late(
    make_end: MakeEnd, peers: tuple[Peer, Peer]
) -> None:
    peer, other = peers
    for process in peers:
        become(process)
    end = make_end(1, **PATIENT)
    peer.link(end.cluster)
    peer.stop()
    try:
        status, error, _ = take_place_soon(other, end.cluster, end.status(2).instance)
        assert (status, end.state(2)) == ("LLM_ALREADY_LINK", LinkState.LINKED)
        assert "which has not answered a ping yet" in error
    finally:
        peer.resume()
    assert peer.state(1) == "LINKED"
    assert take_place(other, end.cluster, timeout_ms=20_000)[0] == "LLM_ALREADY_LINK"


def test_a_peer_that_has_stopped_for_longer_loses_its_place(
    make_end: MakeEnd, peers: tuple[Peer, Peer]
) -> None:
    peer, other = peers
    for process in peers:
        become(process)
    end = make_end(1, **QUICK)
    peer.link(end.cluster)
    peer.stop()
    try:
        assert take_place(other, end.cluster)[0] == "LLM_SUCCESS"
    finally:
        peer.resume()
    assert "nothing heard for" in end.wait_for(2, "BROKEN")
    end.wait_for(2, "LINKED")
    assert peer.wait_for(1, "BROKEN").startswith("WARNING ")
