"""ZMTP: validation of bytes from unauthenticated peers, CURVE authentication, relayed streams."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, cast

import zmq

from kvplan.control.messages import MAX_NBYTES

GREETING_NBYTES: Final = 64
UNUSED_AT: Final = 33
"""Offset of the unused bytes in a greeting. They extend to its end."""

_SIGNATURE: Final = {0: 0xFF, 9: 0x7F}  # the bytes between have no meaning
_MECHANISM: Final = slice(12, 32)
_MAJOR_VERSION: Final = 3
_MAX_COMMAND_NBYTES: Final = 2048
_LONG, _COMMAND = 0x02, 0x04
_ERROR: Final = b"\x05ERROR"
MAX_FRAME_NBYTES: Final = MAX_NBYTES + 64
"""Maximum size of a message on the wire: encryption adds 33 bytes."""

_COMMANDS: Final = {b"NULL": 1, b"CURVE": 2}
"""Mechanisms, and how many commands each side sends in its handshake."""

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_ADMITTED, _REFUSED = (b"200", b"OK"), (b"400", b"not the key of this cluster")
_READ_NBYTES: Final = 64 << 10  # at a time; malloc maps and unmaps buffers from 128 KiB on


def greeting(*, encrypted: bool, unused: bytes = bytes(GREETING_NBYTES - UNUSED_AT)) -> bytes:
    """Return the greeting of either side, with `unused` as the bytes that ZMTP does not use."""
    mechanism = b"CURVE" if encrypted else b"NULL"
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(21, b"\0") + unused


class Unacceptable(Exception):  # noqa: N818 - a property of bytes
    """Bytes that break the protocol of their connection, or that exceed a limit."""


class ZmtpValidator:
    """A parser for one direction of a ZMTP 3 connection. It stops at the first bad byte."""

    def __init__(self, *, encrypted: bool) -> None:
        self._mechanism = b"CURVE" if encrypted else b"NULL"
        self._commands = _COMMANDS[self._mechanism]
        self._greeting = bytearray()
        self._header = bytearray()
        self._body = 0  # bytes of the current frame that are still to come
        self._command: bytearray | None = None  # of the handshake, while it is incomplete

    @property
    def greeted(self) -> bool:
        """True once the peer has sent all of its greeting."""
        return len(self._greeting) == GREETING_NBYTES

    @property
    def unused(self) -> bytes:
        """The bytes of the greeting that ZMTP does not use."""
        return bytes(self._greeting[UNUSED_AT:])

    @property
    def complete(self) -> bool:
        """True once the peer has sent all of its handshake."""
        return self._commands == 0 and self._command is None

    def check(self, chunk: bytes) -> None:
        """Validate the next bytes of the stream."""
        at = 0
        if (missing := GREETING_NBYTES - len(self._greeting)) > 0:
            self._greeting += chunk[:missing]
            self._check_greeting()
            at = missing
        size = len(chunk)
        while at < size:
            if self._body:
                step = min(self._body, size - at)
                self._body -= step
                if self._command is not None:
                    self._command += chunk[at : at + step]
                    self._check_command(self._command)
                at += step
                continue
            self._header.append(chunk[at])
            at += 1
            if len(self._header) == (9 if self._header[0] & _LONG else 2):
                self._begin_frame(self._header[0], int.from_bytes(self._header[1:]))
                self._header.clear()

    def _check_greeting(self) -> None:
        greeting = self._greeting
        for at, expected in _SIGNATURE.items():
            if len(greeting) > at and greeting[at] != expected:
                raise Unacceptable("it does not speak ZMTP")
        if len(greeting) > 10 and greeting[10] < _MAJOR_VERSION:
            raise Unacceptable(f"it speaks ZMTP {greeting[10]}; ZMTP 3 is needed")
        if len(greeting) < _MECHANISM.stop:
            return
        mechanism = bytes(greeting[_MECHANISM]).rstrip(b"\0")
        if mechanism == self._mechanism:
            return
        if mechanism not in _COMMANDS:
            raise Unacceptable("it asks for an unknown security mechanism")
        raise Unacceptable(
            "it uses no cluster key; this side does"
            if mechanism == b"NULL"
            else "it uses a cluster key; this side does not"
        )

    def _begin_frame(self, flags: int, size: int) -> None:
        kind = flags & ~_LONG
        if self._commands:
            if kind != _COMMAND or not 0 < size <= _MAX_COMMAND_NBYTES:
                raise Unacceptable(f"frame {flags:#x} of {size} bytes in place of a handshake")
            self._commands -= 1
            self._command = bytearray()
        elif kind != 0 or size > MAX_FRAME_NBYTES:
            raise Unacceptable(
                f"frame {flags:#x} of {size} bytes; single frames of at most {MAX_NBYTES} are "
                "allowed"
            )
        self._body = size

    def _check_command(self, command: bytearray) -> None:
        if self._body:
            return
        self._command = None
        if command.startswith(_ERROR):
            raise Unacceptable("it refuses this side's key")


class ZapAuthenticator:
    """The authenticator of CURVE clients, which libzmq asks (ZAP, ZeroMQ RFC 27).

    It admits clients whose public key in hexadecimal equals the name of the domain, and has no
    state.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._socket.linger = 0
        self._socket.bind(_ZAP_ADDRESS)
        self._descriptor = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._answer)

    def close(self) -> None:
        """Stop answering. No client is admitted any more."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            envelope, request = frames[: frames.index(b"") + 1], frames[frames.index(b"") + 1 :]
            code, text = _REFUSED
            match request:
                case [b"1.0", _, domain, _, _, b"CURVE", public] if public.hex() == domain.decode():
                    code, text = _ADMITTED
            request_id = request[1] if len(request) > 1 else b""
            reply = [_ZAP_VERSION, request_id, code, text, b"", b""]
            self._socket.send_multipart([*envelope, *reply])


_HIGH, _LOW = 64 << 10, 16 << 10  # unsent bytes at which the source is paused and resumed


class Stream:
    """One side of a relay. It stops reading while the `other` side cannot write."""

    other: Stream

    def __init__(
        self, receive: Callable[[bytes], None], ended: Callable[[Exception | None], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._ended = ended
        self._socket: socket.socket | None = None
        self._descriptor = -1  # for the loop, which takes the repr of a socket in each call
        self._unsent = bytearray()  # bytes still to be written
        self._is_closing = self._is_paused = self._is_write_ended = self._is_full = False

    @property
    def connected(self) -> bool:
        """True from `attach` until the end of the connection is reported."""
        return self._socket is not None

    def attach(self, connection: socket.socket) -> None:
        """Begin on a non-blocking connection, which the stream owns from here on."""
        self._socket, self._descriptor = connection, connection.fileno()
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._is_closing:
            self._loop.call_soon(self._lose, None)
        elif not self._is_paused:
            self._loop.add_reader(self._descriptor, self._read)

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._is_paused = True
        if self._socket is not None:
            self._loop.remove_reader(self._descriptor)

    def resume(self) -> None:
        """Read again."""
        if self._is_paused and self._socket is not None and not self._is_closing:
            self._loop.add_reader(self._descriptor, self._read)
        self._is_paused = False

    def write(self, chunk: bytes) -> None:
        """Send, unless the stream has ended."""
        if self._socket is None or self._is_closing or self._is_write_ended:
            return
        if not self._unsent:
            chunk = chunk[self._send(chunk) :]
            if not chunk or self._is_closing:
                return
            self._loop.add_writer(self._descriptor, self._write)
        self._unsent += chunk
        if len(self._unsent) > _HIGH and not self._is_full:
            self._is_full = True
            self.other.pause()

    def end(self) -> None:
        """Send what is queued, and nothing more. Input is still read."""
        if self._socket is not None and not self._is_write_ended and not self._is_closing:
            self._is_write_ended = True
            if not self._unsent:
                self._shut()

    def close(self) -> None:
        """End once all output is sent. A stream that is not attached yet ends at `attach`."""
        if self._socket is not None and not self._is_closing:
            self._loop.remove_reader(self._descriptor)
            if not self._unsent:
                self._loop.call_soon(self._lose, None)
        self._is_closing = True

    def abort(self) -> None:
        """End now without sending the rest. A stream that is not attached yet ends at `attach`."""
        self._fail(None)

    def _read(self) -> None:
        assert self._socket is not None
        try:
            chunk = self._socket.recv(_READ_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
            return
        if chunk:
            self._receive(chunk)
        else:
            self.close()

    def _write(self) -> None:
        assert self._socket is not None
        del self._unsent[: self._send(self._unsent)]
        if self._is_full and len(self._unsent) < _LOW:
            self._is_full = False
            self.other.resume()
        if self._unsent:
            return
        self._loop.remove_writer(self._descriptor)
        if self._is_closing:
            self._loop.call_soon(self._lose, None)
        elif self._is_write_ended:
            self._shut()

    def _send(self, chunk: bytes | bytearray) -> int:
        """Send as much as possible, and return the number of bytes sent."""
        assert self._socket is not None
        try:
            return self._socket.send(chunk)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._fail(error)
            return len(chunk)

    def _shut(self) -> None:
        assert self._socket is not None
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception | None) -> None:
        """End now, and drop unsent output."""
        self._is_closing = True
        self._unsent.clear()
        if self._is_full:  # the source must read its own end
            self._is_full = False
            self.other.resume()
        if self._socket is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
            self._loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        if self._socket is not None:  # otherwise the end was reported before
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
            self._socket.close()
            self._socket = None
            self._ended(error)
