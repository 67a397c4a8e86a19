"""Frames that a connection reads, and its end, for which `wait_closed` waits."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import select
import socket
import weakref
from pathlib import Path
from typing import cast

import pytest
import zmq

from kvplan.control.connection import QUEUE_LENGTH, Connection
from kvplan.control.loop import ControlLoop
from kvplan.control.zmtp import Stream
from tests.control.conversation import DEADLINE_S
from tests.control.zmtp import GREETING, frame, ready
from tests.support.held import Held

LISTENS = "00010000"  # a flag in /proc/net/unix


def own_listeners() -> list[str]:
    """Return the names at which connections of this process wait for their ZeroMQ sockets."""
    held = {target for _, target in Held.now().descriptors}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [
        row[-1]
        for row in rows
        if row[-1].startswith("@kvplan-control-")
        and row[3] == LISTENS
        and f"socket:[{row[6]}]" in held
    ]


class Ends:
    """A connection of the running loop, and the other end of its stream."""

    def __init__(self, loop: ControlLoop, *, attached: bool = True) -> None:
        near, self.far = socket.socketpair()
        near.setblocking(False)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.far.setblocking(False)
        self.frames: list[bytes] = []
        self.ended: list[str] = []
        self.connection = Connection(
            loop, None, listening=True, on_frame=self.frames.append, on_end=self.ended.append
        )
        self.connection.open(GREETING)
        if attached:
            self.connection.stream.attach(near)
        else:
            near.close()

    async def read_all(self) -> None:
        """Read until the end of the stream."""
        while await asyncio.get_running_loop().sock_recv(self.far, 1 << 16):
            pass


class Unusable(ControlLoop):
    """A loop whose ZeroMQ sockets are closed, so that they cannot connect."""

    def new_socket(self, kind: int) -> zmq.Socket[bytes]:
        made = super().new_socket(kind)
        made.close()
        return made


def test_a_zeromq_socket_that_cannot_connect_ends_the_connection() -> None:
    loop = Unusable()
    loop.start()

    async def run() -> list[str]:
        ends = Ends(loop)
        ends.far.close()
        await ends.connection.wait_closed()
        return ends.ended

    try:
        assert loop.run(run(), DEADLINE_S * 1000) == [f"no socket: {os.strerror(errno.ENOTSOCK)}"]
    finally:
        loop.stop()


@pytest.mark.parametrize("attached", [True, False])
def test_a_connection_that_ends_while_it_opens_leaves_nothing_open(
    loop: ControlLoop, attached: bool
) -> None:
    """The listener for its own ZeroMQ socket is closed, although that has not connected yet."""

    async def run() -> list[str]:
        before = own_listeners()
        ends = Ends(loop, attached=attached)
        assert len(own_listeners()) == len(before) + 1
        ends.connection.close()
        ends.far.close()
        await ends.connection.wait_closed()
        assert ends.ended == []  # `on_end` is not called: the closing side knows
        return sorted(set(own_listeners()) - set(before))

    assert loop.run(run(), timeout_ms=1000 * DEADLINE_S) == []


def test_a_connection_that_has_ended_is_not_kept(loop: ControlLoop) -> None:
    """The loop, which lives as long as its engine, must not keep the connection."""

    async def end() -> weakref.ref[Connection]:
        ends = Ends(loop)
        ends.connection.close()
        await ends.connection.wait_closed()
        ends.far.close()
        return weakref.ref(ends.connection)

    async def run() -> Connection | None:
        ended = await end()
        gc.collect()
        return ended()

    assert loop.run(run(), timeout_ms=1000 * DEADLINE_S) is None


@pytest.mark.parametrize("has_room", [True, False])
def test_a_frame_is_read_though_sending_has_taken_the_signal_of_its_arrival(
    loop: ControlLoop, has_room: bool
) -> None:
    """ZeroMQ signals each change once, to the next call, whatever that does."""

    async def run() -> None:
        ends = Ends(loop)
        connection = ends.connection
        await asyncio.get_running_loop().sock_sendall(ends.far, ready())
        await connection.ready()
        sent = b""
        while b"READY" not in sent:  # before that a peer may not send a frame
            sent += await asyncio.get_running_loop().sock_recv(ends.far, 1 << 16)
        queued = 0
        while not has_room and connection.try_send(bytes(1 << 16)):
            queued += 1
        assert queued < 2 * QUEUE_LENGTH  # some of them are in the buffer of the system
        connection.drain()  # takes the signals so far
        signal = select.poll()
        signal.register(connection._descriptor, select.POLLIN)
        connection._from_peer(frame(b"arrived"))
        assert signal.poll(1000 * DEADLINE_S)  # before the loop looks
        assert connection.try_send(b"sent") or not has_room
        while not ends.frames:
            await asyncio.sleep(0)
        assert ends.frames == [b"arrived"]
        connection.close()
        ends.far.close()

    loop.run(run(), timeout_ms=1000 * DEADLINE_S)


@pytest.mark.parametrize("reads", [True, False])
def test_a_connection_has_ended_when_its_last_bytes_have_left_or_are_given_up(
    loop: ControlLoop, reads: bool
) -> None:
    """The end waits for both of its streams, the peer's and ZeroMQ's."""
    message = bytes(1 << 20)

    async def run() -> None:
        ends = Ends(loop)
        connection, stream = ends.connection, ends.connection.stream
        await asyncio.get_running_loop().sock_sendall(ends.far, ready())
        await connection.ready()
        await connection.send(message)
        connection.close()
        reading = asyncio.create_task(ends.read_all()) if reads else None
        await connection.wait_closed()
        assert not stream.connected
        assert not stream.other.connected
        if reading is not None:
            await reading
        ends.far.close()

    loop.run(run(), timeout_ms=1000 * DEADLINE_S)


class Source:
    """The other side of a relay, which counts how often it is paused and resumed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


