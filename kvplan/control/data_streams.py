"""Connections for the data of a link, through the port of its control connection.

The end that was connected to has greeted with a nonce, as it greets every visitor. The end that
dials answers with 64 bytes that end in a MAC, and the other with a MAC of its own:

    hello   magic "kvplan" | version u8 | index u8 | link id 8 | nonce 16 | HMAC-SHA256 32
            of "client" | greeting | all before it
    answer  HMAC-SHA256 32 of "server" | greeting | hello

The key of both is a secret that the link's handshake has agreed on, from a challenge of its own.
After that the connection is the transport's, which may encrypt by keys made from the secret and the
index. No key is used for two connections, as each end has an index once: the one that dials calls
`open` once for each, and the other refuses an index that has come before (`arrive`).
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvplan.control.endpoint import endpoint_of
from kvplan.control.vetting import GREETING_NBYTES, Unacceptable
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop
    from kvplan.control.visitors import Visitor, Visitors

HELLO_NBYTES: Final = 64

_MAGIC: Final = b"kvplan"  # ZMTP begins with 0xff
_VERSION: Final = 1
_BEGINNING: Final = _MAGIC + bytes((_VERSION,))
_FIELDS: Final = struct.Struct("!7sB8s16s")  # of a hello, before its MAC
_MAC_NBYTES: Final = 32
_ENDED: Final = "the link is not being made any more"
_KEEP_ALIVE: Final = {
    socket.TCP_KEEPIDLE: 10,  # s
    socket.TCP_KEEPINTVL: 5,  # s
    socket.TCP_KEEPCNT: 3,
}

DataStreams: TypeAlias = "DialledStreams | AcceptedStreams"
"""Both are a `Streams` of the transports."""

OpenStreams: TypeAlias = Callable[[bytes], DataStreams]
"""Makes the streams of the handshake with a challenge; on the loop's thread."""


class _Streams:
    """What both ends have in common."""

    def __init__(self, challenge: bytes, way: str, *, private: bool) -> None:
        self.way = way
        self.private = private
        self.secret = hmac.digest(challenge, b"kvplan data secret", "sha256")
        self.link_id = hmac.digest(challenge, b"kvplan data id", "sha256")[:8]

    def _failed(self, index: int, phase: str, reason: str) -> LLMException:
        return LLMException(
            f"{self.way}: data connection {index}: {phase}: {reason}",
            status_code=LLMStatusCode.LLM_LINK_FAILED,
        )

    def _mac(self, label: bytes, *parts: bytes) -> bytes:
        return hmac.digest(self.secret, label + b"".join(parts), "sha256")


