"""Requests of clients without a link."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import resource
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from kvplan import LLMException, LlmRole, LLMStatusCode
from kvplan.control.auth import Keys, proof_of, user_key
from kvplan.control.channel import Channel
from kvplan.control.connecting import connect
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import (
    Body,
    Chosen,
    Claim,
    Confirm,
    Find,
    Hello,
    Linked,
    Notify,
    Offer,
    Release,
    Sync,
    Table,
    Unlink,
    Welcome,
    encode,
)
from kvplan.links import ClusterInfo, LinkState
from kvplan.links.handshake import HandshakeAcceptor
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.link import LocalLink
from kvplan.transport.tcp.transport import TcpTransport
from kvplan.transport.transport import Transport
from tests.links.end import DEADLINE_S, End
from tests.links.peer import Peer
from tests.support.held import Held
from tests.support.ports import free_port
from tests.support.refusals import refused

_T = TypeVar("_T")

MIN_ACCEPTING = 16


class UnlinkedClient:
    """A client that sends any message, and records why it was disconnected."""

    def __init__(self) -> None:
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.loop = ControlLoop("client")
        self.loop.start()

    def call(self, end: End) -> Channel:
        endpoint = Endpoint.parse(end.address)
        return self.run(connect(self.loop, endpoint, self, Keys(user=user_key), DEADLINE_S))

    def ask(self, channel: Channel, body: Body) -> Body:
        return self.run(channel.request(body, DEADLINE_S))

    def begin(self, channel: Channel, hello: Hello) -> Welcome:
        """Request a link, and choose all transports that `hello` offers."""
        welcome = self.ask(channel, hello)
        assert isinstance(welcome, Welcome)
        names = tuple(offer.transport for offer in hello.offers)
        self.run(channel.notify(Chosen(welcome.challenge, names, ())))
        return welcome

    def run(self, task: Coroutine[Any, Any, _T]) -> _T:
        return self.loop.run(task, DEADLINE_S * 1000)

    async def on_request(self, channel: Channel, body: Body) -> Body:
        raise AssertionError(body)

    def on_notice(self, channel: Channel, body: Body) -> None:
        assert isinstance(body, Table)  # the table of caches, once linked

    def on_lost(self, channel: Channel, reason: str) -> None:
        self.lost.put(reason)


@pytest.fixture
def client() -> Iterator[UnlinkedClient]:
    client = UnlinkedClient()
    yield client
    client.loop.stop()


def hello(transport: Transport, **other: Any) -> Hello:
    """Return a Hello from cluster 2 to cluster 1."""
    fields = {
        "cluster_id": 2,
        "to_cluster_id": 1,
        "instance": b"i" * 16,
        "role": LlmRole.MIX,
        "comm": "",
        "offers": (Offer("local", transport.metadata(())),),
        "timeout_ms": 20_000,
    }
    return Hello(**(fields | other))


def test_a_handshake_ends_with_the_listener(end: End, client: UnlinkedClient) -> None:
    """The initiator learns the reason, and nothing of the handshake is kept."""
    with LocalTransport() as transport:
        client.begin(client.call(end), hello(transport))
        assert end.state(2) is LinkState.LINKING
        end.links.stop_listening()
        assert end.state(2) is None
    assert client.lost.get(timeout=DEADLINE_S).endswith("cluster 1 no longer listens")


@pytest.fixture
def shared_port(make_end: Callable[..., End]) -> End:
    """An end with two communicators, 1 and 2, whose members meet at one port: `end.address`."""
    end = make_end(1, listen="", comm_port=(port := free_port()))
    table = {
        "version": "1.2",
        "server_list": [
            {"server_id": f"127.0.0.{host}", "device": [{"rank_id": rank}]}
            for host, rank in ((1, "0"), (2, "1"))
        ],
    }
    for name in ("first", "second"):
        end.links.comm_link(name, {1: 0, 2: 1}, json.dumps(table))
    end.address = f"127.0.0.1:{port}"
    while end.links._run(count_servers(end)) != [1, 1]:
        os.sched_yield()
    return end


async def count_servers(end: End) -> list[int]:
    return [len(comm.servers) for comm in end.links._rendezvous._communicators.values()]


def test_a_handshake_ends_with_its_communicator(shared_port: End, client: UnlinkedClient) -> None:
    """The link would come up after the unlink, and no communicator would have it."""
    end = shared_port
    with LocalTransport() as transport:
        client.begin(client.call(end), hello(transport, comm="first"))
        assert end.state(2) is LinkState.LINKING
        end.links.comm_unlink(1)
        assert end.state(2) is None
    assert client.lost.get(timeout=DEADLINE_S).endswith("communicator 'first' was unlinked")


def test_a_hello_that_waits_while_its_communicator_ends_is_refused(
    shared_port: End, client: UnlinkedClient
) -> None:
    """The hello waits for the end's own handshake with the same cluster."""
    end = shared_port
    with (
        LocalTransport() as transport,
        socket.create_server(("127.0.0.1", 0)) as silent,
        ThreadPoolExecutor(2) as threads,
    ):
        silent_peer = ClusterInfo(2, f"127.0.0.1:{silent.getsockname()[1]}")
        linking = threads.submit(end.links.link, [silent_peer], 20_000)
        end.wait_until(2, LinkState.LINKING)
        channel = client.call(end)
        asking = threads.submit(client.ask, channel, hello(transport, comm="first"))
        client.run(channel.ping())
        end.links.comm_unlink(1)
        end.links.unlink([2], 1000, force=True)
        with pytest.raises(LLMException, match="is not linking communicator 'first'"):
            asking.result(DEADLINE_S)
        linking.result(DEADLINE_S)


