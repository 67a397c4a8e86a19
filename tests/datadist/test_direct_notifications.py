"""Notifications inside one host without threads of the receiver: order, ends, floods."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvplan import ClusterInfo, LlmDataDist
from kvplan.control.notifying import WINDOW
from kvplan.engine.notifications import MAX_UNREAD_OF_ONE
from tests.datadist.conftest import MakeEngine, MakePeer
from tests.datadist.peer import Peer
from tests.support.held import Held
from tests.support.places import PEER_COMMAND
from tests.support.refusals import refused

pytestmark = pytest.mark.skipif(bool(PEER_COMMAND), reason="peers are on another host")

READ_ALL = "result = [note.data for note in datadist.notifications()]"


def numbers(*parts: range) -> list[bytes]:
    return [b"%d" % i for part in parts for i in part]


def test_a_stopped_receiver_has_all_delivered_notifications(user: LlmDataDist, peer: Peer) -> None:
    """The first notification makes the direct connection, so this is true from the second on."""
    user.notify(1, b"0")
    peer.stop()
    for i in range(1, WINDOW + 1):
        user.notify(1, b"%d" % i)
    peer.resume()
    assert peer.run(READ_ALL) == numbers(range(WINDOW + 1))


def test_a_late_notification_is_not_overtaken_and_comes_once(user: LlmDataDist, peer: Peer) -> None:
    user.notify(1, b"0")
    peer.stop()
    for i in range(1, WINDOW + 1):
        user.notify(1, b"%d" % i)
    with refused("LLM_TIMEOUT", "has not answered within 50 ms"):
        user.notify(1, b"%d" % (WINDOW + 1), timeout_ms=50)
    peer.resume()
    for i in range(WINDOW + 2, WINDOW + 10):
        user.notify(1, b"%d" % i)
    assert peer.run(READ_ALL) == numbers(range(WINDOW + 10))


def test_both_ends_may_send_at_once(user: LlmDataDist, peer: Peer) -> None:
    count = 3 * WINDOW
    peer.send(
        """
        found = []
        for i in range(count):
            datadist.notify(2, b"%d" % i)
            found += datadist.notifications()
        while len(found) < count:
            assert datadist.notifications().wait(20_000)
            found += datadist.notifications()
        result = [note.data for note in found]
        """,
        count=count,
    )
    found: list[bytes] = []
    for i in range(count):
        user.notify(1, b"%d" % i)
        found += [notification.data for notification in user.notifications()]
    while len(found) < count:
        assert user.notifications().wait(20_000)
        found += [notification.data for notification in user.notifications()]
    assert found == numbers(range(count))
    assert peer.answer() == numbers(range(count))


def test_several_readers_get_each_notification_once(user: LlmDataDist, peer: Peer) -> None:
    count = 3000
    arrived = user.notifications()
    found: list[list[bytes]] = [[], []]
    ended = threading.Event()

    def read(mine: list[bytes]) -> None:
        while not ended.is_set():
            arrived.wait(10)
            mine += [item.data for item in arrived]

    readers = [threading.Thread(target=read, args=(item,)) for item in found]
    for reader in readers:
        reader.start()
    try:
        peer.run("for i in range(count): datadist.notify(2, b'%d' % i)", count=count)
        user.finalize()  # the peer has the sent notifications
    finally:
        ended.set()
        for reader in readers:
            reader.join()
    rest = [item.data for item in arrived]
    assert sorted(found[0] + found[1] + rest, key=int) == numbers(range(count))


@pytest.mark.parametrize("how", ["unlink", "kill"])
def test_arrived_notifications_survive_the_end_of_their_link(
    user: LlmDataDist, peer: Peer, how: str
) -> None:
    peer.run("for i in range(50): datadist.notify(2, b'%d' % i)")
    user.notify(1, b"one")
    user.notify(1, b"another")
    if how == "kill":
        peer.kill()
        with refused("LLM_LINK_FAILED"):
            for _ in range(WINDOW + 2):
                user.notify(1, b"late")
    else:
        user.unlink_clusters([1], 5000).raise_for_status()
        with pytest.raises(Exception, match=r"LLM_LINK_FAILED|LLM_NOT_YET_LINK"):
            peer.run("datadist.notify(2, b'late')")
        assert peer.run(READ_ALL) == [b"one", b"another"]
    assert [notification.data for notification in user.notifications()] == numbers(range(50))


def test_a_new_link_makes_the_direct_connection_again(user: LlmDataDist, peer: Peer) -> None:
    for turn in range(3):
        for i in range(3):
            user.notify(1, b"%d" % i)
        assert peer.run(READ_ALL) == numbers(range(3)), turn
        user.unlink_clusters([1], 5000).raise_for_status()
        user.link_clusters([ClusterInfo(1, peer.address)], 5000).raise_for_status()


def test_descriptors_are_closed_with_the_link(user: LlmDataDist, peer: Peer) -> None:
    def turn() -> None:
        for _ in range(2):
            user.notify(1, b"x")
            peer.run("datadist.notify(2, b'x')")
        user.unlink_clusters([1], 5000).raise_for_status()
        peer.run(READ_ALL)
        list(user.notifications())

    turn()
    held = Held.now()
    user.link_clusters([ClusterInfo(1, peer.address)], 5000).raise_for_status()
    turn()
    deadline = time.monotonic() + 20
    while {name for _, name in held.new().descriptors if name.startswith("socket")}:
        assert time.monotonic() < deadline, held.new()  # the control connection closes later


FLOOD = """
import asyncio
from kvplan.control.messages import Notify, encode

