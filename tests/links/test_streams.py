"""Data connections of transports, made through the listener at which the peer was linked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.links import LinkState
from kvplan.links.peer_link import PeerLink
from kvplan.links.transitions import Transitions
from kvplan.transport.local import LocalTransport
from kvplan.transport.protocol import Streams
from tests.links.end import DEADLINE_S, End

MakeEnd = Callable[..., End]
COUNT = 3


class Streaming(LocalTransport):
    """A transport that opens connections to its peer, and sends the index of each over it."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Streams] = []

    def refusal(self, metadata: bytes) -> None:
        return None

    def connect(self, metadata: bytes, **given: Any) -> Any:
        streams = given["streams"]
        self.streams.append(streams)
        for index, item in enumerate(streams.open(range(COUNT), given["timeout_ms"] / 1000)):
            with item as stream:
                stream.settimeout(DEADLINE_S)
                stream.sendall(bytes((index,)))
                assert stream.recv(1) == bytes((index,))
        return super().connect(metadata, **given)


def make_two(make_end: MakeEnd) -> tuple[End, End]:
    return (
        make_end(1, transports=[Streaming()], listen=""),
        make_end(2, transports=[Streaming()]),
    )


def of(end: End) -> list[Streams]:
    (transport,) = end.transports
    assert isinstance(transport, Streaming)
    return transport.streams


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_the_end_that_links_dials_where_it_has_linked(make_end: MakeEnd, listen: str) -> None:
    one = make_end(1, transports=[Streaming()], listen="")
    other = make_end(2, transports=[Streaming()], listen=listen)
    one.link(other.cluster)
    (near,), (far,) = of(one), of(other)
    assert (near.dials, far.dials) == (True, False)
    assert near.secret == far.secret
    assert near.way.endswith(other.address)
    assert len(near.secret) == 32


def test_each_link_has_its_own_secret_and_opens_connections_only_while_it_is_made(
    make_end: MakeEnd,
) -> None:
    one, other = make_two(make_end)
    for _ in range(2):
        one.link(other.cluster)
        for end in (one, other):
            with pytest.raises(LLMException, match="the link is not being made any more"):
                of(end)[-1].open([COUNT], DEADLINE_S)
        one.links.unlink([2], 5000).raise_for_status()
    assert of(one)[0].secret != of(one)[1].secret


def test_an_engine_links_from_the_address_of_its_option(make_end: MakeEnd) -> None:
    one = make_end(1, transports=[Streaming()], listen="", tcp_source="127.0.0.5")
    other = make_end(2, transports=[Streaming()])
    one.link(other.cluster)
    assert of(one)[0].way.startswith("127.0.0.5:")


def test_data_connections_of_members_that_meet_at_a_path(make_end: MakeEnd, tmp_path: Path) -> None:
    comm_dir = str(tmp_path / "comm")
    ends = [
        make_end(number, transports=[Streaming()], listen="", comm_dir=comm_dir)
        for number in (1, 2)
    ]
    for end in ends:
        end.links.comm_link("name", {1: 0, 2: 1})
    for end, peer in zip(ends, (2, 1), strict=True):
        end.wait_for(peer, "LINKED")
    near, far = (of(end)[-1] for end in ends)
    assert near.dials is not far.dials
    assert near.way.startswith(f"ipc://{comm_dir}/")


def test_both_ends_call_each_other(make_end: MakeEnd) -> None:
    ends = [make_end(number, transports=[Streaming()]) for number in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(end.link, peer.cluster)
            for end, peer in zip(ends, reversed(ends), strict=True)
        ]
        for call in calls:
            call.result(DEADLINE_S)
    assert [end.state(peer) for end, peer in zip(ends, (2, 1), strict=True)] == [
        LinkState.LINKED,
        LinkState.LINKED,
    ]


