"""Connections that are not authenticated yet: each is cheap, and their number is limited.

A pending connection is greeted with a nonce. It becomes a channel once it has answered with the
key's cookie for the nonce; until then it costs no more than a socket. Without a key, every
connection becomes a channel, and each address has the same chance. The channel stays pending until
it has a link; until then another connection may take its place. With or without a key, a connection
becomes a data connection once it has proved the secret of a link that is being made.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvplan.control.auth import COOKIE_NBYTES, ClusterKey
from kvplan.control.data_streams import (
    ENDED,
    HELLO_NBYTES,
    DataStreams,
    is_hello,
    link_id_of,
    set_options,
)
from kvplan.control.endpoint import IPC, endpoint_of
from kvplan.control.zmtp import GREETING_NBYTES, UNUSED_AT, Unacceptable, ZmtpValidator, greeting

if TYPE_CHECKING:
    from kvplan.control.channel import Channel
    from kvplan.control.loop import ControlLoop, RefusalLog

_TOO_MANY: Final = "too many pending connections"
_RESET: Final = struct.pack("2i", 1, 0)  # of SO_LINGER: close resets the connection
_SITE_NBYTES: Final = 8  # prefix of an IPv6 address, which a host cannot choose


class PendingConnection:
    """A connection that has not authenticated yet."""

    __slots__ = (
        "channel", "greeting", "key", "name", "received", "since", "socket", "source", "validator"
    )  # fmt: skip

    def __init__(self, stream: socket.socket, name: Any, key: ClusterKey | None) -> None:
        self.socket = stream  # until a channel uses it
        self.name = name  # the system's name of the other end
        self.source = _source(name)  # the group of addresses that counts as one address
        self.key = key  # None if no key is needed
        self.since = time.monotonic()
        nonce = secrets.token_bytes(COOKIE_NBYTES)
        self.greeting = greeting(encrypted=key is not None, unused=nonce)
        self.received = bytearray()  # at most as long as a greeting
        self.validator = ZmtpValidator(encrypted=key is not None)
        self.channel: Channel | None = None

    @property
    def peer(self) -> str:
        """Address of the other end, for messages."""
        return str(endpoint_of(self.name)) if self.name else IPC

    @property
    def nonce(self) -> bytes:
        """The random bytes of the greeting."""
        return self.greeting[UNUSED_AT:]

    @property
    def has_key(self) -> bool:
        """True once the peer has proved that it has the key."""
        return self.key is not None and secrets.compare_digest(
            self.validator.unused, self.key.cookie(self.nonce)
        )


class PendingConnections:
    """All pending connections of a server. Only the loop's thread uses it."""

    def __init__(
        self, limit: int, open_channel: Callable[[PendingConnection], Channel], refusals: RefusalLog
    ) -> None:
        self._limit = limit
        self._open_channel = open_channel
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._by_source: dict[str, list[PendingConnection]] = {}
        # Pending connections that wait for a channel.
        self._waiting: dict[str, list[PendingConnection]] = {}
        self._links: dict[bytes, AcceptedStreams] = {}  # links that are being made, by id
        self._count = 0

    def add(self, connection: PendingConnection) -> None:
        """Greet a new connection."""
        try:
            connection.socket.send(connection.greeting)
        except OSError:
            connection.socket.close()
            return
        self._by_source.setdefault(connection.source, []).append(connection)
        self._count += 1
        self._loop.add_reader(connection.socket.fileno(), self._read, connection)
        if self._count > self._limit:
            self._drop_one()

    def remove(self, connection: PendingConnection) -> None:
        """Remove a connection that has proved the key, has got a link, or has ended."""
        _take(self._waiting, connection)
        if _take(self._by_source, connection):
            self._count -= 1

    def sweep(self, earliest: float) -> None:
        """Drop connections older than `earliest` without a channel, and remove linked ones."""
        for connection in self._all():
            if connection.channel is None:
                if connection.since < earliest:
                    self._refuse(connection, "no handshake in time")
            elif connection.channel.bound is not None:
                self.remove(connection)

    def close(self) -> None:
        """Drop all connections without a channel. The server closes the channels."""
        for streams in list(self._links.values()):
            streams.close_now()
        for connection in self._all():
            if connection.channel is None:
                self.drop(connection)

    def expect_link(self, streams: AcceptedStreams) -> None:
        """Accept data connections of this link."""
        self._links[streams.link_id] = streams

    def forget_link(self, streams: AcceptedStreams) -> None:
        """Accept no more data connections of this link."""
        self._links.pop(streams.link_id, None)

    def drop(self, connection: PendingConnection) -> None:
        """Close a connection, if it is still pending."""
        if connection.socket.fileno() >= 0:
            self._loop.remove_reader(connection.socket.fileno())
            connection.socket.close()
            self.remove(connection)

    def _all(self) -> list[PendingConnection]:
        return [connection for group in self._by_source.values() for connection in group]

    def _read(self, connection: PendingConnection) -> None:
        try:
            chunk = connection.socket.recv(GREETING_NBYTES - len(connection.received))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.drop(connection)
            return
        connection.received += chunk
        try:
            if is_hello(connection.received):
                self._accept_data(connection)
                return
            connection.validator.check(chunk)
        except Unacceptable as error:
            self._refuse(connection, str(error))
            return
        if not connection.validator.greeted:
            return
        self._loop.remove_reader(connection.socket.fileno())
        if connection.has_key:
            self.remove(connection)
            self._open_channel(connection)
        elif connection.key is not None:
            self._refuse(connection, f"it does not have this side's key; {connection.key.advice}")
        else:
            if not self._waiting:
                self._loop.call_soon(self._open_next)
            self._waiting.setdefault(connection.source, []).append(connection)

    def _accept_data(self, connection: PendingConnection) -> None:
        """Hand a data connection to the link that its hello names, once the hello is complete."""
        if len(connection.received) < HELLO_NBYTES:
            return
        streams = self._links.get(link_id_of(connection.received))
        if streams is None:
            raise Unacceptable("it does not belong to a link that is being made")
        self._loop.remove_reader(connection.socket.fileno())
        streams.accept(connection)

    def _open_next(self) -> None:
        """Open one channel. Each waiting address has the same chance."""
        if not self._waiting:
            return
        connection = secrets.choice(self._waiting[secrets.choice(list(self._waiting))])
        _take(self._waiting, connection)
        connection.channel = self._open_channel(connection)
        if self._waiting:
            self._loop.call_soon(self._open_next)

    def _drop_one(self) -> None:
        group = max(self._by_source.values(), key=len)
        connection = group[secrets.randbelow(max(1, len(group) - 1))]  # not the newest
        if connection.channel is None:
            self._refuse(connection, _TOO_MANY)
            return
        self.remove(connection)
        if connection.channel.bound is None:  # otherwise it is not pending any more
            self._refusals.note(connection.peer, _TOO_MANY)
            connection.channel.drop(_TOO_MANY)

    def _refuse(self, connection: PendingConnection, reason: str) -> None:
        self._refusals.note(connection.peer, reason)
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.drop(connection)


