"""A direct way for notifications inside one host, beside the control connection.

The control connection takes a message through six threads; here the call that sends is all there is
between the sender's program and the descriptor that the receiver's program watches. It is a Unix
socket with packets, which the kernel keeps whole and in order, from one engine to another:

- The sender listens for a moment, at an abstract name that is derived from a secret, and says the
  secret in a Notify. The receiver connects, shows that it knows the secret, and answers. Then the
  sender has the connection, and the name is gone. Where this is not possible (another host, another
  network namespace, another user) notifications go on over the control connection.
- What `send` has accepted lies in the receiver's socket; the receiver ends by refusing more, and
  then reads what lies there. So a packet has arrived once, or the sender knows that it has not.
- A sender sends `WINDOW` packets at most that the receiver has not taken, and none at all while the
  receiver's queue is full; then it asks over the control connection.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import socket
import termios
from contextlib import suppress
from typing import Final

from kvplan.control.credentials import peer_credentials

WINDOW: Final = 256
"""Packets that lie in the receiver's socket, at most; the kernel has room for 50 of 4 KiB."""

_BACKLOG: Final = 4  # other processes see the name, too
_BUFFER_NBYTES: Final = 212992  # of the kernel's default limit
_TOKEN_NBYTES: Final = 16
_NOTHING: Final = bytes(4)  # an int of the kernel


class DirectSender:
    """Sends packets to one receiver, from any thread; made by `DirectListener.accept`.

    The descriptor is closed with this object only: a thread may be using it when `end` is called.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)  # a program's `socket.setdefaulttimeout` would wait for room
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
        self._left = WINDOW  # threads that change it at a time may miscount by a few
        self._has_room = True  # as the receiver has last said

    def send(self, packet: bytes) -> bool:
        """Send now; returns whether the receiver has it: if not, ask it."""
        if self._left <= 0 and not self._is_emptied():
            return False
        self._left -= 1
        try:
            self._socket.send(packet, socket.MSG_DONTWAIT)
        except OSError:  # no room, or it has ended: the control connection says what is so
            self._left = 0
            return False
        return True

    def grant(self, count: int) -> None:
        """The receiver has taken all that was sent, and has room for `count` more."""
        self._left, self._has_room = count, count > 0

    def end(self) -> None:
        """Send no more."""
        with suppress(OSError):  # the receiver was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def _is_emptied(self) -> bool:
        """Whether the receiver's program has taken all that was sent, as its queue was empty."""
        if not self._has_room:
            return False
        lying = fcntl.ioctl(self._socket, termios.TIOCOUTQ, _NOTHING)
        if lying == _NOTHING:
            self._left = WINDOW
        return self._left > 0

    def __del__(self) -> None:
        self._socket.close()


class DirectListener:
    """Where a receiver may connect, once; used on the loop's thread.

    Attributes:
        secret: what the receiver has to be told.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(16)
        self._listener = _new_socket()
        try:
            self._listener.bind(_name(self.secret))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise

    def accept(self) -> DirectSender | None:
        """Return the connection of the receiver, which has answered; None: it did not connect."""
        with suppress(OSError):
            for _ in range(_BACKLOG + 1):  # so many wait; others who come meanwhile hold up nobody
                connection, _ = self._listener.accept()
                if hmac.compare_digest(_first_packet(connection), _token(self.secret)):
                    return DirectSender(connection)
                connection.close()
        return None

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


def connect(secret: bytes) -> socket.socket | None:
    """Connect to the listener with this secret; None: it cannot be reached from here.

    A process of another user that has taken its name is no way to be notified.
    """
    try:
        connection = _new_socket()
    except OSError:
        return None
    try:
        connection.connect(_name(secret))
        if peer_credentials(connection).uid == os.geteuid():
            connection.send(_token(secret))
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _first_packet(connection: socket.socket) -> bytes:
    connection.setblocking(False)
    try:
        return connection.recv(_TOKEN_NBYTES + 1)
    except OSError:  # it has said nothing, or has gone
        return b""


def _name(secret: bytes) -> bytes:
    return b"\0kvplan-notify-" + hmac.digest(secret, b"name", "sha256")[:16].hex().encode()


def _token(secret: bytes) -> bytes:
    return hmac.digest(secret, b"token", "sha256")[:_TOKEN_NBYTES]
