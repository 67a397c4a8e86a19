"""Hybrid models: states of Mamba and linear attention beside attention, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan.layout import Shard
from kvplan.serving import Place, Table, Target
from kvplan.vllm.options import ConnectorOptions
from kvplan.vllm.scheduler import ConnectorScheduler
from kvplan.vllm.states import StateForm
from kvplan.vllm.step import Step, WorkerAddress
from kvplan.vllm.worker import ConnectorWorker, LayerGroup, Model
from tests.datadist.states import ATTENTION_BLOCKS, STATE_BLOCKS, whole
from tests.planning.test_states import KNOWN
from tests.support.refusals import refused
from tests.vllm.hybrid import KINDS, HostArray, HybridWorker
from tests.vllm.test_scheduler import PROMPT, request
from tests.vllm.test_worker import Peer

TOKENS = list(range(100, 109))  # two blocks of attention, and the last token
KINDS_BY_NAME = {"Codestral Mamba": "MAMBA2", "Bamba": "MAMBA2", "Falcon Mamba": "MAMBA1"}
STATES, ATTENTION = [2], [6, 4]  # blocks of the consumer

OFFER = """
workers = [
    HybridWorker(name, rank, ranks, produces=True, columns_first=first) for rank in range(ranks)
]
for worker in workers:
    worker.fill(whole(worker.model, 1))
addresses = {(0, rank): worker.worker.address for rank, worker in enumerate(workers)}
scheduler = workers[0].scheduler
scheduler.set_workers(addresses)
request = workers[0].request("p1", prompt, {"do_remote_decode": True})
scheduler.arrived(request)
request.num_computed_tokens = len(request.prompt_token_ids)
_, result = scheduler.finished(request, blocks)
step = scheduler.take_step()
for worker in workers:
    worker.worker.prepare(step)
"""


@pytest.fixture(scope="module")
def prefill() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.mark.parametrize(
    ("theirs", "mine", "columns_first"),
    [(1, 2, False), (2, 1, False), (4, 2, True), (2, 2, False)],
)
@pytest.mark.parametrize("name", KINDS)
def test_a_request_is_fetched_with_its_states(
    prefill: Peer, name: str, theirs: int, mine: int, columns_first: bool
) -> None:
    """Each rank fetches its heads of each part, and changes no bytes beside them."""
    params = prefill.run(
        OFFER,
        name=name,
        ranks=theirs,
        first=columns_first,
        prompt=TOKENS,
        blocks=(ATTENTION_BLOCKS, STATE_BLOCKS),
    )
    for rank in range(mine):
        decode = HybridWorker(name, rank, mine, produces=False, columns_first=columns_first)
        filled = HybridWorker(name, rank, mine, produces=False, columns_first=columns_first)
        filled.worker.close()
        filled.fill(whole(decode.model, 1))
        decode.fetch(decode.request("d1", TOKENS, params), ATTENTION, STATES)
        assert decode.results() == (set(), {"d1"}, set())
        for found, source in zip(decode.pages, filled.pages, strict=True):
            expected = np.full_like(found, 0xEE)
            expected[STATES + ATTENTION] = source[STATE_BLOCKS + ATTENTION_BLOCKS]
            np.testing.assert_array_equal(found, expected)
        decode.worker.close()
    prefill.run("[worker.worker.close() for worker in workers]")


def test_a_request_with_a_null_state_fails_and_is_computed(prefill: Peer) -> None:
    params = prefill.run(
        OFFER,
        name="Mamba1",
        ranks=1,
        first=False,
        prompt=TOKENS,
        blocks=(ATTENTION_BLOCKS, STATE_BLOCKS),
    )
    decode = HybridWorker("Mamba1", 0, 1, produces=False)
    decode.fetch(decode.request("d1", TOKENS, params), ATTENTION, [0])
    assert decode.results() == (set(), {"d1"}, {"d1"})
    assert all((page == 0xEE).all() for page in decode.pages)
    decode.worker.close()
    prefill.run("[worker.worker.close() for worker in workers]")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", KNOWN)
def test_heads_follow_from_the_shapes_in_vllm(name: str, ranks: int) -> None:
    """`tests/planning/test_states.py` has vLLM's own table of the shapes of these models."""
    known = KNOWN[name]
    groups = known.columns["B"].num_heads if "B" in known.columns else None
    # A rank with several groups shares none, so its number of groups follows from the shapes only.
    follows = groups is None or ranks == 1 or groups // ranks > 1
    for columns_first, told in product((False, True), {groups, None} if follows else {groups}):
        conv, ssm = known.shapes[ranks]
        spec = states(
            KINDS_BY_NAME.get(name, "GDN_ATTN"), conv[::-1] if columns_first else conv, ssm
        )
        form = StateForm.of(spec, ranks, groups=told, columns_first=columns_first)
        assert (form.columns, form.num_heads) == (known.columns, known.heads)


def states(kind: str, *shapes: tuple[int, ...], replicated: bool = False) -> Any:
    return SimpleNamespace(
        shapes=shapes,
        dtypes=(np.dtype(np.uint16),) * len(shapes),
        mamba_type=SimpleNamespace(name=kind),
        tp_replicated=replicated,
    )


def test_states_may_be_of_a_single_kind() -> None:
    linear = StateForm.of(states("LINEAR", (4, 8, 8)), 2)
    assert (linear.columns, linear.num_heads) == ({}, 8)
    conv = StateForm.of(states("SHORT_CONV", (3, 16)), 2)
    assert (conv.columns["x"].num_heads, conv.num_heads) == (32, 0)
    assert StateForm.of(states("LINEAR", (4, 8, 8), replicated=True), 2).num_heads == 4


