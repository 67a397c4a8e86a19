"""Connecting and disconnecting, in a call and in the background; and messages."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from kvplan import hixl
from kvplan.hixl import AsyncConnectStatus, TransferOpDesc
from tests.hixl.conftest import MakeEngine, MakePeer
from tests.hixl.peer import Peer
from tests.hixl.places import Memory, Place, free_name, pattern, registered

LONG_MS = 30_000
CONNECTED, NOT_CONNECT = AsyncConnectStatus.CONNECTED, AsyncConnectStatus.NOT_CONNECT


def one_range(memory: Memory, peer: Peer) -> list[TransferOpDesc]:
    return [TransferOpDesc(memory.address, peer.address, 4096)]


@pytest.mark.over_tcp
def test_connect_transfer_disconnect(engine: hixl.Hixl, memory: Memory, peer: Peer) -> None:
    moved = one_range(memory, peer)
    peer.fill(1)
    assert engine.transfer_sync(peer.name, hixl.READ, moved) == hixl.NOT_CONNECTED
    assert engine.transfer_async(peer.name, hixl.READ, moved) == (hixl.NOT_CONNECTED, 0)
    assert engine.disconnect(peer.name) == hixl.NOT_CONNECTED
    for _ in range(3):
        assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
        assert engine.connect(peer.name, LONG_MS) == hixl.ALREADY_CONNECTED
        memory.array[:] = 0
        assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
        assert memory.array[:4096].tobytes() == pattern(seed=1)[:4096].tobytes()
        assert engine.disconnect(peer.name, LONG_MS) == hixl.SUCCESS
        assert engine.disconnect(peer.name, LONG_MS) == hixl.NOT_CONNECTED
        assert engine.transfer_sync(peer.name, hixl.READ, moved) == hixl.NOT_CONNECTED


def test_each_end_has_a_connection_of_its_own(make_engine: MakeEngine, place: Place) -> None:
    """If two engines have connected with each other, one may disconnect without the other."""
    names = [free_name(), free_name()]
    engines = [make_engine(name) for name in names]
    memories = [registered(engine, place) for engine in engines]

    def moves(i: int) -> int:
        moved = [TransferOpDesc(memories[i].address, memories[1 - i].address, 100)]
        return engines[i].transfer_sync(names[1 - i], hixl.READ, moved, LONG_MS)

    for first in (0, 1):
        second = 1 - first
        assert engines[first].connect(names[second], LONG_MS) == hixl.SUCCESS
        assert moves(second) == hixl.NOT_CONNECTED
        assert engines[second].connect(names[first], LONG_MS) == hixl.SUCCESS
        for leaves, stays in ((first, second), (second, first)):
            assert engines[leaves].disconnect(names[stays], LONG_MS) == hixl.SUCCESS
            assert (moves(leaves), moves(stays)) == (hixl.NOT_CONNECTED, hixl.SUCCESS)
            assert engines[leaves].connect(names[stays], LONG_MS) == hixl.SUCCESS
            assert (moves(leaves), moves(stays)) == (hixl.SUCCESS, hixl.SUCCESS)
        for number in (0, 1):
            assert engines[number].disconnect(names[1 - number], LONG_MS) == hixl.SUCCESS
        assert not any(engine.datadist.links() for engine in engines)


def test_two_engines_connect_with_each_other_at_once(make_engine: MakeEngine) -> None:
    names = [free_name(), free_name()]
    engines = [make_engine(name) for name in names]
    found: list[int] = []
    begin = threading.Barrier(2)

    def connect(i: int) -> None:
        begin.wait()
        found.append(engines[i].connect(names[1 - i], LONG_MS))

    for _ in range(5):
        found.clear()
        threads = [threading.Thread(target=connect, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [hixl.SUCCESS, hixl.SUCCESS]
        for i in (0, 1):
            assert engines[i].disconnect(names[1 - i], LONG_MS) == hixl.SUCCESS


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_names_of_engines(make_engine: MakeEngine, place: Place, host: str) -> None:
    """Valid names: IPv6, without a port, and a host name of an engine that knows its address."""
    name = free_name(host)
    owner = make_engine(name)
    client = make_engine(name.rpartition(":")[0])
    assert client.datadist.listen_address is None
    theirs, mine = registered(owner, place), registered(client, place)
    moved = [TransferOpDesc(mine.address, theirs.address, 100)]
    if host == "127.0.0.1":
        other = f"localhost:{name.rpartition(':')[2]}"
        assert client.connect(other, LONG_MS) == hixl.SUCCESS
        assert client.transfer_sync(other, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
        assert client.transfer_sync(name, hixl.READ, moved) == hixl.NOT_CONNECTED
        assert client.connect(name, LONG_MS) == hixl.ALREADY_CONNECTED
    else:
        assert client.connect(name, LONG_MS) == hixl.SUCCESS
    assert client.transfer_sync(name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
    assert client.disconnect(name, LONG_MS) == hixl.SUCCESS


def test_an_engine_with_port_0_or_below_does_not_listen(place: Place) -> None:
    for name in ("127.0.0.1:0", "127.0.0.1:-1", "[::1]", "127.0.0.1"):
        engine = hixl.Hixl()
        assert engine.initialize(name, place.options) == hixl.SUCCESS
        assert engine.datadist.listen_address is None
        engine.finalize()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("127.0.0.1", hixl.PARAM_INVALID),
        ("127.0.0.1:0", hixl.PARAM_INVALID),
        ("[::1:5", hixl.PARAM_INVALID),
        ("127.0.0.1:99999", hixl.PARAM_INVALID),
        ("", hixl.PARAM_INVALID),
    ],
)
def test_invalid_names_are_refused(engine: hixl.Hixl, name: str, status: int) -> None:
    assert engine.connect(name) == status
    assert engine.connect_async(name) == status
    assert engine.disconnect(name) == status
    assert engine.transfer_sync(name, hixl.READ, [TransferOpDesc(1, 1, 1)]) == status
    assert engine.get_async_connect_status(name) == (status, NOT_CONNECT)


def test_connecting_without_a_listener_fails(engine: hixl.Hixl) -> None:
    assert engine.connect(free_name(), LONG_MS) == hixl.FAILED


def test_a_peer_that_does_not_answer_is_a_timeout(engine: hixl.Hixl, peer: Peer) -> None:
    peer.stop()
    assert engine.connect(peer.name, 300) == hixl.TIMEOUT
    peer.resume()
    assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS


def test_a_disconnect_that_the_peer_does_not_confirm_ends_the_connection_here(
    engine: hixl.Hixl, memory: Memory, make_peer: MakePeer
) -> None:
    """A second call does not know the peer either. The connection of the other peer stays."""
    peer, other = make_peer(), make_peer()
    for item in (peer, other):
        assert engine.connect(item.name, LONG_MS) == hixl.SUCCESS
    peer.stop()
    assert engine.disconnect(peer.name, 300) == hixl.TIMEOUT
    moved = one_range(memory, peer)
    assert engine.transfer_sync(peer.name, hixl.READ, moved) == hixl.NOT_CONNECTED
    assert engine.disconnect(peer.name, 300) == hixl.NOT_CONNECTED
    peer.resume()
    assert engine.connect(other.name, LONG_MS) == hixl.ALREADY_CONNECTED
    assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
    assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS


@pytest.mark.parametrize(("host", "how"), [("127.0.0.1", ""), ("localhost", " by another name")])
def test_a_second_connect_says_whether_the_name_is_another_one(
    connected: hixl.Hixl, peer: Peer, caplog: pytest.LogCaptureFixture, host: str, how: str
) -> None:
    name = peer.name.replace("127.0.0.1", host)
    assert connected.connect(name, LONG_MS) == hixl.ALREADY_CONNECTED
    assert f"{name} is already connected{how} (LLM_ALREADY_LINK)" in caplog.text


def test_an_engine_cannot_connect_with_itself(make_engine: MakeEngine) -> None:
    name = free_name()
    engine = make_engine(name)
    assert engine.connect(name) == hixl.PARAM_INVALID
    assert engine.connect(name.replace("127.0.0.1", "localhost")) == hixl.PARAM_INVALID


def test_an_occupied_port_is_refused(make_engine: MakeEngine) -> None:
    name = free_name()
    make_engine(name)
    assert hixl.Hixl().initialize(name) == hixl.FAILED


@pytest.mark.over_tcp
def test_with_auto_connect_a_transfer_connects(
    make_engine: MakeEngine, place: Place, make_peer: MakePeer
) -> None:
    engine = make_engine(**{hixl.OPTION_AUTO_CONNECT: "1"})
    memory = registered(engine, place)
    for submit in (False, True):
        peer = make_peer()
        peer.fill(2)
        moved = one_range(memory, peer)
        if submit:
            status, request = engine.transfer_async(peer.name, hixl.READ, moved)
            while engine.get_transfer_status(request)[1] == hixl.TransferStatus.WAITING:
                pass
        else:
            status = engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS)
        assert status == hixl.SUCCESS
        assert memory.array[:4096].tobytes() == pattern(seed=2)[:4096].tobytes()
        assert engine.connect(peer.name) == hixl.ALREADY_CONNECTED
    assert engine.transfer_sync(free_name(), hixl.READ, moved) == hixl.FAILED


class TestInTheBackground:
    def states(self, engine: hixl.Hixl, name: str) -> Iterator[AsyncConnectStatus]:
        while True:
            status, state = engine.get_async_connect_status(name)
            assert status == hixl.SUCCESS
            yield state

    def until(self, engine: hixl.Hixl, name: str, wanted: AsyncConnectStatus) -> list[int]:
        seen: list[int] = []
        for state in self.states(engine, name):
            if not seen or seen[-1] != state:
                seen.append(state)
            if state == wanted:
                return seen
        raise AssertionError

    def test_a_connection_is_made_and_ended(
        self, engine: hixl.Hixl, memory: Memory, peer: Peer
    ) -> None:
        assert engine.get_async_connect_status(peer.name) == (hixl.SUCCESS, NOT_CONNECT)
        assert engine.get_all_async_connect_status() == (hixl.SUCCESS, {})
        assert engine.connect_async(peer.name, LONG_MS) == hixl.SUCCESS
        seen = self.until(engine, peer.name, CONNECTED)
        assert set(seen[:-1]) <= {hixl.CONNECT_PENDING, hixl.CONNECTING}
        moved = one_range(memory, peer)
        assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == hixl.SUCCESS
        both = {peer.name: CONNECTED}
        assert engine.get_all_async_connect_status() == (hixl.SUCCESS, both)
        assert engine.disconnect_async(peer.name, LONG_MS) == hixl.SUCCESS
        seen = self.until(engine, peer.name, NOT_CONNECT)
        assert set(seen[:-1]) <= {hixl.DISCONNECT_PENDING, hixl.DISCONNECTING}
        assert engine.get_all_async_connect_status() == (hixl.SUCCESS, {})
        assert engine.transfer_sync(peer.name, hixl.READ, moved) == hixl.NOT_CONNECTED

    def test_failures_are_states(self, engine: hixl.Hixl) -> None:
        name = free_name()
        assert engine.connect_async(name, LONG_MS) == hixl.SUCCESS
        self.until(engine, name, AsyncConnectStatus.CONNECT_FAILED)
        assert engine.connect_async(name, 0) == hixl.PARAM_INVALID

    def test_connecting_again_succeeds(self, connected: hixl.Hixl, peer: Peer) -> None:
        assert connected.connect_async(peer.name, LONG_MS) == hixl.SUCCESS
        ends = CONNECTED, AsyncConnectStatus.CONNECT_FAILED
        state = next(item for item in self.states(connected, peer.name) if item in ends)
        assert state == CONNECTED
        assert connected.connect(peer.name) == hixl.ALREADY_CONNECTED

    def test_the_link_decides_about_a_peer_without_tasks(
        self, connected: hixl.Hixl, peer: Peer
    ) -> None:
        assert connected.get_async_connect_status(peer.name) == (hixl.SUCCESS, CONNECTED)
        assert connected.disconnect(peer.name, LONG_MS) == hixl.SUCCESS
        assert connected.get_async_connect_status(peer.name) == (hixl.SUCCESS, NOT_CONNECT)

    def test_tasks_of_one_engine_run_in_order(self, engine: hixl.Hixl, peer: Peer) -> None:
        for _ in range(5):
            assert engine.connect_async(peer.name, LONG_MS) == hixl.SUCCESS
            assert engine.disconnect_async(peer.name, LONG_MS) == hixl.SUCCESS
        assert engine.connect_async(peer.name, LONG_MS) == hixl.SUCCESS
        self.until(engine, peer.name, CONNECTED)
        assert engine.connect(peer.name) == hixl.ALREADY_CONNECTED

    def test_waiting_tasks_are_bounded(self, make_engine: MakeEngine, make_peer: MakePeer) -> None:
        config = '{"connect_pool.thread_num": "1", "connect_pool.task_queue_capacity": "2"}'
        engine = make_engine(**{hixl.OPTION_GLOBAL_RESOURCE_CONFIG: config})
        first, other = make_peer(), make_peer()
        first.stop()
        assert engine.connect_async(first.name, LONG_MS) == hixl.SUCCESS
        self.until(engine, first.name, AsyncConnectStatus.CONNECTING)
        assert engine.connect_async(other.name, LONG_MS) == hixl.SUCCESS
        assert engine.disconnect_async(other.name, LONG_MS) == hixl.SUCCESS
        assert engine.connect_async(other.name, LONG_MS) == hixl.RESOURCE_EXHAUSTED
        assert engine.get_async_connect_status(other.name)[1] == hixl.DISCONNECT_PENDING
        first.resume()
        self.until(engine, first.name, CONNECTED)
        self.until(engine, other.name, NOT_CONNECT)

    def test_finalize_ends_tasks(self, place: Place, peer: Peer) -> None:
        engine = hixl.Hixl()
        assert engine.initialize("127.0.0.1", place.options) == hixl.SUCCESS
        peer.stop()
        assert engine.connect_async(peer.name, 600_000) == hixl.SUCCESS
        assert engine.connect_async(peer.name, 600_000) == hixl.SUCCESS
        self.until(engine, peer.name, AsyncConnectStatus.CONNECT_PENDING)
        engine.finalize()
        peer.resume()


@pytest.mark.over_tcp
class TestMessages:
    def test_messages_arrive_once_in_order(self, connected: hixl.Hixl, peer: Peer) -> None:
        sent = [("", ""), ("name", "message"), ("é" * 512, "x" * 1024)]
        for name, text in sent:
            message = hixl.NotifyDesc(name, text)
            assert connected.send_notify(peer.name, message, LONG_MS) == hixl.SUCCESS
        take = """
            status, messages = engine.get_notifies()
            result = status, [(it.name, it.notify_msg) for it in messages]
        """
        assert peer.run(take) == (hixl.SUCCESS, sent)
        assert peer.run(take) == (hixl.SUCCESS, [])

    def test_text_that_is_not_unicode_is_refused_by_its_name(
        self, connected: hixl.Hixl, peer: Peer, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name, given in (("name", ("\ud800", "")), ("notify_msg", ("", "\ud800"))):
            message = hixl.NotifyDesc(*given)
            assert connected.send_notify(peer.name, message) == hixl.PARAM_INVALID
            assert f"{name}='\\ud800' is not Unicode text" in caplog.text

    def test_invalid_messages_are_refused(self, connected: hixl.Hixl, peer: Peer) -> None:
        long = hixl.NotifyDesc("é" * 513, "")
        assert connected.send_notify(peer.name, long) == hixl.PARAM_INVALID
        assert connected.send_notify(peer.name, hixl.NotifyDesc("", "x" * 1025)) == 103900
        message = hixl.NotifyDesc("a", "b")
        assert connected.send_notify(peer.name, message, 0) == hixl.PARAM_INVALID
        assert connected.send_notify(free_name(), message) == hixl.NOT_CONNECTED

    def test_at_most_4096_messages_wait(self, connected: hixl.Hixl, peer: Peer) -> None:
        message = hixl.NotifyDesc("a", "b")
        for _ in range(4096):
            assert connected.send_notify(peer.name, message, LONG_MS) == hixl.SUCCESS
        assert connected.send_notify(peer.name, message, LONG_MS) == hixl.RESOURCE_EXHAUSTED
        assert peer.run("result = len(engine.get_notifies()[1])") == 4096
        assert connected.send_notify(peer.name, message, LONG_MS) == hixl.SUCCESS


def test_a_connection_made_by_the_peer_is_not_this_ends(
    make_engine: MakeEngine, place: Place
) -> None:
    """A connection that has ended does not return when the peer connects with this end."""
    names = [free_name(), free_name()]
    owner, user = (make_engine(name) for name in names)
    theirs, mine = registered(owner, place), registered(user, place)
    moved = [TransferOpDesc(mine.address, theirs.address, 100)]
    assert user.connect(names[0], LONG_MS) == hixl.SUCCESS
    owner.finalize()
    assert owner.initialize(names[0]) == hixl.SUCCESS
    theirs = registered(owner, place)
    assert owner.connect(names[1], LONG_MS) == hixl.SUCCESS
    assert user.transfer_sync(names[0], hixl.READ, moved) == hixl.NOT_CONNECTED
    assert user.connect(names[0], LONG_MS) == hixl.SUCCESS
    assert owner.disconnect(names[1], LONG_MS) == hixl.SUCCESS
    moved = [TransferOpDesc(mine.address, theirs.address, 100)]
    assert user.transfer_sync(names[0], hixl.READ, moved, LONG_MS) == hixl.SUCCESS


def test_connecting_while_the_peer_disconnects(make_engine: MakeEngine) -> None:
    """In any order, an engine whose call has succeeded has a connection."""
    names = [free_name(), free_name()]
    owner, user = (make_engine(name) for name in names)
    message = hixl.NotifyDesc("a", "b")
    for _ in range(20):
        assert owner.connect(names[1], LONG_MS) == hixl.SUCCESS
        ended: list[int] = []
        thread = threading.Thread(
            target=lambda to: to.append(owner.disconnect(names[1], LONG_MS)), args=(ended,)
        )
        thread.start()
        connected = user.connect(names[0], LONG_MS)
        thread.join()
        assert (connected, ended) == (hixl.SUCCESS, [hixl.SUCCESS])
        # If the peer did not know it in time, the link has ended for both, and is made again.
        if user.send_notify(names[0], message, LONG_MS) == hixl.NOT_CONNECTED:
            assert user.connect(names[0], LONG_MS) == hixl.SUCCESS
        assert user.disconnect(names[0], LONG_MS) == hixl.SUCCESS
        owner.get_notifies()


def test_a_call_times_out_while_another_one_uses_the_engine(engine: hixl.Hixl) -> None:
    """The first call waits for an answer that does not come within the time of a test."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        first = threading.Thread(target=engine.connect, args=(name, 2**31 - 1))
        first.start()
        held = silent.accept()
        found: queue.Queue[int] = queue.Queue()
        for call in (engine.connect, engine.disconnect):
            behind = threading.Thread(
                target=lambda call: found.put(call(name, 100)), args=(call,), daemon=True
            )
            behind.start()
            assert found.get(timeout=30) in (hixl.TIMEOUT, hixl.NOT_CONNECTED)
        engine.finalize()
        first.join()
        held[0].close()