def test_a_source_is_paused_as_often_as_the_peer_stops_reading() -> None:
    async def run() -> None:
        loop, near_far = asyncio.get_running_loop(), socket.socketpair()
        for each in near_far:
            each.setblocking(False)
        near, far = near_far
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        source = Source()
        stream = Stream(lambda _: None, lambda _: None)
        stream.other = cast(Stream, source)
        stream.attach(near)
        for _ in range(2):
            stream.write(bytes(1 << 20))
            left = 1 << 20
            while left:
                left -= len(await loop.sock_recv(far, left))
        assert source.calls == ["pause", "resume"] * 2
        stream.abort()
        far.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_bytes_that_find_room_again_do_not_overtake_queued_ones() -> None:
    """The peer reads before the loop has sent what is queued."""

    async def run() -> None:
        loop, (near, far) = asyncio.get_running_loop(), socket.socketpair()
        near.setblocking(False)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        far.settimeout(DEADLINE_S)
        stream = Stream(lambda _: None, lambda _: None)
        stream.other = cast(Stream, Source())
        stream.attach(near)
        stream.write(b"a" * (1 << 20))
        found = bytearray(far.recv(1 << 20))
        stream.write(b"b" * 1000)
        far.setblocking(False)
        while len(found) < (1 << 20) + 1000:
            found += await loop.sock_recv(far, 1 << 20)
        assert found == b"a" * (1 << 20) + b"b" * 1000
        stream.abort()
        far.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


@pytest.mark.parametrize("ending", ["close", "end", "abort"])
@pytest.mark.parametrize("nbytes", [0, 1, 4 << 20], ids=["nothing", "little", "much"])
def test_how_a_stream_ends_decides_what_is_still_sent(ending: str, nbytes: int) -> None:
    """Its end is reported once; `end` ends only its output."""
    content = bytes(range(256)) * (nbytes // 256) or bytes(nbytes)

    async def run() -> None:
        loop, near_far = asyncio.get_running_loop(), socket.socketpair()
        for each in near_far:
            each.setblocking(False)
        near, far = near_far
        received, ended, source = bytearray(), list[Exception | None](), Source()
        stream = Stream(received.extend, ended.append)
        stream.other = cast(Stream, source)
        stream.attach(near)
        stream.write(content)
        is_held = nbytes > 1 << 20
        assert source.calls == ["pause"] * is_held
        getattr(stream, ending)()
        getattr(stream, ending)()
        stream.write(b"too late")
        found = bytearray()
        while piece := await loop.sock_recv(far, 1 << 20):
            found += piece
        assert source.calls == ["pause", "resume"] * is_held
        assert found == content[: len(found)]
        assert (len(found) == nbytes) is (ending != "abort" or not is_held)
        assert stream.connected is (ending == "end")
        assert ended == [None] * (ending != "end")
        if ending == "end":
            await loop.sock_sendall(far, b"answer")
            far.shutdown(socket.SHUT_WR)
            while not ended:
                await asyncio.sleep(0)
            assert received == b"answer"
            assert ended == [None]
        assert near.fileno() == -1
        far.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
