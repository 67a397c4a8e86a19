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

import asyncio
import errno
import hmac
import os
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvplan.control.endpoint import endpoint_of
from kvplan.control.zmtp import GREETING_NBYTES, Unacceptable
from kvplan.status import LLMException, link_failed

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop

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
    """The data connections of a link, at either end, as `Streams`.

    Any thread may call `open` and `close`, and only the loop's thread the other methods.
    """

    dials: bool

    def __init__(self, challenge: bytes, way: str, loop: ControlLoop, *, private: bool) -> None:
        self.way = way
        self.private = private
        self.secret = hmac.digest(challenge, b"kvplan data secret", "sha256")
        self.link_id = hmac.digest(challenge, b"kvplan data id", "sha256")[:8]
        self._control = loop
        self._closed = False
        self._opened: dict[int, socket.socket] = {}  # until a call of `open` takes them

    @abstractmethod
    async def prepare(self, indices: Sequence[int], timeout_s: float) -> None:
        """Open the connections of these indices, so that `open` does not wait for them."""

    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket.socket]:
        """Return the connections of these indices; see `Streams.open`."""
        if not self._opened.keys() >= set(indices):
            self._control.run(self.prepare(indices, timeout_s))
        opened: list[socket.socket] = []
        try:
            opened.extend(self._opened.pop(index) for index in indices)
        except KeyError as error:  # `close_now` was faster, and has closed those that are left
            for stream in opened:
                stream.close()
            raise self._failed(error.args[0], "open", ENDED) from None
        return opened

    def close(self) -> None:
        """End waiting calls of `open`, and connections that were not taken. Idempotent."""
        with suppress(LLMException):  # the loop has ended with all connections
            self._control.call_soon(self.close_now)

    def close_now(self) -> None:
        """Close before this returns."""
        self._closed = True
        with suppress(KeyError):  # empty; a thread in `open` may take the last one
            while True:
                self._opened.popitem()[1].close()

    def _failed(self, index: int, phase: str, reason: str) -> LLMException:
        return link_failed(f"{self.way}: data connection {index}: {phase}: {reason}")

    def _answer(self, greeting: bytes, hello: bytes) -> tuple[int, bytes]:
        """Return the index in a complete hello, and the answer to the hello."""
        fields, mac = hello[: _FIELDS.size], hello[_FIELDS.size :]
        if not hmac.compare_digest(mac, self.mac(b"client", greeting, fields)):
            raise Unacceptable("it does not know the secret of the link that it names")
        return _FIELDS.unpack(fields)[1], self.mac(b"server", greeting, hello)

    def mac(self, label: bytes, *parts: bytes) -> bytes:
        """Return the proof that the sender of `parts` knows the secret."""
        return hmac.digest(self.secret, label + b"".join(parts), "sha256")


OpenStreams: TypeAlias = Callable[[bytes], DataStreams]
"""Function that makes the streams of a link from its challenge, on the loop's thread."""


class DialledStreams(DataStreams):
    """Connections that this side opens."""

    dials = True

    def __init__(
        self,
        challenge: bytes,
        family: socket.AddressFamily,
        address: Any,
        way: str,
        loop: ControlLoop,
        source: str = "",
        *,
        private: bool = False,
    ) -> None:
        super().__init__(challenge, way, loop, private=private)
        self._family, self._address, self._source = family, address, source
        self._dialling: set[_Dial] = set()

    async def prepare(self, indices: Sequence[int], timeout_s: float) -> None:
        """Dial all connections at once; see `DataStreams.prepare`."""
        if self._closed and indices:
            raise self._failed(indices[0], "connect", ENDED)
        dials: list[_Dial] = []
        index = 0
        try:
            for index in indices:
                dials.append(_Dial(self, index, socket.socket(self._family, socket.SOCK_STREAM)))
                dials[-1].begin(self._address, self._source)
            self._dialling.update(dials)
            async with asyncio.timeout(timeout_s):
                for dial in dials:
                    index = dial.index
                    await dial.done
        except BaseException as error:
            phase = next((dial.phase for dial in dials if dial.index == index), "connect")
            for dial in dials:
                dial.end(OSError(ENDED))
                dial.stream.close()
            if not isinstance(error, OSError):
                raise
            reason = error.strerror or str(error)
            if isinstance(error, TimeoutError):
                reason = f"no answer within {timeout_s * 1000:.0f} ms"
            elif isinstance(error, ConnectionError) and phase == "authenticate":
                reason += "; the peer's log says why"
            raise self._failed(index, phase, reason) from None
        finally:
            self._dialling.difference_update(dials)
        self._opened.update((dial.index, dial.stream) for dial in dials)

    def close_now(self) -> None:
        """See `DataStreams.close_now`."""
        super().close_now()
        for dial in self._dialling:
            dial.end(OSError(ENDED))


class _Dial:
    """A connection that this side opens. `done` ends once both ends have proved the secret."""

    def __init__(self, streams: DialledStreams, index: int, stream: socket.socket) -> None:
        self.index, self.stream = index, stream
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._received = self._greeting = self._hello = b""

    @property
    def phase(self) -> str:
        """The step that has not ended yet, for messages."""
        if self._hello:
            return "authenticate"
        with suppress(OSError):
            self.stream.getpeername()
            return "greet"
        return "connect"

    def begin(self, address: Any, source: str) -> None:
        """Connect. The rest happens when the peer's bytes arrive."""
        self.stream.setblocking(False)
        bind_source(self.stream, source)
        error = self.stream.connect_ex(address)
        if error not in {0, errno.EINPROGRESS}:  # EAGAIN: the queue of a Unix socket is full
            raise OSError(error, os.strerror(error))
        self._loop.add_reader(self.stream.fileno(), self._read)

    def end(self, error: OSError) -> None:
        """End the wait for the peer."""
        self._loop.remove_reader(self.stream.fileno())
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # retrieved, so that asyncio does not warn

    def _read(self) -> None:
        """Continue with bytes of the peer, or with the system's error."""
        awaited = _MAC_NBYTES if self._hello else GREETING_NBYTES
        try:
            chunk = self.stream.recv(awaited - len(self._received))
            if not chunk:
                raise ConnectionError("the peer has disconnected")
            self._received += chunk
            if len(self._received) == awaited:
                received, self._received = self._received, b""
                self._authenticate(received)
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(error)

    def _authenticate(self, received: bytes) -> None:
        if not self._hello:
            self._greeting = received
            fields = _FIELDS.pack(
                _BEGINNING, self.index, self._streams.link_id, secrets.token_bytes(16)
            )
            self._hello = fields + self._streams.mac(b"client", received, fields)
            self.stream.send(self._hello)  # a new connection has room
        elif hmac.compare_digest(
            received, self._streams.mac(b"server", self._greeting, self._hello)
        ):
            set_options(self.stream)
            self._loop.remove_reader(self.stream.fileno())
            if not self.done.done():  # the waiting task was not cancelled meanwhile
                self.done.set_result(None)
        else:
            raise OSError("it does not know the secret of this link")


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


def set_options(stream: socket.socket) -> None:
    """Set the options of a data connection, at either end."""
    stream.setblocking(False)
    if stream.family == socket.AF_UNIX:
        return
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
