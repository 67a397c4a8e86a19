"""An ordered channel of messages to one peer: requests with replies, notices, heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from kvplan.control.auth import ClusterKey
from kvplan.control.connection import DISCONNECTED, Connection
from kvplan.control.data_streams import OpenStreams
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import (
    MAX_TEXT,
    Body,
    Close,
    Envelope,
    Failed,
    Ping,
    Pong,
    Refusal,
    Undecodable,
    WrongVersion,
    decode,
    encode,
    encode_refusal,
)
from kvplan.status import LLMException, busy, link_failed

MAX_REQUESTS: Final = 32
"""Maximum number of concurrent requests of one peer. Others are refused."""

MAX_PENDING_REQUESTS: Final = 4
"""Maximum number of concurrent requests of one peer while its channel has no link."""

MAX_UNDECODABLE: Final = 16
"""Maximum number of undecodable frames of a channel. The next one ends it."""

_CHECKS_PER_TIMEOUT: Final = 2
"""Minimum number of heartbeat checks within the shorter of interval and timeout."""

_MEANINGLESS: Final = "too many frames that are not messages"

_Reply = TypeVar("_Reply", bound=Body)


class ChannelClosed(ConnectionError):  # noqa: N818 - the field's word
    """The channel has ended. The text says why."""


class Handler(Protocol):
    """The receiver of a peer's messages, in order, on the loop's thread.

    A request may still run while the next messages are delivered.
    """

    async def on_request(self, channel: Channel, body: Body) -> Body:
        """Answer a request. An LLMException becomes a Failed reply.

        The end of the channel cancels the call.
        """

    def on_notice(self, channel: Channel, body: Body) -> None:
        """Handle a message that needs no reply."""

    def on_lost(self, channel: Channel, reason: str) -> None:
        """Handle the end of an introduced channel that this side did not `close` or `drop`."""


class Channel:
    """An ordered channel of messages to one peer. Only the loop's thread uses it."""

    def __init__(
        self,
        loop: ControlLoop,
        key: ClusterKey | None,
        handler: Handler,
        *,
        listening: bool,
        peer: str,
        streams: OpenStreams,
        on_end: Callable[[Channel], None] | None = None,
    ) -> None:
        # The link that uses the channel. None while the channel is pending: the server then ends
        # the channel if it is silent for long, or if its place is needed.
        self.bound: Any | None = None
        self.introduced = False  # True once the handler must be notified of the end
        self.closed_orderly = False  # True if the peer has ended the channel on purpose
        self.peer = peer  # address, for messages
        self.streams = streams
        self._refusals = loop.refusals
        self._on_end = on_end
        self._control = loop
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        loop.register(self)  # closes before the connection, which then sends the Close
        self.connection = Connection(
            loop, key, listening=listening, on_frame=self._receive, on_end=self._on_connection_end
        )
        self._reason: str | None = None
        self._is_ignoring = False  # True after this side has closed
        self._seq = 0
        self._waiting: dict[int, asyncio.Future[Body | None]] = {}
        self._serving: set[asyncio.Task[Any]] = set()
        self._sending = asyncio.Lock()
        self._undecodable = 0
        self._heard = asyncio.Event()  # for `ping`; also set when the channel ends
        self.last_received = self.last_sent = time.monotonic()  # times of the last messages
        self._heartbeat: Heartbeat | None = None

    @property
    def serving(self) -> bool:
        """True while a request of the peer is being served."""
        return bool(self._serving)

    @property
    def closed(self) -> bool:
        """True once the channel has ended."""
        return self._reason is not None

    async def request(self, body: Body, timeout_s: float) -> Body:
        """Send a request and return the reply."""
        self._check_open()
        self._seq += 1
        seq = self._seq
        reply: asyncio.Future[Body | None] = self._loop.create_future()
        self._waiting[seq] = reply
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(encode(body, seq=seq))
                answer = await reply
        finally:
            del self._waiting[seq]
        if answer is None:
            raise ChannelClosed(self._reason)
        if isinstance(answer, Failed):
            raise answer.exception()
        return answer

    async def typed_request(self, body: Body, expected: type[_Reply], timeout_s: float) -> _Reply:
        """Send a request, and return its reply if that has the expected type."""
        reply = await self.request(body, timeout_s)
        if not isinstance(reply, expected):
            raise link_failed(
                f"the peer answered {type(reply).__name__} to a {type(body).__name__}"
            )
        return reply

    async def notify(self, body: Body) -> None:
        """Send a notice. This waits while the peer does not read earlier ones."""
        self._check_open()
        await self._send(encode(body))

    async def ping(self) -> None:
        """Ping the peer, and wait for any message from it."""
        self._check_open()
        self._heard.clear()
        self.post(Ping())
        await self._heard.wait()
        self._check_open()

    def keep_alive(self, interval_s: float, timeout_s: float) -> None:
        """Ping after `interval_s` without sending, and end after `timeout_s` without receiving."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if not self.closed:
            self._heartbeat = Heartbeat(self, interval_s, timeout_s)

    def close(self, reason: str = "", *, orderly: bool = False) -> None:
        """End the channel, and send the reason to a peer that still reads. Idempotent."""
        self._is_ignoring = True
        if not self.closed:
            self.post(Close((reason or "closed by the peer")[:MAX_TEXT], orderly))
            self._end(reason or "closed by this side")

    def drop(self, reason: str) -> None:
        """End the channel at once, without sending or waiting."""
        self._is_ignoring = True
        if not self.closed:
            self._end(reason)
            self.connection.abort(reason)

    def lose(self, reason: str) -> None:
        """End a channel whose peer has ended it, is dead or is refused; see `Handler.on_lost`."""
        if not self.closed:
            self._end(reason)
            if self.introduced:
                self._loop.call_soon(self._handler.on_lost, self, reason)

    def post(self, body: Body, reply_to: int = 0) -> None:
        """Send without waiting, or drop the message if the queue is full."""
        if self._sending.locked():
            return
        with contextlib.suppress(ConnectionError):
            if self.connection.try_send(encode(body, reply_to=reply_to)):
                self.last_sent = time.monotonic()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended. Call `close` first."""
        await self.connection.wait_closed()

    async def _send(self, frame: bytes) -> None:
        try:
            async with self._sending:  # frames keep their order while the peer is slow
                await self.connection.send(frame)
        except ConnectionError as error:  # a connection ends with its channel
            raise ChannelClosed(self._reason) from error
        self.last_sent = time.monotonic()

    def _receive(self, frame: bytes) -> None:
        if self.closed:
            return
        try:
            envelope = decode(frame)
        except Refusal as error:
            self.lose(f"the peer refuses: {error}")
            return
        except WrongVersion as error:
            self._refusals.note(self.peer, str(error))
            with contextlib.suppress(ConnectionError):
                self.connection.try_send(encode_refusal(str(error)))
            self.lose(str(error))
            return
        except Undecodable as error:
            self._refuse(error)
            return
        self.last_received = time.monotonic()
        self._heard.set()
        self.introduced = True
        self._deliver(envelope)

    def _deliver(self, envelope: Envelope) -> None:
        match envelope:
            case Envelope(seq=0, reply_to=0, body=Ping()):
                self.post(Pong())
            case Envelope(seq=0, reply_to=0, body=Pong()):
                pass
            case Envelope(seq=0, reply_to=0, body=Close(reason, orderly)):
                self.closed_orderly = orderly
                self.lose(reason)
            case Envelope(seq=0, reply_to=0, body=body):
                # Begin in the next iteration, as tasks of requests do, to keep the order.
                self._loop.call_soon(self._notice, body)
            case Envelope(seq=0, reply_to=reply_to, body=body):
                reply = self._waiting.get(reply_to)
                if reply is not None and not reply.done():
                    reply.set_result(body)
            case Envelope(seq=seq) if len(self._serving) >= self._max_requests:
                self.post(Failed.of(_too_many(self._max_requests)), reply_to=seq)
            case Envelope(seq=seq, body=body):
                task = self._loop.create_task(self._serve(seq, body))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    def _notice(self, body: Body) -> None:
        if not self._is_ignoring:
            self._handler.on_notice(self, body)

    async def _serve(self, seq: int, body: Body) -> None:
        try:
            answer = await self._handler.on_request(self, body)
            frame = encode(answer, reply_to=seq)
        except LLMException as error:
            frame = encode(Failed.of(error), reply_to=seq)
        except Exception:
            self._refusals.error(
                "event=request_failed peer=%s request=%s",
                self.peer,
                type(body).__name__,
                exc_info=True,
            )
            failure = LLMException("the peer failed to serve the request; its log says why")
            frame = encode(Failed.of(failure), reply_to=seq)
        with contextlib.suppress(ConnectionError):
            await self._send(frame)

    def _refuse(self, error: Undecodable) -> None:
        self._refusals.note(self.peer, str(error))
        self._undecodable += 1
        if self._undecodable > MAX_UNDECODABLE:
            self.post(Close(_MEANINGLESS, orderly=False))
            self.lose(_MEANINGLESS)

    def _on_connection_end(self, reason: str) -> None:
        if not self.closed and not self.introduced and reason != DISCONNECTED:
            self._refusals.note(self.peer, reason)
        self.lose(reason)

    def _end(self, reason: str) -> None:
        self._reason = reason
        self._heard.set()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_result(None)
        for task in self._serving - {asyncio.current_task()}:
            task.cancel()
        self.connection.close(reason)
        self._control.unregister(self)
        if self._on_end is not None:
            self._on_end(self)

    @property
    def _max_requests(self) -> int:
        return MAX_PENDING_REQUESTS if self.bound is None else MAX_REQUESTS

    def _check_open(self) -> None:
        if self._reason is not None:
            raise ChannelClosed(self._reason)


