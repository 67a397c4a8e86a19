"""A producer in another process, a consumer here: requests that are fetched, refused or dropped."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from kvplan import LLMException, PlanEvent
from kvplan.layout import Interleaved
from kvplan.serving import Compatibility, Exchange, Handle, Place, PullResult, Source, Target
from kvplan.serving.messages import Grant
from tests.serving.peer import Peer
from tests.serving.worker import INSTANCE, Worker, handle, reference
from tests.support.refusals import refused

MakeWorker = Callable[..., Worker]
MakePeer = Callable[..., Peer]


Stages = tuple[tuple[int, int] | None, ...]


def places(ranks: int, stages: Stages = (None,)) -> list[Place]:
    """Return the workers of an engine: its stages in their order, by rank in each."""
    return [
        Place(rank, ranks, stage, stages) for stage in range(len(stages)) for rank in range(ranks)
    ]


def failed(result: PullResult, match: str) -> bool:
    """Return True if the result has an error that matches."""
    assert isinstance(result.error, LLMException)
    with pytest.raises(LLMException, match=match):
        raise result.error
    return True


def test_a_request_is_fetched_and_then_free(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    assert consumer.fetch(reference([peer.source], 0, 11, 21), [7, 1, 30]).error is None
    assert consumer.has(11, [7, 1, 30], 0, 21)
    assert peer.worker.freed() == {"request-11"}
    assert peer.run("result = worker.engine.leases()") == []


def test_transfers_have_the_name_of_the_request(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(), make_worker()
    events: list[PlanEvent] = []
    consumer.engine.on_plan(events.append)
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    wanted = reference([peer.source], 0, 11, 21)
    assert consumer.fetch(wanted, [7, 1, 30], name="cmpl-11").error is None
    assert [(event.operation, event.tag) for event in events] == [("pull_blocks", "cmpl-11")]


def test_only_missing_tokens_move(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    consumer.compute(12, [7], 8)  # other blocks stay as they are
    assert consumer.fetch(reference([peer.source], 0, 11, 21), [7, 1, 30], first=8).error is None
    assert consumer.has(11, [7, 1, 30], 8, 21)
    assert consumer.has(12, [7], 0, 8)


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("transfer", ["", "cmpl-11"], ids=["handle", "transfer"])
def test_a_request_without_missing_tokens_frees_its_producer(
    make_peer: MakePeer, make_worker: MakeWorker, push: bool, transfer: str
) -> None:
    """The missing tokens end where the last block ends."""
    peer, consumer = make_peer(push=push), make_worker(push=push)
    peer.worker.enter(0, 11, [4, 9], 16, transfer)
    consumer.compute(12, [7, 1], 16)
    wanted = reference([peer.source], 0, 11, 16, transfer=transfer)
    assert consumer.fetch(wanted, [7, 1], first=16).error is None
    assert consumer.has(12, [7, 1], 0, 16)
    assert peer.worker.freed() == {"request-11"}
    assert consumer.engine.leases() == []


def test_a_request_whose_transfer_fails_frees_its_producer(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    """Otherwise the producer keeps the blocks until the lease expires."""
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    wanted = reference([peer.source], 0, 11, 21)
    assert failed(consumer.fetch(wanted, [7, 1, 32]), "32")  # there are 32 blocks
    assert peer.worker.freed() == {"request-11"}


def test_calls_are_made_in_the_thread_of_the_exchange(make_worker: MakeWorker) -> None:
    """A call from another thread does not wake the loop. In its debug mode, asyncio refuses it."""
    producer, consumer = make_worker(1), make_worker(2)
    for worker in (producer, consumer):
        worker.exchange._loop.set_debug(True)
    wanted = [reference([producer.source], n, 11, 21, transfer=f"t{n}") for n in range(3)]
    for number, (each, blocks) in enumerate(zip(wanted, ([7, 1], [8, 3], [6, 5]), strict=True)):
        consumer.exchange.expect(f"d{number}", each)
        consumer.exchange.fetch(f"d{number}", each, Target([*blocks, 30 - number]))
        producer.wait_asked(f"t{number}")
    consumer.exchange.cancel("d0")
    producer.exchange.refuse("t1", "was aborted")
    producer.finish(2, 11, [4, 9, 2], 21)
    producer.enter(3, 11, [4, 9, 2], 21, "t2")
    results: dict[str, PullResult] = {}
    while len(results) < 3:
        assert consumer.exchange.wait(60_000)
        results |= {each.request: each for each in consumer.exchange.take_results()}
    assert failed(results["d0"], "the request was cancelled")
    assert failed(results["d1"], "was aborted")
    assert results["d2"].error is None
    consumer.exchange.drop("d4", reference([producer.source], 2, 11, 21))
    freed: set[Handle] = set()
    while len(freed) < 2:
        assert producer.exchange.wait(60_000)
        freed |= producer.exchange.take_freed()
    assert freed == {handle(2), handle(3)}


@pytest.mark.parametrize(("theirs", "mine"), [(8, 4), (4, 8), (8, 8)])
def test_block_sizes_may_differ(
    make_peer: MakePeer, make_worker: MakeWorker, theirs: int, mine: int
) -> None:
    peer, consumer = make_peer(block_tokens=theirs), make_worker(block_tokens=mine)
    peer.worker.finish(0, 11, [4, 9, 2, 0, 8][: -(-19 // theirs)], 19)
    blocks = [7, 1, 30, 3, 5][: -(-19 // mine)]
    assert consumer.fetch(reference([peer.source], 0, 11, 19), blocks).error is None
    assert consumer.has(11, blocks, 0, 19)


WHOLE, STAGES = (None,), ((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("theirs", "owners", "mine", "readers"),
    [
        (WHOLE, 1, WHOLE, 2),
        (WHOLE, 2, WHOLE, 1),
        (WHOLE, 2, WHOLE, 2),
        (WHOLE, 2, WHOLE, 4),
        (WHOLE, 8, WHOLE, 1),
        (WHOLE, 8, WHOLE, 4),
        (STAGES, 1, WHOLE, 1),
        (WHOLE, 1, STAGES, 1),
        (STAGES, 1, STAGES, 1),
        (STAGES, 2, WHOLE, 1),
        (STAGES, 1, STAGES, 2),
    ],
)
def test_numbers_of_workers_and_stages_may_differ(
    make_worker: MakeWorker,
    make_peer: MakePeer,
    theirs: Stages,
    owners: int,
    mine: Stages,
    readers: int,
) -> None:
    first, *other_workers = places(owners, theirs)
    peer = make_peer(10, place=first)
    names, sources = ["worker"], [peer.source]
    # in one process, which stands for another one
    for number, place in enumerate(other_workers, 11):
        code = f"w{number} = Worker({number}, place=place); result = w{number}.source"
        sources.append(peer.run(code, place=place))
        names.append(f"w{number}")
    for name in names:
        peer.run(f"{name}.finish(0, 11, [4, 9], 13)")
    for number, place in enumerate(places(readers, mine), 100):
        consumer = make_worker(number, place=place)
        assert consumer.fetch(reference(sources, 0, 11, 13), [7, 1]).error is None
        assert consumer.has(11, [7, 1], 0, 13)
    for name in names:
        assert peer.run(f"result = {name}.freed()") == {"request-11"}


def test_several_stages_are_not_pushed_to(make_worker: MakeWorker) -> None:
    item, fields = make_worker(), Compatibility({})
    with refused("LLM_PARAM_INVALID", "push=True needs one cache and one stage, not 1 groups and"):
        Exchange(item.engine, item.cache, fields, INSTANCE, place=Place(stages=STAGES), push=True)
    for place in (Place(context=Interleaved(0, 2)), Place(copies=2)):
        with refused("LLM_PARAM_INVALID", "push=True does not support context parallelism"):
            Exchange(item.engine, item.cache, fields, INSTANCE, place=place, push=True)


def test_a_request_fails_if_its_producer_has_other_layers(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = (
        make_peer(place=Place(stages=STAGES)),
        make_worker(place=Place(0, 1, 1, STAGES)),
    )
    wanted = reference([peer.source], 0, 11, 21)
    consumer.exchange.expect("mine", wanted)
    assert failed(consumer.fetch(wanted, [7, 1, 30]), r"no source has layers of \(1, 2\)")


def test_a_reference_that_is_used_again_is_refused(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    stale = reference([peer.source], 0, 11, 21)
    assert consumer.fetch(stale, [7, 1, 30]).error is None
    assert peer.worker.freed() == {"request-11"}
    peer.worker.finish(1, 12, [4, 9, 2], 21)
    assert failed(consumer.fetch(stale, [8, 3, 6]), "request 00000000 has ended")
    assert consumer.fetch(reference([peer.source], 1, 12, 21), [8, 3, 6]).error is None
    assert consumer.has(12, [8, 3, 6], 0, 21)


def test_a_reference_of_other_tokens_is_refused_and_frees_nothing(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    mixed_up = reference([peer.source], 0, 12, 21)
    assert failed(consumer.fetch(mixed_up, [7, 1, 30]), "has other tokens")
    assert consumer.fetch(reference([peer.source], 0, 11, 21), [7, 1, 30]).error is None


def test_a_reference_of_another_process_is_refused(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(instance=b"after a restart!"), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    before = reference([peer.source], 0, 11, 21, instance=INSTANCE)
    assert failed(
        consumer.fetch(before, [7, 1, 30]),
        "not the process that the reference names.*it has restarted",
    )


def test_an_incompatible_field_is_named(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(model="large"), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    result = consumer.fetch(reference([peer.source], 0, 11, 21), [7, 1, 30])
    assert failed(result, "model is 'tiny' here and 'large' there")


def test_a_consumer_may_ask_before_the_producer_knows(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(), make_worker()
    early = reference([peer.source], 0, 11, 21)
    consumer.exchange.fetch("mine", early, Target([7, 1, 30]))
    peer.run(  # the consumer waits for the answer
        """
        import select
        while not worker.exchange._asks.waiting:
            select.select([], [], [], 0.001)
        worker.finish(0, 11, [4, 9, 2], 21)
        """
    )
    assert consumer.exchange.wait(60_000)
    assert [result.error for result in consumer.exchange.take_results()] == [None]
    assert consumer.has(11, [7, 1, 30], 0, 21)


def test_a_request_that_never_finishes_is_refused(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(enter_timeout_ms=20), make_worker()
    result = consumer.fetch(reference([peer.source], 5, 11, 21), [7, 1, 30])
    assert failed(result, "request 05000000 is unknown: it has not finished")


def test_a_request_that_is_cancelled_before_it_is_asked_for_is_not_waited_for(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    """The producer, which is not linked yet, never computes the request."""
    peer, consumer = make_peer(), make_worker(prefill_timeout_ms=2000)
    wanted = reference([peer.source], 0, 11, 21, transfer="t")
    consumer.exchange.fetch("mine", wanted, Target([7, 1, 30]))
    consumer.exchange.cancel("mine")
    assert consumer.exchange.wait(60_000)
    assert failed(consumer.exchange.take_results()[0], "the request was cancelled")


def test_a_dropped_request_is_free(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    consumer.exchange.drop("mine", reference([peer.source], 0, 11, 21))
    assert peer.worker.freed() == {"request-11"}
    assert consumer.exchange.take_results() == []


def test_a_request_that_is_not_fetched_expires(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(lease_ttl_ms=50), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    assert peer.worker.freed() == {"request-11"}
    assert failed(consumer.fetch(reference([peer.source], 0, 11, 21), [7, 1, 30]), "has ended")


def test_an_expired_request_is_freed_soon(make_worker: MakeWorker) -> None:
    """Short leases are checked as often as they need: several end before a longer one."""

    def spent(producer: Worker, request: int) -> float:
        began = time.monotonic()
        producer.finish(request, 11 + request, [4, 9, 2], 21)
        assert producer.freed() == {f"request-{11 + request}"}
        return time.monotonic() - began

    short, long = make_worker(lease_ttl_ms=100), make_worker(lease_ttl_ms=800)
    quickest = min(spent(short, request) for request in range(3))
    assert 0.1 <= quickest < spent(long, 0)


RENEWED_THEN_LATE = """
import select
book = worker.exchange.book
now[0] += 2000  # seconds, of 3600: only renewals from here on last until the next step
while book._held[handle(0)].deadline < now[0] + 3600:
    select.select([], [], [], 0.001)
