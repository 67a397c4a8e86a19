"""Messages that are cut into several notifications, of several peers at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvplan.addressed.connections import _HEAD, MAX_BODY_NBYTES, Connections, Message
from kvplan.control.messages import MAX_NOTIFICATION_NBYTES
from kvplan.engine.datadist import LlmDataDist
from kvplan.links import LinkState
from kvplan.system.logs import Log


class Inbox:
    """Notifications that have arrived at an engine and are unread, and its links."""

    def __init__(self) -> None:
        self.arrived: list[tuple[int, bytes]] = []
        self.links = SimpleNamespace(
            peers={number: SimpleNamespace(state=LinkState.LINKED) for number in (1, 2, 3)}
        )

    def _running(self) -> Inbox:
        return self

    def notifications(self) -> list[tuple[int, bytes]]:
        arrived, self.arrived = self.arrived, []
        return arrived


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def connections(inbox: Inbox) -> Connections:
    return Connections(cast(LlmDataDist, inbox), cast(Any, None), Log("kvplan.test"))


def body(letter: bytes, nbytes: int = MAX_BODY_NBYTES) -> bytes:
    return letter * nbytes


def test_pieces_of_several_peers_do_not_displace_each_other(
    inbox: Inbox, connections: Connections
) -> None:
    """Unfinished pieces of each peer may be as long as the longest message."""
    sent = {cluster: body(bytes([cluster])) for cluster in (1, 2, 3)}
    frames = {cluster: connections.frames(b"name", data) for cluster, data in sent.items()}
    for row in zip(*frames.values(), strict=True):
        inbox.arrived += zip(frames, row, strict=True)
        connections.receive()
    assert connections.take_messages() == [
        Message(cluster, b"name", data) for cluster, data in sent.items()
    ]
    assert not any(connections._pieces.values())


def test_the_oldest_pieces_of_a_peer_are_dropped(inbox: Inbox, connections: Connections) -> None:
    lost, kept = (connections.frames(b"", body(letter)) for letter in (b"a", b"b"))
    other = connections.frames(b"", body(b"c"))
    inbox.arrived = [
        *((1, frame) for frame in lost[:-1]),
        *((2, frame) for frame in other[:-1]),
        *((1, frame) for frame in kept),
        (2, other[-1]),
    ]
    assert [(its.cluster_id, its.body) for its in connections.take_messages()] == [
        (1, body(b"b")),
        (2, body(b"c")),
    ]


@pytest.mark.parametrize("state", ["forgotten", LinkState.BROKEN, LinkState.CLOSED])
def test_pieces_of_a_peer_that_is_gone_are_not_kept(
    inbox: Inbox, connections: Connections, state: Any
) -> None:
    frames = connections.frames(b"", body(b"a"))
    inbox.arrived = [(cluster, frames[0]) for cluster in (1, 2)]
    connections.receive()
    if state == "forgotten":
        del inbox.links.peers[1]
    else:
        inbox.links.peers[1].state = state
    connections.receive()
    assert set(connections._pieces) == {2}


def test_the_number_of_unfinished_messages_of_a_peer_is_bounded(
    inbox: Inbox, connections: Connections
) -> None:
    """Their first pieces may be empty. The messages whose beginnings were dropped do not arrive."""
    sent = [connections.frames(b"", body(b"b", 2 * MAX_NOTIFICATION_NBYTES)) for _ in range(1100)]
    other = connections.frames(b"", body(b"a"))
    inbox.arrived = [(2, other[0]), *((1, first[: _HEAD.size]) for first, *_ in sent)]
    connections.receive()
    most = MAX_BODY_NBYTES // MAX_NOTIFICATION_NBYTES
    assert {cluster: len(each) for cluster, each in connections._pieces.items()} == {1: most, 2: 1}
    inbox.arrived = [*((2, frame) for frame in other[1:]), *((1, frames[-1]) for frames in sent)]
    arrived = [its.cluster_id for its in connections.take_messages()]
    assert arrived == [2, *[1] * most]


def test_a_message_that_arrived_whole_before_its_peer_was_gone_is_read(
    inbox: Inbox, connections: Connections
) -> None:
    frames = connections.frames(b"", body(b"a"))
    inbox.arrived = [(1, frame) for frame in frames[:2]]
    connections.receive()
    inbox.arrived = [(1, frame) for frame in frames[2:]]
    del inbox.links.peers[1]
    assert [its.body for its in connections.take_messages()] == [body(b"a")]


@pytest.mark.parametrize("nbytes", [MAX_BODY_NBYTES // 2, MAX_BODY_NBYTES * 3 // 4])
def test_a_message_whose_beginning_was_dropped_does_not_arrive(
    inbox: Inbox, connections: Connections, caplog: pytest.LogCaptureFixture, nbytes: int
) -> None:
    """Two threads of a peer send at a time. What does not fit is lost whole, and logged."""
    sent = [body(letter, nbytes) for letter in (b"a", b"b")]
    for row in zip(*(connections.frames(b"", data) for data in sent), strict=True):
        inbox.arrived += [(7, frame) for frame in row]
    taken = [message.body for message in connections.take_messages()]
    fits = 2 * nbytes <= MAX_BODY_NBYTES
    assert taken == sent if fits else taken in ([sent[0]], [sent[1]])
    assert ("cluster 7 has sent" in caplog.text) is not fits
    assert not any(connections._pieces.values())


def test_bytes_that_belong_to_no_message_are_logged_and_later_messages_arrive(
    inbox: Inbox, connections: Connections, caplog: pytest.LogCaptureFixture
) -> None:
    inbox.arrived = [(7, b"nonsense"), *((7, data) for data in connections.frames(b"name", b"x"))]
    assert connections.take_messages() == [Message(7, b"name", b"x")]
    assert "cluster 7 has sent 8 bytes that belong to no message" in caplog.text


def test_a_message_that_is_too_long_is_dropped(
    inbox: Inbox, connections: Connections, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer may send any pieces."""
    first, *_, last = connections.frames(b"", body(b"a", MAX_NOTIFICATION_NBYTES + 1))
    more = b"P" + first[1:]
    count = MAX_BODY_NBYTES // (MAX_NOTIFICATION_NBYTES - len(connections.frames(b"", b"")[0]))
    inbox.arrived = [(7, data) for data in (first, *[more] * count, last)]
    assert connections.take_messages() == []
    assert "cluster 7 has sent" in caplog.text
    assert not any(connections._pieces.values())


