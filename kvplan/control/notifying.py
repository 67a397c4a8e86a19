"""Notifications over one link: directly inside one host, or by messages of the control connection.

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

import asyncio
import fcntl
import hmac
import os
import secrets
import socket
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.messages import Notified, Notify
from kvplan.control.users import peer_credentials
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system.logs import LimitedLog, Log

if TYPE_CHECKING:
    import socket


WINDOW: Final = 256
"""Packets that lie in the receiver's socket, at most; the kernel has room for 50 of 4 KiB."""

_BACKLOG: Final = 4  # other processes see the name, too
_BUFFER_NBYTES: Final = 212992  # of the kernel's default limit
_TOKEN_NBYTES: Final = 16
_NOTHING: Final = bytes(4)  # an int of the kernel
_MAX_REQUESTS: Final = 8  # at a time, besides the link's other requests
_peer_log = LimitedLog(Log("kvplan.links"))


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


class Inbox(Protocol):
    """Where the notifications of linked peers arrive; for the control thread, and never blocks."""

    def deliver(self, cluster_id: int, data: bytes, direct: socket.socket | None) -> int:
        """Put in what a peer sends by a message, behind what lies in its direct connection.

        Returns:
            How many more may be sent directly.

        Raises:
            LLMException: LLM_LINK_BUSY: nobody has read those before; LLM_ENGINE_FINALIZED.
        """

    def attach(self, cluster_id: int, direct: socket.socket) -> None:
        """Take from now on what a peer sends directly.

        Raises:
            OSError: the system has no room to watch it.
        """

    def detach(self, direct: socket.socket) -> None:
        """Take what lies there, and close it; idempotent."""


class Notifier:
    """Sends and receives the notifications of one link."""

    def __init__(self, cluster_id: int) -> None:
        self._cluster_id = cluster_id
        self._sending: DirectSender | None = None
        self._receiving: socket.socket | None = None
        self._may_offer = True
        self._slots = asyncio.Semaphore(_MAX_REQUESTS)
        # Of requests, in the order in which they were sent. While one is not answered it may still
        # arrive, and what is sent directly would overtake it.
        self._last_sent = self._last_answered = 0
        self._later: set[object] = set()  # what `send_later` has not sent, or has no answer to
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself refers to them weakly

    def send_directly(self, data: bytes) -> bool:
        """Send from the calling thread; returns whether it has arrived: else use a message."""
        direct = self._sending
        return (
            direct is not None
            and not self._later
            and self._last_sent == self._last_answered
            and direct.send(data)
        )

    async def send(self, channel: Channel, data: bytes, timeout_s: float) -> None:
        """Send by a message, and wait for the answer; makes the direct connection if it can."""
        async with asyncio.timeout(timeout_s), self._slots:  # in order: both are FIFO
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
                self._may_offer = self._may_offer or connects  # it was not answered

    def send_later(
        self, token: object, channel: Callable[[], Channel], data: bytes, timeout_s: float
    ) -> None:
        """As `send`, in the background; what fails is logged."""
        task = asyncio.get_running_loop().create_task(
            self._send_and_log(token, channel, data, timeout_s)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def defer(self) -> object:
        """Have what follows sent by messages, too, after one that the control thread will send."""
        self._later.add(token := object())
        return token

    def settle(self, token: object) -> None:
        """End what `defer` has begun: the message is answered, or has failed."""
        self._later.discard(token)

    def receive(self, notify: Notify, inbox: Inbox) -> Notified:
        """Put what the peer sends where the program reads."""
        window = inbox.deliver(self._cluster_id, notify.data, self._receiving)
        if notify.direct is not None and (connection := connect(notify.direct)) is not None:
            if self._receiving is not None:
                inbox.detach(self._receiving)
            try:
                inbox.attach(self._cluster_id, connection)
                self._receiving = connection
            except OSError:  # the peer finds that it has ended
                connection.close()
                self._receiving = None
        return Notified(window)

    def end(self, inbox: Inbox | None) -> None:
        """The link has ended; in the control thread."""
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
            # As text: a record that is kept would keep the error, and with it what has failed.
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
