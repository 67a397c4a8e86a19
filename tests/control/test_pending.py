"""Places of a listener and of its pending connections: owners, ends, leaks."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvplan.control.auth import COOKIE_NBYTES, Keys
from kvplan.control.channel import Channel
from kvplan.control.connecting import MAX_PENDING, PENDING_S, Server, connect
from kvplan.control.endpoint import Endpoint
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Notified, Notify, Sync, Synced
from kvplan.control.notifying import Notifier
from kvplan.control.pending_connections import PendingConnection, PendingConnections
from kvplan.control.zmtp import greeting
from tests.control.conversation import DEADLINE_S, LOCAL, Recorder, call

OLD_S = PENDING_S + 1


class Fields:
    """An object with the given attributes, which is equal only to itself."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def listen(loop: ControlLoop, endpoint: Endpoint) -> Server:
    return loop.run(Server.listen(loop, endpoint, Recorder(), Keys()))


def test_a_server_removes_only_its_own_path(loop: ControlLoop, tmp_path: Path) -> None:
    """Another server may have the name, after an administrator removed the first socket."""
    path = tmp_path / "socket"
    first = listen(loop, Endpoint(path=str(path)))
    path.unlink()
    second = listen(loop, Endpoint(path=str(path)))
    call(loop, first.close)
    assert path.is_socket()

    async def ask() -> object:
        channel = await connect(loop, second.endpoint, Recorder(), Keys(), DEADLINE_S)
        return await channel.request(Sync(), DEADLINE_S)

    assert loop.run(ask()) == Synced(1)
    call(loop, second.close)
    assert not path.exists()


def test_a_closed_server_has_no_timer_left(loop: ControlLoop) -> None:
    server = listen(loop, LOCAL)
    assert server._sweeping is not None
    call(loop, server.close)
    assert server._sweeping.cancelled()
    call(loop, server.close)


def test_a_server_accepts_again_once_a_descriptor_is_free(
    loop: ControlLoop, caplog: pytest.LogCaptureFixture
) -> None:
    server, (soft, hard) = listen(loop, LOCAL), resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(2):
        caplog.clear()
        with socket.socket() as client:
            client.settimeout(DEADLINE_S)
            os.close(lowest := os.dup(client.fileno()))  # a free number
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                client.connect((server.endpoint.host, server.endpoint.port))
                give_up = time.monotonic() + DEADLINE_S
                while "event=accept_failed" not in caplog.text:
                    assert time.monotonic() < give_up
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert client.recv(1) == b"\xff"  # the client is greeted
    call(loop, server.close)


def test_only_silent_conversations_without_a_link_are_ended(loop: ControlLoop) -> None:
    """Silence counts from the start or the last message, but not while a request is served."""
    server, now, dropped = listen(loop, LOCAL), time.monotonic(), []
    expected = []
    for case in product((0, OLD_S), (0, OLD_S), (None, "a link"), (False, True)):
        begun, received, bound, serving = case
        channel = Fields(
            last_received=now - received,
            bound=bound,
            serving=serving,
            drop=lambda reason, case=case: dropped.append((case, reason)),
            close=lambda reason: None,
        )
        server._channels[cast(Channel, channel)] = now - begun
        if begun and received and bound is None and not serving:
            expected.append((case, "silent for 10 s without a link"))
    call(loop, server._sweep)
    assert dropped == expected == [((OLD_S, OLD_S, None, False), expected[0][1])]
    call(loop, server.close)


class Places:
    """Pending connections with room for `limit`, each with a stand-in for its conversation."""

    def __init__(self, limit: int) -> None:
        self.refused: list[str] = []
        refusals: Any = SimpleNamespace(note=lambda peer, reason: self.refused.append(reason))
        self.pending = PendingConnections(limit, lambda _: cast(Channel, None), refusals)
        self.dropped: list[int] = []
        self.made: list[PendingConnection] = []
        self.far: list[socket.socket] = []

    def add(self, *, bound: bool) -> PendingConnection:
        ends = socket.socketpair()
        ends[0].setblocking(False)
        self.far.append(ends[1])
        connection = PendingConnection(ends[0], None, None)
        number = len(self.made)
        channel: Any = SimpleNamespace(
            bound="a link" if bound else None, drop=lambda _: self.dropped.append(number)
        )
        connection.channel = channel
        self.made.append(connection)
        self.pending.add(connection)
        return connection

    def close(self) -> None:
        for connection in self.made:
            self.pending.drop(connection)
        for end in self.far:
            end.close()