def test_a_restarted_process_does_not_end_earlier_messages(
    inbox: Inbox, connections: Connections
) -> None:
    """The cluster is the same, because its id follows from the name. The later pieces are lost."""
    before, after = (
        Connections(cast(LlmDataDist, Inbox()), cast(Any, None), Log("kvplan.test"))
        for _ in range(2)
    )
    lost = before.frames(b"", body(b"a", MAX_NOTIFICATION_NBYTES + 1))
    kept = after.frames(b"", body(b"b", MAX_NOTIFICATION_NBYTES + 1))
    inbox.arrived = [(1, lost[0]), *((1, frame) for frame in kept)]
    assert [its.body for its in connections.take_messages()] == [
        body(b"b", MAX_NOTIFICATION_NBYTES + 1)
    ]


@pytest.mark.parametrize("name", [b"", b"a name of 19 bytes"], ids=["unnamed", "named"])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_message_is_cut_where_it_no_longer_fits(
    inbox: Inbox, connections: Connections, more: int, name: bytes
) -> None:
    room = MAX_NOTIFICATION_NBYTES - len(connections.frames(name, b"")[0])
    frames = connections.frames(name, body(b"y", room + more))
    assert len(frames) == 1 + (more > 0)
    assert max(map(len, frames)) <= MAX_NOTIFICATION_NBYTES
    inbox.arrived = [(1, frame) for frame in frames]
    assert connections.take_messages() == [Message(1, name, body(b"y", room + more))]
