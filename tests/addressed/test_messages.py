"""Messages that are cut into several notifications, of several peers at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvplan.addressed.connections import MAX_BODY_NBYTES, Connections, Message
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
    assert connections._pieces == {}


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


def test_of_two_messages_at_a_time_that_are_too_long_together_one_arrives_whole(
    inbox: Inbox, connections: Connections
) -> None:
    """The rest of the other one is not taken for a message."""
    pairs = zip(*(connections.frames(b"", body(letter)) for letter in (b"a", b"b")), strict=True)
    inbox.arrived = [(1, frame) for pair in pairs for frame in pair]
    assert {its.body for its in connections.take_messages()} <= {body(b"a"), body(b"b")}
    one = connections.frames(b"", body(b"c"))
    inbox.arrived = [(1, frame) for frame in one]
    assert [its.body for its in connections.take_messages()] == [body(b"c")]


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
    assert {cluster for cluster, _ in connections._pieces} == {2}


def test_the_number_of_unfinished_messages_of_a_peer_is_bounded(
    inbox: Inbox, connections: Connections
) -> None:
    """Their first pieces may be empty."""
    other = connections.frames(b"", body(b"a"))
    empty = [connections.frames(b"", body(b"b"))[0][:11] for _ in range(1100)]
    inbox.arrived = [(2, other[0]), *((1, frame) for frame in empty)]
    connections.receive()
    assert len(connections._pieces) == 1025
    inbox.arrived = [(2, frame) for frame in other[1:]]
    assert [its.body for its in connections.take_messages()] == [body(b"a")]


def test_a_message_that_arrived_whole_before_its_peer_was_gone_is_read(
    inbox: Inbox, connections: Connections
) -> None:
    frames = connections.frames(b"", body(b"a"))
    inbox.arrived = [(1, frame) for frame in frames[:2]]
    connections.receive()
    inbox.arrived = [(1, frame) for frame in frames[2:]]
    del inbox.links.peers[1]
    assert [its.body for its in connections.take_messages()] == [body(b"a")]


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