class DialledStreams(_Streams):
    """Connections that this end opens, for any thread.

    Args:
        challenge: of the handshake.
        family: of the control connection.
        address: what that is connected to.
        way: for people.
        source: address of this host to connect from; empty: the system's choice.
        private: whether the handshake was encrypted.
    """

    dials: Final = True

    def __init__(
        self,
        challenge: bytes,
        family: socket.AddressFamily,
        address: Any,
        way: str,
        source: str = "",
        *,
        private: bool = False,
    ) -> None:
        super().__init__(challenge, way, private=private)
        self._family = family
        self._address = address
        self._source = source
        self._mutex = threading.Lock()
        self._closed = False
        self._dialling: set[socket.socket] = set()

    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
        """Dial connections; see `Streams.open`.

        Each step is taken on all of them before the next: they take as many round trips as one.
        """
        deadline = time.monotonic() + timeout_s
        streams: list[socket.socket] = []
        hellos: list[tuple[bytes, bytes]] = []
        index, phase = indices[0], "connect"
        try:
            for index in indices:  # noqa: B007 - which fails is told
                streams.append(stream := socket.socket(self._family, socket.SOCK_STREAM))
                bind_source(stream, self._source)
                self._begin(stream)
            for index, stream in zip(indices, streams, strict=True):
                phase = "connect"
                _await_connected(stream, deadline)
                phase = "greet"
                greeting = _receive(stream, GREETING_NBYTES, deadline)
                phase = "authenticate"
                hellos.append((greeting, self._say_hello(stream, greeting, index)))
            for index, stream, said in zip(indices, streams, hellos, strict=True):  # noqa: B007
                self._check_answer(_receive(stream, _MAC_NBYTES, deadline), *said)
                _prepare(stream)
        except BaseException as error:
            self._forget(streams)
            for stream in streams:
                stream.close()
            if not isinstance(error, OSError):
                raise
            reason = error.strerror or str(error)
            if self._closed:
                reason = _ENDED
            elif isinstance(error, TimeoutError):
                reason = f"no answer within {timeout_s * 1000:.0f} ms"
            elif isinstance(error, ConnectionError) and phase == "authenticate":
                reason += "; the peer's log says why"
            raise self._failed(index, phase, reason) from None
        self._forget(streams)
        return streams

    def close(self) -> None:
        """End the calls of `open` that wait, and refuse others; idempotent, for any thread."""
        with self._mutex:
            self._closed = True
            for stream in self._dialling:
                with suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)

    def _begin(self, stream: socket.socket) -> None:
        with self._mutex:
            if self._closed:
                raise ConnectionError(_ENDED)
            _begin_connect(stream, self._address)  # within: one that `close` shuts is connecting
            self._dialling.add(stream)

    def _say_hello(self, stream: socket.socket, greeting: bytes, index: int) -> bytes:
        """Prove that this end knows the secret; returns what it has said."""
        fields = _FIELDS.pack(_BEGINNING, index, self.link_id, secrets.token_bytes(16))
        hello = fields + self._mac(b"client", greeting, fields)
        stream.send(hello)  # a connection this young has room
        return hello

    def _check_answer(self, answer: bytes, greeting: bytes, hello: bytes) -> None:
        if not hmac.compare_digest(answer, self._mac(b"server", greeting, hello)):
            raise OSError("it does not know the secret of this link")

    def _forget(self, streams: list[socket.socket]) -> None:
        with self._mutex:
            self._dialling.difference_update(streams)


