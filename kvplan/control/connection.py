"""One validated TCP or Unix connection, and the ZeroMQ socket that uses it.

Bytes go  peer <-> stream <-> private Unix socket <-> ZeroMQ PAIR <-> frames. A validator checks
those of the peer. libzmq does not own the stream. So this module can report the errno of system
errors, notice the end of the peer at once, never reconnect silently, and stop hostile bytes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import Callable
from typing import Final, cast

import zmq

from kvplan.control.auth import ClusterKey
from kvplan.control.loop import CLOSING_S, ControlLoop
from kvplan.control.zmtp import (
    GREETING_NBYTES,
    MAX_FRAME_NBYTES,
    UNUSED_AT,
    Stream,
    Unacceptable,
    ZmtpValidator,
)
from kvplan.control.zmtp import greeting as zmtp_greeting
from kvplan.system.users import peer_credentials

QUEUE_LENGTH: Final = 32
"""Maximum number of frames that wait in ZeroMQ, in each direction of a connection."""

DISCONNECTED: Final = "the peer has disconnected"

_SOCKET_OPTIONS: Final = {
    zmq.LINGER: 200,  # ms
    zmq.MAXMSGSIZE: MAX_FRAME_NBYTES,
    zmq.SNDHWM: QUEUE_LENGTH,
    zmq.RCVHWM: QUEUE_LENGTH,
    # A day: never in practice, but enabled, or libzmq would drop input when the peer ends.
    zmq.RECONNECT_IVL: 86_400_000,
}
_MAX_DRAINED: Final = 4 * QUEUE_LENGTH


class Connection:
    """Ordered frames to and from one peer. Only the loop's thread uses it."""

    def __init__(
        self,
        loop: ControlLoop,
        key: ClusterKey | None,
        *,
        listening: bool,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._control = loop
        self._loop = asyncio.get_running_loop()
        self._key = key
        self._listening = listening
        self._on_frame = on_frame
        self._on_end = on_end
        self.nonce = b""  # of the listener's greeting, once the greetings were exchanged
        self._validator = ZmtpValidator(encrypted=key is not None)
        self._early = bytearray()  # bytes of the peer that wait for the ZeroMQ socket
        self._skip = GREETING_NBYTES  # bytes of ZeroMQ's output to drop: a greeting was sent
        self._is_cookie_due = not listening
        self._own_listener: socket.socket | None = None  # while the ZeroMQ socket connects to it
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        self._is_drain_scheduled = False
        self._writable = asyncio.Event()
        self._reason = ""
        self._ended = False
        self._ready = asyncio.Event()
        self._abort_timer: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()
        self.stream = Stream(self._from_peer, self._peer_ended)
        self._inner = Stream(self._from_zmq, self._zmq_ended)
        self.stream.other, self._inner.other = self._inner, self.stream
        loop.register(self)

    def open(self, greeting: bytes = b"", nonce: bytes = b"") -> None:
        """Begin the ZMTP handshake on a stream that is connected or about to be."""
        self.nonce = nonce
        self._early += greeting
        if greeting:
            self._validator.check(greeting)
            self._open()
        else:
            # The rest, the cookie, follows once the nonce in the peer's greeting has arrived.
            self.stream.write(zmtp_greeting(encrypted=self._key is not None)[:UNUSED_AT])

    @property
    def greeted(self) -> bool:
        """True once the peer has sent its greeting."""
        return self._validator.greeted

    async def ready(self) -> None:
        """Wait until the peer's handshake is complete."""
        await self._ready.wait()
        if self._ended:
            raise ConnectionError(self._reason)

    async def send(self, frame: bytes) -> None:
        """Queue a frame, once there is room."""
        while not self.try_send(frame):
            self._writable.clear()
            await self._writable.wait()

    def try_send(self, frame: bytes) -> bool:
        """Queue a frame if there is room, and return True if there was."""
        if self._ended or self._socket is None:
            raise ConnectionError(self._reason or "the connection is not open")
        try:
            self._socket.send(frame, zmq.DONTWAIT)
            awaited = zmq.POLLIN
        except zmq.Again:
            awaited = zmq.POLLIN | zmq.POLLOUT
        # The descriptor signals each change once, and sending may have consumed the signal.
        if cast(int, self._socket.getsockopt(zmq.EVENTS)) & awaited:
            self._schedule_drain()
        return awaited == zmq.POLLIN

    def drain(self) -> bool:
        """Deliver frames that have arrived, and return True if none is left."""
        self._writable.set()  # there may be room to write now
        for _ in range(_MAX_DRAINED):
            if self._socket is None:
                return True
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return True
            self._on_frame(frame)
        self._schedule_drain()
        return False

    def abort(self, reason: str) -> None:
        """End the connection at once, and drop queued frames."""
        self.close(reason)
        self._abort_both()

    def close(self, reason: str = "closed by this side") -> None:
        """End the connection. Queued frames are still sent if the peer reads them soon."""
        if self._ended:
            return
        self._ended = True
        self._reason = self._reason or reason
        self._writable.set()
        self._ready.set()
        self._close_listener()
        if self._socket is not None:
            if self._descriptor >= 0:  # it was connected
                self._loop.remove_reader(self._descriptor)
            self._socket.close()  # its last frames still reach the stream
            self._socket = None
        if not self._inner.connected:
            self.stream.close()
        if not self.stream.connected:
            self._inner.abort()
        self._abort_timer = self._loop.call_later(CLOSING_S, self._abort_both)
        self._settle()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended. `close` limits that time."""
        await self._closed.wait()

    def _open(self) -> None:
        """Make the ZeroMQ socket. The peer's bytes wait until it has connected."""
        self.stream.pause()
        try:
            self._own_listener = listener = socket.socket(socket.AF_UNIX)
            listener.setblocking(False)
            listener.bind(f"\0kvplan-control-{secrets.token_hex(16)}")
            listener.listen(1)
            self._connect_socket(listener.getsockname()[1:].decode())
            self._loop.add_reader(listener.fileno(), self._accept_own)
        except (OSError, zmq.ZMQError) as error:
            self._fail(f"no socket: {os.strerror(error.errno or 0)}")

    def _connect_socket(self, name: str) -> None:
        pair = self._socket = self._control.new_socket(zmq.PAIR)
        for option, value in _SOCKET_OPTIONS.items():
            pair.setsockopt(option, value)
        if self._key is not None:
            self._key.apply(pair, listening=self._listening)
        pair.connect(f"ipc://@{name}")
        self._descriptor = cast(int, pair.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)

    def _accept_own(self) -> None:
        """Accept the connection of this process. Other processes may connect to the name, too."""
        assert self._own_listener is not None
        try:
            near, _ = self._own_listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"no socket: {os.strerror(error.errno or 0)}")
            return
        if peer_credentials(near).pid != os.getpid():
            near.close()
            return
        self._close_listener()
        near.setblocking(False)
        self._inner.attach(near)
        self.stream.resume()
        self._inner.write(bytes(self._early))
        self._early.clear()

    def _close_listener(self) -> None:
        if self._own_listener is not None:
            self._loop.remove_reader(self._own_listener.fileno())
            self._own_listener.close()
            self._own_listener = None

    def _schedule_drain(self) -> None:
        if not self._is_drain_scheduled:
            self._is_drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_scheduled = False
        self.drain()

    def _from_peer(self, chunk: bytes) -> None:
        if self._ended:
            return
        try:
            self._validator.check(chunk)
        except Unacceptable as error:
            self._fail(str(error))
            self._abort_both()
            return
        if self._is_cookie_due and self._validator.greeted:
            self._is_cookie_due = False
            nonce = self.nonce = self._validator.unused
            self.stream.write(bytes(len(nonce)) if self._key is None else self._key.cookie(nonce))
            # Last: the cookie makes the peer open its socket, so both ends do so in parallel.
            self._open()
        if not self._inner.connected:
            self._early += chunk
        else:
            self._inner.write(chunk)
        if self._validator.complete:
            self._ready.set()

    def _from_zmq(self, chunk: bytes) -> None:
        rest = chunk[self._skip :]
        self._skip = max(0, self._skip - len(chunk))
        self.stream.write(rest)

    def _peer_ended(self, error: Exception | None) -> None:
        number = getattr(error, "errno", None)
        if number in (errno.ECONNRESET, errno.EPIPE) and not self._ready.is_set():
            number = None  # the peer closed before it had read all of our handshake
        self._reason = self._reason or (
            f"connection lost: {os.strerror(number)}" if number else DISCONNECTED
        )
        if self._ended:
            self._inner.abort()
        elif not self._inner.connected:
            self._fail(self._reason)
        else:
            self._inner.end()  # input from before the end is still read
        self._settle()

    def _zmq_ended(self, _error: Exception | None) -> None:
        if not self._ended:
            self.drain()
            self._fail("the peer's handshake or encryption is not valid")
        self.stream.close()
        self._settle()

    def _fail(self, reason: str) -> None:
        if not self._ended:
            self.close(reason)
            self._on_end(self._reason)

    def _abort_both(self) -> None:
        self.stream.abort()
        self._inner.abort()

    def _settle(self) -> None:
        if not self._ended or self.stream.connected or self._inner.connected:
            return
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._closed.set()
        self._control.unregister(self)