class Immediate(Streaming):
    """A transport that waits only for its connections; `threads` has those that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    @property
    def connects_at_once(self) -> bool:
        return True

    def num_streams(self, metadata: bytes) -> int:
        return COUNT

    def connect(self, metadata: bytes, **given: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        for stream in given["streams"].open(range(COUNT), given["timeout_ms"] / 1000):
            stream.close()
        return LocalTransport.connect(self, metadata, **given)


def test_a_transport_that_waits_only_for_its_connections_needs_no_worker(
    make_end: MakeEnd,
) -> None:
    ends = [make_end(number, transports=[Immediate()]) for number in (1, 2)]
    ends[0].link(ends[1].cluster)
    for number, end in enumerate(ends, 1):
        (transport,) = end.transports
        assert isinstance(transport, Immediate)
        assert transport.threads == [f"kvplan-control-{number}"]


class Waiting(Streaming):
    """A transport that waits for a connection; `ended` receives the outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.ended: list[str] = []
        self.done = threading.Event()

    def connect(self, metadata: bytes, **given: Any) -> Any:
        self.begun.set()
        try:
            (stream,) = given["streams"].open([0], 6 * DEADLINE_S)
        except LLMException as error:
            self.ended.append(str(error.args[0]))
            raise
        finally:
            self.done.set()
        stream.close()
        return LocalTransport.connect(self, metadata, **given)


class Failing(Streaming):
    """A transport that opens no connection, and fails once `begun` is set."""

    def __init__(self, begun: threading.Event) -> None:
        super().__init__()
        self.begun = begun

    def connect(self, metadata: bytes, **given: Any) -> Any:
        assert self.begun.wait(DEADLINE_S)
        raise LLMException("no memory left", status_code=LLMStatusCode.LLM_LINK_FAILED)


class Silent(Streaming):
    """A transport that opens no connection, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def connect(self, metadata: bytes, **given: Any) -> Any:
        assert self.go_on.wait(DEADLINE_S)
        raise LLMException("given up", status_code=LLMStatusCode.LLM_LINK_FAILED)


@pytest.mark.parametrize("fails", ["dials", "accepts"])
def test_the_failure_of_the_peer_ends_the_wait(make_end: MakeEnd, fails: str) -> None:
    """The waiting thread is not blocked until the timeout of the link."""
    waiting = Waiting()
    failing = Failing(waiting.begun)
    transports = [failing, waiting] if fails == "dials" else [waiting, failing]
    one, other = (make_end(number, transports=[transports[number - 1]]) for number in (1, 2))
    # A connection that arrives before the other end has failed is answered.
    early = "no memory left"
    reason = early if fails == "dials" else f"data connection 0: authenticate: |{early}"
    one.check_link_fails(other.cluster, LLMStatusCode.LLM_LINK_FAILED, reason)
    assert waiting.done.wait(DEADLINE_S)
    if fails == "dials":
        assert "accept: the link is not being made any more" in waiting.ended[0]


def test_an_engine_that_closes_waits_for_no_connection(make_end: MakeEnd) -> None:
    accepting = make_end(1, transports=[waiting := Waiting()])
    dialling = make_end(2, transports=[silent := Silent()], listen="")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(dialling.links.link, [accepting.cluster], 60_000)
        assert waiting.begun.wait(DEADLINE_S)
        accepting.close()
        assert waiting.done.wait(DEADLINE_S)
        silent.go_on.set()
        assert call.result(DEADLINE_S).status is not LLMStatusCode.LLM_SUCCESS


def test_a_handshake_whose_link_has_ended_connects_no_transport(
    make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unlink by force comes after the answer of the peer, and before the connections."""
    expect, ours = Transitions.expect, Immediate()

    def unlink_first(self: Transitions, link: PeerLink, challenge: bytes) -> None:
        if link.phase:  # of the end that links
            self.unlinked(link, "unlinked by force")
        expect(self, link, challenge)

    near, far = (
        make_end(number, transports=[each]) for number, each in ((1, ours), (2, Immediate()))
    )
    monkeypatch.setattr(Transitions, "expect", unlink_first)
    for _ in range(10):  # a task that is cancelled late may go on
        near.check_link_fails(far.cluster, LLMStatusCode.LLM_LINK_FAILED, "unlinked by force")
    near.links.close()
    assert ours.threads == []  # no call of `connect`
    assert "never retrieved" not in caplog.text