def test_a_link_made_by_a_restarted_peer_is_not_this_ends(
    make_engine: MakeEngine, place: Place
) -> None:
    """The peer has started again under its name, and connected."""
    names = free_name(), free_name()
    engine, before = make_engine(names[0]), make_engine(names[1])
    ours, theirs = (registered(value, place) for value in (engine, before))
    moved = [TransferOpDesc(ours.address, theirs.address, 4096)]
    assert engine.connect(names[1], LONG_MS) == hixl.SUCCESS
    before.finalize()
    now = make_engine(names[1])
    again = registered(now, place)
    assert now.connect(names[0], LONG_MS) == hixl.SUCCESS
    message = hixl.NotifyDesc("n", "")
    assert engine.transfer_sync(names[1], hixl.READ, moved) == hixl.NOT_CONNECTED
    assert engine.transfer_async(names[1], hixl.READ, moved)[0] == hixl.NOT_CONNECTED
    assert engine.send_notify(names[1], message) == hixl.NOT_CONNECTED
    assert engine.disconnect(names[1]) == hixl.NOT_CONNECTED
    assert engine.connect(names[1], LONG_MS) == hixl.SUCCESS
    moved = [TransferOpDesc(ours.address, again.address, 4096)]
    assert engine.transfer_sync(names[1], hixl.READ, moved, LONG_MS) == hixl.SUCCESS