class AcceptedStreams(_Streams):
    """Connections that come to this end's listener; made on the loop's thread.

    Until `open` waits for it, a connection is one visitor among others.

    Args:
        challenge: of the handshake.
        loop: of the listener.
        visitors: of the listener.
        way: for people.
        private: whether the handshake was encrypted.
    """

    dials: Final = False

    def __init__(
        self, challenge: bytes, loop: ControlLoop, visitors: Visitors, way: str, *, private: bool
    ) -> None:
        super().__init__(challenge, way, private=private)
        self._loop = loop
        self._visitors = visitors
        self._closed = False
        self._places: dict[int, asyncio.Future[Visitor]] = {}
        self._wanted: set[int] = set()
        visitors.expect_link(self)

    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
        """Wait for connections; see `Streams.open`."""
        return self._loop.run(self._take(indices, timeout_s))

    def close(self) -> None:
        """End the calls of `open` that wait, and connections not taken; idempotent."""
        with suppress(LLMException):  # the loop has ended, and all visitors with it
            self._loop.call_soon(self.close_now)

    def close_now(self) -> None:
        """As `close`, in the loop's thread, and done on return."""
        self._closed = True
        self._visitors.forget_link(self)
        for place in self._places.values():
            if not place.done():
                place.set_exception(ConnectionError(_ENDED))
                place.exception()  # so that it is no complaint where nobody waits
            elif not place.cancelled() and place.exception() is None:
                self._visitors.drop(place.result())

    def arrive(self, visitor: Visitor) -> None:
        """A visitor has said a whole hello with this link's id; on the loop's thread.

        Raises:
            Unacceptable: it does not know the secret, or its index is in use.
        """
        hello = bytes(visitor.said)
        fields, mac = hello[: _FIELDS.size], hello[_FIELDS.size :]
        if not hmac.compare_digest(mac, self._mac(b"client", visitor.greeting, fields)):
            raise Unacceptable("it does not know the secret of the link that it names")
        index = _FIELDS.unpack(fields)[1]
        place = self._place(index)
        if place.done():
            raise Unacceptable("its index is in use, or not waited for any more")
        answer = self._mac(b"server", visitor.greeting, hello)
        try:
            _prepare(visitor.socket)
            visitor.socket.send(answer)  # a connection this young has room
        except OSError as error:
            raise Unacceptable(f"it cannot be answered: {error.strerror}") from None
        place.set_result(visitor)
        if index in self._wanted:
            self._visitors.leave(visitor)

    async def _take(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
        came: list[Visitor] = []
        if self._closed:
            raise self._failed(indices[0], "accept", _ENDED)
        # All of them now: `close` ends the wait for those that there are.
        places = [self._place(it) for it in indices]
        self._wanted.update(indices)
        for place in places:
            if place.done() and not place.cancelled():
                self._visitors.leave(place.result())
        try:
            async with asyncio.timeout(timeout_s):
                for place in places:
                    came.append(await place)  # noqa: PERF401 - one that fails is the next
        except TimeoutError:
            reason = f"it has not come within {timeout_s * 1000:.0f} ms"
            raise self._failed(indices[len(came)], "accept", reason) from None
        except ConnectionError as error:
            raise self._failed(indices[len(came)], "accept", str(error)) from None
        for index, visitor in zip(indices, came, strict=True):
            if visitor.socket.fileno() < 0:
                reason = "it was opened before, or dropped: too many visitors"
                raise self._failed(index, "accept", reason)
        streams = []
        for visitor in came:
            streams.append(socket.socket(fileno=visitor.socket.detach()))
            streams[-1].setblocking(False)
        return streams

    def _place(self, index: int) -> asyncio.Future[Visitor]:
        if index not in self._places:
            self._places[index] = asyncio.get_running_loop().create_future()
        return self._places[index]


def is_hello(said: bytes | bytearray) -> bool:
    """Whether what a visitor says is, or begins, the hello of a data connection.

    Raises:
        Unacceptable: it begins as one, and goes on otherwise.
    """
    if not said.startswith(_MAGIC[:1]):
        return False
    if not said.startswith(_MAGIC[: len(said)]):
        raise Unacceptable("it speaks neither ZMTP nor the protocol of data connections")
    if not said.startswith(_BEGINNING[: len(said)]):
        raise Unacceptable(
            f"it speaks version {said[len(_MAGIC)]} of data connections, this end {_VERSION}"
        )
    return True


def link_id_of(hello: bytes | bytearray) -> bytes:
    """The link that a whole hello is for; not proven yet."""
    link_id: bytes = _FIELDS.unpack_from(hello)[2]
    return link_id


def way_of(dialler: Any, listener: Any) -> str:
    """The two ends of a connection, by the system's names of them; a path has one name."""
    ends = f"{endpoint_of(dialler)} -> " if isinstance(dialler, tuple) else ""
    return f"{ends}{endpoint_of(listener)}"


def bind_source(stream: socket.socket, source: str) -> None:
    """Have a connection leave from an address of this host; a Unix socket has none.

    Raises:
        OSError: it is no address of this host, or not of the peer's family.
    """
    if source and stream.family != socket.AF_UNIX:
        try:
            stream.bind((source, 0))
        except OSError as error:
            raise OSError(f"tcp_source={source}: {error.strerror}") from None


def _prepare(stream: socket.socket) -> None:
    """Set what every data connection needs, at either end."""
    stream.setblocking(False)
    if stream.family == socket.AF_UNIX:
        return
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        stream.setsockopt(socket.IPPROTO_TCP, option, value)


def _begin_connect(stream: socket.socket, address: Any) -> None:
    stream.setblocking(False)
    try:
        stream.connect(address)
    except BlockingIOError as error:
        if error.errno != errno.EINPROGRESS:  # the queue of a Unix socket is full
            raise


def _await_connected(stream: socket.socket, deadline: float) -> None:
    _await(stream, select.POLLOUT, deadline)
    if error := stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))


def _await(stream: socket.socket, events: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(stream, events)
    if not poll.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
        raise TimeoutError


def _receive(stream: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Exactly `nbytes`, and nothing behind them."""
    received = b""
    while len(received) < nbytes:
        _await(stream, select.POLLIN, deadline)
        chunk = stream.recv(nbytes - len(received))
        if not chunk:
            raise ConnectionError("the peer has disconnected")
        received += chunk
    return received
