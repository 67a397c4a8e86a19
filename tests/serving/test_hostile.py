"""Hostile messages of a linked peer: it gets no other's request, and fills no memory."""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections.abc import Callable, Sequence

import msgspec
import pytest

from kvplan import ClusterInfo
from kvplan.serving import Handle, Target
from kvplan.serving.asks import MAX_WAITING
from kvplan.serving.book import MAX_EARLY
from kvplan.serving.messages import (
    MAX_HANDLES,
    Ask,
    Done,
    Grant,
    Hello,
    Message,
    Refusal,
    Renew,
    encode,
    peer_log,
)
from kvplan.serving.pusher import Goal
from kvplan.serving.tables import GroupLease, encode_leases
from kvplan.serving.tasks import MAX_OF_PEER, Tasks
from tests.serving.test_exchange import MakePeer, MakeWorker, failed
from tests.serving.worker import DEADLINE_MS, INSTANCE, Worker, handle, reference

DIGEST = reference([], 0, 11, 21).digest
MINE = [7, 1, 30]


def link(one: Worker, other: Worker) -> None:
    one.engine.link_clusters(
        [ClusterInfo(other.source.cluster_id, other.source.address)]
    ).raise_for_status()


def receive(worker: Worker, cluster_id: int, *messages: Message | bytes) -> None:
    """Let an exchange receive messages as if a cluster had sent them, and wait until it has."""
    done: list[None] = []

    def receive_all() -> None:
        for message in messages:
            worker.exchange._receive(
                cluster_id, message if isinstance(message, bytes) else encode(message)
            )
        done.append(None)

    worker.exchange._call(receive_all)
    wait(lambda: bool(done))


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while not until():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.001)


