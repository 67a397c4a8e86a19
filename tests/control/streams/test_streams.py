"""Data connections arrive at the listener's port, in any order, and end with their link."""

from __future__ import annotations

import hmac
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.connecting import connect
from kvplan.control.data_streams import DialledStreams
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Sync, Synced
from kvplan.status import LLMException, LLMStatusCode
from tests.control.conversation import DEADLINE_S, Conversation, Recorder, call
from tests.control.streams.link import (
    GREETING_NBYTES,
    Link,
    UnauthenticatedClient,
    derived,
    hello,
    listening,
    new_link,
    open_one,
    refusal,
    say,
)
from tests.support.refusals import refused


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


def test_all_connections_of_a_link_take_as_many_round_trips_as_one(loop: ControlLoop) -> None:
    """The peer answers each step only when all connections have taken it."""
    count, challenge = 5, b"c" * 16
    secret = derived(challenge, b"kvplan data secret")
    with listening() as server, ExitStack() as held, ThreadPoolExecutor(1) as threads:
        streams = DialledStreams(challenge, socket.AF_INET, server.getsockname(), "there", loop)
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


def test_the_answer_of_the_listener_may_come_in_pieces(loop: ControlLoop) -> None:
    """Bytes after the answer of the listener are left for the user of the connection."""
    challenge = b"c" * 16
    with listening() as server, ThreadPoolExecutor(1) as threads:
        streams = DialledStreams(challenge, socket.AF_INET, server.getsockname(), "there", loop)
        dialling = threads.submit(open_one, streams, 0)
        accepted, _ = server.accept()
        with accepted:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = bytes(range(GREETING_NBYTES))
            for byte in greeting:
                accepted.sendall(bytes((byte,)))
            proof = b"server" + greeting + accepted.recv(64, socket.MSG_WAITALL)
            answer = hmac.digest(derived(challenge, b"kvplan data secret"), proof, "sha256")
            accepted.sendall(answer[:1])
            accepted.sendall(answer[1:] + b"data")
            with dialling.result() as near:
                near.settimeout(DEADLINE_S)
                assert near.recv(64) == b"data"


def test_if_one_connection_fails_none_is_left(link: Link) -> None:
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


def test_no_byte_after_the_handshake_is_read(link: Link, conversation: Conversation) -> None:
    with UnauthenticatedClient(conversation.server.endpoint) as client:
        client.socket.sendall(hello(link.challenge, client.greeting) + b"what follows")
        with open_one(link.far, 0) as stream:
            stream.setblocking(True)
            assert stream.recv(64) == b"what follows"


def test_the_answer_proves_the_secret_as_documented(link: Link, conversation: Conversation) -> None:
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


def test_an_index_can_be_opened_once(link: Link) -> None:
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


def test_the_peer_that_does_not_listen_is_named(loop: ControlLoop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    streams = DialledStreams(b"c" * 16, socket.AF_INET, address, "1.2.3.4:5 -> 6.7.8.9:1", loop)
    assert refusal(streams, 9) == (
        "1.2.3.4:5 -> 6.7.8.9:1: data connection 9: connect: Connection refused"
    )


def test_the_timeout_names_the_missing_connections(link: Link) -> None:
    assert refusal(link.far, 4, timeout_s=0.01) == (
        f"{link.far.way}: data connection 4: accept: it has not arrived within 10 ms"
    )
    assert "authenticate" in refusal(link.near, 4), "the index is not expected any more"


def test_a_connection_that_is_late_leaves_nothing_to_the_next_one(
    link: Link, conversation: Conversation
) -> None:
    """The next one has the same descriptor."""
    with listening() as server:
        where, loop = server.getsockname(), conversation.loop
        streams = DialledStreams(b"c" * 16, socket.AF_INET, where, "there", loop)
        assert refusal(streams, timeout_s=0.02).endswith(": no answer within 20 ms")
        link.check(0)


class TestSource:
    def test_both_kinds_of_connection_leave_from_the_requested_address(
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
    def test_an_unavailable_address_is_named(
        self, conversation: Conversation, source: str, reason: str
    ) -> None:
        loop, server = conversation.loop, conversation.server
        keys = Keys(conversation.key)
        with pytest.raises(LLMException) as error:
            loop.run(connect(loop, server.endpoint, Recorder(), keys, DEADLINE_S, source=source))
        expected = f"{server.endpoint}: connect: tcp_source={source}: {reason}"
        assert error.value.args[0] == expected


def test_a_deadline_that_has_passed_does_not_wait(loop: ControlLoop) -> None:
    with listening() as server:
        streams = DialledStreams(b"c" * 16, socket.AF_INET, server.getsockname(), "there", loop)
        assert refusal(streams, timeout_s=0).endswith(": no answer within 0 ms")


class TestClose:
    def test_ends_the_wait_for_a_connection(self, link: Link) -> None:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(refusal, link.far)
            link.far.close()
            assert waiting.result().endswith("accept: the link is not being made any more")
        assert refusal(link.far).endswith("the link is not being made any more")

    def test_ends_a_connect(self, loop: ControlLoop) -> None:
        with listening() as server, ThreadPoolExecutor(1) as threads:
            streams = DialledStreams(b"c" * 16, socket.AF_INET, server.getsockname(), "there", loop)
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

    def test_is_done_if_a_worker_takes_the_last_connection_just_now(
        self, loop: ControlLoop
    ) -> None:
        class Taken(dict[int, socket.socket]):
            """The last connection is taken once the loop has looked for it."""

            def __bool__(self) -> bool:
                self.clear()
                return True

        streams = DialledStreams(b"c" * 16, socket.AF_INET, ("127.0.0.1", 1), "there", loop)
        with socket.socket() as last:
            streams._opened = Taken({0: last})
            streams.close_now()
            assert len(streams._opened) == 0

    def test_leaves_no_connection_to_a_worker_that_has_taken_only_some(
        self, loop: ControlLoop
    ) -> None:
        class Closed(dict[int, socket.socket]):
            """The streams are closed before the second connection is taken."""

            def pop(self, index: int, *default: Any) -> socket.socket:
                if index == 1:
                    streams.close_now()
                return super().pop(index)

        streams = DialledStreams(b"c" * 16, socket.AF_INET, ("127.0.0.1", 1), "there", loop)
        taken, left = socket.socket(), socket.socket()
        streams._opened = Closed({0: taken, 1: left})
        with refused("LLM_LINK_FAILED", "data connection 1: open: the link is not") as error:
            streams.open([0, 1], DEADLINE_S)
        assert (taken.fileno(), left.fileno()) == (-1, -1), error

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


def test_threads_may_open_and_close_at_any_time(conversation: Conversation) -> None:
    """All calls end in some way, and nothing is left open."""
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
