"""Requests that move while their producer, another process, computes them."""

from __future__ import annotations

import logging
import signal
import time
from threading import Event

import pytest

from kvplan.serving import Place, PullResult, Target, asks, pusher
from tests.serving.peer import Peer
from tests.serving.test_exchange import MakePeer, MakeWorker, failed
from tests.serving.worker import Worker, reference

NAME = "cmpl-11"


def ask(peer: Peer, consumer: Worker, blocks: list[int], tokens: int, first: int = 0) -> None:
    """Ask for a request before it is computed, and wait until the producer knows the ask."""
    wanted = reference([peer.source], 0, 11, tokens, transfer=NAME)
    consumer.exchange.fetch("mine", wanted, Target(blocks, first))
    peer.run(f"worker.wait_asked({NAME!r})")


def result(consumer: Worker) -> PullResult:
    assert consumer.exchange.wait(60_000)
    (item,) = consumer.exchange.take_results()
    return item


@pytest.mark.parametrize(("theirs", "mine"), [(8, 8), (4, 8), (8, 4)])
def test_a_request_computed_in_chunks_arrives_complete(
    make_peer: MakePeer,
    make_worker: MakeWorker,
    theirs: int,
    mine: int,
) -> None:
    peer = make_peer(push=True, block_tokens=theirs)
    consumer = make_worker(push=True, block_tokens=mine)
    peer.run("tags = set(); worker.engine.on_plan(lambda event: tags.add(event.tag))")
    blocks = [7, 1, 30, 3, 5, 9][: -(-21 // mine)]
    ask(peer, consumer, blocks, 21)
    first_token = [4, 9, 2, 0, 8, 6][: -(-21 // theirs)]
    for first, end in ((0, 5), (5, 19), (19, 21)):
        peer.run(f"worker.step(11, {first_token}, {first}, {end}, 21, {NAME!r})")
    peer.run(f"worker.enter(0, 11, {first_token}, 21, {NAME!r})")
    item = result(consumer)
    assert item.error is None
    assert consumer.has(11, blocks, 0, 21)
    assert item.pushed == 21
    assert peer.run("result = tags") == {NAME}
    assert peer.worker.freed() == {"request-11"}
    assert peer.run("result = worker.exchange._pusher.transfers()") == []
    assert consumer.engine.leases() == []


@pytest.mark.parametrize("consumer_limit", [False, True])
def test_a_goal_that_is_too_large_is_refused_at_once(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, consumer_limit: bool
) -> None:
    """The consumer refuses, or a producer with less room or with goals of other requests."""
    producer = make_worker(1, push=True)
    consumer = make_worker(push=True, blocks=4000, block_tokens=1)
    monkeypatch.setattr(asks, "MAX_GOAL_NBYTES", 7000)
    if consumer_limit:
        monkeypatch.setattr(pusher, "MAX_GOAL_NBYTES", 7000)
    wanted = reference([producer.source], 0, 11, 21, transfer=NAME)
    found = consumer.fetch(wanted, [*range(4000)])
    expected = (
        "fetch fewer, or with push=False" if consumer_limit else "unread goals exceed 7000 bytes"
    )
    assert expected in str(found.error)
    assert consumer.engine.leases() == []


def test_a_layer_moves_before_the_next_is_computed(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True)
    ask(peer, consumer, [7], 8)
    peer.run(
        f"""
        from kvplan.serving import Chunk, token_digest
        from tests.serving.worker import prompt
        digest = token_digest(prompt(11, 8))
        worker.exchange.begin_step([Chunk({NAME!r}, digest, [4], 8, True)])
        worker.compute(11, [4], 8)
        worker.exchange.layer_ready(0)
        """
    )
    first, second = consumer.engine.arrays(consumer.cache)
    end = time.monotonic() + 60  # reached only by a push that does not begin
    while not first[7].all():  # 1 KiB, whose last word arrives soon
        assert time.monotonic() < end, "the layer did not move"
    assert not second[7].any()
    peer.run(f"worker.exchange.end_step(); worker.enter(0, 11, [4], 8, {NAME!r})")
    assert result(consumer).error is None
    assert consumer.has(11, [7], 0, 8)


def test_pushed_tokens_stay_if_the_rest_cannot_be_pulled(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True)
    entered = Event()
    consumer.engine.on_plan(lambda _: entered.wait(60) and peer.kill())  # before the pull
    ask(peer, consumer, [7, 1, 30], 21)
    peer.run(f"worker.step(11, [4, 9, 2], 0, 17, 21, {NAME!r})")  # whole blocks: 16 tokens
    peer.run(f"worker.enter(0, 11, [4, 9, 2], 21, {NAME!r})")
    entered.set()
    item = result(consumer)
    # A dying process closes its descriptors a moment before it has exited.
    assert failed(item, "has exited|has closed its transport")
    assert (item.tokens, item.pushed) == (21, 16)
    assert consumer.has(11, [7, 1], 0, 16)


def test_only_missing_tokens_are_pushed(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True)
    consumer.compute(12, [7], 8)
    ask(peer, consumer, [7, 1, 30], 21, first=8)
    peer.run(f"worker.step(11, [4, 9, 2], 0, 21, 21, {NAME!r})")
    peer.run(f"worker.enter(0, 11, [4, 9, 2], 21, {NAME!r})")
    item = result(consumer)
    assert item.error is None
    assert consumer.has(12, [7], 0, 8)
    assert consumer.has(11, [7, 1, 30], 8, 21)
    assert item.pushed == 13


def test_a_consumer_that_comes_late_fetches_the_beginning_too(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True)
    peer.run(f"worker.step(11, [4, 9, 2], 0, 10, 21, {NAME!r})")
    ask(peer, consumer, [7, 1, 30], 21)
    peer.run(f"worker.step(11, [4, 9, 2], 10, 21, 21, {NAME!r})")
    peer.run(f"worker.enter(0, 11, [4, 9, 2], 21, {NAME!r})")
    item = result(consumer)
    assert item.error is None
    assert consumer.has(11, [7, 1, 30], 0, 21)
    assert item.pushed == 21


@pytest.mark.parametrize(("producer", "consumes"), [(True, False), (False, True), (False, False)])
def test_finished_requests_are_pulled_if_only_one_side_pushes(
    make_peer: MakePeer,
    make_worker: MakeWorker,
    producer: bool,
    consumes: bool,
) -> None:
    peer, consumer = make_peer(push=producer), make_worker(push=consumes)
    ask(peer, consumer, [7, 1, 30], 21)
    peer.run(f"worker.step(11, [4, 9, 2], 0, 21, 21, {NAME!r})")
    peer.run(f"worker.enter(0, 11, [4, 9, 2], 21, {NAME!r})")
    item = result(consumer)
    assert item.error is None
    assert consumer.has(11, [7, 1, 30], 0, 21)
    assert item.pushed == 0


def test_a_consumer_that_asks_for_a_finished_request_pulls_it(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True)
    peer.run(f"worker.step(11, [4, 9, 2], 0, 21, 21, {NAME!r})")
    peer.run(f"worker.enter(0, 11, [4, 9, 2], 21, {NAME!r})")
    wanted = reference([peer.source], 0, 11, 21, transfer=NAME)
    assert consumer.fetch(wanted, [7, 1, 30]).error is None
    assert consumer.has(11, [7, 1, 30], 0, 21)
    assert peer.worker.freed() == {"request-11"}  # a thread takes the end of the first request
    assert failed(consumer.fetch(wanted, [7, 1, 30]), "cmpl-11 has ended")


def test_other_tokens_are_never_pushed(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True)
    ask(peer, consumer, [7, 1, 30], 21)
    peer.run(f"worker.step(12, [4, 9, 2], 0, 21, 21, {NAME!r})")
    peer.run(f"worker.enter(0, 12, [4, 9, 2], 21, {NAME!r})")
    assert failed(result(consumer), "has other tokens")
    assert not any(array.any() for array in consumer.engine.arrays(consumer.cache))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_request_that_is_computed_again_is_pushed_from_its_new_blocks(
    make_peer: MakePeer, make_worker: MakeWorker, at_once: bool
) -> None:
    """The step that follows a preemption may already compute the request again."""
    peer, consumer = make_peer(push=True), make_worker(push=True)
    ask(peer, consumer, [7, 1, 30], 21)
    peer.run(f"worker.step(11, [4, 9], 0, 12, 21, {NAME!r})")
    if not at_once:
        peer.run(f"worker.exchange.begin_step([], [{NAME!r}]); worker.exchange.end_step()")
    peer.run(
        f"""
        worker.compute(12, [4, 9], 16)  # another's now
        worker.step(11, [3, 5, 6], 0, 21, 21, {NAME!r}, {[NAME] * at_once!r})
        worker.enter(0, 11, [3, 5, 6], 21, {NAME!r})
        """
    )
    item = result(consumer)
    assert (item.error, item.pushed) == (None, 21)
    assert consumer.has(11, [7, 1, 30], 0, 21)


def test_a_request_that_is_preempted_between_two_layers_is_pushed_from_its_beginning(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    """A cancelled task had the second layer of the first tokens."""
    peer, consumer = make_peer(push=True), make_worker(push=True)
    ask(peer, consumer, [7, 1, 30], 21)
    peer.run(
        f"""
        worker.begin(11, [4, 9], 12, 21, {NAME!r})
        worker.compute(11, [4, 9], 12, 0, [0])
        worker.exchange.layer_ready(0)
        worker.exchange.begin_step([], [{NAME!r}])
        worker.exchange.end_step()
        worker.compute(12, [4, 9], 16)  # another's now
        worker.step(11, [3, 5, 6], 0, 21, 21, {NAME!r})
        worker.enter(0, 11, [3, 5, 6], 21, {NAME!r})
        """
    )
    assert result(consumer).error is None
    assert consumer.has(11, [7, 1, 30], 0, 21)


def test_a_request_that_its_producer_aborts_fails(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True)
    ask(peer, consumer, [7, 1, 30], 21)
    peer.run(f"worker.step(11, [4, 9], 0, 12, 21, {NAME!r})")
    peer.run(f"worker.exchange.begin_step([], [{NAME!r}])")
    peer.run(f"worker.exchange.refuse({NAME!r}, 'was aborted')")
    assert failed(result(consumer), "cmpl-11 was aborted")


def test_a_request_that_is_cancelled_gets_no_more_bytes_and_is_free(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True)
    ask(peer, consumer, [7, 1, 30], 21)
    peer.run(f"worker.step(11, [4, 9, 2], 0, 8, 21, {NAME!r})")
    consumer.exchange.cancel("mine")
    assert failed(result(consumer), "the request was cancelled")
    consumer.compute(13, [7, 1, 30], 21)  # the blocks belong to another request now
    peer.run(f"worker.step(11, [4, 9, 2], 8, 21, 21, {NAME!r})")
    peer.run(f"worker.enter(0, 11, [4, 9, 2], 21, {NAME!r})")
    assert peer.worker.freed() == {"request-11"}
    assert consumer.has(13, [7, 1, 30], 0, 21)


def test_a_producer_that_dies_in_between_fails_the_request(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True)
    ask(peer, consumer, [7, 1, 30], 21)
    peer.run(f"worker.step(11, [4, 9], 0, 12, 21, {NAME!r})")
    peer.process.send_signal(signal.SIGKILL)
    peer.process.wait()
    assert failed(result(consumer), "broke before it answered")
    assert consumer.engine.leases() == []


def test_a_request_that_is_never_computed_fails_in_time(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(push=True), make_worker(push=True, prefill_timeout_ms=300)
    ask(peer, consumer, [7, 1, 30], 21)
    assert failed(result(consumer), "has not finished a request named cmpl-11 in 300")


@pytest.mark.parametrize(("owners", "readers"), [(1, 2), (2, 1), (2, 2)])
def test_each_worker_pushes_its_heads(
    make_worker: MakeWorker, make_peer: MakePeer, owners: int, readers: int
) -> None:
    peer = make_peer(10, push=True, place=Place(0, owners))
    sources = [peer.source]
    for rank in range(1, owners):
        code = f"w{rank} = Worker({10 + rank}, place=place, push=True); result = w{rank}.source"
        sources.append(peer.run(code, place=Place(rank, owners)))
    names = ["worker", *(f"w{index}" for index in range(1, owners))]
    wanted = reference(sources, 0, 11, 13, transfer=NAME)
    consumers = [
        make_worker(100 + index, place=Place(index, readers), push=True) for index in range(readers)
    ]
    for consumer in consumers:
        consumer.exchange.fetch("mine", wanted, Target([7, 1]))
    for consumer in names:
        peer.run(f"{consumer}.wait_asked({NAME!r}, {max(1, readers // owners)})")
        peer.run(f"{consumer}.step(11, [4, 9], 0, 13, 13, {NAME!r})")
        peer.run(f"{consumer}.enter(0, 11, [4, 9], 13, {NAME!r})")
    for consumer in consumers:
        assert result(consumer).error is None
        assert consumer.has(11, [7, 1], 0, 13)
    for consumer in names:
        assert peer.run(f"result = {consumer}.freed()") == {"request-11"}


@pytest.mark.parametrize("pushes", [(True, False), (False, True)])
def test_tokens_that_one_of_two_producers_has_not_pushed_are_pulled(
    make_worker: MakeWorker, make_peer: MakePeer, pushes: tuple[bool, bool]
) -> None:
    """Each producer has half of the heads, so the slower one decides how many tokens arrived."""
    peer = make_peer(10, push=pushes[0], place=Place(0, 2))
    code = "other = Worker(11, **options); result = other.source.address"
    address = peer.run(code, options={"place": Place(1, 2), "push": pushes[1]})
    sources = [peer.source, type(peer.source)(11, address)]
    consumer = make_worker(100, push=True)
    wanted = reference(sources, 0, 11, 13, transfer=NAME)
    consumer.exchange.fetch("mine", wanted, Target([7, 1]))
    for name in ("worker", "other"):
        peer.run(f"{name}.wait_asked({NAME!r})")
        peer.run(f"{name}.step(11, [4, 9], 0, 13, 13, {NAME!r})")
        peer.run(f"{name}.enter(0, 11, [4, 9], 13, {NAME!r})")
    name = result(consumer)
    assert (name.error, name.pushed) == (None, 0)
    assert consumer.has(11, [7, 1], 0, 13)


def test_the_log_has_the_tokens_bytes_and_workers_of_a_fetch(
    make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = make_worker(1), make_worker(2)
    producer.finish(0, 11, [4, 9, 2], 21)
    with caplog.at_level(logging.INFO, "kvplan.serving"):
        consumer.exchange.fetch(
            "cmpl-5", reference([producer.source], 0, 11, 21), Target([7, 1, 30], 8)
        )
        item = result(consumer)
    assert item.error is None
    (line,) = [text for text in caplog.messages if text.startswith("cmpl-5")]
    assert line == (
        f"cmpl-5: 13 tokens ({2 * 4 * 13 * 8 * 4} bytes, 0 pushed) from 1 workers "
        f"in {item.move_ms:.1f} ms, after {item.wait_ms:.1f} ms"
    )