@pytest.fixture
def in_places(loop: ControlLoop) -> Callable[[int, Callable[[Places], None]], None]:
    """A function that runs a check in the loop's thread."""

    def run(limit: int, check: Callable[[Places], None]) -> None:
        def made() -> None:
            places = Places(limit)
            try:
                check(places)
            finally:
                places.close()

        call(loop, made)

    return run


def test_a_conversation_with_a_link_leaves_its_place(in_places: Any) -> None:
    """The next sweep removes it, without ending the conversation."""

    def check(places: Places) -> None:
        linked = [places.add(bound=number % 2 == 0) for number in range(5)]
        places.pending.sweep(0.0)
        assert places.pending._all() == linked[1::2]
        assert places.pending._count == 2
        assert places.dropped == []

    in_places(8, check)


@pytest.mark.parametrize("bound", [False, True])
def test_a_connection_too_many_takes_the_place_of_another_one(in_places: Any, bound: bool) -> None:
    """A conversation that has a link now is not ended, but its place is free."""

    def check(places: Places) -> None:
        for number in range(30):
            newest = places.add(bound=bound)
            assert newest in places.pending._all()
            assert places.pending._count == len(places.pending._all()) == min(number + 1, 3)
        assert len(places.dropped) == (0 if bound else 27)
        assert places.refused == ([] if bound else ["too many pending connections"] * 27)

    in_places(3, check)


def test_addresses_of_one_site_count_as_one() -> None:
    def source(address: str) -> str:
        ends = socket.socketpair()
        try:
            return PendingConnection(ends[0], (address, 1, 0, 0), None).source
        finally:
            for end in ends:
                end.close()

    assert source("::ffff:10.0.0.1") != source("::ffff:10.0.0.2")
    assert source("10.0.0.1") != source("10.0.0.2")
    assert source("2001:db8:1:1::1") == source("2001:db8:1:1:ffff::2")
    assert source("2001:db8:1:1::1") != source("2001:db8:1:2::1")
    assert source("fe80::1%eth0") == source("fe80::1%eth1")


