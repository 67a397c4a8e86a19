"""Identity of requests: the handle decides, and neither a name nor another process replaces it."""

from __future__ import annotations

import json
import pickle
from contextlib import nullcontext

import pytest

from kvplan import ClusterInfo
from kvplan.serving import Handle, Reference, Source, Target
from tests.serving.peer import Peer
from tests.serving.test_exchange import MakePeer, MakeWorker, failed
from tests.serving.worker import INSTANCE, handle, reference
from tests.support.refusals import refused

MINE = [7, 1, 30]


def enter(peer: Peer, request: int, blocks: list[int], name: str, transfer: str = "") -> Handle:
    """Compute a request of 21 tokens in the peer, and offer it under a handle of its own."""
    return Handle(
        peer.run(
            """
            from kvplan.serving import token_digest
            from tests.serving.worker import prompt
            worker.compute(request, blocks, 21)
            made = worker.exchange.enter(name, blocks, token_digest(prompt(request, 21)), transfer)
            worker.names[made] = f"request-{request}"
            result = made.value
            """,
            request=request,
            blocks=blocks,
            name=name,
            transfer=transfer,
        )
    )


def reference_to(peer: Peer, made: Handle, request: int) -> Reference:
    by_number = reference([peer.source], 0, request, 21)
    return Reference(INSTANCE, made, by_number.digest, 21, by_number.sources)


