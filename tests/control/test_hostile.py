"""Hostile bytes to a live server in another process, which stays small and continues to serve."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.connecting import connect
from kvplan.control.loop import ControlLoop, RefusalLog
from kvplan.control.messages import MAX_NBYTES, PROTOCOL_VERSION, Ping, Pong, Sync, Synced, encode
from kvplan.control.zmtp import greeting
from tests.control.conversation import DEADLINE_S, Conversation, ListeningProcess, Recorder, call
from tests.control.flood import Flood
from tests.control.zmtp import GREETING, Peer, frame, ready

FINDINGS = Path(__file__).parent / "findings"
GROWTH_MIB = 48


class Victim:
    """A listening process, with checks before, during and after an attack."""

    def __init__(self, process: ListeningProcess, loop: ControlLoop, key: ClusterKey | None):
        self.process, self.loop, self.key = process, loop, key
        self.peers: list[Peer] = []
        self.serve()
        self.before = process.state()

    def peer(self) -> Peer:
        """Return a client that stays connected until `hang_up`."""
        self.peers.append(Peer(self.process.address))
        return self.peers[-1]

    def hang_up(self) -> None:
        for peer in self.peers:
            peer.close()
        self.peers.clear()

    def serve(self) -> int:
        """Send a request of a good peer, and return the number of served requests."""

        async def ask() -> int:
            channel = await connect(
                self.loop, self.process.endpoint, Recorder(), Keys(self.key), DEADLINE_S
            )
            answer = await channel.request(Sync(), DEADLINE_S)
            channel.close()
            assert isinstance(answer, Synced)
            return answer.version

        return self.loop.run(ask())

    def check(self) -> None:
        """Check that only good peers were served, and that memory has not grown much."""
        assert self.serve() == self.before["requests"] + 1
        state = self.process.state()
        assert state["notices"] == 0
        assert state["resident_mib"] < self.before["resident_mib"] + GROWTH_MIB
        self.before["requests"] += 1


@pytest.fixture(scope="module")
def loop() -> Iterator[ControlLoop]:
    loop = ControlLoop("test-hostile")
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture(scope="module", params=["open", "encrypted"])
def victim(
    request: pytest.FixtureRequest, loop: ControlLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Victim]:
    path, key = tmp_path_factory.mktemp("key") / "key", None
    if request.param == "encrypted":
        key = ClusterKey.generate()
        key.save(path)
    process = ListeningProcess(*[str(path)] * (key is not None))
    yield Victim(process, loop, key)
    process.close()


@pytest.fixture(autouse=True)
def hang_up(victim: Victim) -> Iterator[None]:
    yield
    victim.hang_up()


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(noise=st.binary(max_size=2000), greeted=st.integers(0, 3), cut=st.booleans())
def test_random_bytes_on_the_port_do_no_harm(
    victim: Victim, noise: bytes, greeted: int, cut: bool
) -> None:
    peer = victim.peer()
    if greeted == 3:
        peer.shake_hands()
        peer.send(frame(encode(Ping())))
    else:
        peer.send(*[GREETING, ready()][:greeted])
    peer.send(noise)
    if cut:
        peer.end()
        peer.read()
    victim.check()


@pytest.mark.parametrize("path", sorted(FINDINGS.glob("stream-*")), ids=lambda path: path.name)
def test_findings_end_the_connection_and_nothing_else(victim: Victim, path: Path) -> None:
    peers = [victim.peer() for _ in range(3)]
    for peer in peers:
        peer.send(path.read_bytes())
    for peer in peers:
        peer.read()  # until the server has closed it
    victim.check()


@pytest.mark.parametrize("size", [0, 1, 255, 60_000])
def test_a_message_of_endless_parts_is_ended_at_its_first(victim: Victim, size: int) -> None:
    peer = victim.peer()
    peer.shake_hands()
    parts = frame(bytes(size), more=True) * (1 + 100_000 // (size + 2))
    deadline = time.monotonic() + DEADLINE_S
    while peer.send(parts):
        assert time.monotonic() < deadline
    victim.check()


@pytest.mark.parametrize("size", [2048, 2049, 1 << 16, MAX_NBYTES])
def test_commands_of_a_handshake_are_of_bounded_size(victim: Victim, size: int) -> None:
    padding = bytes(size - len(ready()) - len("Padding") - 3)
    command = ready(Padding=padding)
    assert len(command) == 9 + size
    peer = victim.peer()
    peer.shake_hands(command)
    peer.send(frame(encode(Ping())))
    answered = encode(Pong()) in peer.read(until=encode(Pong()))
    assert answered is (victim.key is None and size <= 2048)
    victim.check()


def test_frames_without_meaning_end_the_conversation(victim: Victim) -> None:
    peer = victim.peer()
    peer.shake_hands()
    peer.send(frame(bytes((PROTOCOL_VERSION,)) + b"noise") * 1000)
    answer = peer.read()
    assert victim.key is not None or b"not messages" in answer
    victim.check()
    assert victim.process.state()["refused"] > victim.before["refused"]


def test_large_frames_that_are_never_finished_do_no_harm(victim: Victim) -> None:
    peers = [victim.peer() for _ in range(100)]
    for peer in peers:
        peer.shake_hands()
        peer.send(frame(bytes(MAX_NBYTES))[:100_000])
    victim.check()


def test_a_peer_that_never_reads_does_no_harm(victim: Victim) -> None:
    peer = victim.peer()
    peer.shake_hands()
    for _ in range(20):
        peer.send(frame(encode(Ping())) * 1000)
    victim.check()


ELSEWHERE = "127.0.0.9"


def test_a_flood_from_one_address_keeps_no_other_out(victim: Victim) -> None:
    """The flood makes thousands of connections per second, which greet like engines."""
    said = GREETING + ready() if victim.key is None else greeting(encrypted=True)
    with closing(Flood(victim.process.address, ELSEWHERE, 5000, said)) as flood:
        before = victim.process.state()["refused"]
        deadline = time.monotonic() + 2 * DEADLINE_S  # two concurrent floods have taken 10 s
        while victim.process.state()["refused"] < before + 50:  # until the flood has an effect
            assert time.monotonic() < deadline, "this machine cannot make so many connections"
        for _ in range(5):
            victim.before["requests"] = victim.serve()
        flood.end()
    victim.check()


def test_more_connections_than_allowed_are_dropped(victim: Victim) -> None:
    beginnings = [b"", GREETING[:10], GREETING, GREETING + ready()]
    for number in range(1500):
        victim.peer().send(beginnings[number % len(beginnings)])
    victim.check()
    assert victim.process.state()["conversations"] <= 1025


def test_a_client_that_has_left_takes_no_place(loop: ControlLoop, far_loop: ControlLoop) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))  # room for 32 pending connections
    try:
        conversation = Conversation(loop, far_loop, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for _ in range(40):
        channel = conversation.connect()
        call(loop, channel.close)
        loop.run(channel.wait_closed())
    assert conversation.request(Sync()) == Synced(1)
    assert far_loop.refusals.count == 0


def test_many_refusals_at_a_time_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog()
    with caplog.at_level("WARNING", "kvplan.control"):
        for _ in range(5):
            refusals.note("visitor", "no reason")
    (line,) = [message for message in caplog.messages if "event=refused peer=visitor" in message]
    assert "unlogged" not in line
    assert refusals.count == 5