def test_a_hello_alone_changes_nothing(
    make_end: Callable[..., End], end: End, client: UnlinkedClient
) -> None:
    other = make_end(2)
    other.link(end.cluster)
    instance = bytes.fromhex(end.status(2).instance)
    channel = client.call(end)
    again = hello(other.transports[0], instance=instance)
    proof = proof_of(other.links.get(1).secret, channel.connection.nonce, encode(again))
    recorded = replace(again, proof=proof)
    for refused_hello, its_channel in (
        (again, channel),
        (replace(recorded, timeout_ms=19_999), channel),
        (recorded, client.call(end)),
    ):
        with refused(LLMStatusCode.LLM_ALREADY_LINK, "which is alive"):
            client.ask(its_channel, refused_hello)
    assert isinstance(client.ask(channel, recorded), Welcome)
    for body in (Sync(), Find(1, 1, 1), Claim(1, 1, 1), Release(1, None), Unlink(1)):
        with refused(LLMStatusCode.LLM_NOT_YET_LINK, r"no such link|the link does not exist"):
            client.ask(channel, body)
    with pytest.raises(LLMException, match="the challenge belongs to another handshake"):
        client.ask(channel, Confirm(b"\0" * 16))
    assert (end.state(2), other.state(1)) == (LinkState.LINKED, LinkState.LINKED)
    end.links.get(2).begin(end)
    end.links.get(2).end(end)


def test_a_confirmation_that_comes_after_another_link(
    make_end: Callable[..., End], peer: Peer, client: UnlinkedClient
) -> None:
    end = make_end(3)
    with ThreadPoolExecutor(1) as thread, LocalTransport() as transport:
        peer.stop()
        try:
            linking = thread.submit(end.link, peer.cluster, timeout_ms=20_000)
            end.wait_until(2, LinkState.LINKING)
            channel = client.call(end)
            welcome = client.begin(channel, hello(transport, to_cluster_id=3))
        finally:
            peer.resume()
        linking.result(DEADLINE_S)
        with refused(LLMStatusCode.LLM_ALREADY_LINK, "another link to cluster 2 was made"):
            client.ask(channel, Confirm(welcome.challenge))
        assert (end.state(2), peer.state(3)) == (LinkState.LINKED, "LINKED")


def test_a_call_waits_for_the_handshake_of_the_peer_until_its_own_timeout(
    end: End, client: UnlinkedClient
) -> None:
    client.ask(client.call(end), hello(end.transports[0]))  # never confirmed
    with socket.create_server(("127.0.0.1", 0)) as unused:
        cluster = ClusterInfo(2, f"127.0.0.1:{unused.getsockname()[1]}")
        (result,) = end.links.link([cluster], 50)
        assert result.status is LLMStatusCode.LLM_LINK_FAILED
        assert "cluster 2: its own handshake has not ended within 50 ms" in str(result.error)
        unused.setblocking(False)
        with pytest.raises(BlockingIOError):
            unused.accept()  # the call has made no attempt of its own
    assert end.state(2) is LinkState.LINKING


