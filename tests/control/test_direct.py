"""The direct connection of two ends on one host: its owner, and the arrival of packets."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from random import Random
from typing import Any

import pytest

from kvnative._packets import LARGEST, take_packets
from kvplan.control.messages import Notified, Notify
from kvplan.control.notifying import WINDOW, DirectListener, DirectSender, Notifier, connect
from kvplan.status import busy
from tests.support.held import ended_tasks
from tests.support.refusals import refused

UNPRIVILEGED = 65534
DEADLINE_S = 30  # reached only by a test that waits for a socket in vain
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def ends() -> Iterator[tuple[DirectSender, socket.socket]]:
    listener = DirectListener()
    receiver = connect(listener.secret)
    sender = listener.accept()
    listener.close()
    assert sender is not None
    assert receiver is not None
    with receiver:
        yield sender, receiver


def taken(receiver: socket.socket, most: int = 10_000) -> tuple[list[bytes], bool]:
    """Return the packets that have arrived, and whether more may come."""
    queue: deque[tuple[int, bytes]] = deque()
    unread: deque[None] = deque()
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        goes_on = take_packets(receiver, most, 7, queue, unread, eventfd)
        assert bool(select.select([eventfd], [], [], 0)[0]) is bool(queue)
    finally:
        os.close(eventfd)
    assert {sender for sender, _ in queue} <= {7}
    assert len(unread) == len(queue)
    return [data for _, data in queue], goes_on


def test_packets_are_kept_whole_and_in_order(ends: tuple[DirectSender, socket.socket]) -> None:
    sender, receiver = ends
    packets = [b"x", bytes(LARGEST), b"last"]
    assert [sender.send(packet) for packet in packets] == [True] * 3
    assert taken(receiver, 0) == ([], True)
    assert taken(receiver, 1) == (packets[:1], True)
    assert taken(receiver) == (packets[1:], True)
    assert taken(receiver) == ([], True)


def test_several_readers_keep_the_order(ends: tuple[DirectSender, socket.socket]) -> None:
    sender, receiver = ends
    queue: deque[tuple[int, bytes]] = deque()
    unread: deque[None] = deque()
    count, readers = 5_000, 4
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)

    def read() -> None:
        while len(queue) < count:
            assert take_packets(receiver, 50, 7, queue, unread, eventfd)

    try:
        with ThreadPoolExecutor(readers) as threads:
            reading = [threads.submit(read) for _ in range(readers)]
            for number in range(count):
                while not sender.send(number.to_bytes(4)):
                    pass  # until the readers have taken packets that fill the window
            for task in reading:
                task.result()
    finally:
        os.close(eventfd)
    assert [int.from_bytes(data) for _, data in queue] == [*range(count)]
    assert len(unread) == count


def test_garbage_collection_in_a_reader_lets_no_other_reader_in(
    ends: tuple[DirectSender, socket.socket],
) -> None:
    """A finalizer may read itself, or let another thread run that reads."""
    sender, receiver = ends
    packets = [b"%d" % i for i in range(WINDOW)]
    assert [sender.send(packet) for packet in packets] == [True] * WINDOW
    queue: deque[tuple[int, bytes]] = deque()
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    calls = 0

    def read(phase: str, _: object) -> None:
        nonlocal calls
        calls += 1
        take_packets(receiver, 1, 7, queue, deque(), eventfd)

    thresholds = gc.get_threshold()
    gc.callbacks.append(read)
    gc.set_threshold(1)
    try:
        while len(queue) < WINDOW:
            take_packets(receiver, 5, 7, queue, deque(), eventfd)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(read)
        os.close(eventfd)
    assert calls > 0
    assert [data for _, data in queue] == packets


def test_no_more_packets_than_the_window_are_unread(
    ends: tuple[DirectSender, socket.socket],
) -> None:
    sender, receiver = ends
    assert [sender.send(b"%d" % i) for i in range(WINDOW)] == [True] * WINDOW
    assert sender.send(b"late") is False
    assert taken(receiver)[0] == [b"%d" % i for i in range(WINDOW)]
    assert sender.send(b"next") is True
    sender.grant(0)  # the receiver's queue is full
    taken(receiver)
    assert sender.send(b"late") is False
    sender.grant(1)
    assert sender.send(b"again") is True
    assert taken(receiver)[0] == [b"again"]


def test_a_packet_without_room_in_the_kernel_was_not_sent(
    ends: tuple[DirectSender, socket.socket],
) -> None:
    sender, receiver = ends
    large = [bytes((i,)) * LARGEST for i in range(WINDOW)]
    count = [sender.send(packet) for packet in large].index(False)
    assert taken(receiver, 1)[0] == large[:1]
    assert sender.send(b"while others lie there") is False
    assert taken(receiver)[0] == large[1:count]
    assert sender.send(b"again") is True


def test_a_receiver_that_ends_has_all_that_was_accepted(
    ends: tuple[DirectSender, socket.socket],
) -> None:
    sender, receiver = ends
    assert sender.send(b"before") is True
    receiver.shutdown(socket.SHUT_RD)
    assert sender.send(b"after") is False
    assert taken(receiver)[0] == [b"before"]
    assert taken(receiver) == ([], False)
    receiver.close()
    assert taken(receiver) == ([], False)


def test_a_sender_that_ends_has_sent_all_accepted_packets(
    ends: tuple[DirectSender, socket.socket],
) -> None:
    sender, receiver = ends
    assert sender.send(b"before") is True
    sender.end()
    assert sender.send(b"after") is False
    sender.end()
    assert taken(receiver) == ([b"before"], False)


def test_a_packet_that_is_too_large_ends_the_connection() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for packet in (b"good", bytes(LARGEST + 1), b"behind"):
            theirs.send(packet)
        assert taken(ours) == ([b"good"], False)


def test_a_process_without_the_secret_is_not_taken_for_the_receiver() -> None:
    listener = DirectListener()
    name = listener._listener.getsockname()
    others = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(4)]
    for other in others:
        other.connect(name)
    others[1].send(bytes(16))  # the others send nothing
    receiver = connect(listener.secret)
    assert connect(listener.secret) is None  # the queue was full
    sender = listener.accept()
    assert sender is not None
    assert sender.send(b"for the receiver")
    assert receiver is not None
    assert taken(receiver)[0] == [b"for the receiver"]
    for other in others:
        with other:
            assert other.recv(1) == b""
    receiver.close()
    listener.close()


@pytest.fixture
def default_timeout() -> Iterator[None]:
    """A default timeout that a program may set for its own new sockets."""
    socket.setdefaulttimeout(2 * DEADLINE_S)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("default_timeout")
def test_a_default_timeout_of_sockets_does_not_delay_notifications(
    ends: tuple[DirectSender, socket.socket],
) -> None:
    sender, receiver = ends
    began = time.monotonic()
    while sender.send(bytes(LARGEST)):
        pass
    taken(receiver)
    listener = DirectListener()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(listener._listener.getsockname())
        assert listener.accept() is None
    listener.close()
    assert time.monotonic() - began < DEADLINE_S


def test_an_offer_without_a_receiver_makes_no_connection() -> None:
    listener = DirectListener()
    assert listener.accept() is None
    listener.close()
    assert connect(listener.secret) is None
    assert connect(bytes(16)) is None


@needs_root
def test_another_user_that_knows_the_name_cannot_notify() -> None:
    """All users can see the name. A process that takes the free name is not the peer."""
    listener = DirectListener()
    name = listener._listener.getsockname()
    listener.close()
    ready, done = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.setuid(UNPRIVILEGED)
        impostor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        impostor.bind(name)
        impostor.listen()
        os.write(ready[1], b"x")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    assert os.read(ready[0], 1) == b"x"
    assert connect(listener.secret) is None
    for fd in (*ready, *done):
        os.close(fd)
    os.waitpid(child, 0)


class Receiving:
    """The other end of a control connection, which takes messages on demand."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Task[None]] = []
        self.wire: deque[tuple[Notify, asyncio.Future[Notified]]] = deque()
        self.arrived: list[int] = []
        self.read: list[socket.socket | None] = []  # direct connections to read before messages
        self.is_full = False
        self.windows: Callable[[], int] = lambda: WINDOW
        self._direct: list[socket.socket] = []
        self._notifier = Notifier(1)

    async def typed_request(self, message: Notify, *_: object) -> Notified:
        answer = asyncio.get_running_loop().create_future()
        self.wire.append((message, answer))
        return await answer

    def take(self) -> None:
        message, answer = self.wire.popleft()
        reply = self._notifier.receive(message, self)
        if not answer.done():
            answer.set_result(reply)

    def refuse(self) -> None:
        """Answer that the queue is full."""
        _, answer = self.wire.popleft()
        if not answer.done():
            answer.set_exception(busy("the queue is full"))

    def deliver(self, _: int, data: bytes, direct: socket.socket | None) -> int:
        self.read.append(direct)
        if direct is not None:
            self.arrived += map(int, taken(direct)[0])
        self.arrived.append(int(data))
        return self.windows()

    def attach(self, _: int, direct: socket.socket) -> None:
        if self.is_full:
            raise OSError("no room to watch it")
        self._direct.append(direct)

    def detach(self, direct: socket.socket) -> None:
        self.arrived += map(int, taken(direct)[0])
        direct.close()

    def end(self) -> None:
        self._notifier.end(self)