def test_no_message_ends_an_exchange(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, other = make_peer(), make_worker()
    other.engine.link_clusters([ClusterInfo(1, peer.source.address)]).raise_for_status()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    for data in (
        b"\x94\x03\x01\xa1x" + b"\x91" * 2000 + b"\x00",  # nested, in a part too many
        b"\x92\x05" + b"\x91" * 2000 + b"\x00",
        b"\x91" * 4096,
        b"no message",
        msgspec.msgpack.encode([1, 2**63, b"", b"", b""]),
    ):
        other.engine.notify(1, data)
    assert other.fetch(reference([peer.source], 0, 11, 21), MINE).error is None
    assert other.has(11, MINE, 0, 21)


def test_hellos_are_bounded_in_tasks_and_in_logs(
    make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    producer, peer = make_worker(1), make_worker(2)
    link(peer, producer)
    hello = Hello({"model": "other"}, b"i", answer=False)
    with caplog.at_level(logging.WARNING, "kvplan.serving"):
        receive(producer, 2, *[hello] * (2 * MAX_OF_PEER))
        assert len(producer.exchange._tasks._running) <= MAX_OF_PEER + 8
    assert len(caplog.records) < 20
    producer.finish(0, 11, [4, 9, 2], 21)
    third = make_worker(3)
    assert third.fetch(reference([producer.source], 0, 11, 21), MINE).error is None


def test_the_tasks_of_a_peer_are_bounded() -> None:
    """Tasks above the limit of one peer are dropped. Other peers and the program go on."""
    started = []

    async def wait_forever(number: int) -> None:
        started.append(number)
        await asyncio.Event().wait()

    async def spawn_tasks() -> None:
        tasks = Tasks(asyncio.get_running_loop())
        for number in range(MAX_OF_PEER + 1):
            tasks.spawn(wait_forever(number), 2)
        tasks.spawn(wait_forever(-1), 3)
        tasks.spawn(wait_forever(-2))
        await asyncio.sleep(0)
        await tasks.cancel()
        tasks.spawn(wait_forever(-3), 2)
        await asyncio.sleep(0)
        await tasks.cancel()

    asyncio.run(spawn_tasks())
    assert started == [*range(MAX_OF_PEER), -1, -2, -3]


def test_an_error_of_a_task_ends_no_other_and_leaves_no_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer whose tasks fail has as many as before."""
    monkeypatch.setattr(peer_log, "_kinds", {})
    started = []

    async def fail() -> None:
        raise OSError("as the test says")

    async def start(number: int) -> None:
        started.append(number)

    async def spawn_tasks() -> None:
        tasks = Tasks(asyncio.get_running_loop())
        for _ in range(2):
            for _ in range(MAX_OF_PEER):
                tasks.spawn(fail(), 2)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for number in range(MAX_OF_PEER):
            tasks.spawn(start(number), 2)
        await asyncio.sleep(0)
        await tasks.cancel()

    asyncio.run(spawn_tasks())
    assert started == [*range(MAX_OF_PEER)]
    (line, *_) = caplog.records
    assert line.getMessage() == "the exchange continues after an error"
    assert line.exc_info is not None
    assert str(line.exc_info[1]) == "as the test says"


@pytest.mark.parametrize("is_readable", [False, True])
def test_a_dropped_message_is_logged_with_its_sender_and_the_next_one_is_received(
    make_worker: MakeWorker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_readable: bool,
) -> None:
    monkeypatch.setattr(peer_log, "_kinds", {})
    producer, consumer = make_worker(1), make_worker(2)
    producer.finish(0, 11, [4, 9, 2], 21)
    link(consumer, producer)
    renew = producer.exchange.book.renew
    failures = iter([OSError("as the test says")])

    def renew_later(handles: Sequence[Handle]) -> None:
        if (error := next(failures, None)) is not None:
            raise error
        renew(handles)

    monkeypatch.setattr(producer.exchange.book, "renew", renew_later)
    message = encode(Renew(INSTANCE, (handle(0).value,))) if is_readable else b"no message"
    consumer.engine.notify(1, message)
    wait(lambda: bool(caplog.records))
    (line,) = caplog.records
    if is_readable:
        assert line.getMessage() == "cluster 2: dropped a message"
        assert line.exc_info is not None
        assert str(line.exc_info[1]) == "as the test says"
    else:
        assert line.getMessage().startswith("cluster 2: ")
        assert "is not a message" in line.getMessage()
    assert consumer.fetch(reference([producer.source], 0, 11, 21), MINE).error is None


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (Ask(5, INSTANCE, b"", DIGEST), "the ask names neither a handle nor a transfer"),
        (
            Ask(5, b"before", handle(0).value, DIGEST),
            "the request belongs to the process before a restart",
        ),
    ],
)
def test_an_ask_that_can_never_be_granted_is_refused_at_once(
    make_worker: MakeWorker, ask: Ask, reason: str
) -> None:
    producer = make_worker(1)
    producer.finish(0, 11, [4, 9, 2], 21)
    answers: list[tuple[int, Message]] = []

    async def send(cluster_id: int, messages: Sequence[Message]) -> None:
        answers.extend((cluster_id, message) for message in messages)

    producer.exchange._asks._send = send
    receive(producer, 2, ask)
    wait(lambda: bool(answers))
    ((cluster_id, answer),) = answers
    assert isinstance(answer, Refusal)
    assert (cluster_id, answer.number, answer.reason) == (2, 5, reason)
    assert not producer.exchange._asks.waiting
    assert [lease.tag for lease in producer.engine.leases()] == ["request-11"]


def test_no_message_of_a_burst_is_lost(make_worker: MakeWorker) -> None:
    """A consumer may end many requests at once, and none of them stays leased."""
    count = 1500
    producer = make_worker(1, blocks=count)
    handles = [producer.exchange.enter(f"{index}", [index], DIGEST) for index in range(count)]
    receive(producer, 2, *[Done(INSTANCE, item.value, DIGEST, 1) for item in handles])
    freed: set[Handle] = set()
    while len(freed) < count:
        assert producer.exchange.wait(DEADLINE_MS), f"{len(freed)} of {count} are free"
        freed |= producer.exchange.take_freed()
    assert freed == set(handles)


def test_asks_of_one_consumer_are_bounded(make_worker: MakeWorker) -> None:
    producer = make_worker(1, push=True)
    for cluster_id in (2, 3, 4):  # asks of other consumers are removed from time to time
        link(make_worker(cluster_id), producer)
    asks = [
        Ask(index, INSTANCE, b"", DIGEST, f"transfer-{index}", 0, 1, b"")
        for index in range(MAX_WAITING + 9)
    ]
    receive(producer, 2, *asks)
    assert len(producer.exchange._asks._consumers[2].waiting) == MAX_WAITING
    receive(producer, 3, Ask(1, INSTANCE, b"", DIGEST, "of another"))
    assert "of another" in producer.exchange._asks.waiting
    early = [Done(INSTANCE, b"", DIGEST, 2, f"early-{index}") for index in range(MAX_EARLY + 9)]
    for begin in range(0, len(early), 500):
        receive(producer, 4, *early[begin : begin + 500])
        wait(lambda: not producer.exchange._tasks._of_peers[4])
    assert len(producer.exchange.book._early[4]) == MAX_EARLY


def test_all_expected_requests_are_renewed(make_worker: MakeWorker) -> None:
    """A message has room for some of many requests only, so they need several messages."""
    count = 2 * MAX_HANDLES + 1
    producer = make_worker(1, blocks=count, lease_ttl_ms=90_000)
    consumer = make_worker(2, renew_interval_ms=20)
    for number in range(count):
        producer.enter(number, number, [number], 8)
    held = producer.exchange.book._held
    entered = {name: item.deadline for name, item in held.items()}
    for number in range(count):
        wanted = reference([producer.source], number, number, 8)
        consumer.exchange.expect(f"{number}", wanted)
    wait(lambda: all(item.deadline > entered[name] for name, item in list(held.items())))
    assert len(held) == count  # a request that is not renewed would have expired before


def test_only_a_renewal_by_its_handle_keeps_a_request(make_worker: MakeWorker) -> None:
    producer = make_worker(1)
    producer.enter(7, 11, [4, 9, 2], 21)
    held = producer.exchange.book._held[handle(7)]
    before = held.deadline
    receive(producer, 9, Renew(INSTANCE, (handle(0).value, handle(8).value)))
    assert held.deadline == before
    receive(producer, 9, Renew(INSTANCE, (handle(7).value,)))
    assert held.deadline > before


def test_a_wrong_digest_tells_no_name(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    result = consumer.fetch(reference([peer.source], 0, 12, 21), MINE)
    assert failed(result, "request 00000000 has other tokens")
    assert "request-11" not in str(result.error)


def test_a_consumer_cannot_name_the_blocks_of_another_as_its_goal(
    make_worker: MakeWorker, make_peer: MakePeer
) -> None:
    producer, consumer, victim = make_worker(1, push=True), make_worker(2), make_worker(3)
    link(consumer, producer)
    link(producer, victim)
    goal = Goal(victim.engine.lease_blocks(victim.cache, MINE), 0, 0)
    receive(producer, 2, Ask(5, INSTANCE, b"", DIGEST, "cmpl", 0, 1, goal.to_bytes()))
    assert producer.exchange._pusher.transfers() == []
    assert "cmpl" not in producer.exchange._asks.waiting
    producer.step(11, [4, 9, 2], 0, 21, 21, "cmpl")
    assert not any(array.any() for array in victim.engine.arrays(victim.cache))
    receive(producer, 3, Ask(5, INSTANCE, b"", DIGEST, "cmpl", 0, 1, goal.to_bytes()))
    assert producer.exchange._pusher.transfers() == [(3, "cmpl")]  # its own transfer


@pytest.mark.parametrize("kind", ["no goal", "before its lease", "of another cluster"])
def test_a_goal_that_cannot_be_written_is_refused_at_once(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The request is never computed, and would be waited for until the timeout of prompts."""
    producer, consumer, victim = (
        make_worker(1, push=True),
        make_worker(2, push=True),
        make_worker(3),
    )
    link(producer, victim)
    mine = consumer.engine.lease_blocks(consumer.cache, MINE)
    theirs = victim.engine.lease_blocks(victim.cache, MINE)
    data, reason = {
        "no goal": (b"goal", "is not a goal"),
        "before its lease": (Goal(mine, 8, 7).to_bytes(), "first_token=7 must be >= lease_token=8"),
        "of another cluster": (Goal(theirs, 0, 0).to_bytes(), "its goal is a lease of cluster 3"),
    }[kind]
    monkeypatch.setattr(Goal, "to_bytes", lambda _: data)
    wanted = reference([producer.source], 0, 11, 21, transfer="cmpl")
    assert failed(consumer.fetch(wanted, MINE), reason)


def test_a_producer_cannot_grant_the_blocks_of_another(make_worker: MakeWorker) -> None:
    producer, consumer, victim = make_worker(1), make_worker(2), make_worker(3)
    link(consumer, victim)
    wanted = reference([producer.source], 0, 11, 21, transfer="cmpl")
    consumer.exchange.fetch("mine", wanted, Target(MINE))
    producer.wait_asked("cmpl")
    ((_, number),) = producer.exchange._asks.waiting["cmpl"]
    lease = GroupLease(victim.engine.lease_blocks(victim.cache, [4, 9, 2]), 0)
    grant = Grant(number, handle(0).value, 0, 0, 1, encode_leases([lease]))
    receive(consumer, 1, grant)
    assert consumer.exchange.wait(60_000)
    (result,) = consumer.exchange.take_results()
    assert failed(result, "cluster 1 grants a lease of cluster 3")
    assert not any(array.any() for array in consumer.engine.arrays(consumer.cache))
