"""Direct notifications: senders of any kind do not exceed the room of the queue."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from random import Random

import pytest

from kvplan.control.notifying import WINDOW
from kvplan.engine.notifications import (
    MAX_UNREAD,
    MAX_UNREAD_OF_ONE,
    Notification,
    NotificationCallbacks,
    Notifications,
)
from kvplan.engine.queues import PollableQueue
from tests.support import lone_user
from tests.support.lines import interrupted
from tests.support.refusals import refused


class Sender:
    """A sender that sends as much as the kernel takes."""

    def __init__(self, arrived: Notifications, cluster_id: int) -> None:
        self.theirs, self._ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.receiving = self.theirs
        arrived.attach(cluster_id, self.theirs)
        self.sent = 0

    def flood(self) -> int:
        """Fill the socket, and return the number of packets."""
        before = self.sent
        while True:
            try:
                self._ours.send(b"%d" % self.sent)
            except BlockingIOError:
                return self.sent - before
            self.sent += 1

    def close(self) -> None:
        self._ours.close()


@pytest.fixture
def arrived() -> Iterator[Notifications]:
    arrived = Notifications()
    yield arrived
    arrived.close()


def is_readable(arrived: Notifications) -> bool:
    return bool(select.select([arrived], [], [], 0)[0])


def test_a_sender_that_ignores_the_window_gets_no_more_room(arrived: Notifications) -> None:
    flooding, other = Sender(arrived, 1), Sender(arrived, 2)
    while flooding.flood():
        assert len(arrived) <= MAX_UNREAD_OF_ONE
    assert len(arrived) == MAX_UNREAD_OF_ONE
    with refused("LLM_LINK_BUSY", "4096 notifications wait .* 4096 of them from cluster 1"):
        arrived.deliver(1, b"x", flooding.receiving)
    assert other.flood() > 0
    found = list(arrived)
    assert [
        int(notification.data) for notification in found if notification.cluster_id == 1
    ] == list(range(flooding.sent))
    assert [
        int(notification.data) for notification in found if notification.cluster_id == 2
    ] == list(range(other.sent))
    assert not is_readable(arrived)
    for value in (flooding, other):
        value.close()


@pytest.mark.parametrize("num_peers", [1, MAX_UNREAD // MAX_UNREAD_OF_ONE + 1])
def test_a_sender_learns_the_remaining_room(arrived: Notifications, num_peers: int) -> None:
    """The room never exceeds the limit of one sender, nor the limit of all."""
    most = min(MAX_UNREAD, num_peers * MAX_UNREAD_OF_ONE)
    for number in range(most):
        peer = number % num_peers
        room = min(MAX_UNREAD_OF_ONE - number // num_peers, MAX_UNREAD - number) - 1
        assert arrived.deliver(peer, b"x", None) == min(WINDOW, room)
    with refused("LLM_LINK_BUSY"):
        arrived.deliver(0, b"x", None)


def test_all_senders_together_have_a_limit_too(arrived: Notifications) -> None:
    senders = [Sender(arrived, index) for index in range(MAX_UNREAD // MAX_UNREAD_OF_ONE + 1)]
    while sum([sender.flood() for sender in senders]):
        assert len(arrived) <= MAX_UNREAD
    assert len(arrived) == MAX_UNREAD
    with refused("LLM_LINK_BUSY", f"{MAX_UNREAD} notifications wait .* at most {MAX_UNREAD} can"):
        arrived.deliver(99, b"x", None)
    found = list(arrived)
    assert len(found) == sum(sender.sent for sender in senders)
    for sender in senders:
        sender.close()


def test_a_peer_whose_notifications_are_read_leaves_nothing_behind(arrived: Notifications) -> None:
    tracemalloc.start()
    try:
        for cluster_id in range(3000):
            arrived.deliver(cluster_id, b"x", None)
            assert len(list(arrived)) == 1
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10 * 3000  # a deque per peer takes 800


def test_messages_are_queued_after_direct_notifications(arrived: Notifications) -> None:
    sender = Sender(arrived, 1)
    count = sender.flood()
    arrived.deliver(1, b"message", sender.receiving)
    assert [item.data for item in arrived] == [*(b"%d" % i for i in range(count)), b"message"]
    sender.close()


def test_an_ended_connection_does_not_stay_readable(arrived: Notifications) -> None:
    sender = Sender(arrived, 1)
    count = sender.flood()
    sender.close()
    assert len(list(arrived)) == count
    assert not is_readable(arrived)
    arrived.detach(sender.receiving)
    arrived.detach(sender.receiving)
    assert list(arrived) == []


def test_unread_packets_are_kept_when_the_link_ends(arrived: Notifications) -> None:
    sender = Sender(arrived, 1)
    count = sender.flood()
    arrived.detach(sender.receiving)
    assert is_readable(arrived)
    with pytest.raises(OSError, match="Broken pipe"):
        sender.flood()
    arrived.close()
    assert list(arrived) == [Notification(1, b"%d" % i) for i in range(count)]
    sender.close()


def test_unread_packets_are_kept_when_the_queue_is_full(arrived: Notifications) -> None:
    """The peer knows that they have arrived."""
    sender = Sender(arrived, 1)
    while sender.flood():
        assert len(arrived) <= MAX_UNREAD_OF_ONE
    assert sender.sent > len(arrived) == MAX_UNREAD_OF_ONE
    arrived.detach(sender.receiving)
    assert [int(item.data) for item in arrived] == list(range(sender.sent))
    sender.close()


def test_a_forked_child_takes_nothing_from_its_parent(arrived: Notifications) -> None:
    sender = Sender(arrived, 1)
    count = sender.flood()
    if not (child := os.fork()):
        os._exit(len(arrived))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(arrived) == count
    sender.close()


@pytest.mark.parametrize("seed", range(10))
def test_each_callback_gets_the_notifications_of_its_time(
    arrived: Notifications, seed: int
) -> None:
    """Callbacks come and go in any order. Without one, notifications wait for the next."""
    random, callbacks = Random(seed), NotificationCallbacks(arrived, "kvplan-callbacks")
    there: list[tuple[queue.Queue[Notification], Callable[[], None]]] = []
    waiting: list[Notification] = []
    for number in range(60):
        choice = random.choice(("add", "remove", "arrive", "arrive"))
        if choice == "add":
            seen: queue.Queue[Notification] = queue.Queue()
            there.append((seen, callbacks.add(seen.put)))
            assert [seen.get(timeout=30) for _ in waiting] == waiting
            waiting.clear()
        elif choice == "remove" and there:
            seen, remove = there.pop(random.randrange(len(there)))
            remove()
            remove()
            assert seen.empty()
        elif choice == "arrive":
            notification = Notification(1, b"%d" % number)
            arrived.deliver(*notification, None)
            if there:
                assert [item.get(timeout=30) for item, _ in there] == [notification] * len(there)
            else:
                waiting.append(notification)
    for _, remove in there:
        remove()
    assert list(arrived) == waiting


def test_a_callback_whose_thread_cannot_start_is_not_called_later() -> None:
    program = """
        from queue import SimpleQueue
        from kvplan import LLMException
        from kvplan.engine.notifications import NotificationCallbacks, Notifications
        from tests.support.lone_user import allow_threads, become

        become()
        arrived, called = Notifications(), SimpleQueue()
        callbacks = NotificationCallbacks(arrived, "kvplan-callbacks")
        for name, room in (("refused", 1), ("added", None)):
            allow_threads(room)
            try:
                callbacks.add(lambda _, name=name: called.put(name))
            except LLMException as error:
                assert room == 1 and error.status_code.name == "LLM_OUT_OF_MEMORY", error
        arrived.deliver(1, b"", None)
        assert called.get(timeout=20) == "added"
    """
    lone_user.run(program)


def test_a_loop_reads_what_arrives_at_any_step_before_the_end() -> None:
    for at in count(1):
        arrived: PollableQueue[str] = PollableQueue()
        arrived.put("first")

        def end(arrived: PollableQueue[str] = arrived) -> None:
            if not arrived.closed:
                arrived.put("last")
                arrived.close()

        async def read(
            arrived: PollableQueue[str] = arrived, end: Callable[[], None] = end
        ) -> list[str]:
            asyncio.get_running_loop().call_soon(end)  # if it has not come to that line before
            return [item async for item in arrived]

        found: list[str] = []
        reading = partial(lambda read, found: found.extend(asyncio.run(read())), read, found)
        came = interrupted(at, reading, end, {PollableQueue.__aiter__.__code__})
        assert found == ["first", "last"]
        if not came:
            break
    assert at > 4