def test_a_direct_connection_without_room_is_closed_and_forgotten() -> None:
    """The earlier connection is forgotten, too: another file may have its descriptor now."""
    inbox, notifier = Receiving(), Notifier(1)
    listeners = [DirectListener() for _ in range(2)]
    with closing(listeners[0]), closing(listeners[1]):
        notifier.receive(Notify(b"1", listeners[0].secret), inbox)
        (first,) = inbox._direct
        inbox.is_full = True
        notifier.receive(Notify(b"2", listeners[1].secret), inbox)
        assert first.fileno() == -1
        sender = listeners[1].accept()
        assert sender is not None
        assert not sender.send(b"the other end is closed")
        notifier.receive(Notify(b"3"), inbox)
        notifier.end(inbox)
    assert inbox.arrived == [1, 2, 3]
    assert inbox.read == [None, first, None]


async def sent(sender: Notifier, receiving: Receiving) -> Notify:
    """Send a message, whose answer is missing yet, and return it."""
    channel: Any = receiving
    number = len(receiving.wire)
    receiving.calls.append(asyncio.create_task(sender.send(channel, b"1", 60)))
    while len(receiving.wire) == number:
        await asyncio.sleep(0)
    return receiving.wire[-1][0]


def test_the_direct_connection_is_offered_until_an_offer_was_answered() -> None:
    async def run() -> None:
        sender, receiving = Notifier(2), Receiving()
        for _ in range(2):
            assert (await sent(sender, receiving)).direct is not None
            receiving.wire.clear()  # lost, and its caller stops waiting
            receiving.calls.pop().cancel()
            await asyncio.sleep(0)
            assert not sender.send_directly(b"2")
        assert (await sent(sender, receiving)).direct is not None
        receiving.take()
        await receiving.calls.pop()
        assert sender.send_directly(b"3")
        assert (await sent(sender, receiving)).direct is None
        assert not sender.send_directly(b"4")  # it would overtake the message
        receiving.refuse()
        with refused("LLM_LINK_BUSY", "the queue is full"):
            await receiving.calls.pop()
        assert not sender.send_directly(b"5")  # the queue is full
        await sent(sender, receiving)
        receiving.take()
        await receiving.calls.pop()
        assert sender.send_directly(b"6")
        direct = sender._sending  # as a thread that is about to send has it
        assert direct is not None
        sender.end(None)
        assert not sender.send_directly(b"7")
        assert not direct.send(b"8")
        del direct  # `refused` keeps the traceback, and so this frame and the connection
        assert (await sent(sender, receiving)).direct is None
        receiving.calls.pop().cancel()
        receiving.end()
        assert receiving.arrived == [1, 3, 1, 6]

    asyncio.run(run())


