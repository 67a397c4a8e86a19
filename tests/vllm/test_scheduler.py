"""The scheduler's half: what it says to the workers of each request, and what vLLM is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvplan.serving import Chunk, Reference, Table, Target, token_digest
from kvplan.vllm.scheduler import ConnectorScheduler
from kvplan.vllm.step import Step, WorkerAddress

PROMPT = list(range(100, 170))


def request(name: str = "r1", status: str = "FINISHED_LENGTH_CAPPED", **values: Any) -> Any:
    given = {
        "request_id": name,
        "kv_transfer_params": None,
        "prompt_token_ids": PROMPT,
        "_all_token_ids": [*PROMPT],
        "num_prompt_tokens": len(PROMPT),
        "num_computed_tokens": len(PROMPT),
        "max_tokens": 16,
        "status": SimpleNamespace(name=status),
        "lora_request": None,
        "prompt_embeds": None,
        "cache_salt": None,
        "mm_features": [],
    }
    return SimpleNamespace(**(given | values))


@pytest.fixture
def producer() -> ConnectorScheduler:
    scheduler = ConnectorScheduler("an engine's id")
    scheduler.set_workers({(0, 1): WorkerAddress(12, "b:2"), (0, 0): WorkerAddress(11, "a:1")})
    return scheduler


@pytest.fixture
def consumer() -> ConnectorScheduler:
    return ConnectorScheduler("another's")


def finished(producer: ConnectorScheduler, name: str = "p1", **values: Any) -> dict[str, Any]:
    """What travels with a request that has finished."""
    given = {"kv_transfer_params": {"do_remote_decode": True}} | values
    held, params = producer.finished(request(name, **given), ([5, 6, 7],))
    assert held
    assert params
    return params


def test_a_request_that_is_finished_is_offered(producer: ConnectorScheduler) -> None:
    params = finished(producer)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    reference = Reference.from_dict(params["kvplan"])
    (offer,) = producer.take_step().offers
    assert (offer.request, offer.blocks) == ("p1", (5, 6, 7))
    assert (offer.handle, offer.digest) == (reference.handle, reference.digest)
    assert reference.instance == producer.instance
    assert [(source.cluster_id, source.address) for source in reference.sources] == [
        (11, "a:1"),
        (12, "b:2"),
    ]
    assert producer.take_step() == Step()


def test_workers_are_named_by_stage_and_then_by_rank(producer: ConnectorScheduler) -> None:
    places = [(1, 1), (0, 1), (1, 0), (0, 0)]
    workers = {
        (stage, rank): WorkerAddress(10 * stage + rank, "a:1", ((0, 3), (3, 4))[stage])
        for stage, rank in places
    }
    producer.set_workers(workers)
    sources = Reference.from_dict(finished(producer)["kvplan"]).sources
    assert [source.cluster_id for source in sources] == [0, 1, 10, 11]
    assert [source.layers for source in sources] == [(0, 3), (0, 3), (3, 4), (3, 4)]


def test_each_request_is_offered_once_under_a_handle_of_its_own(
    producer: ConnectorScheduler,
) -> None:
    for _ in range(3):
        finished(producer, "p1")
    assert len({offer.handle for offer in producer.take_step().offers}) == 3


@pytest.mark.parametrize(
    "values",
    [
        {"kv_transfer_params": None},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"status": SimpleNamespace(name="FINISHED_ABORTED")},
        {"prompt_token_ids": None},
        {"num_computed_tokens": 0},
    ],
)
def test_others_are_not_kept(producer: ConnectorScheduler, values: dict[str, Any]) -> None:
    given = {"kv_transfer_params": {"do_remote_decode": True}} | values
    assert producer.finished(request(**given), ([5],)) == (False, None)
    assert producer.take_step() == Step()


def test_what_was_generated_is_not_offered(producer: ConnectorScheduler) -> None:
    params = finished(producer, num_computed_tokens=len(PROMPT) + 3)
    reference = Reference.from_dict(params["kvplan"])
    assert (reference.num_tokens, reference.digest) == (len(PROMPT), token_digest(PROMPT))


def test_a_request_is_expected_and_then_fetched(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    arriving = request(kv_transfer_params=finished(producer))
    consumer.arrived(arriving)
    (reference,) = consumer.take_step().expected.values()
    assert reference == Reference.from_dict(arriving.kv_transfer_params["kvplan"])
    assert consumer.missing_tokens(arriving, 32) == 38
    assert consumer.missing_tokens(arriving, 32) == 38  # it may be asked often
    consumer.allocated(arriving, ([1, 2, 3],), 38)
    assert consumer.take_step().fetched == {"r1": (reference, Target((1, 2, 3), 32))}
    consumer.fetched(["r1"])
    assert consumer.missing_tokens(arriving, 0) == 0  # after a failure it is computed here
    consumer.allocated(arriving, ([1, 2, 3],), 0)
    assert consumer.finished(arriving, ([1, 2, 3],)) == (False, None)
    assert consumer.take_step() == Step()


def test_what_is_here_already_is_dropped(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    arriving = request(kv_transfer_params=finished(producer))
    consumer.arrived(arriving)
    assert consumer.missing_tokens(arriving, 70) == 0
    consumer.allocated(arriving, ([1, 2, 3],), 0)
    step = consumer.take_step()
    assert (set(step.dropped), step.fetched) == ({"r1"}, {})


def test_what_is_aborted_before_it_has_blocks_is_dropped(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    arriving = request(kv_transfer_params=finished(producer), status="FINISHED_ABORTED")
    consumer.arrived(arriving)
    assert consumer.finished(arriving, ([],)) == (False, None)
    assert set(consumer.take_step().dropped) == {"r1"}


@pytest.mark.parametrize(("num_tokens", "fetched"), [(40, 40), (70, 70), (75, 70)])
def test_no_more_is_fetched_than_either_side_has(
    producer: ConnectorScheduler, consumer: ConnectorScheduler, num_tokens: int, fetched: int
) -> None:
    tokens = [*PROMPT, 1, 2, 3, 4, 5][:num_tokens]
    arriving = request(kv_transfer_params=finished(producer), prompt_token_ids=tokens)
    consumer.arrived(arriving)
    (reference,) = consumer.take_step().expected.values()
    assert (reference.num_tokens, reference.digest) == (fetched, token_digest(tokens[:fetched]))
    assert consumer.missing_tokens(arriving, 32) == fetched - 32


def test_a_request_is_asked_for_by_its_own_tokens(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    others = [1, *PROMPT[1:]]
    consumer.arrived(request(kv_transfer_params=finished(producer), prompt_token_ids=others))
    (reference,) = consumer.take_step().expected.values()
    assert reference.digest == token_digest(others) != token_digest(PROMPT)


def test_more_than_tokens_counts(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    params = finished(producer, cache_salt="salt")
    consumer.arrived(request("same", kv_transfer_params=params, cache_salt="salt"))
    consumer.arrived(request("plain", kv_transfer_params=params))
    expected = consumer.take_step().expected
    theirs = Reference.from_dict(params["kvplan"])
    assert expected["same"].digest == theirs.digest != expected["plain"].digest


def test_requests_with_inputs_that_are_not_known_are_not_transferred(
    producer: ConnectorScheduler,
) -> None:
    params = finished(producer)
    strict = ConnectorScheduler("another's", count_keys=lambda request, num_tokens: 1)
    strict.arrived(request(kv_transfer_params=params))
    step = strict.take_step()
    assert (step.expected, set(step.dropped)) == ({}, {"r1"})  # its producer may free it
    model = computing()
    strict.arrived(model)
    assert strict.finished(model, ([5],)) == (False, None)
    step = strict.take_step()
    assert (step.offers, step.refused) == ([], ["cmpl-1"])


@pytest.mark.parametrize("reference", [None, {}, {"protocol": 9}, {"remote_block_ids": [1]}])
def test_what_is_no_reference_is_computed_here(
    consumer: ConnectorScheduler, reference: dict[str, Any] | None
) -> None:
    arriving = request(kv_transfer_params={"do_remote_prefill": True, "kvplan": reference})
    consumer.arrived(arriving)
    assert consumer.missing_tokens(arriving, 0) == 0
    assert consumer.take_step() == Step()


def computing(name: str = "p1", computed: int = 0, **values: Any) -> Any:
    """A request that has arrived at its producer, whose consumer may wait for it already."""
    params = {"do_remote_decode": True, "kvplan": {"transfer": "cmpl-1"}}
    return request(name, kv_transfer_params=params, num_computed_tokens=computed, **values)


def test_of_a_request_with_a_transfer_each_step_says_what_it_computes(
    producer: ConnectorScheduler,
) -> None:
    model = computing(computed=32)  # which the prefix cache had
    producer.arrived(model)
    blocks = {"p1": [5, 6, 7], "other": [8]}
    producer.computing({"p1": 20, "other": 3}, blocks.get)
    digest = token_digest(PROMPT)
    assert producer.take_step().chunks == [Chunk("cmpl-1", digest, (5, 6, 7), 52, False)]
    model.num_computed_tokens = 52
    producer.computing({"p1": 18}, blocks.get)
    assert producer.take_step().chunks == [Chunk("cmpl-1", digest, (5, 6, 7), 70, True)]
    model.num_computed_tokens = 70
    producer.computing({"p1": 1}, blocks.get)  # what it generates is nobody's
    assert producer.take_step() == Step()
    held, params = producer.finished(model, ([5, 6, 7],))
    assert held
    assert params
    (offer,) = producer.take_step().offers
    assert (offer.transfer, offer.digest) == ("cmpl-1", digest)


def test_a_request_that_is_preempted_is_computed_again(producer: ConnectorScheduler) -> None:
    model = computing()
    producer.arrived(model)
    producer.computing({"p1": 70}, {"p1": [5, 6, 7]}.get)
    producer.take_step()
    producer.preempted({"p1", "other"})
    assert producer.take_step().moved == ["cmpl-1"]
    producer.computing({"p1": 70}, {"p1": [1, 2, 3]}.get)
    (chunk,) = producer.take_step().chunks
    assert (chunk.blocks, chunk.end, chunk.last) == ((1, 2, 3), 70, True)


def test_consumers_of_a_request_that_is_aborted_are_told(producer: ConnectorScheduler) -> None:
    model = computing(status=SimpleNamespace(name="FINISHED_ABORTED"))
    producer.arrived(model)
    assert producer.finished(model, ([5],)) == (False, None)
    assert producer.take_step() == Step(moved=["cmpl-1"], refused=["cmpl-1"])


def waiting(producer: ConnectorScheduler) -> dict[str, Any]:
    """What travels with a request that its producer has not finished."""
    known = finished(producer)["kvplan"]  # what an earlier answer said of the producer
    theirs = {key: known[key] for key in ("protocol", "instance", "sources")}
    return {"do_remote_prefill": True, "kvplan": theirs | {"transfer": "cmpl-1"}}


def test_a_request_that_has_not_finished_is_expected_by_its_name(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    arriving = request(kv_transfer_params=waiting(producer))
    consumer.arrived(arriving)
    (reference,) = consumer.take_step().expected.values()
    assert (reference.transfer, reference.num_tokens) == ("cmpl-1", len(PROMPT))
    assert reference.digest == token_digest(PROMPT)
    assert consumer.missing_tokens(arriving, 32) == 38
    consumer.allocated(arriving, ([1, 2, 3],), 38)
    consumer.take_step()
    assert consumer.finished(arriving, ([1, 2, 3],)) == (False, None)
    assert consumer.take_step().cancelled == ["r1"]  # nobody waits for it any more


@pytest.mark.parametrize("reported", [False, True])
def test_a_name_that_an_aborted_request_still_has_is_not_fetched(
    producer: ConnectorScheduler, consumer: ConnectorScheduler, reported: bool
) -> None:
    """Clients choose names. The worker would refuse this one, which would end vLLM's engine."""
    first, again = (request(kv_transfer_params=finished(producer, name)) for name in ("a", "b"))
    consumer.arrived(first)
    consumer.allocated(first, ([1, 2, 3],), len(PROMPT))
    consumer.finished(first, ([1, 2, 3],))
    consumer.take_step()
    if reported:
        consumer.fetched(["r1"])
    consumer.arrived(again)
    step = consumer.take_step()
    dropped = [Reference.from_dict(again.kv_transfer_params["kvplan"])]
    assert len(step.expected) == int(reported)
    assert list(step.dropped.values()) == ([] if reported else dropped)  # its blocks are freed
    assert "r1" not in step.dropped  # the worker would refuse that name
    assert consumer.missing_tokens(again, 0) == (len(PROMPT) if reported else 0)


