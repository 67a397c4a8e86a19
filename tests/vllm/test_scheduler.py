"""The scheduler's half: its messages to the workers about each request, and its answers to vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvplan.serving import Chunk, Reference, Table, Target, token_digest
from kvplan.vllm.scheduler import ConnectorScheduler
from kvplan.vllm.step import Step, WorkerAddress
from tests.vllm.test_inputs import ones

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
    """Finish a request, and return the parameters that travel with it."""
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
def test_blocks_of_other_requests_are_not_held(
    producer: ConnectorScheduler, values: dict[str, Any]
) -> None:
    given = {"kv_transfer_params": {"do_remote_decode": True}} | values
    assert producer.finished(request(**given), ([5],)) == (False, None)
    assert producer.take_step() == Step()


def test_generated_tokens_are_not_offered(producer: ConnectorScheduler) -> None:
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
    assert consumer.missing_tokens(arriving, 32) == 38  # vLLM may ask several times
    consumer.allocated(arriving, ([1, 2, 3],), 38)
    assert consumer.take_step().fetched == {"r1": (reference, Target((1, 2, 3), 32))}
    consumer.fetched(["r1"])
    assert consumer.missing_tokens(arriving, 0) == 0  # after a failure this engine computes it
    consumer.allocated(arriving, ([1, 2, 3],), 0)
    assert consumer.finished(arriving, ([1, 2, 3],)) == (False, None)
    assert consumer.take_step() == Step()


def test_a_request_with_all_tokens_here_is_dropped(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    arriving = request(kv_transfer_params=finished(producer))
    consumer.arrived(arriving)
    assert consumer.missing_tokens(arriving, 70) == 0
    consumer.allocated(arriving, ([1, 2, 3],), 0)
    step = consumer.take_step()
    assert (set(step.dropped), step.fetched) == ({"r1"}, {})


def test_a_request_aborted_before_it_has_blocks_is_dropped(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    arriving = request(kv_transfer_params=finished(producer), status="FINISHED_ABORTED")
    consumer.arrived(arriving)
    assert consumer.finished(arriving, ([],)) == (False, None)
    assert set(consumer.take_step().dropped) == {"r1"}


@pytest.mark.parametrize(("num_tokens", "fetched"), [(40, 40), (70, 70), (75, 70)])
def test_only_tokens_that_both_sides_have_are_fetched(
    producer: ConnectorScheduler, consumer: ConnectorScheduler, num_tokens: int, fetched: int
) -> None:
    tokens = [*PROMPT, 1, 2, 3, 4, 5][:num_tokens]
    arriving = request(kv_transfer_params=finished(producer), prompt_token_ids=tokens)
    consumer.arrived(arriving)
    (reference,) = consumer.take_step().expected.values()
    assert (reference.num_tokens, reference.digest) == (fetched, token_digest(tokens[:fetched]))
    assert consumer.missing_tokens(arriving, 32) == fetched - 32


def test_the_digest_is_of_the_consumers_tokens(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    others = [1, *PROMPT[1:]]
    consumer.arrived(request(kv_transfer_params=finished(producer), prompt_token_ids=others))
    (reference,) = consumer.take_step().expected.values()
    assert reference.digest == token_digest(others) != token_digest(PROMPT)


def test_other_inputs_than_tokens_count(
    producer: ConnectorScheduler, consumer: ConnectorScheduler
) -> None:
    params = finished(producer, cache_salt="salt")
    consumer.arrived(request("same", kv_transfer_params=params, cache_salt="salt"))
    consumer.arrived(request("plain", kv_transfer_params=params))
    expected = consumer.take_step().expected
    theirs = Reference.from_dict(params["kvplan"])
    assert expected["same"].digest == theirs.digest != expected["plain"].digest


def test_requests_with_unknown_inputs_are_not_transferred(
    producer: ConnectorScheduler,
) -> None:
    params = finished(producer)
    counted: list[tuple[Any, int]] = []
    strict = ConnectorScheduler("another's", count_keys=lambda *given: counted.append(given) or 1)
    arriving = request(kv_transfer_params=params)
    strict.arrived(arriving)
    assert counted == [(arriving, len(PROMPT))]
    step = strict.take_step()
    assert (step.expected, set(step.dropped)) == ({}, {"r1"})  # its producer may free it
    model = computing()
    strict.arrived(model)
    assert strict.finished(model, ([5],)) == (False, None)
    step = strict.take_step()
    assert (step.offers, step.refused) == ([], ["cmpl-1"])


@pytest.mark.parametrize("reference", [None, {}, {"protocol": 9}, {"remote_block_ids": [1]}])
def test_a_request_with_an_invalid_reference_is_computed_here(
    consumer: ConnectorScheduler, reference: dict[str, Any] | None
) -> None:
    arriving = request(kv_transfer_params={"do_remote_prefill": True, "kvplan": reference})
    consumer.arrived(arriving)
    assert consumer.missing_tokens(arriving, 0) == 0
    assert consumer.take_step() == Step()


def computing(name: str = "p1", computed: int = 0, **values: Any) -> Any:
    """Return a request that has arrived at its producer; its consumer may wait for it already."""
    params = {"do_remote_decode": True, "kvplan": {"transfer": "cmpl-1"}}
    return request(name, kv_transfer_params=params, num_computed_tokens=computed, **values)


def test_each_step_of_a_transfer_reports_its_computed_tokens(
    producer: ConnectorScheduler,
) -> None:
    model = computing(computed=32)  # the prefix cache had them
    producer.arrived(model)
    blocks = {"p1": [5, 6, 7], "other": [8]}
    producer.computing({"p1": 20, "other": 3}, blocks.get)
    digest = token_digest(PROMPT)
    assert producer.take_step().chunks == [Chunk("cmpl-1", digest, (5, 6, 7), 52, False)]
    model.num_computed_tokens = 52
    producer.computing({"p1": 18}, blocks.get)
    assert producer.take_step().chunks == [Chunk("cmpl-1", digest, (5, 6, 7), 70, True)]
    model.num_computed_tokens = 70
    producer.computing({"p1": 1}, blocks.get)  # a generated token is not transferred
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


def test_consumers_of_an_aborted_request_are_notified(producer: ConnectorScheduler) -> None:
    model = computing(status=SimpleNamespace(name="FINISHED_ABORTED"))
    producer.arrived(model)
    assert producer.finished(model, ([5],)) == (False, None)
    assert producer.take_step() == Step(moved=["cmpl-1"], refused=["cmpl-1"])


def waiting(producer: ConnectorScheduler) -> dict[str, Any]:
    """Return the parameters of a request that its producer has not finished."""
    by_number = finished(producer)["kvplan"]  # an earlier answer describes the producer
    theirs = {key: by_number[key] for key in ("protocol", "instance", "sources")}
    return {"do_remote_prefill": True, "kvplan": theirs | {"transfer": "cmpl-1"}}


def test_an_unfinished_request_is_expected_by_its_transfer(
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
    assert consumer.take_step().cancelled == ["r1"]  # the request is not awaited any more


@pytest.mark.parametrize("reported", [False, True])
def test_a_request_with_the_name_of_an_aborted_one_is_not_fetched(
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
def test_aborted_requests_of_one_name_are_dropped_under_unique_names(
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
def test_a_transfer_with_an_invalid_name_is_ignored(
    producer: ConnectorScheduler, transfer: Any
) -> None:
    model = computing()
    model.kv_transfer_params["kvplan"] = {"transfer": transfer}
    producer.arrived(model)
    producer.computing({"p1": 70}, {"p1": [5, 6, 7]}.get)
    assert producer.take_step() == Step()


def windowed_offer(**values: Any) -> tuple[Any, dict[str, Any] | None, Step]:
    """Finish a prompt of 70 tokens in blocks of 32, of which one layer uses the last 32."""
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


@pytest.mark.parametrize("shared", [False, True])
def test_the_consumer_of_a_window_computes_the_last_token(shared: bool) -> None:
    """The list of all tokens may be that of the prompt, or another one."""
    tokens = [*PROMPT]
    item, params, step = windowed_offer(
        prompt_token_ids=tokens, _all_token_ids=tokens if shared else [*PROMPT]
    )
    assert (item.prompt_token_ids, item._all_token_ids) == (PROMPT[:-1], PROMPT[:-1])
    assert (item.num_prompt_tokens, item.max_tokens) == (69, 1)
    assert params
    theirs = Reference.from_dict(params["kvplan"])
    assert (theirs.num_tokens, theirs.digest) == (69, token_digest(PROMPT[:-1]))
    assert step.offers[0].digest == theirs.digest


def test_embeddings_of_a_window_are_neither_cut_nor_offered() -> None:
    item, params, step = windowed_offer(prompt_embeds=ones())
    assert (item.prompt_token_ids, item._all_token_ids) == (PROMPT, PROMPT)
    assert (item.num_prompt_tokens, item.max_tokens) == (len(PROMPT), 16)
    assert (params, step) == (None, Step())


def test_a_request_without_tokens_is_not_prepared(consumer: ConnectorScheduler) -> None:
    given = {"do_remote_decode": True, "kvplan": {"transfer": "t"}}
    consumer.arrived(request(kv_transfer_params=given, prompt_token_ids=None))
    assert consumer.take_step() == Step()


def test_a_single_token_is_not_left_to_the_consumer() -> None:
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