def test_notifications_in_the_background_leave_nothing() -> None:
    async def run() -> int:
        sender, receiving = Notifier(2), Receiving()
        channel: Any = receiving
        before = ended_tasks()
        for _ in range(50):
            sender.send_later(sender.defer(), lambda: channel, b"1", 60)
            async with asyncio.timeout(DEADLINE_S):
                while not receiving.wire:
                    await asyncio.sleep(0)
            receiving.take()
        await sent(sender, receiving)
        receiving.take()
        async with asyncio.timeout(DEADLINE_S):
            await receiving.calls.pop()  # after all earlier ones
        sender.end(None)
        receiving.end()
        assert receiving.arrived == [1] * 51
        return ended_tasks() - before

    assert asyncio.run(run()) < 25


@pytest.mark.parametrize("seed", range(8))
def test_notifications_arrive_in_the_order_of_the_calls(seed: int) -> None:
    """The order holds for each way, even if callers have stopped waiting, or the queue is full."""
    random = Random(seed)

    async def walk() -> None:
        sender, receiving = Notifier(2), Receiving()
        receiving.windows = lambda: random.choice((0, 1, 5))
        channel: Any = receiving
        calls: list[asyncio.Task[None]] = []
        num_direct = 0
        for number in range(400):
            choice = random.choice(("call", "call", "take", "refuse", "give up"))
            if number < 2:  # its answer makes the direct connection
                choice = ("call", "take")[number]
            if choice == "call" and sender.send_directly(b"%d" % number):
                num_direct += 1
            elif choice == "call":
                calls.append(asyncio.create_task(sender.send(channel, b"%d" % number, 60)))
            elif choice == "take" and receiving.wire:
                receiving.take()
            elif choice == "refuse" and receiving.wire:
                receiving.refuse()
            elif choice == "give up" and calls:
                calls.pop(random.randrange(len(calls))).cancel()
            for _ in range(3):  # enough iterations until a call waits for an answer, or has one
                await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        while receiving.wire:
            receiving.take()
        sender.end(None)
        receiving.end()
        assert receiving.arrived == sorted({*receiving.arrived})
        assert 0 < num_direct < len(receiving.arrived)

    asyncio.run(walk())


def test_about_50_packets_of_4_kib_fit(ends: tuple[DirectSender, socket.socket]) -> None:
    """Whatever limit the system has for new sockets; the kernel doubles it for its own use."""
    own = ends[0]._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert own >= 2 * 50 * 4096
    sent = [ends[0].send(bytes(4096)) for _ in range(50)]
    assert sent == [True] * 50
