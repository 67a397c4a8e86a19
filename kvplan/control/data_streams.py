"""Connections for the data of a link, to the port of its control connection.

The end that listens greets with a nonce, as it greets every connection. The end that dials answers
with 64 bytes that end in a MAC, and the listening end replies with a MAC of its own:

    hello   magic "kvplan" | version u8 | index u8 | link id 8 | nonce 16 | HMAC-SHA256 32
            of "client" | greeting | all before it
    answer  HMAC-SHA256 32 of "server" | greeting | hello

The key of both MACs is a secret that is derived from the challenge of the link's handshake. After
that, the connection belongs to the transport, which may encrypt with keys derived from the secret
and the index. Each key is used for one connection only: the end that dials opens each index once,
and the other end refuses an index that was used before.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from kvnative._signals import Mutex
from kvplan.control.endpoint import endpoint_of
from kvplan.control.zmtp import GREETING_NBYTES, Unacceptable
from kvplan.status import LLMException, link_failed

HELLO_NBYTES: Final = 64

_MAGIC: Final = b"kvplan"  # ZMTP begins with 0xff
_VERSION: Final = 1
_BEGINNING: Final = _MAGIC + bytes((_VERSION,))
_FIELDS: Final = struct.Struct("!7sB8s16s")  # of a hello, before its MAC
_MAC_NBYTES: Final = 32
ENDED: Final = "the link is not being made any more"
_KEEP_ALIVE: Final = {
    socket.TCP_KEEPIDLE: 10,  # s
    socket.TCP_KEEPINTVL: 5,  # s
    socket.TCP_KEEPCNT: 3,
}


class DataStreams(ABC):
    """The data connections of a link, at either end. It implements `Streams`."""

    dials: bool

    def __init__(self, challenge: bytes, way: str, *, private: bool) -> None:
        self.way = way
        self.private = private
        self.secret = hmac.digest(challenge, b"kvplan data secret", "sha256")
        self.link_id = hmac.digest(challenge, b"kvplan data id", "sha256")[:8]

    @abstractmethod
    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
        """Open the connections of these indices; see `Streams.open`."""

    async def arrived(self, indices: Sequence[int], timeout_s: float) -> None:  # noqa: B027
        """Wait until `open` of these indices would not block. The dialling end does not wait."""

    @abstractmethod
    def close(self) -> None:
        """End waiting calls of `open`, and connections that were not taken. Idempotent."""

    def _failed(self, index: int, phase: str, reason: str) -> LLMException:
        return link_failed(f"{self.way}: data connection {index}: {phase}: {reason}")

    def _answer(self, greeting: bytes, hello: bytes) -> tuple[int, bytes]:
        """Return the index in a complete hello, and the answer to the hello."""
        fields, mac = hello[: _FIELDS.size], hello[_FIELDS.size :]
        if not hmac.compare_digest(mac, self._mac(b"client", greeting, fields)):
            raise Unacceptable("it does not know the secret of the link that it names")
        return _FIELDS.unpack(fields)[1], self._mac(b"server", greeting, hello)

    def _mac(self, label: bytes, *parts: bytes) -> bytes:
        return hmac.digest(self.secret, label + b"".join(parts), "sha256")


OpenStreams: TypeAlias = Callable[[bytes], DataStreams]
"""Function that makes the streams of a link from its challenge, on the loop's thread."""