def test_two_requests_of_one_name_are_two(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(), make_worker()
    one = enter(peer, 11, [4, 9, 2], "cmpl-1")
    two = enter(peer, 12, [5, 6, 8], "cmpl-1")
    assert consumer.fetch(reference_to(peer, one, 11), MINE).error is None
    assert peer.worker.freed() == {"request-11"}  # without the blocks of the other request
    peer.run("worker.compute(13, [4, 9, 2], 21)")
    assert consumer.fetch(reference_to(peer, two, 12), [8, 3, 6]).error is None
    assert consumer.has(12, [8, 3, 6], 0, 21)


def test_a_handle_is_entered_once(make_worker: MakeWorker) -> None:
    producer = make_worker(1)
    producer.finish(0, 11, [4, 9, 2], 21)
    with refused("LLM_PARAM_INVALID", "request 00000000 was used before"):
        producer.finish(0, 12, [5, 6, 8], 21)
    producer.exchange.abort(handle(0))
    assert producer.freed() == {"request-11"}
    with refused("LLM_PARAM_INVALID", "was used before"):
        producer.finish(0, 12, [5, 6, 8], 21)
    assert producer.engine.leases() == []


def test_handles_are_random_and_travel() -> None:
    made = {Handle.new() for _ in range(100)}
    assert len(made) == 100
    item = made.pop()
    assert pickle.loads(pickle.dumps(item)) == item
    whole = Reference(INSTANCE, item, b"digest", 21, (Source(1, "a:1"),))
    assert Reference.from_dict(json.loads(json.dumps(whole.to_dict()))).handle == item
    with refused("LLM_PARAM_INVALID", "must be 16 bytes"):
        Handle(b"short")


def test_a_second_fetch_of_a_request_in_flight_is_refused(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(), make_worker()
    wanted = reference([peer.source], 0, 11, 21, transfer="cmpl-11")
    other = reference([peer.source], 1, 12, 21)
    consumer.exchange.fetch("mine", wanted, Target(MINE))
    peer.run("worker.wait_asked('cmpl-11')")
    for again in (
        lambda: consumer.exchange.fetch("mine", wanted, Target([8, 3, 6])),
        lambda: consumer.exchange.fetch("mine", other, Target([8, 3, 6])),
        lambda: consumer.exchange.expect("mine", other),
        lambda: consumer.exchange.drop("mine", other),
    ):
        with refused("LLM_PARAM_INVALID", "request='mine' is being fetched"):
            again()
    enter(peer, 11, [4, 9, 2], "cmpl-11", "cmpl-11")
    assert consumer.exchange.wait(60_000)
    (result,) = consumer.exchange.take_results()
    assert (result.error, result.blocks) == (None, MINE)
    enter(peer, 12, [4, 9, 2], "cmpl-12", "cmpl-12")
    wanted = reference([peer.source], 0, 12, 21, transfer="cmpl-12")
    assert consumer.fetch(wanted, [8, 3, 6]).error is None  # a request with the same name
    assert consumer.has(12, [8, 3, 6], 0, 21)


def test_a_transfer_that_is_entered_twice_is_of_the_first(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    peer, consumer = make_peer(), make_worker()
    enter(peer, 11, [4, 9, 2], "cmpl-1", "name")
    two = enter(peer, 12, [5, 6, 8], "cmpl-2", "name")
    wanted = reference([peer.source], 0, 11, 21, transfer="name")
    assert consumer.fetch(wanted, MINE).error is None
    assert consumer.has(11, MINE, 0, 21)
    assert peer.worker.freed() == {"request-11"}
    assert consumer.fetch(reference_to(peer, two, 12), [8, 3, 6]).error is None
    assert consumer.has(12, [8, 3, 6], 0, 21)


def test_a_lease_that_failed_is_reported(make_peer: MakePeer, make_worker: MakeWorker) -> None:
    peer, consumer = make_peer(), make_worker()
    peer.run("worker.enter(0, 11, [4, 9, 2000], 21)")  # block 2000 does not exist
    result = consumer.fetch(reference([peer.source], 0, 11, 21), MINE)
    assert failed(result, "request 00000000 could not be leased: .*2000")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("worker.exchange.abort(handle(0))", "its producer has aborted it"),
        ("worker.exchange.book.expire()", "it was not fetched in 50 ms"),
    ],
    ids=["abort", "expire"],
)
def test_the_end_of_a_request_is_reported_with_its_reason(
    make_peer: MakePeer, make_worker: MakeWorker, end: str, reason: str
) -> None:
    peer, consumer = make_peer(lease_ttl_ms=50), make_worker()
    peer.run(f"worker.enter(0, 11, [4, 9, 2], 21); {end}")
    assert peer.worker.freed() == {"request-11"}
    result = consumer.fetch(reference([peer.source], 0, 11, 21), MINE)
    assert failed(result, f"request 00000000 has ended: {reason}")


def test_a_producer_that_was_replaced_is_linked_anew(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    old, consumer = make_peer(), make_worker()
    old.worker.finish(0, 11, [4, 9, 2], 21)
    assert consumer.fetch(reference([old.source], 0, 11, 21), MINE).error is None
    stale = reference([old.source], 1, 12, 21, instance=b"no such one")
    failure = consumer.fetch(stale, [7, 1, 30])
    # so the link to the process is not used
    assert failed(failure, f"at {old.source.address} is not the process")
    # another process of the same cluster, while the old one lives
    new = make_peer(instance=b"the new one")
    new.worker.finish(1, 12, [5, 6, 8], 21)
    wanted = reference([new.source], 1, 12, 21, instance=b"the new one")
    assert consumer.fetch(wanted, [8, 3, 6]).error is None
    assert consumer.has(12, [8, 3, 6], 0, 21)
    stale = reference([new.source], 1, 12, 21, instance=b"no such one")
    assert failed(consumer.fetch(stale, MINE), f"at {new.source.address} is not the process")


def test_a_linked_producer_is_used_in_spite_of_another_address(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    """The address cannot be linked, but the process is the one that the reference names."""
    peer, consumer = make_peer(), make_worker()
    peer.worker.finish(0, 11, [4, 9, 2], 21)
    cluster_id, address = peer.source.cluster_id, peer.source.address
    consumer.engine.link_clusters([ClusterInfo(cluster_id, address)]).raise_for_status()
    elsewhere = Source(cluster_id, "127.0.0.1:1", peer.source.layers)
    assert consumer.fetch(reference([elsewhere], 0, 11, 21), MINE).error is None
    assert consumer.has(11, MINE, 0, 21)
    assert [link.address for link in consumer.engine.links()] == [address]


@pytest.mark.parametrize(("nbytes", "fits"), [(0, False), (1, True), (32, True), (33, False)])
def test_an_instance_has_up_to_32_bytes(make_worker: MakeWorker, nbytes: int, fits: bool) -> None:
    with nullcontext() if fits else refused("LLM_PARAM_INVALID", "must have 1 to 32 bytes"):
        make_worker(instance=bytes(nbytes))


def test_a_producer_that_was_replaced_is_named_while_the_old_one_is_in_use(
    make_peer: MakePeer, make_worker: MakeWorker
) -> None:
    old, consumer = make_peer(), make_worker()
    wanted = reference([old.source], 0, 11, 21, transfer="cmpl-11")
    consumer.exchange.fetch("waits", wanted, Target(MINE))
    old.run("worker.wait_asked('cmpl-11')")
    new = make_peer(instance=b"the new one")
    new.worker.finish(1, 12, [5, 6, 8], 21)
    wanted = reference([new.source], 1, 12, 21, instance=b"the new one")
    result = consumer.fetch(wanted, [8, 3, 6])
    assert failed(result, f"{new.source.address} is not linked.*{old.source.address}, is in use")
    enter(old, 11, [4, 9, 2], "cmpl-11", "cmpl-11")
    assert consumer.exchange.wait(60_000)
    assert [item.error for item in consumer.exchange.take_results()] == [None]
