"""Data connections come by the listener's port and prove whose they are; all else is closed."""

from __future__ import annotations

import hmac
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.connecting import connect
from kvplan.control.data_streams import DialledStreams
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop, RefusalLog
from kvplan.control.messages import Sync, Synced
from kvplan.control.pending_connections import (
    AcceptedStreams,
    PendingConnection,
    PendingConnections,
)
from kvplan.status import LLMException, LLMStatusCode
from tests.control.conversation import DEADLINE_S, Conversation, Recorder, call
from tests.control.flood import Flood
from tests.control.recording_proxy import RecordingProxy
from tests.support.refusals import refused

GREETING_NBYTES, ANSWER_NBYTES = 64, 32


class Link:
    """Both sides of one link's data connections."""

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
        """A connection can be made, and bytes pass both ways."""
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
    """What the end that dials says, by the letter of docs/internals/control-protocol.md."""
    secret = derived(challenge, b"kvplan data secret")
    link_id = derived(challenge, b"kvplan data id")[:8]
    fields = beginning + struct.pack("!B8s16s", index, link_id, b"n" * 16)
    return fields + hmac.digest(secret, b"client" + greeting + fields, "sha256")


class UnauthenticatedClient:
    """A TCP connection to a server that has been greeted."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.socket = socket.create_connection((endpoint.host, endpoint.port), DEADLINE_S)
        self.greeting = b""
        while len(self.greeting) < GREETING_NBYTES:
            self.greeting += self.socket.recv(GREETING_NBYTES - len(self.greeting))

    def end(self) -> None:
        """Say nothing more."""
        with suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_WR)

    def heard(self) -> bytes:
        """All that comes until the other end closes it."""
        heard = b""
        with suppress(ConnectionResetError):
            while chunk := self.socket.recv(1 << 16):
                heard += chunk
        return heard

    def __enter__(self) -> UnauthenticatedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[ControlLoop]:
    loop = ControlLoop("test-dials")
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def far_loop() -> Iterator[ControlLoop]:
    loop = ControlLoop("test-accepts")
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture(scope="module", params=[False, True], ids=["open", "encrypted"])
def conversation(
    request: pytest.FixtureRequest, loop: ControlLoop, far_loop: ControlLoop
) -> Conversation:
    return Conversation(loop, far_loop, ClusterKey.generate() if request.param else None)


_links = iter(range(10**9))


@pytest.fixture
def link(conversation: Conversation) -> Iterator[Link]:
    link = new_link(conversation)
    yield link
    link.near.close()
    link.far.close()


def new_link(conversation: Conversation) -> Link:
    return Link(conversation, next(_links).to_bytes(16))


def refusal(streams: Any, *indices: int, timeout_s: float = DEADLINE_S) -> str:
    with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
        streams.open(indices or [0], timeout_s)
    return str(error.value.args[0])


@pytest.mark.parametrize("where", ["127.0.0.1:0", "[::1]:0", "ipc://"])
@pytest.mark.parametrize("has_key", [False, True], ids=["open", "encrypted"])
def test_connections_of_all_kinds_of_address(
    loop: ControlLoop, far_loop: ControlLoop, tmp_path: Path, where: str, has_key: bool
) -> None:
    endpoint = Endpoint.parse(f"{where}{tmp_path}/socket" if where == "ipc://" else where)
    key = ClusterKey.generate() if has_key else None
    link = Link(Conversation(loop, far_loop, key, endpoint), b"c" * 16)
    for index in (0, 3, 255):
        link.check(index)
    assert (link.near.dials, link.far.dials) == (True, False)
    assert link.near.private is link.far.private is has_key
    assert link.near.secret == link.far.secret == derived(b"c" * 16, b"kvplan data secret")


def test_ends_may_come_in_any_order_and_at_once(link: Link) -> None:
    with ThreadPoolExecutor(16) as threads:
        accepted = [threads.submit(open_one, link.far, index) for index in range(8)]
        dialled = [threads.submit(open_one, link.near, index) for index in range(8)]
        for near, far in zip(dialled, accepted, strict=True):
            with near.result() as one, far.result() as other:
                other.settimeout(DEADLINE_S)
                assert say(one, other) == b"data"


def test_all_connections_of_a_link_take_as_many_round_trips_as_one() -> None:
    """A peer that takes each step with all of them at once, and not before."""
    count, challenge = 5, b"c" * 16
    secret = derived(challenge, b"kvplan data secret")
    with listening() as server, ExitStack() as held, ThreadPoolExecutor(1) as threads:
        streams = DialledStreams(challenge, socket.AF_INET, server.getsockname(), "there")
        dialling = threads.submit(streams.open, range(count), DEADLINE_S)
        accepted = [held.enter_context(server.accept()[0]) for _ in range(count)]
        for stream in accepted:
            stream.sendall(b"g" * GREETING_NBYTES)
        said = [stream.recv(64, socket.MSG_WAITALL) for stream in accepted]
        assert [text[7] for text in said] == list(range(count))
        for stream, hello_of_it in zip(accepted, said, strict=True):
            proof = b"server" + b"g" * GREETING_NBYTES + hello_of_it
            stream.sendall(hmac.digest(secret, proof, "sha256"))
        for near, far in zip(dialling.result(), accepted, strict=True):
            with near:
                near.settimeout(DEADLINE_S)
                assert say(near, far) == b"data"


def test_where_one_connection_fails_none_is_left(link: Link) -> None:
    near, far = link.open(2)
    with near, far:
        assert "data connection 2: authenticate" in refusal(link.near, *range(3))
        for stream in link.far.open(range(2), DEADLINE_S):
            with stream:
                stream.settimeout(DEADLINE_S)
                assert stream.recv(1) == b""


def test_both_ends_show_the_same_addresses(link: Link, conversation: Conversation) -> None:
    dialler, listener = link.near.way.split(" -> ")
    assert link.near.way == link.far.way
    assert listener == str(conversation.server.endpoint)
    assert dialler.startswith("127.0.0.1:")


def test_small_messages_leave_at_once_and_dead_peers_are_noticed(link: Link) -> None:
    for stream in link.open(0):
        with stream:
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            assert [stream.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [
                10,
                5,
                3,
            ]


def test_nothing_behind_the_handshake_is_read(link: Link, conversation: Conversation) -> None:
    with UnauthenticatedClient(conversation.server.endpoint) as client:
        client.socket.sendall(hello(link.challenge, client.greeting) + b"what follows")
        with open_one(link.far, 0) as stream:
            stream.setblocking(True)
            assert stream.recv(64) == b"what follows"


def test_the_answer_proves_the_secret_by_the_letter(link: Link, conversation: Conversation) -> None:
    with UnauthenticatedClient(conversation.server.endpoint) as client:
        said = hello(link.challenge, client.greeting, index=7)
        client.socket.sendall(said)
        open_one(link.far, 7).close()
        secret = derived(link.challenge, b"kvplan data secret")
        assert client.heard() == hmac.digest(secret, b"server" + client.greeting + said, "sha256")


def test_greetings_never_repeat(conversation: Conversation) -> None:
    greetings = set()
    for _ in range(8):
        with UnauthenticatedClient(conversation.server.endpoint) as client:
            greetings.add(client.greeting[33:])
    assert len(greetings) == 8


def flipped(said: bytes, bit: int) -> bytes:
    return (int.from_bytes(said) ^ 1 << bit).to_bytes(len(said))


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


def test_an_index_is_had_once(link: Link) -> None:
    near, far = link.open(2)
    with near, far:
        assert ": authenticate: the peer has disconnected; the peer's log" in (
            refusal(link.near, 2).replace("Connection reset by peer", "the peer has disconnected")
        )
        assert refusal(link.far, 2).endswith(
            "opened before, or dropped: too many pending connections"
        )
        assert say(near, far) == b"data"
    link.check(3)


def test_a_recorded_session_is_of_no_use(conversation: Conversation, link: Link) -> None:
    proxy = RecordingProxy(conversation.server.endpoint)
    way = DialledStreams(
        link.challenge, socket.AF_INET, (proxy.endpoint.host, proxy.endpoint.port), "proxy"
    )
    near, far = open_one(way, 0), open_one(link.far, 0)
    far.settimeout(DEADLINE_S)
    assert say(near, far) == b"data"
    near.close()
    far.close()
    recorded = proxy.finish()
    assert len(recorded) == 64 + len(b"data")
    again = Link(conversation, link.challenge)  # the same link, as if it were made again
    for there in (link, again, new_link(conversation)):
        with UnauthenticatedClient(conversation.server.endpoint) as replay:
            replay.socket.sendall(recorded)
            assert replay.heard() == b""
        assert refusal(there.far, 1, timeout_s=0.0).endswith("it has not come within 0 ms")
    again.check(0)
    # And the other way round: a server that says again what the real one has said.
    with listening() as server, ThreadPoolExecutor(1) as threads:
        played = threads.submit(play, server, bytes(proxy.heard))
        replayed = DialledStreams(link.challenge, socket.AF_INET, server.getsockname(), "replayed")
        assert refusal(replayed) == (
            "replayed: data connection 0: authenticate: it does not know the secret of this link"
        )
        assert len(played.result()) == 64


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        yield server


def play(server: socket.socket, said: bytes) -> bytes:
    """Be a server that says `said` to one connection; returns what it heard."""
    stream, _ = server.accept()
    with stream:
        stream.settimeout(DEADLINE_S)
        stream.sendall(said)
        heard = b""
        while chunk := stream.recv(1 << 16):
            heard += chunk
        return heard


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "greet: no answer within 50 ms"),
        (b"g" * 63, "greet: no answer within 50 ms"),
        (b"g" * 64, "authenticate: no answer within 50 ms"),
        (b"g" * 95, "authenticate: no answer within 50 ms"),
        (b"g" * 96, "authenticate: it does not know the secret of this link"),
    ],
)
def test_a_server_that_does_not_know_the_secret_is_refused(said: bytes, reason: str) -> None:
    with listening() as server, ThreadPoolExecutor(1) as threads:
        threads.submit(play, server, said)
        timeout_s = DEADLINE_S if len(said) == 96 else 0.05
        streams = DialledStreams(b"c" * 16, socket.AF_INET, server.getsockname(), "there")
        assert refusal(streams, 1, timeout_s=timeout_s).startswith(
            f"there: data connection 1: {reason}"
        )


def test_the_peer_that_does_not_listen_is_named(link: Link) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    streams = DialledStreams(b"c" * 16, socket.AF_INET, address, "1.2.3.4:5 -> 6.7.8.9:1")
    assert refusal(streams, 9) == (
        "1.2.3.4:5 -> 6.7.8.9:1: data connection 9: connect: Connection refused"
    )


def test_the_timeout_names_the_connections_that_did_not_come(link: Link) -> None:
    assert refusal(link.far, 4, timeout_s=0.01) == (
        f"{link.far.way}: data connection 4: accept: it has not come within 10 ms"
    )
    assert "authenticate" in refusal(link.near, 4), "one that is not waited for any more"


class TestSource:
    def test_both_kinds_of_connection_leave_from_the_address_asked_for(
        self, conversation: Conversation
    ) -> None:
        loop, server = conversation.loop, conversation.server
        keys, near = Keys(conversation.key), Recorder()
        dial = connect(loop, server.endpoint, near, keys, DEADLINE_S, source="127.0.0.5")
        channel = loop.run(dial)
        assert loop.run(channel.request(Sync(), DEADLINE_S)) == Synced(1)
        assert conversation.far.next() == ("request", Sync())
        dialled = call(loop, channel.streams, b"from" * 4)
        accepted = call(conversation.far_loop, conversation.far.channels[-1].streams, b"from" * 4)
        assert dialled.way.startswith("127.0.0.5:")
        with open_one(dialled, 0), open_one(accepted, 0) as stream:
            assert stream.getpeername()[0] == "127.0.0.5"
        call(loop, channel.close)
        assert conversation.far.next()[0] == "lost"

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("192.0.2.77", "Cannot assign requested address"),
            ("::1", "Address family for hostname not supported"),
        ],
    )
    def test_an_address_that_cannot_be_had_is_named(
        self, conversation: Conversation, source: str, reason: str
    ) -> None:
        loop, server = conversation.loop, conversation.server
        keys = Keys(conversation.key)
        with pytest.raises(LLMException) as error:
            loop.run(connect(loop, server.endpoint, Recorder(), keys, DEADLINE_S, source=source))
        expected = f"{server.endpoint}: connect: tcp_source={source}: {reason}"
        assert error.value.args[0] == expected


def test_a_time_that_has_passed_is_no_wait() -> None:
    with listening() as server:
        streams = DialledStreams(b"c" * 16, socket.AF_INET, server.getsockname(), "there")
        assert refusal(streams, timeout_s=0).endswith(": no answer within 0 ms")


class TestClose:
    def test_ends_the_wait_for_a_connection(self, link: Link) -> None:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(refusal, link.far)
            link.far.close()
            assert waiting.result().endswith("accept: the link is not being made any more")
        assert refusal(link.far).endswith("the link is not being made any more")

    def test_ends_a_connect(self) -> None:
        with listening() as server, ThreadPoolExecutor(1) as threads:
            streams = DialledStreams(b"c" * 16, socket.AF_INET, server.getsockname(), "there")
            dialling = threads.submit(refusal, streams, timeout_s=6 * DEADLINE_S)
            stream, _ = server.accept()
            with stream:
                streams.close()
                assert dialling.result(DEADLINE_S).endswith(
                    "greet: the link is not being made any more"
                )
            assert refusal(streams).endswith("connect: the link is not being made any more")

    def test_ends_connections_that_were_not_taken(self, link: Link) -> None:
        with open_one(link.near, 0) as near, open_one(link.near, 1) as taken:
            far = open_one(link.far, 1)
            for _ in range(2):
                link.far.close()
            near.settimeout(DEADLINE_S)
            assert near.recv(1) == b""
            far.settimeout(DEADLINE_S)
            assert say(taken, far) == b"data"
            far.close()

    def test_accepts_no_further_connection(self, link: Link) -> None:
        link.far.close()
        assert "authenticate" in refusal(link.near)

    def test_closing_the_server_ends_the_wait(
        self, loop: ControlLoop, far_loop: ControlLoop
    ) -> None:
        conversation = Conversation(loop, far_loop, None)
        link = new_link(conversation)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(refusal, link.far)
            call(far_loop, conversation.server.close)
            assert waiting.result().endswith("accept: the link is not being made any more")


def test_a_connection_that_says_a_byte_now_and_then_is_ended_in_time(far_loop: ControlLoop) -> None:
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
        said = bytearray(hello(link.challenge, client.greeting))
        for at, mask in data.draw(
            st.dictionaries(st.integers(0, 63), st.integers(1, 255), min_size=1, max_size=8)
        ).items():
            said[at] ^= mask
        client.socket.sendall(said)
        client.end()
        assert client.heard() == b""
    link.check(0)
    link.far.close()


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(noise=st.binary(max_size=200), begun=st.integers(0, 40))
def test_noise_is_refused(conversation: Conversation, noise: bytes, begun: int) -> None:
    link = new_link(conversation)
    with UnauthenticatedClient(conversation.server.endpoint) as client:
        said = hello(link.challenge, client.greeting)[:begun] + noise
        client.socket.sendall(said)
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


def test_a_connection_that_was_taken_is_not_pending_any_more(
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


def test_a_connection_that_is_waited_for_is_not_pending_any_more(
    loop: ControlLoop, far_loop: ControlLoop
) -> None:
    """While the others of its link are on their way, too."""
    conversation = with_room_for_32_connections(loop, far_loop, has_key=True)
    endpoint = conversation.server.endpoint
    link = new_link(conversation)
    with ExitStack() as held, ThreadPoolExecutor(1) as threads:
        held.enter_context(open_one(link.near, 0))
        accepted = threads.submit(link.far.open, [0, 1], DEADLINE_S)
        conversation.request(Sync())  # so it has been seen, as what comes later is
        for _ in range(300):
            held.enter_context(UnauthenticatedClient(endpoint))
        held.enter_context(open_one(link.near, 1))
        for stream in accepted.result():
            held.enter_context(stream)


@pytest.mark.parametrize("has_key", [False, True], ids=["open", "encrypted"])
def test_a_flood_of_half_open_connections_does_not_keep_a_link_from_being_made(
    loop: ControlLoop, far_loop: ControlLoop, has_key: bool
) -> None:
    """Thousands in a second that begin as data connections do, from one address."""
    conversation = with_room_for_32_connections(loop, far_loop, has_key)
    endpoint = conversation.server.endpoint
    said = hello(b"c" * 16, bytes(64))[:40]
    with closing(Flood((endpoint.host, endpoint.port), "127.0.0.9", 5000, said)) as flood:
        refused_before = conversation.far_loop.refusals.count
        deadline = time.monotonic() + DEADLINE_S
        while conversation.far_loop.refusals.count < refused_before + 50:  # until it is felt
            assert time.monotonic() < deadline, "this machine cannot make so many connections"
            assert conversation.request(Sync()) == Synced(1)
        for _ in range(5):
            new_link(conversation).check(0)
        flood.end()


def test_threads_may_open_and_close_at_any_time(conversation: Conversation) -> None:
    """Whatever comes of it, it ends, and nothing is left open."""
    links = [new_link(conversation) for _ in range(20)]
    opened: list[socket.socket] = []
    statuses: set[LLMStatusCode] = set()

    def open_all(streams: Any) -> None:
        try:
            opened.extend(streams.open(range(4), DEADLINE_S))
        except LLMException as error:
            statuses.add(error.status_code)

    for link in links:
        ends = [threading.Thread(target=open_all, args=(item,)) for item in (link.near, link.far)]
        ends += [threading.Thread(target=item.close) for item in (link.far, link.near)]
        for thread in ends:
            thread.start()
        for thread in ends:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    for stream in opened:
        stream.close()
    assert statuses <= {LLMStatusCode.LLM_LINK_FAILED}