@pytest.mark.parametrize("in_use", [True, False])
def test_each_aborted_request_of_a_name_is_dropped_under_a_name_of_its_own(
    producer: ConnectorScheduler, consumer: ConnectorScheduler, in_use: bool
) -> None:
    """All come in one step. A living request may have the name that would be next."""
    living = request("r1 (again)", kv_transfer_params=finished(producer))
    first, *others = (request(kv_transfer_params=finished(producer, name)) for name in "abc")
    consumer.arrived(living)
    if in_use:
        consumer.arrived(first)
        consumer.allocated(first, ([1, 2, 3],), len(PROMPT))
        consumer.finished(first, ([1, 2, 3],))
    for other in others:
        consumer.arrived(other)
        consumer.finished(other, ([],))
    step = consumer.take_step()
    assert [reference.handle for reference in step.dropped.values()] == [
        Reference.from_dict(other.kv_transfer_params["kvplan"]).handle for other in others
    ]
    assert step.expected.keys() == {"r1 (again)"} | ({"r1"} if in_use else set())
    assert not step.dropped.keys() & step.expected.keys()


def test_a_request_by_transfer_of_a_name_in_use_is_not_dropped(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    """Its producer has not finished it, and has no blocks to free."""
    first = request(kv_transfer_params=finished(producer))
    consumer.arrived(first)
    consumer.allocated(first, ([1, 2, 3],), len(PROMPT))
    consumer.take_step()
    consumer.arrived(request(kv_transfer_params=waiting(producer)))
    assert consumer.take_step() == Step()


@pytest.mark.parametrize("transfer", [7, "x" * 129, "a\n", None])
def test_a_transfer_that_has_no_name_is_none(producer: ConnectorScheduler, transfer: Any) -> None:
    model = computing()
    model.kv_transfer_params["kvplan"] = {"transfer": transfer}
    producer.arrived(model)
    producer.computing({"p1": 70}, {"p1": [5, 6, 7]}.get)
    assert producer.take_step() == Step()


def windowed_offer(**values: Any) -> tuple[Any, dict[str, Any] | None, Step]:
    """A prompt of 70 tokens has finished, in blocks of 32, and one layer sees the last 32."""
    producer = ConnectorScheduler("an engine's id", windowed=True)
    producer.set_workers({(0, 0): WorkerAddress(11, "a:1")})
    given = {"kv_transfer_params": {"do_remote_decode": True}, "prompt_token_ids": [*PROMPT]}
    item = request("p1", **(given | values))
    producer.arrived(item)
    item.num_computed_tokens = item.num_prompt_tokens
    _, params = producer.finished(item, ([0, 4, 9], [5, 6, 7]))
    return item, params, producer.take_step()


def test_blocks_that_a_window_has_left_are_not_offered() -> None:
    _, _, step = windowed_offer()
    assert step.offers[0].blocks == (Table((4, 9), 1), Table((5, 6, 7)))


def test_the_last_token_is_left_to_the_consumer_of_a_window() -> None:
    item, params, step = windowed_offer()
    assert (item.prompt_token_ids, item._all_token_ids) == (PROMPT[:-1], PROMPT[:-1])
    assert (item.num_prompt_tokens, item.max_tokens) == (69, 1)
    assert params
    theirs = Reference.from_dict(params["kvplan"])
    assert (theirs.num_tokens, theirs.digest) == (69, token_digest(PROMPT[:-1]))
    assert step.offers[0].digest == theirs.digest


def test_of_a_single_token_none_is_left() -> None:
    item, params, _ = windowed_offer(prompt_token_ids=[7], _all_token_ids=[7], num_prompt_tokens=1)
    assert (item.prompt_token_ids, item.max_tokens) == ([7], 16)
    assert params
    assert Reference.from_dict(params["kvplan"]).num_tokens == 1


@pytest.mark.parametrize("transfer", ["", "cmpl-3"])
def test_a_window_is_fetched_but_for_the_last_token(transfer: str) -> None:
    _, params, _ = windowed_offer()
    assert params
    params["kvplan"] |= {"transfer": transfer}
    consumer = ConnectorScheduler("another's", windowed=True)
    arriving = request(kv_transfer_params=params)
    consumer.arrived(arriving)
    (reference,) = consumer.take_step().expected.values()
    assert reference.digest == token_digest(PROMPT[:-1])
    assert consumer.missing_tokens(arriving, 32) == 37
    consumer.allocated(arriving, ([0, 2, 3], [1, 8, 6]), 37)
    target = Target((Table((2, 3), 1), Table((1, 8, 6))), 32)
    assert consumer.take_step().fetched == {"r1": (reference, target)}


def test_a_group_without_blocks_is_not_kept() -> None:
    producer = ConnectorScheduler("an engine's id", windowed=True)
    item = request(kv_transfer_params={"do_remote_decode": True})
    assert producer.finished(item, ([4], [])) == (False, None)