class Offers:
    """A channel that records which requests offer a direct connection, and fails on demand."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes = [*outcomes]
        self.offered: list[bool] = []

    async def typed_request(self, body: Notify, expected: type, timeout_s: float) -> Notified:
        self.offered.append(body.direct is not None)
        if (error := self.outcomes.pop(0)) is not None:
            raise error
        return Notified(1)


@pytest.mark.parametrize(
    "error", [TimeoutError(), ConnectionError("lost"), asyncio.CancelledError(), None]
)
def test_a_direct_connection_is_offered_until_the_offer_is_answered(
    loop: ControlLoop, error: BaseException | None
) -> None:
    """An offer is repeated after every error, and not made after the end."""
    notifier, channel = Notifier(7), Offers(error, error, None, None, None)

    async def send() -> None:
        fails = channel.outcomes[0] is not None
        with pytest.raises(type(error)) if fails else nullcontext():
            await notifier.send(cast(Channel, channel), b"x", DEADLINE_S)

    for _ in range(4):
        loop.run(send())
    until_answered = 1 if error is None else 3
    assert channel.offered == [number < until_answered for number in range(4)]
    ended, late = Notifier(7), Offers(None)
    call(loop, ended.end, None)
    loop.run(ended.send(cast(Channel, late), b"x", DEADLINE_S))
    assert late.offered == [False]


def test_a_sweep_ends_connections_that_began_no_conversation_in_time(loop: ControlLoop) -> None:
    server = listen(loop, LOCAL)
    near = [socket.create_connection((server.endpoint.host, server.endpoint.port)) for _ in "123"]

    def pending() -> list[PendingConnection]:
        return server._pending._all()

    for client in near:
        client.settimeout(DEADLINE_S)
        assert client.recv(1) == b"\xff"
    for connection in pending()[:2]:
        connection.since -= OLD_S
    call(loop, server._sweep)
    assert len(pending()) == 1
    call(loop, server.close)
    assert pending() == []
    for client in near:
        client.close()


@pytest.mark.parametrize("files", [800, 10_000])
def test_pending_connections_take_half_of_the_descriptors_at_most(
    loop: ControlLoop, files: int
) -> None:
    """A conversation takes 4 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < files:
        pytest.skip("the system allows fewer files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        server = listen(loop, LOCAL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert server._pending._limit == min(files // 2 // 4, MAX_PENDING)
    call(loop, server.close)


class TestWalk:
    """Pending connections after each of many random events, compared with a list of them."""

    LIMIT = 6

    def test_each_place_has_one_owner_and_none_is_left(self, loop: ControlLoop) -> None:
        num_opened = [call(loop, self.walk, Random(seed)) for seed in range(20)]
        assert sum(num_opened) > 20

    def walk(self, random: Random) -> int:
        self.refused: list[str] = []
        self.opened: list[PendingConnection] = []
        refusals: Any = SimpleNamespace(note=lambda peer, reason: self.refused.append(reason))
        pending = PendingConnections(self.LIMIT, self.open, refusals)
        held: list[PendingConnection] = []
        far: dict[PendingConnection, socket.socket] = {}
        for _ in range(60):
            event = random.choice(("add", "add", "greet", "end", "sweep", "link", "leave"))
            one = random.choice(held) if held else None
            crowd = {
                source: [each for each in held if each.source == source]
                for source in {each.source for each in held}
            }
            if event == "add":
                ends = socket.socketpair()
                ends[0].setblocking(False)
                host = random.choice(("10.0.0.1", "10.0.0.2", "2001:db8::1"))
                new = PendingConnection(ends[0], (host, 7, 0, 0), None)
                far[new] = ends[1]
                held.append(new)
                crowd.setdefault(new.source, []).append(new)
                pending.add(new)
                if len(held) > self.LIMIT:  # one of the largest crowd, and never its newest
                    (gone,) = [each for each in held if each not in pending._all()]
                    largest = max(map(len, crowd.values()))
                    assert len(crowd[gone.source]) == largest
                    assert gone is not new or largest == 1
                    held.remove(gone)
                    assert self.refused.pop() == "too many pending connections"
            elif one is None:
                continue
            elif event == "greet" and not one.validator.greeted:
                far[one].send(greeting(encrypted=False, unused=bytes(COOKIE_NBYTES)))
                pending._read(one)
                assert one.validator.greeted
            elif event == "end" and not one.validator.greeted:
                far[one].close()
                pending._read(one)
                held.remove(one)
            elif event == "sweep":
                pending.sweep(one.since)
                old = [each for each in held if each.channel is None and each.since < one.since]
                assert self.refused == ["no handshake in time"] * len(old)
                self.refused.clear()
                linked = [each for each in held if each.channel and each.channel.bound]
                held = [each for each in held if each not in (*old, *linked)]
            elif event == "link" and one.validator.greeted:
                if one.channel is None:
                    pending._open_next()
                    one = self.opened[-1]
                cast(Any, one.channel).bound = random.choice((None, "a link"))
            elif event == "leave":
                pending.remove(one)
                pending.remove(one)  # by its sweep, and by its channel
                held.remove(one)
            self.check(pending, held)
        for one in held:
            pending.remove(one)
        self.check(pending, [])
        for one, end in far.items():
            end.close()
            if one.socket.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(one.socket)
                one.socket.close()
        return len(self.opened)

    def open(self, connection: PendingConnection) -> Channel:
        assert connection.validator.greeted
        self.opened.append(connection)
        return cast(Channel, SimpleNamespace(bound=None, drop=lambda _: None))

    def check(self, pending: PendingConnections, held: list[PendingConnection]) -> None:
        assert self.refused == []
        assert pending._count == len(held)
        by_source: dict[str, list[PendingConnection]] = {}
        waiting: dict[str, set[PendingConnection]] = {}
        for connection in held:
            by_source.setdefault(connection.source, []).append(connection)
            if connection.validator.greeted and connection.channel is None:
                waiting.setdefault(connection.source, set()).add(connection)
        assert pending._by_source == by_source
        assert {source: {*group} for source, group in pending._waiting.items()} == waiting
