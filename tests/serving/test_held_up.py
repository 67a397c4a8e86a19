"""Delays by one peer: they do not delay the others."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from kvplan import BlockLease, ClusterInfo, LayerTask, Transfers
from kvplan.serving import Chunk, Handle, Source, Target, token_digest
from kvplan.serving.messages import Ask, encode, pieces
from kvplan.serving.pusher import MAX_GOAL_NBYTES, Goal
from kvplan.serving.tables import Place
from tests.faults.gate import Gate
from tests.serving.test_exchange import MakePeer, MakeWorker, failed
from tests.serving.worker import INSTANCE, Worker, handle, prompt, reference
from tests.support.refusals import refused


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def gated(make_worker: MakeWorker, gate: Gate) -> Iterator[Worker]:
    """Workers; transfers of cluster 2, which has one thread, stop after the first descriptor."""
    transfers = Transfers(1, gate.wrap)
    yield make_worker(2, transfers=transfers, max_pulls=1, renew_interval_ms=20, push=True)
    gate.open()


def test_messages_go_out_while_all_transfers_wait(
    gate: Gate, gated: Worker, make_worker: MakeWorker
) -> None:
    one, other = make_worker(1), make_worker(3)
    one.finish(0, 11, [4, 9, 2], 21)
    other.finish(0, 12, [4, 9, 2], 21)
    gated.exchange.fetch("held", reference([one.source], 0, 11, 21), Target([7, 1, 30]))
    gate.wait()
    gated.exchange.expect("waits", reference([other.source], 0, 12, 21))
    later = reference([other.source], 0, 13, 21, transfer="later")
    gated.exchange.fetch("later", later, Target([8, 2, 29]))
    other.wait_asked("later")
    deadline = other.exchange.book._held[handle(0)].deadline
    while other.exchange.book._held[handle(0)].deadline == deadline:  # the lease was not renewed
        select.select([], [], [], 0.001)
    gated.exchange.cancel("later")
    assert gated.exchange.wait(60_000)  # the lease of the other request was released
    assert [result.request for result in gated.exchange.take_results()] == ["later"]
    gate.open()
    assert gated.exchange.wait(60_000)
    assert [result.error for result in gated.exchange.take_results()] == [None]
    assert gated.has(11, [7, 1, 30], 0, 21)


def test_a_request_cancelled_while_it_waits_is_not_moved(
    gate: Gate, gated: Worker, make_worker: MakeWorker
) -> None:
    one = make_worker(1)
    one.finish(0, 11, [4, 9, 2], 21)
    one.finish(1, 12, [5, 8, 3], 21)
    gated.exchange.fetch("held", reference([one.source], 0, 11, 21), Target([7, 1, 30]))
    gate.wait()
    gated.exchange.fetch("waits", reference([one.source], 1, 12, 21), Target([8, 2, 29]))
    while (pull := gated.exchange._puller.pulls.get("waits")) is None or not pull.handles:
        select.select([], [], [], 0.001)
    gated.exchange.cancel("waits")
    while pull.cancelled is None:
        select.select([], [], [], 0.001)
    gate.open()
    results = {}
    while len(results) < 2:
        assert gated.exchange.wait(60_000)
        results |= {result.request: result for result in gated.exchange.take_results()}
    assert results["held"].error is None
    assert failed(results["waits"], "the request was cancelled")


def test_an_ask_for_another_request_goes_on_waiting(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1), make_worker(2)
    late = reference([producer.source], 9, 13, 21, transfer="late")
    consumer.exchange.fetch("late", late, Target([8, 2, 29]))
    producer.wait_asked("late")
    waiting = producer.exchange._asks.waiting["late"]
    producer.finish(0, 11, [4, 9, 2], 21)
    wanted = reference([producer.source], 0, 11, 21)
    assert consumer.fetch(wanted, [7, 1, 30]).error is None
    assert producer.exchange._asks.waiting["late"] is waiting


def test_incomplete_goals_are_bounded(make_worker: MakeWorker) -> None:
    producer = make_worker(1, push=True)
    consumer_2 = make_worker(2)
    consumer_2.engine.link_clusters([ClusterInfo(1, producer.source.address)]).raise_for_status()
    for number in range(6000):
        data = encode(Ask(number, INSTANCE, b"", bytes(16), "never", 0, 2, bytes(3500)))
        producer.exchange._call(producer.exchange._receive, 2, data)
    producer.finish(0, 11, [4, 9, 2], 21)
    assert consumer_2.fetch(reference([producer.source], 0, 11, 21), [7, 1, 30]).error is None
    assert producer.exchange._asks._consumers[2].nbytes <= MAX_GOAL_NBYTES


def test_a_partial_goal_is_removed_with_the_link_of_its_consumer(make_worker: MakeWorker) -> None:
    producer = make_worker(1, push=True, lease_ttl_ms=40)  # looks for links ten times in 40 ms
    consumers = [make_worker(2), make_worker(3)]
    no_request = {"handle": b""} if "handle" in Ask.__struct_fields__ else {"sequence": 0}
    partial_goal = Ask(
        number=7,
        instance=INSTANCE,
        digest=bytes(16),
        transfer="never",
        parts=2,
        data=b"a part",
        **no_request,
    )
    for other in consumers:
        other.engine.link_clusters([ClusterInfo(1, producer.source.address)]).raise_for_status()
        other.engine.notify(1, encode(partial_goal))
    asks = producer.exchange._asks
    until(lambda: asks.clusters() == {2, 3})
    consumers[0].engine.unlink_clusters([1]).raise_for_status()
    until(lambda: asks.clusters() == {3})


def test_a_push_is_removed_with_the_link_of_its_consumer(make_worker: MakeWorker) -> None:
    """Another consumer of the same transfer still gets its push."""
    producer = make_worker(1, push=True, lease_ttl_ms=40)  # looks for links ten times in 40 ms
    consumers = [make_worker(2, push=True), make_worker(3, push=True)]
    for other in consumers:
        wanted = reference([producer.source], 0, 11, 21, transfer="t")
        other.exchange.fetch("mine", wanted, Target([7, 1, 30]))
    producer.wait_asked("t", 2)
    pusher = producer.exchange._pusher
    assert sorted(pusher.transfers()) == [(2, "t"), (3, "t")]
    consumers[0].engine.unlink_clusters([1], force=True).raise_for_status()
    until(lambda: pusher.transfers() == [(3, "t")])


def test_each_producer_of_a_request_gets_renewals(make_worker: MakeWorker) -> None:
    """The consumer renews at each worker that it reads from, not only at the first."""
    producers = [make_worker(index + 3, place=Place(index, 2)) for index in range(2)]
    consumer = make_worker(2, renew_interval_ms=20)
    for producer in producers:
        producer.finish(0, 11, [4, 9, 2], 21)
    held = [producer.exchange.book._held[handle(0)] for producer in producers]
    first = [item.deadline for item in held]
    consumer.exchange.expect(
        "mine", reference([producer.source for producer in producers], 0, 11, 21)
    )
    until(lambda: all(item.deadline > before for item, before in zip(held, first, strict=True)))


@pytest.mark.parametrize("refusing", [0, 1])
def test_no_producer_is_waited_for_after_another_has_refused(
    make_worker: MakeWorker, refusing: int
) -> None:
    hour = {"enter_timeout_ms": 3_600_000, "pull_timeout_ms": 3_600_000}
    producers = [make_worker(index + 3, place=Place(index, 2), **hour) for index in range(2)]
    consumer = make_worker(2, **hour)
    producers[refusing].finish(0, 11, [4, 9, 2], 21)
    producers[refusing].exchange.abort(handle(0))
    wanted = reference([producer.source for producer in producers], 0, 11, 21)
    asks = consumer.exchange._puller._asks
    consumer.exchange.expect("mine", wanted)
    until(lambda: bool(producers[1 - refusing].exchange._asks.waiting))
    until(lambda: not asks)
    consumer.exchange.drop("mine", wanted)


def until(holds: Callable[[], bool]) -> None:
    """Wait for an event of another thread; the deadline is reached only if it never happens."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        select.select([], [], [], 0.001)


