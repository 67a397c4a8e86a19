"""Requests with one name, and free blocks that others still use: no wrong bytes arrive."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from kvplan import BlockLease, ClusterInfo, LayerTask
from kvplan.serving import PullResult, Target
from kvplan.serving.messages import Done, Grant, encode
from kvplan.serving.pusher import Goal
from kvplan.serving.tables import encode_leases
from tests.serving.test_exchange import MakeWorker, failed
from tests.serving.worker import INSTANCE, Worker, handle, reference

NAME = "cmpl-11"


def results(consumer: Worker, number: int) -> dict[str, PullResult]:
    found: list[PullResult] = []
    while len(found) < number:
        assert consumer.exchange.wait(60_000)
        found += consumer.exchange.take_results()
    return {item.request: item for item in found}


def is_error_or_correct(consumer: Worker, blocks: list[int], pull_result: PullResult) -> bool:
    """Return True if the result has an error, or the blocks have the bytes of the request."""
    return pull_result.error is not None or consumer.has(11, blocks, 0, 21)


def test_two_requests_of_a_consumer_wait_for_one_transfer(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1, push=True), make_worker(2, push=True)
    wanted = reference([producer.source], 0, 11, 21, transfer=NAME)
    for name, blocks in (("first", [7, 1, 30]), ("second", [8, 2, 29])):
        consumer.exchange.fetch(name, wanted, Target(blocks))
    producer.wait_asked(NAME, 2)
    producer.step(11, [4, 9, 2], 0, 21, 21, NAME)
    producer.enter(0, 11, [4, 9, 2], 21, NAME)
    ended = results(consumer, 2)
    assert is_error_or_correct(consumer, [7, 1, 30], ended["first"])
    assert is_error_or_correct(consumer, [8, 2, 29], ended["second"])
    assert None in {item.error for item in ended.values()}
    assert producer.freed() == {"request-11"}
    assert producer.exchange._pusher.transfers() == []


def test_a_cancelled_request_does_not_leave_the_other_waiting(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1, push=True), make_worker(2, push=True)
    wanted = reference([producer.source], 0, 11, 21, transfer=NAME)
    for name, blocks in (("first", [7, 1, 30]), ("second", [8, 2, 29])):
        consumer.exchange.fetch(name, wanted, Target(blocks))
    producer.wait_asked(NAME, 2)
    consumer.exchange.cancel("first")
    ended = results(consumer, 2)
    assert failed(ended["first"], "the request was cancelled")
    assert failed(ended["second"], "does not need it any more")


class Reading:
    """A push that reads its blocks until it is let go."""

    done = False

    def __init__(self) -> None:
        self.cancelled, self.let_go = threading.Event(), threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def wait(self) -> None:
        assert self.let_go.wait(60)
        self.done = True


def test_a_push_is_known_until_it_has_stopped(make_worker: MakeWorker) -> None:
    """Its blocks are not free while the consumer's `Done` waits for its end."""
    pusher = make_worker(1, push=True).exchange._pusher
    pusher.add(2, 0, "a", b"", Goal(BlockLease(2, bytes(16), 1, 1, (1,), True, "", ()), 0, 0))
    reading = Reading()
    pusher._pushes["a"][2, 0].tasks.append((cast("LayerTask", reading), 8))
    removing = threading.Thread(target=pusher.remove, args=(2, "a"))
    removing.start()
    try:
        assert reading.cancelled.wait(60)
        assert not pusher.end("a")
    finally:
        reading.let_go.set()
    removing.join(60)
    assert pusher.end("a")


@pytest.mark.parametrize("end", ["abort", "done"])
def test_free_blocks_are_not_pushed(make_worker: MakeWorker, end: str) -> None:
    producer, consumer = make_worker(1, push=True), make_worker(2, push=True)
    consumer.exchange.fetch(
        "mine", reference([producer.source], 0, 11, 21, transfer=NAME), Target([7, 1, 30])
    )
    producer.wait_asked(NAME)
    producer.compute(11, [4, 9, 2], 21)
    digest = reference([producer.source], 0, 11, 21).digest
    producer.begin(11, [4, 9, 2], 21, 21, NAME)
    producer.exchange.layer_ready(0)  # the other layer stays on its way until the test ends it
    producer.enter(0, 11, [4, 9, 2], 21, NAME)
    if end == "abort":
        producer.exchange.abort(handle(0))
    else:  # another reader of the same tokens
        producer.exchange._receive(3, encode(Done(INSTANCE, b"", digest, 1, NAME)))
    assert producer.freed() == {"request-11"}
    producer.compute(12, [4, 9, 2], 21)
    producer.exchange.end_step()
    (value,) = results(consumer, 1).values()
    assert is_error_or_correct(consumer, [7, 1, 30], value)


