"""Notifications over one link, in both directions: directly inside one host, or by messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from kvplan.control.channel import Channel, ChannelClosed
from kvplan.control.direct import DirectListener, DirectSender, connect
from kvplan.control.messages import Notified, Notify
from kvplan.logs import LimitedLog, Log
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    import socket

_MAX_REQUESTS: Final = 8  # at a time, besides the link's other requests

_peer_log = LimitedLog(Log("kvplan.links"))


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