class AcceptedStreams(DataStreams):
    """Data connections that arrive on this side's listener.

    A connection stays pending until `prepare` waits for it.
    """

    dials = False

    def __init__(
        self,
        challenge: bytes,
        loop: ControlLoop,
        pending: PendingConnections,
        way: str,
        *,
        private: bool,
    ) -> None:
        super().__init__(challenge, way, loop, private=private)
        self._pending = pending
        self._slots: dict[int, asyncio.Future[PendingConnection]] = {}
        self._awaited: set[int] = set()
        pending.expect_link(self)

    def close_now(self) -> None:
        """See `DataStreams.close_now`."""
        super().close_now()
        self._pending.forget_link(self)
        for slot in self._slots.values():
            if not slot.done():
                slot.set_exception(ConnectionError(ENDED))
                slot.exception()  # retrieved, so that asyncio does not warn
            elif not slot.cancelled() and slot.exception() is None:
                self._pending.drop(slot.result())

    def accept(self, connection: PendingConnection) -> None:
        """Accept a connection whose complete hello names this link."""
        index, answer = self._answer(connection.greeting, bytes(connection.received))
        slot = self._slot(index)
        if slot.done():
            raise Unacceptable("its index is in use, or no longer expected")
        try:
            set_options(connection.socket)
            connection.socket.send(answer)  # a new connection has room
        except OSError as error:
            raise Unacceptable(f"it cannot be answered: {error.strerror}") from None
        slot.set_result(connection)
        if index in self._awaited:
            self._pending.remove(connection)

    async def prepare(self, indices: Sequence[int], timeout_s: float) -> None:
        """Wait for the connections; see `DataStreams.prepare`."""
        if not indices:
            return
        if self._closed:
            raise self._failed(indices[0], "accept", ENDED)
        # Make all slots first: `close_now` ends only the waits for slots that exist.
        slots = [self._slot(index) for index in indices]
        self._awaited.update(indices)
        for slot in slots:
            if slot.done() and not slot.cancelled():
                self._pending.remove(slot.result())
        accepted: list[PendingConnection] = []
        try:
            async with asyncio.timeout(timeout_s):
                for slot in slots:
                    accepted.append(await slot)  # noqa: PERF401 - the error names the next
        except TimeoutError:
            reason = f"it has not arrived within {timeout_s * 1000:.0f} ms"
            raise self._failed(indices[len(accepted)], "accept", reason) from None
        except ConnectionError as error:
            raise self._failed(indices[len(accepted)], "accept", str(error)) from None
        for index, connection in zip(indices, accepted, strict=True):
            if connection.socket.fileno() < 0:
                reason = "it was opened before, or dropped: too many pending connections"
                raise self._failed(index, "accept", reason)
            stream = socket.socket(fileno=connection.socket.detach())
            stream.setblocking(False)
            self._opened[index] = stream

    def _slot(self, index: int) -> asyncio.Future[PendingConnection]:
        if index not in self._slots:
            self._slots[index] = asyncio.get_running_loop().create_future()
        return self._slots[index]


def _take(groups: dict[str, list[PendingConnection]], connection: PendingConnection) -> bool:
    """Remove a connection from its group, and return True if it was there."""
    group = groups.get(connection.source, [])
    if connection not in group:
        return False
    group.remove(connection)
    if not group:
        del groups[connection.source]
    return True


def _source(name: Any) -> str:
    if not isinstance(name, tuple):
        return ""
    host: str = name[0].partition("%")[0]
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return socket.inet_pton(socket.AF_INET6, host)[:_SITE_NBYTES].hex()