@pytest.mark.parametrize(
    ("conv", "ssm", "dtype", "differs"),
    [
        (
            (3, 96),
            (4, 8, 8),
            np.float32,
            ("state 0, dtype DT_FLOAT16, ", "state 0, dtype DT_FLOAT, "),
        ),
        ((3, 80), (2, 8, 8), np.float16, (", state_heads 4, ", ", state_heads 2, ")),
        ((4, 96), (4, 8, 8), np.float16, (", tensors 3'", ", tensors 4'")),
    ],
)
def test_each_part_of_the_states_is_compared(
    conv: tuple[int, ...], ssm: tuple[int, ...], dtype: type, differs: tuple[str, str]
) -> None:
    """The only group has a cache for each part, and only one part is of another kind."""
    made = []
    for shapes, kind in ((((3, 96), (4, 8, 8)), np.float16), ((conv, ssm), dtype)):
        spec = states("GDN_ATTN", *shapes)
        spec.dtypes = (np.dtype(np.float16), np.dtype(kind))
        group = LayerGroup(("model.layers.0.mixer",), 64, states=StateForm.of(spec, 1))
        model = Model("m", 4, Place(), 0, 4, (group,), produces=False, consumes=True)
        made.append(ConnectorWorker(bytes(16), model, ConnectorOptions.of({})))
        page = np.zeros((4, 1, 1, 2048), np.int8).view(HostArray)
        made[-1].register({"model.layers.0.mixer": page})
    mine, theirs = (worker.exchange._compatibility for worker in made)
    here, there = mine.difference(theirs.fields).split(" here and ")
    assert differs[0] in here + " here"
    assert differs[1] in there
    for worker in made:
        worker.close()


def test_a_replicated_state_is_whole_on_each_rank() -> None:
    form = StateForm.of(states("LINEAR", (4, 8, 8), replicated=True), 2)
    pages = [np.zeros((3, 2 * 4 * 8 * 8), np.uint8)]
    ranks = [form.caches(pages, rank, Shard(num_heads=4))["state"].desc for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0].shape == (3, 4, 8, 8)


@pytest.mark.parametrize("short", [0, 1])
def test_a_page_that_is_too_small_for_its_states_is_refused(short: int) -> None:
    form = StateForm.of(states("LINEAR", (4, 8, 8)), 1)
    pages = [np.zeros((3, 512 - 2 * (short == number)), np.uint8) for number in range(2)]
    with refused("LLM_PARAM_INVALID", "a page has 510 bytes; its states have 512"):
        form.caches(pages, 0, Shard(num_heads=4))


@pytest.mark.parametrize(
    ("spec", "groups", "message"),
    [
        (states("MAMBA2", (3, 28), (4, 4, 6)), None, "does not say its number of groups"),
        (states("MAMBA2", (3, 28), (4, 4, 6)), 8, "have 28 columns"),
        (states("MAMBA2", (3, 28), (4, 4, 6), (4, 8, 4)), 1, "are not supported"),
        (states("CUSTOM", (3, 28), (4, 4, 6)), None, "CUSTOM .* are not supported"),
    ],
)
def test_states_that_disagree_with_the_description_are_refused(
    spec: Any, groups: int | None, message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        StateForm.of(spec, 2, groups=groups)


@pytest.mark.parametrize(
    ("tokens", "blocks", "state"),
    [(64, [7, 0, 0], [7]), (65, [0, 9, 3], [9]), (65, [7], []), (65, [7, 0], [])],
)
def test_the_state_after_the_last_token_is_in_its_block(
    tokens: int, blocks: list[int], state: list[int]
) -> None:
    """With prefix caching vLLM has a block of states for each 64 tokens, mostly null ones."""
    consumer = ConnectorScheduler("decode", states=(64, 0))
    assert consumer._held((blocks, [1, 2]), tokens) == (Table(tuple(state)), Table((1, 2)))


def scheduled(prompt: list[int]) -> tuple[int, Step]:
    """Return the tokens and the step of a prompt of a hybrid model that is finished and fetched."""
    producer, consumer = (ConnectorScheduler(name, states=(64, 0)) for name in ("p", "d"))
    producer.set_workers({(0, 0): WorkerAddress(11, "a:1")})
    first = request(
        "p1",
        kv_transfer_params={"do_remote_decode": True},
        prompt_token_ids=[*prompt],
        num_computed_tokens=max(1, len(prompt) - 1),
    )
    producer.arrived(first)
    held, params = producer.finished(first, ([3, 5], [8]))
    assert held
    second = request("d1", kv_transfer_params=params, prompt_token_ids=[*prompt])
    consumer.arrived(second)
    missing = consumer.missing_tokens(second, 0)
    consumer.allocated(second, ([1, 2], [4]), missing)
    return missing, consumer.take_step()


def test_the_last_token_of_a_prompt_is_left_to_the_consumer() -> None:
    """The consumer computes the last token again, so the state must not include it."""
    missing, step = scheduled(PROMPT)
    assert missing == len(PROMPT) - 1 == 69
    assert step.fetched["d1"][1] == Target((Table((2,)), Table((4,))), 0)
    missing, step = scheduled(PROMPT[:2])
    assert (missing, [*step.fetched], [*step.dropped]) == (1, ["d1"], [])
    missing, step = scheduled(PROMPT[:1])  # nothing is left to fetch: the producer may free it
    assert (missing, [*step.fetched], [*step.dropped]) == (0, [], ["d1"])


def test_a_request_without_its_state_is_not_offered() -> None:
    producer = ConnectorScheduler("p", states=(64, 0))
    given = request(kv_transfer_params={"do_remote_decode": True})
    assert producer.finished(given, ([3, 0], [8])) == (False, None)
    assert producer.take_step().offers == []
