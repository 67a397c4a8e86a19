"""Notifications over one link: directly inside one host, or by control messages.

A control message passes six threads. A direct notification needs one system call, which wakes the
receiver's program at a descriptor. The direct connection is a Unix packet socket, which keeps
packets whole and in order:

- The sender listens briefly at an abstract name derived from a secret, and sends the secret in a
Notify. The receiver connects, proves that it knows the secret, and answers. Then the sender has the
connection, and removes the name. If this is not possible (another host, network namespace or user),
notifications continue over the control connection.
- A packet that `send` has accepted is in the receiver's socket. The receiver ends by refusing more
packets, and then reads the rest. So each packet arrives once, or the sender knows that it did not.
- A sender sends at most `WINDOW` packets that the receiver has not taken, and none while the
receiver's queue is full. It then sends a Notify, whose reply grants more packets.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import os
import secrets
import socket
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Notified, Notify
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system.logs import LimitedLog, Log
from kvplan.system.users import peer_credentials

WINDOW: Final = 256
"""Maximum number of unread packets in the receiver's socket; about 50 of 4 KiB fit there."""

_BACKLOG: Final = 4  # other processes may connect, too
_BUFFER_NBYTES: Final = 212992  # the kernel's default limit
_TOKEN_NBYTES: Final = 16
_NOTHING: Final = bytes(4)  # a C int of 0
_MAX_REQUESTS: Final = 8  # at a time, besides the link's other requests
_peer_log = LimitedLog(Log("kvplan.links"))


class DirectSender:
    """The sender of packets to one receiver, for any thread.

    Only the garbage collection of this object closes the descriptor, because a thread may be using
    it when `end` is called.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)  # a program's `socket.setdefaulttimeout` would wait for room
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
        self._left = WINDOW  # concurrent changes may miscount by a few
        self._has_room = True  # as the receiver last reported

    def send(self, packet: bytes) -> bool:
        """Send now. Return True if the receiver has the packet, or False if a message is needed."""
        if self._left <= 0 and not self._is_emptied():
            return False
        self._left -= 1
        try:
            self._socket.send(packet, socket.MSG_DONTWAIT)
        except OSError:  # no room, or it has ended: the control connection reports which
            self._left = 0
            return False
        return True

    def grant(self, count: int) -> None:
        """Record that the receiver has room for `count` more packets."""
        self._left, self._has_room = count, count > 0

    def end(self) -> None:
        """Send no more."""
        with suppress(OSError):  # the receiver has ended first
            self._socket.shutdown(socket.SHUT_RDWR)

    def _is_emptied(self) -> bool:
        """Return True if packets may be sent again, because the receiver has taken all."""
        if not self._has_room:
            return False
        unread = fcntl.ioctl(self._socket, termios.TIOCOUTQ, _NOTHING)
        if unread == _NOTHING:
            self._left = WINDOW
        return self._left > 0

    def __del__(self) -> None:
        self._socket.close()


class DirectListener:
    """A listener for one connection of a receiver. Only the loop's thread uses it."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(16)  # the receiver must know it
        self._listener = _new_socket()
        try:
            self._listener.bind(_name(self.secret))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise

    def accept(self) -> DirectSender | None:
        """Return the connection of the receiver after its answer, or None if it did not connect."""
        with suppress(OSError):
            for _ in range(_BACKLOG + 1):  # all that can wait: skips other processes
                connection, _ = self._listener.accept()
                if hmac.compare_digest(_first_packet(connection), _token(self.secret)):
                    return DirectSender(connection)
                connection.close()
        return None

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


