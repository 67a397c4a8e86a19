"""Notifications between engines of two processes, and their reading by a program."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import select
import selectors
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvplan import ClusterInfo, LlmDataDist, LLMException, Notification
from kvplan.control.notifying import WINDOW
from kvplan.engine.notifications import MAX_UNREAD_OF_ONE
from tests.datadist.conftest import MakeEngine, MakePeer
from tests.datadist.peer import Peer
from tests.support.held import Held
from tests.support.refusals import refused

WAIT_MS = 20_000  # only a hanging test reaches it

READ = """
def read(count):
    found = []
    while len(found) < count:
        assert datadist.notifications().wait(20_000)
        found += datadist.notifications()
    return [tuple(note) for note in found]
"""


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


@pytest.mark.over_tcp
def test_a_notification_arrives_as_it_was_sent(user: LlmDataDist, peer: Peer) -> None:
    peer.run(READ)
    for data in (b"x", bytes(range(256)) * 16):
        user.notify(1, data)
        assert peer.run("result = read(1)") == [(2, data)]


def test_a_notification_has_arrived_when_the_sender_returns(user: LlmDataDist, peer: Peer) -> None:
    user.notify(1, b"there")
    assert peer.run("result = [tuple(got) for got in datadist.notifications()]") == [(2, b"there")]


def test_the_accepting_end_sends_notifications(user: LlmDataDist, peer: Peer) -> None:
    arrived = user.notifications()
    assert not is_readable(arrived.fileno())
    peer.run("for data in (b'first', b'second'): datadist.notify(2, data)")
    assert is_readable(arrived.fileno())
    assert len(arrived) == 2
    assert next(iter(arrived)) == Notification(1, b"first")
    assert is_readable(arrived.fileno())
    assert list(arrived) == [(1, b"second")]
    assert not is_readable(arrived.fileno())
    assert list(arrived) == []
    assert user.notifications() is arrived


def test_the_accepting_end_may_notify_as_soon_as_it_is_linked(
    make_peer: MakePeer, make_engine: Callable[..., LlmDataDist]
) -> None:
    """The accepting end is linked before the other end has read the confirmation."""
    peer = make_peer()
    peer.send(
        """
        while True:
            try:
                datadist.notify(2, b"at once")
            except LLMException as error:
                assert error.status_code is LLMStatusCode.LLM_NOT_YET_LINK, error
            else:
                break
        result = None
        """
    )
    user = make_engine(2)
    user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
    assert user.notifications().wait(WAIT_MS)
    assert list(user.notifications()) == [(1, b"at once")]
    peer.answer()


def test_waiting_ends_with_an_arrival_or_in_time(user: LlmDataDist, peer: Peer) -> None:
    arrived = user.notifications()
    assert arrived.wait(0) is False
    assert arrived.wait(1) is False
    peer.send("datadist.notify(2, b'now')")
    assert arrived.wait(float("inf")) is True
    for forever in (None, 2.0**31, float("inf")):
        assert arrived.wait(forever) is True  # the notification is still unread
    peer.answer()
    with pytest.raises(ValueError, match="timeout_ms=-1 must be >= 0"):
        arrived.wait(-1)


def test_async_for_yields_all_and_ends_with_the_engine(user: LlmDataDist, peer: Peer) -> None:
    async def read() -> list[bytes]:
        found = []
        async for _, data in user.notifications():
            found.append(data)
            if len(found) == 3:
                threading.Thread(target=user.finalize).start()
        return found

    peer.send("for i in range(3): datadist.notify(2, b'%d' % i)")
    assert asyncio.run(asyncio.wait_for(read(), WAIT_MS / 1000)) == [b"0", b"1", b"2"]
    peer.answer()


def test_two_tasks_may_read_and_a_cancelled_one_loses_nothing(
    user: LlmDataDist, peer: Peer
) -> None:
    async def read(found: list[bytes], count: int) -> None:
        async for _, data in user.notifications():
            found.append(data)
            if len(found) == count:
                return

    async def run() -> list[bytes]:
        found: list[bytes] = []
        given_up = asyncio.create_task(read([], 1))
        reading = asyncio.create_task(read(found, 2))
        await asyncio.sleep(0)  # both wait
        given_up.cancel()
        await asyncio.wait([given_up])
        await asyncio.to_thread(peer.run, "for i in range(2): datadist.notify(2, b'%d' % i)")
        await asyncio.wait_for(reading, WAIT_MS / 1000)
        return found

    assert asyncio.run(run()) == [b"0", b"1"]


class CountingSelector(selectors.DefaultSelector):
    """A selector that counts the iterations of a loop."""

    rounds = 0

    def select(self, timeout: float | None = None) -> Any:
        self.rounds += 1
        return super().select(timeout)


def test_a_loop_sleeps_while_its_reader_handles_one_of_several(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.run("for i in range(2): datadist.notify(2, b'%d' % i)")
    selector = CountingSelector()

    async def read() -> int:
        async for _ in user.notifications():
            before = selector.rounds
            await asyncio.to_thread(peer.run, "sum(range(1_000_000))")
            return selector.rounds - before
        return -1

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        assert 0 < runner.run(read()) < 20


def test_a_callback_that_exits_ends_neither_itself_nor_another(
    user: LlmDataDist, peer: Peer
) -> None:
    seen: queue.Queue[Notification] = queue.Queue()
    user.on_notification(lambda _: sys.exit("not today"))
    user.on_notification(seen.put)
    peer.run("for i in range(2): datadist.notify(2, b'%d' % i)")
    assert [seen.get(timeout=20).data for _ in range(2)] == [b"0", b"1"]


def test_callbacks_leave_no_descriptor_and_no_thread(user: LlmDataDist) -> None:
    held = Held.now()
    for _ in range(3):
        user.on_notification(print)()
    held.check_new_threads(set())
    held.check_nothing_new()


def test_a_callback_gets_each_notification_and_stops_no_other(
    user: LlmDataDist, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Notification) -> None:
        raise RuntimeError("not today")

    seen: queue.Queue[Notification] = queue.Queue()
    remove_failing = user.on_notification(fail)
    remove = user.on_notification(seen.put)
    peer.run("for i in range(3): datadist.notify(2, b'%d' % i)")
    assert [seen.get(timeout=20).data for _ in range(3)] == [b"0", b"1", b"2"]
    assert "not today" in caplog.text
    remove()
    remove_failing()
    remove()
    peer.run("datadist.notify(2, b'for the iterator')")
    assert user.notifications().wait(WAIT_MS)
    assert list(user.notifications()) == [(1, b"for the iterator")]
    assert seen.empty()
    with pytest.raises(TypeError, match="must be callable"):
        user.on_notification(3)  # type: ignore[arg-type]


def test_order_is_kept_for_each_thread_that_sends(user: LlmDataDist, peer: Peer) -> None:
    count, threads = 200, 4
    peer.run(READ)
    peer.send("result = read(count)", count=count * threads)

    def send(name: int) -> None:
        for i in range(count):
            user.notify(1, b"%d %d" % (name, i))

    senders = [threading.Thread(target=send, args=(index,)) for index in range(threads)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    found = [data.split() for _, data in peer.answer()]
    for name in range(threads):
        assert [int(i) for who, i in found if int(who) == name] == list(range(count))


def test_notifications_are_refused_when_the_queue_is_full(user: LlmDataDist, peer: Peer) -> None:
    for i in range(MAX_UNREAD_OF_ONE):
        user.notify(1, b"%d" % i)
    with refused("LLM_LINK_BUSY", f"{MAX_UNREAD_OF_ONE} notifications wait .* cluster 2; at most"):
        user.notify(1, b"one too many")
    peer.run(READ)
    first = peer.run("it = iter(datadist.notifications()); result = next(it).data")
    assert first == b"0"
    user.notify(1, b"there is room again")
    found = peer.run("result = read(count)", count=MAX_UNREAD_OF_ONE)
    assert [item for _, item in found[:-1]] == [b"%d" % i for i in range(1, MAX_UNREAD_OF_ONE)]
    assert found[-1] == (2, b"there is room again")


@pytest.mark.over_tcp
def test_a_coroutine_notifies_in_order_while_its_loop_goes_on(
    make_engine: MakeEngine, peer: Peer
) -> None:
    # Another process that asks for the status would start a thread.
    user = make_engine(2, **{"kvplan.status_socket": "0"})
    user.link_clusters([ClusterInfo(1, peer.address)]).raise_for_status()
    peer.run(READ)
    peer.stop()
    count, threads = 400, set(threading.enumerate())  # more than fit into a peer's socket

    async def send() -> int:
        tasks = [asyncio.create_task(user.notify_async(1, b"%d" % i)) for i in range(count)]
        await asyncio.sleep(0)  # all have begun
        waiting = sum(not task.done() for task in tasks)
        late = asyncio.create_task(user.notify_async(1, b"late"))
        await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert set(threading.enumerate()) <= threads
        peer.resume()
        await asyncio.gather(*tasks)
        return waiting

    assert asyncio.run(send()) > 0
    user.notify(1, b"last")
    found = [data for _, data in peer.run("result = read(count)", count=count + 1)]
    assert [data for data in found if data != b"late"] == [b"%d" % i for i in range(count)] + [
        b"last"
    ]
    assert user.metrics()["in_flight"] == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_later_coroutine_does_not_overtake_a_message_that_is_not_sent_yet(
    user: LlmDataDist, peer: Peer, waits: bool
) -> None:
    """The caller of the first waits for its answer, or leaves that to the control thread."""
    peer.run(READ)
    for _ in range(1 + WINDOW):  # the first by a message, then as many as fit into the socket
        user.notify(1, b"-")
    links, go_on = user._engine.links, threading.Event()  # type: ignore[union-attr]

    async def send() -> None:
        calls = []
        if waits:
            calls.append(asyncio.create_task(user.notify_async(1, b"first")))
            await asyncio.sleep(0)  # it has begun, and waits for the control thread
        else:
            links.get(1).notify_soon(b"first")
        peer.run("read(count)", count=1 + WINDOW)  # now the socket has room again
        calls.append(asyncio.create_task(user.notify_async(1, b"second")))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*calls)

    links._control.call_soon(go_on.wait, WAIT_MS / 1000)
    asyncio.run(send())
    assert [data for _, data in peer.run("result = read(2)")] == [b"first", b"second"]


def test_a_coroutine_gets_the_reason_why_it_could_not_notify(user: LlmDataDist, peer: Peer) -> None:
    def refuse(status: str, text: str | None, cluster_id: int = 1, **how: Any) -> None:
        with refused(status, text):
            asyncio.run(user.notify_async(cluster_id, b"x", **how))

    refuse("LLM_PARAM_INVALID", "is this engine's own", 2)
    refuse("LLM_NOT_YET_LINK", None, 7)
    peer.stop()
    refuse("LLM_TIMEOUT", "not answered within 50 ms; the notification may", timeout_ms=50)
    peer.kill()
    refuse("LLM_LINK_FAILED", None)
    with pytest.raises(ValueError, match="timeout_ms=0"):
        asyncio.run(user.notify_async(1, b"x", timeout_ms=0))


def test_invalid_notifications_are_refused(user: LlmDataDist, peer: Peer) -> None:
    with refused("LLM_PARAM_INVALID", r"data has 0 bytes; allowed are \[1, 4096\]"):
        user.notify(1, b"")
    with refused("LLM_PARAM_INVALID", "data has 4097 bytes"):
        user.notify(1, bytes(4097))
    with refused("LLM_PARAM_INVALID", "is this engine's own"):
        user.notify(2, b"me")
    with refused("LLM_NOT_YET_LINK"):
        user.notify(7, b"nobody")
    for wrong in ("text", bytearray(b"x"), None, 5):
        with pytest.raises(TypeError, match="data="):
            user.notify(1, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cluster_id="):
        user.notify("1", b"x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_ms=0"):
        user.notify(1, b"x", timeout_ms=0)
    user.unlink_clusters([1], 5000).raise_for_status()
    with refused("LLM_NOT_YET_LINK"):
        user.notify(1, b"x")


def test_arrived_notifications_outlive_their_link_and_engine(user: LlmDataDist, peer: Peer) -> None:
    arrived = user.notifications()
    peer.run("for i in range(3): datadist.notify(2, b'%d' % i)")
    peer.kill()
    reading = iter(arrived)
    assert next(reading) == (1, b"0")
    user.finalize()
    assert arrived.closed
    assert is_readable(arrived.fileno())
    assert arrived.wait(None) is True
    assert [item.data for item in arrived] == [b"1", b"2"]
    assert arrived.wait(None) is False
    assert is_readable(arrived.fileno())  # a poll sees the end
    with refused("LLM_ENGINE_FINALIZED"):
        user.notifications()


def test_the_sender_learns_that_the_peer_is_dead(user: LlmDataDist, peer: Peer) -> None:
    peer.kill()
    with refused("LLM_LINK_FAILED"):
        user.notify(1, b"x")


def test_a_peer_that_is_stopped_or_dies_fails_unacknowledged_notifications(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.stop()
    with refused("LLM_TIMEOUT", "not answered within 50 ms"):
        user.notify(1, b"x", timeout_ms=50)
    outcomes: queue.Queue[Any] = queue.Queue()
    begun = threading.Barrier(11)

    def send() -> None:
        begun.wait()
        try:
            user.notify(1, b"y", timeout_ms=WAIT_MS)
        except LLMException as error:
            outcomes.put(error.status_code.name)

    for _ in range(10):
        threading.Thread(target=send).start()
    begun.wait()
    peer.kill()
    assert [outcomes.get(timeout=20) for _ in range(10)] == ["LLM_LINK_FAILED"] * 10


def test_a_stopped_peer_gets_timed_out_notifications_once_and_in_order(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.stop()
    with refused("LLM_TIMEOUT"):
        user.notify(1, b"late", timeout_ms=50)
    peer.resume()
    user.notify(1, b"after")
    found = peer.run("result = [note.data for note in datadist.notifications()]")
    assert found == [b"late", b"after"]


def test_notifications_are_refused_in_a_forked_child(user: LlmDataDist, peer: Peer) -> None:
    arrived = user.notifications()
    peer.run("datadist.notify(2, b'for the parent')")
    child = os.fork()
    if not child:
        refusals = 0
        for call in (lambda: list(arrived), arrived.fileno, arrived.wait, user.notifications):
            try:
                call()
            except LLMException:
                refusals += 1
        os._exit(refusals)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 4
    assert list(arrived) == [(1, b"for the parent")]


def test_the_descriptor_is_closed_with_its_object(make_engine: Callable[..., LlmDataDist]) -> None:
    engine = make_engine(2)
    arrived = engine.notifications()
    fd = arrived.fileno()
    engine.finalize()
    assert os.fstat(fd)
    del arrived
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.slow
def test_more_than_the_unread_limit_arrive_in_order(user: LlmDataDist, peer: Peer) -> None:
    peer.run(READ)
    many = MAX_UNREAD_OF_ONE + 1000
    peer.send(f"result = read({many})")
    for i in range(many):
        user.notify(1, b"%d" % i)
    assert peer.answer() == [(2, b"%d" % i) for i in range(many)]