def test_a_push_without_progress_times_out(make_worker: MakeWorker) -> None:
    """No layer becomes ready here, so the consumer fetches all of it."""
    producer = make_worker(1, push=True, pull_timeout_ms=100)
    consumer = make_worker(2, push=True)
    wanted = reference([producer.source], 0, 11, 21, transfer="t")
    consumer.exchange.fetch("mine", wanted, Target([7, 1, 30]))
    producer.wait_asked("t")
    producer.compute(11, [4, 9, 2], 21)
    producer.begin(11, [4, 9, 2], 21, 21, "t")
    producer.enter(0, 11, [4, 9, 2], 21, "t")
    assert consumer.exchange.wait(60_000)
    assert [(result.error, result.pushed) for result in consumer.exchange.take_results()] == [
        (None, 0)
    ]
    assert consumer.has(11, [7, 1, 30], 0, 21)


def test_chunks_that_have_arrived_are_not_kept(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1, push=True), make_worker(2, push=True)
    tokens, blocks = 160, list(range(20))
    wanted = reference([producer.source], 0, 11, tokens, transfer="t")
    consumer.exchange.fetch("mine", wanted, Target(blocks))
    producer.wait_asked("t")
    for end in range(8, tokens + 1, 8):
        (push,) = producer.exchange._pusher._pushes["t"].values()
        for task, _ in push.tasks:
            assert task.wait_done(60_000)
        producer.step(11, blocks, end - 8, end, tokens, "t")
        assert len(push.tasks) == 1
    producer.enter(0, 11, blocks, tokens, "t")
    assert consumer.exchange.wait(60_000)
    assert [(result.error, result.pushed) for result in consumer.exchange.take_results()] == [
        (None, tokens)
    ]
    assert consumer.has(11, blocks, 0, tokens)