class DialledStreams(DataStreams):
    """Connections that this side opens, in any thread."""

    dials = True

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
        self._mutex = Mutex()
        self._closed = False
        self._dialling: set[socket.socket] = set()

    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
        """Dial connections; see `Streams.open`.

        Each step is done for all connections before the next step, so that all of them take as
        many round trips as one.
        """
        deadline = time.monotonic() + timeout_s
        streams: list[socket.socket] = []
        hellos: list[tuple[bytes, bytes]] = []
        index, phase = indices[0], "connect"
        try:
            for index in indices:  # noqa: B007 - the error names the index
                streams.append(stream := socket.socket(self._family, socket.SOCK_STREAM))
                bind_source(stream, self._source)
                self._begin(stream)
            for index, stream in zip(indices, streams, strict=True):
                phase = "connect"
                _await_connected(stream, deadline)
                phase = "greet"
                greeting = _receive(stream, GREETING_NBYTES, deadline)
                phase = "authenticate"
                hellos.append((greeting, self._send_hello(stream, greeting, index)))
            for index, stream, sent in zip(indices, streams, hellos, strict=True):  # noqa: B007
                self._check_answer(_receive(stream, _MAC_NBYTES, deadline), *sent)
                prepare(stream)
        except BaseException as error:
            self._forget(streams)
            for stream in streams:
                stream.close()
            if not isinstance(error, OSError):
                raise
            reason = error.strerror or str(error)
            if self._closed:
                reason = ENDED
            elif isinstance(error, TimeoutError):
                reason = f"no answer within {timeout_s * 1000:.0f} ms"
            elif isinstance(error, ConnectionError) and phase == "authenticate":
                reason += "; the peer's log says why"
            raise self._failed(index, phase, reason) from None
        self._forget(streams)
        return streams

    def close(self) -> None:
        """End waiting calls of `open`, and refuse later ones. Idempotent, in any thread."""
        with self._mutex:
            self._closed = True
            for stream in self._dialling:
                with suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)

    def _begin(self, stream: socket.socket) -> None:
        with self._mutex:
            if self._closed:
                raise ConnectionError(ENDED)
            # Under the lock: `close` can shut down a stream only once it connects.
            _begin_connect(stream, self._address)
            self._dialling.add(stream)

    def _send_hello(self, stream: socket.socket, greeting: bytes, index: int) -> bytes:
        """Prove that this side knows the secret, and return the bytes sent."""
        fields = _FIELDS.pack(_BEGINNING, index, self.link_id, secrets.token_bytes(16))
        hello = fields + self._mac(b"client", greeting, fields)
        stream.send(hello)  # a new connection has room
        return hello

    def _check_answer(self, answer: bytes, greeting: bytes, hello: bytes) -> None:
        if not hmac.compare_digest(answer, self._mac(b"server", greeting, hello)):
            raise OSError("it does not know the secret of this link")

    def _forget(self, streams: list[socket.socket]) -> None:
        with self._mutex:
            self._dialling.difference_update(streams)


def is_hello(received: bytes | bytearray) -> bool:
    """Return True if these bytes are, or begin, the hello of a data connection."""
    if not received.startswith(_MAGIC[:1]):
        return False
    if not received.startswith(_MAGIC[: len(received)]):
        raise Unacceptable("it speaks neither ZMTP nor the protocol of data connections")
    if not received.startswith(_BEGINNING[: len(received)]):
        raise Unacceptable(
            f"it speaks version {received[len(_MAGIC)]} of data connections, this side {_VERSION}"
        )
    return True


def link_id_of(hello: bytes | bytearray) -> bytes:
    """Return the link that a complete hello names. The name is not proven yet."""
    link_id: bytes = _FIELDS.unpack_from(hello)[2]
    return link_id


def way_of(dialler: Any, listener: Any) -> str:
    """Return the two ends of a connection, for messages. A Unix socket has one name."""
    ends = f"{endpoint_of(dialler)} -> " if isinstance(dialler, tuple) else ""
    return f"{ends}{endpoint_of(listener)}"


def bind_source(stream: socket.socket, source: str) -> None:
    """Bind a TCP connection to an address of this host, if `source` is not empty."""
    if source and stream.family != socket.AF_UNIX:
        try:
            stream.bind((source, 0))
        except OSError as error:
            raise OSError(f"tcp_source={source}: {error.strerror}") from None


def prepare(stream: socket.socket) -> None:
    """Set the options of a data connection, at either end."""
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
    """Read exactly `nbytes`."""
    received = b""
    while len(received) < nbytes:
        _await(stream, select.POLLIN, deadline)
        chunk = stream.recv(nbytes - len(received))
        if not chunk:
            raise ConnectionError("the peer has disconnected")
        received += chunk
    return received
