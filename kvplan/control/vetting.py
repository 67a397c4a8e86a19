"""What may pass from a peer to ZeroMQ: whole handshakes and single frames, both of bounded size.

libzmq 4.3.5 keeps the parts of a multipart message until the last one has come, without any limit;
a peer can have it take a gigabyte a second. It reads nothing here that was not looked at before.
"""

from __future__ import annotations

from typing import Final

from kvplan.control.messages import MAX_NBYTES

GREETING_NBYTES: Final = 64
UNUSED_AT: Final = 33
"""Where the bytes of a greeting begin that ZMTP leaves unused, up to its end."""

_SIGNATURE: Final = {0: 0xFF, 9: 0x7F}  # the bytes between are of no meaning
_MECHANISM: Final = slice(12, 32)
_MAJOR_VERSION: Final = 3
_MAX_COMMAND_NBYTES: Final = 2048
_LONG, _COMMAND = 0x02, 0x04
_ERROR: Final = b"\x05ERROR"
MAX_FRAME_NBYTES: Final = MAX_NBYTES + 64
"""Of a message as it is sent: encryption adds 33 bytes."""

_COMMANDS: Final = {b"NULL": 1, b"CURVE": 2}
"""Mechanisms, and how many commands each side sends in its handshake."""


def greeting(*, encrypted: bool, unused: bytes = bytes(GREETING_NBYTES - UNUSED_AT)) -> bytes:
    """What an end says first, with `unused` where ZMTP has no use for the bytes."""
    mechanism = b"CURVE" if encrypted else b"NULL"
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(21, b"\0") + unused


class Unacceptable(Exception):  # noqa: N818 - what it says of bytes
    """Bytes that are no ZMTP 3 of the mechanism in use, or ask for too much."""


class Vetting:
    """Follows one direction of a ZMTP 3 connection, and stops it at the first bad byte."""

    def __init__(self, *, encrypted: bool) -> None:
        self._mechanism = b"CURVE" if encrypted else b"NULL"
        self._commands = _COMMANDS[self._mechanism]
        self._greeting = bytearray()
        self._header = bytearray()
        self._body = 0  # bytes of the current frame that are still to come
        self._command: bytearray | None = None  # the handshake's, while it is not whole

    @property
    def greeted(self) -> bool:
        """Whether the peer has sent all of its greeting."""
        return len(self._greeting) == GREETING_NBYTES

    @property
    def unused(self) -> bytes:
        """What the greeting has where ZMTP has no use for it."""
        return bytes(self._greeting[UNUSED_AT:])

    @property
    def complete(self) -> bool:
        """Whether the peer has sent all of its handshake."""
        return self._commands == 0 and self._command is None

    def check(self, chunk: bytes) -> None:
        """Follow the next bytes of the stream.

        Raises:
            Unacceptable: saying what is wrong; the connection must be cut.
        """
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
            "it uses no cluster key; this end does"
            if mechanism == b"NULL"
            else "it uses a cluster key; this end does not"
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
            raise Unacceptable("it refuses this end's key")