@pytest.mark.parametrize(("max_links", "files", "held"), [(18, 1000, 18), (64, 335, 20)])
def test_unconfirmed_handshakes_are_limited_by_links_and_descriptors(
    make_end: Callable[..., End], client: UnlinkedClient, max_links: int, files: int, held: int
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        end = make_end(1, max_links=max_links)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for cluster_id in range(10, 31):
        client.ask(client.call(end), hello(end.transports[0], cluster_id=cluster_id))
    linking = [number for number in range(10, 31) if end.state(number) is LinkState.LINKING]
    assert linking == [*range(31 - held, 31)]


def test_unconfirmed_handshakes_keep_no_peer_out(
    make_end: Callable[..., End], client: UnlinkedClient
) -> None:
    end, other = make_end(1, max_links=1), make_end(2)
    for cluster_id in range(10, 30):
        greeting = hello(other.transports[0], cluster_id=cluster_id)
        assert isinstance(client.ask(client.call(end), greeting), Welcome)
    assert "too many unconfirmed handshakes" in client.lost.get(timeout=DEADLINE_S)
    held = [
        cluster_id for cluster_id in range(10, 30) if end.state(cluster_id) is LinkState.LINKING
    ]
    assert held == [*range(30 - MIN_ACCEPTING, 30)]
    other.link(end.cluster)
    assert (end.state(2), other.state(1)) == (LinkState.LINKED, LinkState.LINKED)
    late = client.call(end)
    with pytest.raises(LLMException, match="max_links=1"):
        client.ask(late, hello(other.transports[0], cluster_id=40))


def test_no_more_handshakes_are_confirmed_than_links_are_allowed(
    make_end: Callable[..., End], client: UnlinkedClient
) -> None:
    end, other = make_end(1, max_links=1), make_end(2)
    first, second = client.call(end), client.call(end)
    challenges = []
    for cluster_id, channel in ((10, first), (11, second)):
        welcome = client.begin(channel, hello(other.transports[0], cluster_id=cluster_id))
        challenges.append(welcome.challenge)
    assert client.ask(first, Confirm(challenges[0])) == Linked()
    with pytest.raises(LLMException, match="max_links=1"):
        client.ask(second, Confirm(challenges[1]))
    assert end.state(10) is LinkState.LINKED
    assert end.links.live() == 1


def test_the_time_of_a_handshake_that_a_peer_keeps_open_is_limited(
    end: End, client: UnlinkedClient
) -> None:
    with LocalTransport() as transport:
        client.ask(client.call(end), hello(transport, timeout_ms=2**31 - 1))

        async def seconds_left() -> list[float]:
            loop = asyncio.get_running_loop()
            return [
                timer.when() - loop.time()
                for timer in loop._scheduled
                if getattr(timer._callback, "__name__", "") == HandshakeAcceptor._expire.__name__
            ]

        (left,) = end.links._engine.control.run(seconds_left(), DEADLINE_S * 1000)
        assert 0 < left <= 60


class Blocking(LocalTransport):
    """A transport that waits in `connect` until it may continue; `calls` counts the begun calls."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.calls = threading.Event(), 0

    def connect(self, metadata: bytes, **given: Any) -> LocalLink:
        if "session" in given:  # otherwise this is only a check of reachability
            self.calls += 1
            assert self.go_on.wait(DEADLINE_S)
        return super().connect(metadata, **given)


def num_workers(end: End) -> int:
    name = f"kvplan-control-{end.cluster_id}-worker"
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_handshakes_that_wait_for_data_connections_take_no_threads(
    make_end: Callable[..., End], client: UnlinkedClient
) -> None:
    end, other = (make_end(number, transports=[TcpTransport()]) for number in (1, 2))
    offers = (Offer("tcp", other.transports[0].metadata(())),)
    for cluster_id in range(10, 50):
        greeting = hello(other.transports[0], cluster_id=cluster_id, offers=offers)
        channel = client.call(end)
        welcome = client.begin(channel, greeting)
        if cluster_id % 2:  # confirmed, but no data connection comes
            confirmation = channel.request(Confirm(welcome.challenge), DEADLINE_S)
            client.loop.call_soon(asyncio.ensure_future, confirmation)
    assert num_workers(end) < 8
    other.link(end.cluster)
    assert num_workers(end) < 8


def test_handshakes_whose_transport_blocks_have_few_threads(
    make_end: Callable[..., End], client: UnlinkedClient
) -> None:
    blocking = Blocking()
    end, other = make_end(1, transports=[blocking]), make_end(2)
    for cluster_id in range(10, 50):
        client.begin(client.call(end), hello(other.transports[0], cluster_id=cluster_id))
    assert num_workers(end) < 40
    assert blocking.calls == 32
    blocking.go_on.set()
    other.link(end.cluster)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"to_cluster_id": 5}, "cluster 1 is here, not cluster 5"),
        ({"cluster_id": 1}, "cluster 1 cannot link with itself"),
        ({"comm": "name"}, "communicator 'name' is not linked by address"),
        (
            {"offers": ()},
            "no transport between cluster 1 and cluster 2: local: cluster 2 does not have it",
        ),
        (
            {"offers": (Offer("local", b"x"),)},
            "no transport between cluster 1 and cluster 2: local: ",
        ),
    ],
)
def test_wrong_hellos_are_refused(
    end: End, client: UnlinkedClient, change: dict[str, Any], message: str
) -> None:
    with LocalTransport() as transport:
        body = hello(transport, **change)
        with refused(LLMStatusCode.LLM_LINK_FAILED, message):
            client.ask(client.call(end), body)
    assert end.links.live() == 0


@pytest.mark.parametrize(
    ("transports", "challenge", "message"),
    [
        (("tcp",), b"", "the peer chose 'tcp', which was not offered"),
        (("local", "tcp"), b"", "the peer chose 'tcp', which was not offered"),
        (("local",), bytes(16), "the challenge belongs to another handshake"),
    ],
)
def test_wrong_choices_are_refused(
    end: End,
    client: UnlinkedClient,
    transports: tuple[str, ...],
    challenge: bytes,
    message: str,
) -> None:
    with LocalTransport() as transport:
        channel = client.call(end)
        welcome = client.ask(channel, hello(transport))
        assert isinstance(welcome, Welcome)
        before = Held.now()
        chosen = Chosen(challenge or welcome.challenge, transports, ())
        client.run(channel.notify(chosen))
        assert message in end.wait_for(2, "UNLINKED")
        assert client.lost.get(timeout=DEADLINE_S)
        assert not Held.now().descriptors - before.descriptors
    assert end.links.live() == 0


def test_a_link_is_not_confirmed_before_transports_are_chosen(
    end: End, client: UnlinkedClient
) -> None:
    with LocalTransport() as transport:
        channel = client.call(end)
        welcome = client.ask(channel, hello(transport))
        assert isinstance(welcome, Welcome)
        with refused(LLMStatusCode.LLM_LINK_FAILED, "confirm: no transport was chosen before"):
            client.ask(channel, Confirm(welcome.challenge))
    assert end.links.live() == 0


def test_a_handshake_that_is_never_confirmed_ends(end: End, client: UnlinkedClient) -> None:
    with LocalTransport() as transport:
        channel = client.call(end)
        client.ask(channel, hello(transport, timeout_ms=100))
        assert "has not confirmed in time" in end.wait_for(2, "UNLINKED")
    assert end.links.live() == 0


def test_a_conversation_that_ends_ends_its_handshake(end: End, client: UnlinkedClient) -> None:
    with LocalTransport() as transport:
        channel = client.call(end)
        client.ask(channel, hello(transport))
        assert end.state(2) is LinkState.LINKING
        client.loop.call_soon(channel.close, "changed my mind")
        assert "changed my mind" in end.wait_for(2, "UNLINKED")


def test_a_table_without_a_link_ends_the_conversation(end: End, client: UnlinkedClient) -> None:
    channel = client.call(end)
    client.run(channel.notify(Table(1, True, (), ())))
    assert client.lost.get(timeout=DEADLINE_S) == "cluster 1 has no such link"


def test_a_forked_child_has_no_part_in_links(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    errors = peer.run(
        """
        import os
        read, write = os.pipe()
        if not (pid := os.fork()):
            errors = []
            for call in (
                lambda: end.links.get(1),
                lambda: end.links.unlink([1], 1000),
                lambda: end.links.comm_status(1),
            ):
                try:
                    call()
                except kvplan.LLMException as error:
                    errors.append(f"{error.status_code.name} {error}")
            end.registry._on_change()
            end.links.close()
            os.write(write, repr(errors).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        result = os.read(read, 10000).decode()
        """
    )
    assert errors.count("LLM_FAILED the engine belongs to process") == 3
    assert (end.state(2), peer.state(1)) == (LinkState.LINKED, "LINKED")


def test_a_client_without_a_link_cannot_notify(client: UnlinkedClient, end: End) -> None:
    channel = client.call(end)
    for _ in range(100):
        with refused(LLMStatusCode.LLM_NOT_YET_LINK, "cluster 1 has no such link"):
            client.ask(channel, Notify(b"x"))