now[0] += 2000
book.expire()
"""


def test_an_expected_request_does_not_expire(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    """The test turns the clock of the producer, on which no other request is renewed."""
    peer = make_peer(lease_ttl_ms=3_600_000)
    peer.run("now = [0.0]; worker.exchange.book._clock = lambda: now[0]")
    consumer = make_worker(renew_interval_ms=20)
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    wanted = reference([peer.source], 0, 11, 21)
    consumer.exchange.expect("mine", wanted)
    for number, request in ((1, 12), (2, 13)):
        peer.worker.finish(number, request, [5], 8)
        peer.run(RENEWED_THEN_LATE)
        assert peer.worker.freed() == {f"request-{request}"}
    assert consumer.fetch(wanted, [7, 1, 30]).error is None
    assert consumer.has(11, [7, 1, 30], 0, 21)


def test_requests_to_a_dead_producer_fail(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    assert consumer.fetch(reference([peer.source], 0, 11, 21), [7, 1, 30]).error is None
    peer.process.send_signal(signal.SIGKILL)
    peer.process.wait()
    assert failed(consumer.fetch(reference([peer.source], 1, 12, 21), [7, 1, 30]), "cluster 1|link")


def test_requests_wait_together_for_a_silent_producer(
    make_worker: MakeWorker,
) -> None:
    consumer = make_worker(link_timeout_ms=400)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source(77, f"127.0.0.1:{silent.getsockname()[1]}")
        wanted = reference([source], 0, 11, 21)
        began = time.monotonic()
        assert failed(consumer.fetch(wanted, [7, 1, 30]), "no answer")
        single_s = time.monotonic() - began
        began = time.monotonic()
        for number in range(30):
            consumer.exchange.fetch(f"mine-{number}", wanted, Target([7, 1, 30]))
        found: list[PullResult] = []
        while len(found) < 30:
            assert consumer.exchange.wait(60_000)
            found += consumer.exchange.take_results()
    assert all(failed(item, "no answer") for item in found)
    assert time.monotonic() - began < 15 * single_s  # 30 times if each waited on its own


def test_a_target_begins_at_a_token(make_worker: MakeWorker) -> None:
    worker = make_worker()
    with refused("LLM_PARAM_INVALID", "target.first_token=-3 must be >= 0"):
        worker.exchange.fetch("mine", reference([], 1, 11, 21), Target([7, 1, 30], -3))


def test_a_result_has_the_moved_tokens_and_bytes(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    result = consumer.fetch(reference([peer.source], 0, 11, 21), [7, 1, 30], first=8)
    assert (result.tokens, result.nbytes) == (13, 2 * 4 * 13 * 8 * 4)  # layers, heads, tokens, ...
    assert result.move_ms > 0
    assert result.wait_ms > 0


def test_an_aborted_request_is_free_and_refused(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    peer.run("worker.exchange.abort(handle(0))")
    assert peer.worker.freed() == {"request-11"}
    assert failed(consumer.fetch(reference([peer.source], 0, 11, 21), [7, 1, 30]), "has ended")


def test_a_lease_of_many_blocks_comes_in_parts(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(blocks=4096, block_tokens=1), make_worker(blocks=512)
    peer.worker.finish(0, 11, list(range(4095, 95, -1)), 4000)
    blocks = list(range(500))
    assert consumer.fetch(reference([peer.source], 0, 11, 4000), blocks).error is None
    assert consumer.has(11, blocks, 0, 4000)


@pytest.mark.parametrize("max_parts", [4, 3])
def test_leases_of_too_many_parts_are_refused(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, max_parts: int
) -> None:
    """The consumer would drop the answer as invalid, and wait until it times out."""
    monkeypatch.setattr("kvplan.serving.asks.MAX_PARTS", max_parts)
    producer, consumer = make_worker(1, blocks=4096, block_tokens=1), make_worker(2, blocks=512)
    producer.finish(0, 11, list(range(4095, 95, -1)), 4000)
    result = consumer.fetch(reference([producer.source], 0, 11, 4000), [*range(500)])
    if max_parts == 4:
        assert result.error is None
    else:
        assert failed(result, "its leases need 4 messages; at most 3 are sent")


@pytest.mark.parametrize("before", ["the same", "a longer one", "the end of one"])
def test_an_answer_is_taken_when_it_comes_again_after_a_cut(
    make_worker: MakeWorker, before: str
) -> None:
    """A link broke between two parts, and the consumer asked again."""
    producer, consumer = make_worker(1, blocks=4096, block_tokens=1), make_worker(2, blocks=512)
    asks = producer.exchange._asks
    send = asks._send

    async def cut_off_first(cluster_id: int, messages: Sequence[Grant]) -> None:
        assert len(messages) > 2
        first = messages[:2]
        if before == "a longer one":
            first = [replace(messages[0], part=part, parts=9, data=b"old") for part in range(8)]
        elif before == "the end of one":
            first = messages[2:]
        await send(cluster_id, first)
        await send(cluster_id, messages)

    asks._send = cut_off_first
    producer.finish(0, 11, list(range(4095, 95, -1)), 4000)
    blocks = list(range(500))
    assert consumer.fetch(reference([producer.source], 0, 11, 4000), blocks).error is None
    assert consumer.has(11, blocks, 0, 4000)