def test_stopped_consumers_delay_no_other(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    """The stopped peers have more cancelled pushes in flight than a peer has threads."""
    tcp = {"engine_options": {"kvplan.transport": "tcp"}, "push": True, "blocks": 512}
    producer = make_worker(1, **tcp)
    honest = make_worker(2, **tcp)
    stopped = [make_peer(cluster_id, **tcp) for cluster_id in (11, 12)]
    tokens, blocks = 4000, list(range(500))  # more than a socket takes
    names = [(peer, f"{peer.source.cluster_id}-{n}") for peer in stopped for n in range(8)]
    for peer, name in names:
        wanted = reference([producer.source], 0, 11, tokens, transfer=name)
        peer.run(
            "worker.exchange.fetch(name, wanted, target)",
            name=name,
            wanted=wanted,
            target=Target(blocks),
        )
        producer.wait_asked(name)
    for peer in stopped:
        peer.stop()
    digest = token_digest(prompt(11, tokens))
    producer.exchange.begin_step([Chunk(item, digest, blocks, tokens, True) for _, item in names])
    producer.exchange.end_step()
    for number, (_, name) in enumerate(names):
        producer.enter(number, 11, blocks, tokens, name)
        producer.exchange.abort(handle(number))
    producer.finish(99, 12, [501, 502, 503], 21)
    assert honest.fetch(reference([producer.source], 99, 12, 21), [7, 1, 30]).error is None
    freed: set[Handle] = set()
    while handle(99) not in freed:
        assert producer.exchange.wait(60_000)
        freed |= producer.exchange.take_freed()
    assert freed == {handle(99)}  # blocks of the stopped peers are still being read
    for peer in stopped:
        peer.resume()
    while len(freed) <= len(names):  # then all of them are free
        assert producer.exchange.wait(60_000)
        freed |= producer.exchange.take_freed()


class SlowPush:
    """A push to a stopped consumer; each `cancel` returns when all pushes are being cancelled."""

    done = False

    def __init__(self, together: threading.Barrier) -> None:
        self._together = together
        self._ended = threading.Event()

    def cancel(self) -> None:
        self._together.wait(60)
        self._ended.set()

    def wait(self) -> None:
        assert self._ended.wait(60), "another push was waited for first"


def test_consumers_of_moved_blocks_are_waited_for_together(make_worker: MakeWorker) -> None:
    pusher = make_worker(1, push=True).exchange._pusher
    together = threading.Barrier(3)
    lease = BlockLease(2, bytes(16), 1, 1, (1,), True, "", ())
    for cluster_id, name in ((2, "a"), (3, "a"), (3, "b")):
        pusher.add(cluster_id, 0, name, b"", Goal(lease, 0, 0))
        task = cast("LayerTask", SlowPush(together))
        pusher._pushes[name][cluster_id, 0].tasks.append((task, 8))
    pusher.cancel(["a", "b"])
    assert not any(push.tasks for item in pusher._pushes.values() for push in item.values())


def test_dead_producers_are_forgotten(make_worker: MakeWorker) -> None:
    consumer = make_worker(2, lease_ttl_ms=40)
    for cluster_id in range(100, 110):  # no producer listens there
        unused_source = Source(cluster_id, "127.0.0.1:1")
        assert consumer.fetch(reference([unused_source], 0, 11, 21), [7, 1, 30]).error is not None
    producer = make_worker(1)
    producer.finish(0, 11, [4, 9, 2], 21)
    assert consumer.fetch(reference([producer.source], 0, 11, 21), [7, 1, 30]).error is None
    producers = consumer.exchange._producers
    until(lambda: len(producers) == 1)
    producer.close()
    until(lambda: len(producers) == 0)


def test_an_incompatible_producer_is_forgotten_like_others(make_worker: MakeWorker) -> None:
    """Several refusals over one link leave nothing behind either."""
    consumer, producer = make_worker(2), make_worker(1, model="another")
    for number in range(3):
        wanted = reference([producer.source], number, 11, 21)
        assert "does not fit" in str(consumer.fetch(wanted, [7, 1, 30]).error)
    assert len(consumer.exchange._producers) == 1
    producer.close()
    until(lambda: len(consumer.exchange._producers) == 0)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_producer_keeps_no_blocks_of_others(make_worker: MakeWorker, dead: int) -> None:
    """Several producers have a request that is dropped."""
    long = {"lease_ttl_ms": 3_600_000}  # prevents that a lease expires
    producers = [make_worker(10 + rank, place=Place(rank, 4), **long) for rank in range(4)]
    for producer in producers:
        producer.finish(0, 11, [4, 9], 13)
    consumer = make_worker(2, place=Place())
    wanted = reference([producer.source for producer in producers], 0, 11, 13)
    consumer.exchange.expect("mine", wanted)
    pulls = consumer.exchange._puller.pulls
    until(lambda: "mine" in pulls and len(pulls["mine"].handles) == 4)
    producers.pop(dead).close()
    consumer.exchange.drop("mine", wanted)
    for producer in producers:
        assert producer.freed() == {"request-11"}


def test_a_link_that_has_ended_is_made_again(make_worker: MakeWorker) -> None:
    consumer, producer = make_worker(2), make_worker(1)
    for number in range(2):
        producer.finish(number, 11, [4, 9, 2], 21)
        wanted = reference([producer.source], number, 11, 21)
        assert consumer.fetch(wanted, [7, 1, 30]).error is None
        consumer.engine.unlink_clusters([1], force=True).raise_for_status()


def test_waiting_goals_are_bounded(make_worker: MakeWorker) -> None:
    """Complete goals count, too: a consumer cannot fill the memory of its producer."""
    producer, consumer = make_worker(1, push=True), make_worker(2)
    consumer.engine.link_clusters([ClusterInfo(1, producer.source.address)]).raise_for_status()
    lease = BlockLease(2, bytes(16), 1, 1, tuple(range(2**20)), True, "", ())
    parts = pieces(Goal(lease, 0, 0).to_bytes())
    asks = producer.exchange._asks
    for number in range(6):
        for part, data in enumerate(parts):
            name = f"never-{number}"
            ask = Ask(number, INSTANCE, b"", bytes(16), name, part, len(parts), data)
            producer.exchange._call(asks.take, 2, ask)
    taken: list[bool] = []
    producer.exchange._call(taken.append, True)
    until(lambda: bool(taken))
    assert asks._consumers[2].nbytes <= MAX_GOAL_NBYTES
    assert 1 <= len(asks.waiting) < 6


def test_an_ask_does_not_take_the_place_of_another(make_worker: MakeWorker) -> None:
    """The push of the replaced ask would stay as long as the link, and be outside of all limits."""
    producer, consumer = make_worker(1, push=True), make_worker(2)
    consumer.engine.link_clusters([ClusterInfo(1, producer.source.address)]).raise_for_status()
    goal = Goal(BlockLease(2, bytes(16), 1, 1, (1,), True, "", ()), 0, 0).to_bytes()
    taken: list[bool] = []
    for number in range(50):
        ask = Ask(7, INSTANCE, b"", bytes(16), f"never-{number}", data=goal)
        producer.exchange._call(producer.exchange._asks.take, 2, ask)
    producer.exchange._call(taken.append, True)
    until(lambda: bool(taken))
    assert list(producer.exchange._asks.waiting) == ["never-0"]
    assert producer.exchange._pusher.transfers() == [(2, "never-0")]


def test_a_push_is_forgotten_when_its_consumer_has_the_answer(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1, push=True), make_worker(2, push=True)
    wanted = reference([producer.source], 0, 11, 21, transfer="t")
    consumer.exchange.fetch("mine", wanted, Target([7, 1, 30]))
    producer.wait_asked("t")
    producer.step(11, [4, 9, 2], 0, 21, 21, "t")
    pushes = producer.exchange._pusher._pushes
    assert pushes["t"]
    producer.enter(0, 11, [4, 9, 2], 21, "t")
    assert consumer.exchange.wait(60_000)
    assert [(result.error, result.pushed) for result in consumer.exchange.take_results()] == [
        (None, 21)
    ]
    assert not pushes


def test_a_stopped_producer_delays_no_other(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    """Only one transfer at once is allowed from each producer."""
    tcp = {"engine_options": {"kvplan.transport": "tcp"}}
    stopped, honest = make_peer(11, **tcp), make_worker(1, **tcp)
    consumer = make_worker(2, max_pulls=1, **tcp)
    stopped.worker.finish(0, 11, [4, 9, 2], 21)
    honest.finish(0, 12, [4, 9, 2], 21)
    held = reference([stopped.source], 0, 11, 21)
    consumer.exchange.expect("held", held)
    pulls = consumer.exchange._puller.pulls
    until(lambda: any(pull.handles for pull in list(pulls.values())))  # the lease is granted
    stopped.stop()
    consumer.exchange.fetch("held", held, Target([8, 2, 29]))
    assert consumer.fetch(reference([honest.source], 0, 12, 21), [7, 1, 30]).error is None
    stopped.resume()
    assert consumer.exchange.wait(60_000)
    assert [(result.request, result.error) for result in consumer.exchange.take_results()] == [
        ("held", None)
    ]
    assert consumer.has(11, [8, 2, 29], 0, 21)


def test_a_stopped_producer_delays_renewals_at_no_other(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    """Renewals to the stopped producer wait for an hour, once its socket is full."""
    stopped, honest = make_peer(11), make_worker(1)
    consumer = make_worker(
        2,
        renew_interval_ms=20,
        link_timeout_ms=3_600_000,
        engine_options={"kvplan.heartbeat_timeout_ms": "3600000"},
    )
    stopped.worker.finish(0, 11, [4, 9, 2], 21)
    honest.finish(0, 12, [4, 9, 2], 21)
    for request, producer in ((11, stopped), (12, honest)):
        wanted = reference([producer.source], 0, request, 21)
        consumer.exchange.expect(f"request {request}", wanted)
    pulls = consumer.exchange._puller.pulls
    until(lambda: sum(len(pull.handles) for pull in list(pulls.values())) == 2)
    stopped.stop()
    try:
        with refused("LLM_TIMEOUT"):
            while True:
                consumer.engine.notify(11, b"no message of an exchange", timeout_ms=100)
        held = honest.exchange.book._held[handle(0)]
        for _ in range(5):
            before = held.deadline
            until(lambda before=before: held.deadline > before)  # type: ignore[misc]
        tasks = consumer.exchange._tasks._running
        until(lambda: str(list(tasks)).count("Puller.renew()") <= 1)  # of the stopped producer
    finally:
        stopped.resume()


def num_elements(item: object, visited: set[int]) -> int:
    """Return the number of elements in the containers of an exchange and of its parts."""
    if id(item) in visited:
        return 0
    visited.add(id(item))
    if isinstance(item, dict | list | set | deque | tuple):
        values = [*item.values()] if isinstance(item, dict) else [*item]
        return len(values) + sum(num_elements(value, visited) for value in values)
    if not type(item).__module__.startswith("kvplan.serving"):
        return 0
    return sum(num_elements(value, visited) for value in getattr(item, "__dict__", {}).values())


@pytest.mark.parametrize("push", [False, True])
def test_a_consumer_keeps_nothing_of_requests_that_have_ended(
    make_worker: MakeWorker, push: bool
) -> None:
    """Requests may be fetched, refused, or dropped."""
    consumer, producer = make_worker(2, push=push), make_worker(1, push=push)
    exchange, first = consumer.exchange, 0
    for number in range(4):
        producer.finish(number, 11, [4, 9, 2], 21)
        good = reference([producer.source], number, 11, 21)
        assert consumer.fetch(good, [7, 1, 30]).error is None
        bad = reference([producer.source], number, 12, 21)
        assert consumer.fetch(bad, [7, 1, 30]).error is not None
        exchange.expect("other", bad)
        exchange.drop("other", bad)
        first = first or num_elements(exchange, set())
    until(lambda: num_elements(exchange, set()) <= first)
