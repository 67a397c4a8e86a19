"""What a connection reads, and its end, for which `wait_closed` waits."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import select
import socket
import weakref
from pathlib import Path

import pytest
import zmq

from kvplan.control.connection import Connection
from kvplan.control.loop import ControlLoop
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
    """Its ZeroMQ sockets can be made, and not connected."""

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
    """Neither the loop, which lives as long as its engine, nor a timer keeps it."""

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
        while not has_room and connection.try_send(bytes(1 << 16)):
            pass
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
    """That holds for both of its streams, the peer's and ZeroMQ's."""
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