hostile = LlmDataDist(3, LlmRole.MIX)
# A connection that is not read from would break after 5 s.
hostile.initialize(
    {"kvplan.heartbeat_interval_ms": "20000", "kvplan.heartbeat_timeout_ms": "60000"}
)
hostile.link_clusters([ClusterInfo(1, address)], 5000).raise_for_status()
channel = hostile._engine.links.get(1).channel

async def flood(count):
    connection = channel.connection
    for number in range(1, count + 1):
        await connection.send(encode(Notify(bytes(4096)), seq=number))
"""


def kib(peer: Peer) -> int:
    return int(Path(f"/proc/{peer.pid}/statm").read_text().split()[1]) * 4


@pytest.mark.parametrize("reads", [True, False])
def test_a_flood_of_a_linked_peer_takes_no_memory_and_stops_no_other_link(
    user: LlmDataDist, peer: Peer, make_peer: MakePeer, make_engine: MakeEngine, reads: bool
) -> None:
    """The program does not read 80 MiB of frames that no engine would send."""
    hostile = make_peer()
    hostile.run(FLOOD, address=peer.address)
    before = kib(peer)
    try:
        hostile.send(
            """
            control = hostile._engine.links._control
            if not reads:
                control.call_soon(channel.connection.stream.pause)
            control.run(flood(20_000), timeout_ms=60_000)
            result = "sent"
            """,
            reads=reads,
        )
        for i in range(200):
            user.notify(1, b"%d" % i, timeout_ms=20_000)
        other = make_engine(4)
        other.link_clusters([ClusterInfo(1, peer.address)], 20_000).raise_for_status()
        other.notify(1, b"new")
        assert hostile.answer() == "sent"
        # The limit for one peer, plus queues.
        assert kib(peer) - before < MAX_UNREAD_OF_ONE * 5 + (16 << 10)
        unread, found = peer.run(
            """
            arrived = datadist.notifications()
            result = len(arrived), [(note.cluster_id, note.data[:3]) for note in arrived]
            """
        )
        assert unread <= MAX_UNREAD_OF_ONE + 201
        assert [data for who, data in found if who == 2] == numbers(range(200))
        assert [data for who, data in found if who == 4] == [b"new"]
    finally:
        hostile.run("hostile.finalize()")
