"""ZMTP 3 (without encryption) byte by byte, for peers that violate it."""

from __future__ import annotations

import contextlib
import socket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready(**properties: bytes) -> bytes:
    """Return the only command of the handshake."""
    body = b"\x05READY"
    for name, value in {"Socket-Type": b"PAIR", **properties}.items():
        body += bytes((len(name),)) + name.encode() + len(value).to_bytes(4) + value
    if len(body) < 256:
        return bytes((0x04, len(body))) + body
    return b"\x06" + len(body).to_bytes(8) + body


def frame(body: bytes, *, more: bool = False) -> bytes:
    """Return a message frame."""
    if len(body) < 256:
        return bytes((more, len(body))) + body
    return bytes((0x02 | more,)) + len(body).to_bytes(8) + body


class Peer:
    """A TCP connection that sends anything; `read` returns all bytes up to `until` or the end."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=10)

    def send(self, *parts: bytes) -> bool:
        """Send everything, and return whether the other end has accepted it."""
        try:
            self.socket.sendall(b"".join(parts))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def shake_hands(self, command: bytes = ready()) -> None:
        """Do a whole handshake: libzmq accepts no message before it has sent its own READY.

        An encrypted server ends the connection, as `send` and `read` then show.
        """
        self.send(GREETING, command)
        received, size = bytearray(), len(GREETING) + 2
        while len(received) < size and (chunk := self._receive()):
            received += chunk
            if len(received) > len(GREETING) + 1:
                size = len(GREETING) + 2 + received[len(GREETING) + 1]

    def end(self) -> None:
        """Shut down sending."""
        with contextlib.suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_WR)

    def read(self, until: bytes | None = None) -> bytes:
        received = bytearray()
        while (until is None or until not in received) and (chunk := self._receive()):
            received += chunk
        return bytes(received)

    def close(self) -> None:
        self.socket.close()

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(1 << 16)
        except ConnectionResetError:
            return b""