def connect(secret: bytes) -> socket.socket | None:
    """Connect to the listener with this secret, or return None if it is not reachable.

    A process of another user that has taken the name is refused.
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
    except OSError:  # silent or gone
        return b""


def _name(secret: bytes) -> bytes:
    return b"\0kvplan-notify-" + hmac.digest(secret, b"name", "sha256")[:16].hex().encode()


def _token(secret: bytes) -> bytes:
    return hmac.digest(secret, b"token", "sha256")[:_TOKEN_NBYTES]


class Inbox(Protocol):
    """The queue for notifications of linked peers. Its methods never block."""

    def deliver(self, cluster_id: int, data: bytes, direct: socket.socket | None) -> int:
        """Add a notification that came as a message, after those in the peer's direct connection.

        Returns:
            Number of packets that may be sent directly.

        Raises:
            LLMException: LLM_LINK_BUSY if the queue is full; LLM_ENGINE_FINALIZED.
        """

    def attach(self, cluster_id: int, direct: socket.socket) -> None:
        """Receive from a direct connection of a peer from now on.

        Raises:
            OSError: The system cannot watch another descriptor.
        """

    def detach(self, direct: socket.socket) -> None:
        """Read the remaining packets of a direct connection, and close it. Idempotent."""


class Notifier:
    """The notifications of one link, in both directions."""

    def __init__(self, cluster_id: int) -> None:
        self._cluster_id = cluster_id
        self._sending: DirectSender | None = None
        self._receiving: socket.socket | None = None
        self._may_offer = True
        self._slots = asyncio.Semaphore(_MAX_REQUESTS)
        # Numbers of requests, in sending order. Direct packets would overtake an unanswered one,
        # which may still arrive.
        self._last_sent = self._last_answered = 0
        self._later: set[object] = set()  # tokens of `defer` that are not settled
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds only weak references

    def send_directly(self, data: bytes) -> bool:
        """Send from the calling thread, and return False if a message is needed instead."""
        direct = self._sending
        return (
            direct is not None
            and not self._later
            and self._last_sent == self._last_answered
            and direct.send(data)
        )

    async def send(self, channel: Channel, data: bytes, timeout_s: float) -> None:
        """Send by a message, wait for the answer, and make the direct connection if possible."""
        async with asyncio.timeout(timeout_s), self._slots:  # in order, as a semaphore is FIFO
            listener = self._offer()
            connects = listener is not None
            self._last_sent = number = self._last_sent + 1
            try:
                secret = None if listener is None else listener.secret
                reply = await channel.typed_request(Notify(data, secret), Notified, timeout_s)
                if listener is not None:
                    connects, self._sending = False, listener.accept()
                self._last_answered = max(self._last_answered, number)
                self._grant(reply.window)
            except LLMException as error:
                if error.status_code is LLMStatusCode.LLM_LINK_BUSY:
                    self._grant(0)
                self._last_answered = max(self._last_answered, number)
                raise
            finally:
                if listener is not None:
                    listener.close()
                self._may_offer = self._may_offer or connects  # the offer was not answered

    def send_later(
        self, token: object, channel: Callable[[], Channel], data: bytes, timeout_s: float
    ) -> None:
        """Send in the background. A failure is logged."""
        task = asyncio.get_running_loop().create_task(
            self._send_and_log(token, channel, data, timeout_s)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def defer(self) -> object:
        """Make later notifications follow a message that the control thread is about to send."""
        self._later.add(token := object())
        return token

    def settle(self, token: object) -> None:
        """Conclude a message that `defer` has begun."""
        self._later.discard(token)

    def receive(self, notify: Notify, inbox: Inbox) -> Notified:
        """Queue the peer's notification, and connect directly if the peer offers that."""
        window = inbox.deliver(self._cluster_id, notify.data, self._receiving)
        if notify.direct is not None and (connection := connect(notify.direct)) is not None:
            if self._receiving is not None:
                inbox.detach(self._receiving)
            try:
                inbox.attach(self._cluster_id, connection)
                self._receiving = connection
            except OSError:  # the peer notices that the connection has ended
                connection.close()
                self._receiving = None
        return Notified(window)

    def end(self, inbox: Inbox | None) -> None:
        """End all notifications with the link."""
        if self._sending is not None:
            self._sending.end()
            self._sending = None
        self._may_offer = False
        if self._receiving is not None and inbox is not None:
            inbox.detach(self._receiving)
            self._receiving = None

    async def _send_and_log(
        self, token: object, channel: Callable[[], Channel], data: bytes, timeout_s: float
    ) -> None:
        try:
            await self.send(channel(), data, timeout_s)
        except (LLMException, TimeoutError, ChannelClosed) as error:
            # As text: a log record that a handler keeps would keep the error and its frames.
            _peer_log.warning("event=not_notified peer=%s reason=%s", self._cluster_id, repr(error))
        finally:
            self.settle(token)

    def _offer(self) -> DirectListener | None:
        if not self._may_offer:
            return None
        with suppress(OSError):
            listener = DirectListener()
            self._may_offer = False
            return listener
        return None

    def _grant(self, window: int) -> None:
        if self._sending is not None:
            self._sending.grant(window)
