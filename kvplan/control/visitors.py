"""Who has connected, and has not shown that it belongs here: cheap to hold, and few of one address.

A visitor is greeted with a nonce, and becomes a conversation once it has shown the key's cookie for
it; nobody else costs more than a socket. Where there is no key, all may converse: each address in
its turn, and until they have a link others may take their place. With or without a key, a visitor
becomes a data connection once it has shown that it knows the secret of a link that is being made.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvplan.control.cluster_key import COOKIE_NBYTES, ClusterKey
from kvplan.control.data_streams import HELLO_NBYTES, is_hello, link_id_of
from kvplan.control.endpoint import IPC, endpoint_of
from kvplan.control.vetting import GREETING_NBYTES, UNUSED_AT, Unacceptable, Vetting, greeting

if TYPE_CHECKING:
    from kvplan.control.channel import Channel
    from kvplan.control.data_streams import AcceptedStreams
    from kvplan.control.refusals import Refusals

_TOO_MANY: Final = "too many visitors"
_RESET: Final = struct.pack("2i", 1, 0)  # of SO_LINGER: to close leaves nothing behind
_NEXT_64_HOSTS: Final = 8  # bytes of an IPv6 address that a site cannot choose


class Visitor:
    """One of them.

    Attributes:
        socket: the connection, until there is a conversation on it.
        name: what the system calls the other end.
        source: what counts as one address.
        key: of its conversation; None: none is needed.
        since: when it came, on the clock of `time.monotonic`.
        greeting: what it is greeted with.
        said: what it has said so far, at most as much.
        channel: its conversation.
    """

    __slots__ = (
        "channel", "greeting", "key", "name", "said", "since", "socket", "source", "vetting"
    )  # fmt: skip

    def __init__(self, stream: socket.socket, name: Any, key: ClusterKey | None) -> None:
        self.socket = stream
        self.name = name
        self.source = _source(name)
        self.key = key
        self.since = time.monotonic()
        nonce = secrets.token_bytes(COOKIE_NBYTES)
        self.greeting = greeting(encrypted=key is not None, unused=nonce)
        self.said = bytearray()
        self.vetting = Vetting(encrypted=key is not None)
        self.channel: Channel | None = None

    @property
    def peer(self) -> str:
        """Its address, for messages."""
        return str(endpoint_of(self.name)) if self.name else IPC

    @property
    def belongs_here(self) -> bool:
        """Whether it has shown that it has the key."""
        return self.key is not None and secrets.compare_digest(
            self.vetting.unused, self.key.cookie(self.greeting[UNUSED_AT:])
        )


class Visitors:
    """All visitors of a server; used on the loop's thread.

    Args:
        limit: how many there may be; of one more, one of the address that has the most is dropped.
        converse: begins the conversation of a visitor.
        refusals: is told of those who are turned away.
    """

    def __init__(
        self, limit: int, converse: Callable[[Visitor], Channel], refusals: Refusals
    ) -> None:
        self._limit = limit
        self._converse = converse
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._here: dict[str, list[Visitor]] = {}
        self._ready: dict[str, list[Visitor]] = {}  # those of them that wait for their turn
        self._links: dict[bytes, AcceptedStreams] = {}  # that are being made, by id
        self._count = 0

    def arrive(self, visitor: Visitor) -> None:
        """Greet a visitor."""
        try:
            visitor.socket.send(visitor.greeting)
        except OSError:
            visitor.socket.close()
            return
        self._here.setdefault(visitor.source, []).append(visitor)
        self._count += 1
        self._loop.add_reader(visitor.socket, self._read, visitor)
        if self._count > self._limit:
            self._drop_one()

    def leave(self, visitor: Visitor) -> None:
        """It is not a visitor any more: it has shown its key, has a link, or has gone."""
        _take(self._ready, visitor)
        if _take(self._here, visitor):
            self._count -= 1

    def sweep(self, earliest: float) -> None:
        """Drop who came before `earliest` and is still a visitor; forget who is linked by now."""
        for visitor in self._all():
            if visitor.channel is None:
                if visitor.since < earliest:
                    self._refuse(visitor, "no handshake in time")
            elif visitor.channel.bound is not None:
                self.leave(visitor)

    def close(self) -> None:
        """Drop all who have no conversation; the others end by themselves."""
        for streams in tuple(self._links.values()):
            streams.close_now()
        for visitor in self._all():
            if visitor.channel is None:
                self.drop(visitor)

    def expect_link(self, streams: AcceptedStreams) -> None:
        """Let data connections of this link come."""
        self._links[streams.link_id] = streams

    def forget_link(self, streams: AcceptedStreams) -> None:
        """None come any more."""
        self._links.pop(streams.link_id, None)

    def drop(self, visitor: Visitor) -> None:
        """End its connection, if that is a visitor's still."""
        if visitor.socket.fileno() >= 0:
            self._loop.remove_reader(visitor.socket)
            visitor.socket.close()
            self.leave(visitor)

    def _all(self) -> list[Visitor]:
        return [it for crowd in self._here.values() for it in crowd]

    def _read(self, visitor: Visitor) -> None:
        try:
            chunk = visitor.socket.recv(GREETING_NBYTES - len(visitor.said))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.drop(visitor)
            return
        visitor.said += chunk
        try:
            if is_hello(visitor.said):
                self._admit_data(visitor)
                return
            visitor.vetting.check(chunk)
        except Unacceptable as error:
            self._refuse(visitor, str(error))
            return
        if not visitor.vetting.greeted:
            return
        self._loop.remove_reader(visitor.socket)
        if visitor.belongs_here:
            self.leave(visitor)
            self._converse(visitor)
        elif visitor.key is not None:
            self._refuse(visitor, f"it does not have this end's key; {visitor.key.advice}")
        else:
            if not self._ready:
                self._loop.call_soon(self._serve_next)
            self._ready.setdefault(visitor.source, []).append(visitor)

    def _admit_data(self, visitor: Visitor) -> None:
        """Let the link that a hello names have this connection, once all of it has come."""
        if len(visitor.said) < HELLO_NBYTES:
            return
        streams = self._links.get(link_id_of(visitor.said))
        if streams is None:
            raise Unacceptable("it is of no link that is being made")
        self._loop.remove_reader(visitor.socket)
        streams.arrive(visitor)

    def _serve_next(self) -> None:
        """Begin one conversation: whichever address waits is as near as any other."""
        if not self._ready:
            return
        visitor = secrets.choice(self._ready[secrets.choice(list(self._ready))])
        _take(self._ready, visitor)
        visitor.channel = self._converse(visitor)
        if self._ready:
            self._loop.call_soon(self._serve_next)

    def _drop_one(self) -> None:
        crowd = max(self._here.values(), key=len)
        visitor = crowd[secrets.randbelow(max(1, len(crowd) - 1))]  # not who has just come
        if visitor.channel is None:
            self._refuse(visitor, _TOO_MANY)
            return
        self.leave(visitor)
        if visitor.channel.bound is None:  # else it is not a visitor any more
            self._refusals.note(visitor.peer, _TOO_MANY)
            visitor.channel.drop(_TOO_MANY)

    def _refuse(self, visitor: Visitor, reason: str) -> None:
        self._refusals.note(visitor.peer, reason)
        visitor.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.drop(visitor)


def _take(crowds: dict[str, list[Visitor]], visitor: Visitor) -> bool:
    """Take a visitor out, and return whether it was there."""
    crowd = crowds.get(visitor.source, [])
    if visitor not in crowd:
        return False
    crowd.remove(visitor)
    if not crowd:
        del crowds[visitor.source]
    return True


def _source(name: Any) -> str:
    if not isinstance(name, tuple):
        return ""
    host: str = name[0].partition("%")[0]
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return socket.inet_pton(socket.AF_INET6, host)[:_NEXT_64_HOSTS].hex()
