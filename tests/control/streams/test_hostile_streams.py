"""Connections that do not prove their link are closed, and floods of them keep out no other."""

from __future__ import annotations

import resource
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.control.auth import ClusterKey
from kvplan.control.data_streams import DialledStreams
from kvplan.control.loop import ControlLoop, RefusalLog
from kvplan.control.messages import Sync, Synced
from kvplan.control.pending_connections import PendingConnection, PendingConnections
from kvplan.status import LLMException
from tests.control.conversation import DEADLINE_S, Conversation, call
from tests.control.flood import Flood
from tests.control.recording_proxy import RecordingProxy
from tests.control.streams.link import (
    GREETING_NBYTES,
    Link,
    UnauthenticatedClient,
    hello,
    listening,
    new_link,
    open_one,
    refusal,
    say,
)


def flipped(sent: bytes, bit: int) -> bytes:
    return (int.from_bytes(sent) ^ 1 << bit).to_bytes(len(sent))


@pytest.mark.parametrize(
    "forge",
    [
        lambda link, greeting: hello(b"other" + bytes(11), greeting),
        lambda link, greeting: hello(link.challenge, bytes(GREETING_NBYTES)),
        lambda link, greeting: hello(link.challenge, greeting)[:32] + bytes(32),
        lambda link, greeting: flipped(hello(link.challenge, greeting), 0),
        lambda link, greeting: flipped(hello(link.challenge, greeting), 8 * 56),
        lambda link, greeting: hello(link.challenge, greeting).replace(b"\1", b"\1\0", 1),
        lambda link, greeting: (
            hello(link.challenge, greeting)[:32] + hello(b"other" + bytes(11), greeting)[32:]
        ),
    ],
    ids=["id", "greeting", "zeros", "last bit", "index", "shifted", "secret"],
)
def test_an_unauthenticated_connection_is_closed_without_an_answer(
    link: Link, conversation: Conversation, forge: Any
) -> None:
    refused_before = conversation.far_loop.refusals.count
    with UnauthenticatedClient(conversation.server.endpoint) as client:
        client.socket.sendall(forge(link, client.greeting))
        assert client.heard() == b""
    assert conversation.far_loop.refusals.count == refused_before + 1
    link.check(0)


@pytest.mark.parametrize("beginning", [b"kvplan\0", b"kvplan\2", b"kvplaN", b"kx", b"GET"])
def test_other_versions_and_protocols_are_refused_at_their_first_byte(
    link: Link, conversation: Conversation, beginning: bytes
) -> None:
    with UnauthenticatedClient(conversation.server.endpoint) as client:
        client.socket.sendall(beginning)
        assert client.heard() == b""
    link.check(0)


def test_a_recorded_session_cannot_be_replayed(conversation: Conversation, link: Link) -> None:
    proxy = RecordingProxy(conversation.server.endpoint)
    way = DialledStreams(
        link.challenge,
        socket.AF_INET,
        (proxy.endpoint.host, proxy.endpoint.port),
        "proxy",
        conversation.loop,
    )
    near, far = open_one(way, 0), open_one(link.far, 0)
    far.settimeout(DEADLINE_S)
    assert say(near, far) == b"data"
    near.close()
    far.close()
    recorded = proxy.finish()
    assert len(recorded) == 64 + len(b"data")
    again = Link(conversation, link.challenge)  # the same link, as if made again
    for there in (link, again, new_link(conversation)):
        with UnauthenticatedClient(conversation.server.endpoint) as replay:
            replay.socket.sendall(recorded)
            assert replay.heard() == b""
        assert refusal(there.far, 1, timeout_s=0.0).endswith("it has not arrived within 0 ms")
    again.check(0)
    # The reverse: a server that replays the bytes of the real one.
    with listening() as server, ThreadPoolExecutor(1) as threads:
        played = threads.submit(play, server, bytes(proxy.heard))
        replayed = DialledStreams(
            link.challenge, socket.AF_INET, server.getsockname(), "replayed", conversation.loop
        )
        assert refusal(replayed) == (
            "replayed: data connection 0: authenticate: it does not know the secret of this link"
        )
        assert len(played.result()) == 64


def play(server: socket.socket, sent: bytes) -> bytes:
    """Be a server that sends `sent` on one connection, and return the bytes of the client."""
    stream, _ = server.accept()
    with stream:
        stream.settimeout(DEADLINE_S)
        stream.sendall(sent)
        heard = b""
        while chunk := stream.recv(1 << 16):
            heard += chunk
        return heard


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "greet: no answer within "),
        (b"g" * 63, "greet: no answer within "),
        (b"g" * 64, "authenticate: no answer within "),
        (b"g" * 95, "authenticate: no answer within "),
        (b"g" * 96, "authenticate: it does not know the secret of this link"),
    ],
)
def test_a_server_that_does_not_know_the_secret_is_refused(
    loop: ControlLoop, sent: bytes, reason: str
) -> None:
    with listening() as server, ThreadPoolExecutor(1) as threads:
        streams = DialledStreams(b"c" * 16, socket.AF_INET, server.getsockname(), "there", loop)
        for timeout_s in (0.05, 0.5, DEADLINE_S):  # on a loaded machine the server may send late
            threads.submit(play, server, sent)
            found = refusal(streams, 1, timeout_s=timeout_s)
            if reason in found:
                break
        waited = f"{timeout_s * 1000:.0f} ms" if reason.endswith("within ") else ""
        assert found.startswith(f"there: data connection 1: {reason}{waited}")


