"""A `Link`: both ends of a link's data connections; and a client that may send anything."""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvplan.control.data_streams import DialledStreams
from kvplan.control.endpoint import Endpoint
from kvplan.control.pending_connections import AcceptedStreams
from kvplan.status import LLMStatusCode
from tests.control.conversation import DEADLINE_S, Conversation, call
from tests.support.refusals import refused

GREETING_NBYTES = 64


class Link:
    """The data connections of a link, with both of its ends."""

    def __init__(self, conversation: Conversation, challenge: bytes) -> None:
        self.challenge = challenge
        self.far = call(conversation.far_loop, conversation.far_channel().streams, challenge)
        self.near = call(conversation.loop, conversation.channel.streams, challenge)
        assert isinstance(self.near, DialledStreams)
        assert isinstance(self.far, AcceptedStreams)

    def open(self, index: int) -> tuple[socket.socket, socket.socket]:
        near = open_one(self.near, index)
        far = open_one(self.far, index)
        for stream in (near, far):
            assert stream.gettimeout() == 0
            stream.settimeout(DEADLINE_S)
        return near, far

    def check(self, index: int) -> None:
        """Check that a connection can be made, and that bytes pass both ways."""
        near, far = self.open(index)
        with near, far:
            assert say(near, far) == say(far, near) == b"data"


def open_one(streams: Any, index: int) -> socket.socket:
    (stream,) = streams.open([index], DEADLINE_S)
    assert isinstance(stream, socket.socket)
    return stream


def say(sender: socket.socket, receiver: socket.socket) -> bytes:
    sender.sendall(b"data")
    return receiver.recv(64)


def derived(challenge: bytes, label: bytes) -> bytes:
    return hmac.digest(challenge, label, "sha256")


def hello(
    challenge: bytes, greeting: bytes, index: int = 0, beginning: bytes = b"kvplan\1"
) -> bytes:
    """Return the hello of the dialling end, as docs/internals/control-protocol.md describes it."""
    secret = derived(challenge, b"kvplan data secret")
    link_id = derived(challenge, b"kvplan data id")[:8]
    fields = beginning + struct.pack("!B8s16s", index, link_id, b"n" * 16)
    return fields + hmac.digest(secret, b"client" + greeting + fields, "sha256")


class UnauthenticatedClient:
    """A TCP connection to a server, which has sent its greeting."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.socket = socket.create_connection((endpoint.host, endpoint.port), DEADLINE_S)
        self.greeting = b""
        while len(self.greeting) < GREETING_NBYTES:
            self.greeting += self.socket.recv(GREETING_NBYTES - len(self.greeting))

    def end(self) -> None:
        """Send nothing more."""
        with suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_WR)

    def heard(self) -> bytes:
        """Return all bytes until the other end closes the connection."""
        heard = b""
        with suppress(ConnectionResetError):
            while chunk := self.socket.recv(1 << 16):
                heard += chunk
        return heard

    def __enter__(self) -> UnauthenticatedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


_links = iter(range(10**9))


def new_link(conversation: Conversation) -> Link:
    return Link(conversation, next(_links).to_bytes(16))


def refusal(streams: Any, *indices: int, timeout_s: float = DEADLINE_S) -> str:
    with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
        streams.open(indices or [0], timeout_s)
    return str(error.value.args[0])


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        yield server