class Heartbeat:
    """The heartbeat of a channel: it pings an idle peer, and ends a silent channel.

    Silence counts only while this process runs and has read all input. Otherwise a process that was
    stopped, or did not get the GIL, would regard all of its peers as dead.
    """

    def __init__(self, channel: Channel, interval_s: float, timeout_s: float) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._step_s = min(interval_s, timeout_s) / _CHECKS_PER_TIMEOUT
        self._last_received = channel.last_received
        self._silent_s = 0.0
        self._checked_at = time.monotonic()
        self._plan_check(self._checked_at)

    def stop(self) -> None:
        """Stop all checks."""
        self._timer.cancel()

    def _check(self) -> None:
        channel = self._channel
        # A peer that has sent any message in the meantime is not silent.
        drained = channel.last_received == self._last_received and channel.connection.drain()
        if channel.closed:
            return
        now = time.monotonic()
        if channel.last_received != self._last_received:
            self._last_received, self._silent_s = channel.last_received, 0.0
        elif drained:
            self._silent_s += min(now - self._checked_at, self._step_s)
        self._checked_at = now
        if self._silent_s >= self._timeout_s:
            channel.lose(f"nothing heard for {self._silent_s:.3g} s")
            return
        if now - channel.last_sent >= self._interval_s:
            channel.post(Ping())
        self._plan_check(now)

    def _plan_check(self, now: float) -> None:
        """Plan the next check at the next Ping or timeout, within bounds."""
        ping_s = self._channel.last_sent + self._interval_s - now
        due_s = min(ping_s, self._timeout_s - self._silent_s)
        delay_s = min(max(due_s, self._step_s / 2), self._step_s)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)


def _too_many(limit: int) -> LLMException:
    return busy(f"more than {limit} requests at a time")