def test_a_connection_that_sends_single_bytes_is_ended_in_time(far_loop: ControlLoop) -> None:
    refusals = RefusalLog()

    async def pending_connections() -> PendingConnections:
        return PendingConnections(8, lambda _: pytest.fail("it is not a conversation"), refusals)

    pending = far_loop.run(pending_connections())
    with listening() as server, socket.create_connection(server.getsockname()) as slow:
        stream, name = server.accept()
        stream.setblocking(False)
        connection = PendingConnection(stream, name, None)
        call(far_loop, pending.add, connection)
        slow.settimeout(DEADLINE_S)
        assert len(slow.recv(GREETING_NBYTES)) == GREETING_NBYTES
        before = time.monotonic()
        for byte in b"kvplan\1":
            slow.send(bytes((byte,)))
            while not connection.received.endswith(bytes((byte,))):
                assert time.monotonic() < before + DEADLINE_S
        call(far_loop, pending.sweep, connection.since)
        assert select.select([slow], [], [], 0) == ([], [], [])
        call(far_loop, pending.sweep, before)
        with pytest.raises(ConnectionResetError):
            slow.recv(1)
    assert refusals.count == 1


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_mutated_hellos_are_refused(conversation: Conversation, data: st.DataObject) -> None:
    link = new_link(conversation)
    with UnauthenticatedClient(conversation.server.endpoint) as client:
        sent = bytearray(hello(link.challenge, client.greeting))
        for at, mask in data.draw(
            st.dictionaries(st.integers(0, 63), st.integers(1, 255), min_size=1, max_size=8)
        ).items():
            sent[at] ^= mask
        client.socket.sendall(sent)
        client.end()
        assert client.heard() == b""
    link.check(0)
    link.far.close()


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(noise=st.binary(max_size=200), begun=st.integers(0, 40))
def test_noise_is_refused(conversation: Conversation, noise: bytes, begun: int) -> None:
    link = new_link(conversation)
    with UnauthenticatedClient(conversation.server.endpoint) as client:
        sent = hello(link.challenge, client.greeting)[:begun] + noise
        client.socket.sendall(sent)
        client.end()
        assert client.heard() == b""
    link.check(0)
    link.far.close()


def with_room_for_32_connections(
    loop: ControlLoop, far_loop: ControlLoop, has_key: bool
) -> Conversation:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        return Conversation(loop, far_loop, ClusterKey.generate() if has_key else None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_connection_that_was_taken_is_no_longer_pending(
    loop: ControlLoop, far_loop: ControlLoop
) -> None:
    refused_before = far_loop.refusals.count
    link = new_link(with_room_for_32_connections(loop, far_loop, has_key=True))
    with ExitStack() as held:
        for index in range(40):
            for stream in link.open(index):
                held.enter_context(stream)
    assert far_loop.refusals.count == refused_before


def test_connections_that_are_not_taken_are_limited(
    loop: ControlLoop, far_loop: ControlLoop
) -> None:
    link = new_link(with_room_for_32_connections(loop, far_loop, has_key=True))
    with ExitStack() as held:
        for index in range(40):
            held.enter_context(open_one(link.near, index))
        dropped = 0
        for index in range(40):
            try:
                held.enter_context(open_one(link.far, index))
            except LLMException as error:
                dropped += "dropped: too many pending connections" in str(error)
    assert dropped == 8


@pytest.mark.parametrize("comes_first", [True, False])
def test_an_awaited_connection_is_no_longer_pending(
    loop: ControlLoop, far_loop: ControlLoop, comes_first: bool
) -> None:
    """The connection leaves at once, before the others of the link arrive."""
    conversation = with_room_for_32_connections(loop, far_loop, has_key=True)
    endpoint = conversation.server.endpoint
    link = new_link(conversation)
    with ExitStack() as held, ThreadPoolExecutor(1) as threads:
        if comes_first:
            held.enter_context(open_one(link.near, 0))
        accepted = threads.submit(link.far.open, [0, 1], DEADLINE_S)
        while not call(far_loop, lambda: len(link.far._slots) == 2):
            assert not accepted.done(), accepted.result()
        if not comes_first:
            held.enter_context(open_one(link.near, 0))
        for _ in range(300):
            held.enter_context(UnauthenticatedClient(endpoint))
        held.enter_context(open_one(link.near, 1))
        for stream in accepted.result():
            held.enter_context(stream)


@pytest.mark.parametrize("has_key", [False, True], ids=["open", "encrypted"])
def test_a_flood_of_half_open_connections_does_not_keep_a_link_from_being_made(
    loop: ControlLoop, far_loop: ControlLoop, has_key: bool
) -> None:
    """An address makes thousands of connections per second that begin like data connections."""
    conversation = with_room_for_32_connections(loop, far_loop, has_key)
    endpoint = conversation.server.endpoint
    sent = hello(b"c" * 16, bytes(64))[:40]
    with closing(Flood((endpoint.host, endpoint.port), "127.0.0.9", 5000, sent)) as flood:
        refused_before = conversation.far_loop.refusals.count
        deadline = time.monotonic() + DEADLINE_S
        while conversation.far_loop.refusals.count < refused_before + 50:  # an effect of the flood
            assert time.monotonic() < deadline, "this machine cannot make so many connections"
            assert conversation.request(Sync()) == Synced(1)
        for _ in range(5):
            new_link(conversation).check(0)
        flood.end()