def test_a_request_that_cannot_be_leased_is_not_pushed_any_more(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1, push=True), make_worker(2, push=True)
    consumer.exchange.fetch(
        "mine", reference([producer.source], 0, 11, 21, transfer=NAME), Target([7, 1, 30])
    )
    producer.wait_asked(NAME)
    producer.compute(11, [4, 9, 2], 21)
    producer.begin(11, [4, 9, 2], 21, 21, NAME)
    producer.enter(0, 11, [4, 9, 2000], 21, NAME)  # block 2000 does not exist
    assert producer.freed() == {"request-11"}
    producer.compute(12, [4, 9, 2], 21)
    producer.exchange.end_step()
    (value,) = results(consumer, 1).values()
    assert failed(value, "could not be leased")
    assert not any(array[[7, 1, 30]].any() for array in consumer.engine.arrays(consumer.cache))


def test_a_name_can_be_used_as_soon_as_it_was_dropped(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1), make_worker(2)
    producer.finish(0, 11, [4, 9, 2], 21)
    producer.finish(1, 12, [5, 6, 8], 21)
    consumer.exchange.expect("mine", reference([producer.source], 0, 11, 21))
    consumer.exchange.drop("mine", reference([producer.source], 0, 11, 21))
    consumer.exchange.expect("mine", reference([producer.source], 1, 12, 21))
    consumer.exchange.fetch("mine", reference([producer.source], 1, 12, 21), Target([7, 1, 30]))
    assert results(consumer, 1)["mine"].error is None
    assert consumer.has(12, [7, 1, 30], 0, 21)


def test_an_expected_request_whose_name_is_used_for_another_is_free(
    make_worker: MakeWorker,
) -> None:
    """The first request is dropped: its producer frees it long before its lease expires."""
    producer, consumer = make_worker(1), make_worker(2)
    producer.finish(0, 11, [4, 9, 2], 21)
    producer.finish(1, 12, [5, 6, 8], 21)
    consumer.exchange.expect("mine", reference([producer.source], 0, 11, 21))
    consumer.exchange.expect("mine", reference([producer.source], 1, 12, 21))
    assert producer.freed() == {"request-11"}
    assert producer.exchange.book.expired == 0
    wanted = reference([producer.source], 1, 12, 21)
    assert consumer.fetch(wanted, [7, 1, 30]).error is None
    assert consumer.has(12, [7, 1, 30], 0, 21)
    assert producer.freed() == {"request-12"}


def test_a_fetch_replaces_an_expected_request_of_its_name(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1), make_worker(2)
    producer.finish(0, 11, [4, 9, 2], 21)
    producer.finish(1, 12, [5, 6, 8], 21)
    consumer.exchange.expect("mine", reference([producer.source], 0, 11, 21))
    consumer.exchange.fetch("mine", reference([producer.source], 1, 12, 21), Target([7, 1, 30]))
    assert results(consumer, 1)["mine"].error is None
    assert consumer.has(12, [7, 1, 30], 0, 21)
    assert producer.freed() <= {"request-11", "request-12"}


def test_only_the_asked_producer_can_answer(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1), make_worker(2)
    producer.finish(0, 12, [5, 6, 8], 21)
    consumer.exchange.fetch(
        "mine", reference([producer.source], 0, 11, 21, transfer=NAME), Target([7, 1, 30])
    )
    producer.wait_asked(NAME)
    (ask,) = producer.exchange._asks.waiting[NAME].values()
    _, leases = producer.exchange.book.leases_of(handle(0), reference([], 0, 12, 21).digest)
    consumer.exchange._call(
        consumer.exchange._receive,
        9,
        encode(Grant(ask.number, bytes(16), 21, 0, 1, encode_leases(leases))),
    )
    producer.finish(1, 11, [4, 9, 2], 21)
    producer.enter(2, 11, [4, 9, 2], 21, NAME)
    (value,) = results(consumer, 1).values()
    assert value.error is None
    assert consumer.has(11, [7, 1, 30], 0, 21)


def test_numbers_of_asks_differ_between_processes(make_worker: MakeWorker) -> None:
    numbers = {next(make_worker(number).exchange._puller._numbers) for number in (2, 3)}
    assert len(numbers) == 2


def test_a_restarted_producer_that_links_itself_is_compared_again(make_worker: MakeWorker) -> None:
    producer, consumer = make_worker(1), make_worker(2)
    producer.finish(0, 11, [4, 9, 2], 21)
    assert consumer.fetch(reference([producer.source], 0, 11, 21), [7, 1, 30]).error is None
    producer.close()
    new_producer = make_worker(1, model="large", instance=b"another life")
    new_producer.finish(0, 11, [4, 9, 2], 21)
    consumer_info = ClusterInfo(2, consumer.source.address)
    new_producer.engine.link_clusters([consumer_info]).raise_for_status()
    wanted = reference([new_producer.source], 0, 11, 21, instance=b"another life")
    assert failed(consumer.fetch(wanted, [8, 2, 29]), "model is 'tiny' here and 'large' there")