def test_disconnecting_from_a_peer_that_reads_no_messages(make_engine: MakeEngine) -> None:
    names = free_name(), free_name()
    reader, sender = (make_engine(name) for name in names)
    assert reader.connect(names[1], 10_000) == hixl.SUCCESS
    assert sender.connect(names[0], 10_000) == hixl.SUCCESS
    count = 0
    while (status := sender.send_notify(names[0], hixl.NotifyDesc("n", str(count)))) == 0:
        count += 1
    assert status == hixl.RESOURCE_EXHAUSTED
    assert sender.disconnect(names[0]) == hixl.SUCCESS
    assert sender.disconnect(names[0]) == hixl.NOT_CONNECTED
    assert sender.send_notify(names[0], hixl.NotifyDesc("n", "")) == hixl.NOT_CONNECTED
    read = [int(notify.notify_msg) for notify in reader.get_notifies()[1]]
    assert read == [*range(count)]
    assert sender.connect(names[0], 10_000) == hixl.SUCCESS


def test_both_disconnect_while_one_of_them_moves_bytes(make_engine: MakeEngine) -> None:
    """Each leaves the link to the other engine, and the last one ends it."""
    names = free_name(), free_name()
    one, other = (make_engine(name) for name in names)
    assert one.connect(names[1], LONG_MS) == hixl.SUCCESS
    assert other.connect(names[0], LONG_MS) == hixl.SUCCESS
    (link,) = one.datadist._running().links.peers.values()
    transfer = threading.Event()  # anything with weak references
    link.begin(transfer)  # type: ignore[arg-type]
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(one.disconnect(names[1], LONG_MS)))
    thread.start()
    while one.send_notify(names[1], hixl.NotifyDesc("n", "")) == hixl.SUCCESS:
        pass  # until its call waits for the transfer
    assert other.disconnect(names[0], LONG_MS) == hixl.SUCCESS
    link.end(transfer)  # type: ignore[arg-type]
    thread.join()
    assert ended == [hixl.SUCCESS]
    assert not one.datadist.links()
