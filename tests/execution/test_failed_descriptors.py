"""Names of failed descriptors: layer, keys or values, head and tokens in the model."""

from __future__ import annotations

import re

import numpy as np
import pytest

import kvplan
from kvplan import (
    CacheDesc,
    DataType,
    LLMException,
    LLMStatusCode,
    Plan,
    Rows,
    Shard,
    Transfer,
    Transfers,
)
from kvplan.execution.task import TransferTask
from tests.support.plans import joined
from tests.support.refusals import refused
from tests.support.wrappers import fail_at

FP16 = DataType.DT_FLOAT16


def cache(axes: str, tensors: int, layers: range, heads: range, **lengths: int) -> CacheDesc:
    lengths = {"layer": len(layers), "kv": 2, "head": len(heads), "dim": 4} | lengths
    shape = tuple(lengths[word] for word in axes.split())
    return CacheDesc(tensors, shape, FP16, kv_tensor_format=axes, shard=Shard(layers, heads, 6, 8))


def fails_at(plan: Plan, descriptor: int) -> tuple[LLMException, TransferTask]:

    def zeros(name: str) -> list[np.ndarray]:
        sides = [getattr(part, name) for part in plan.parts]
        return [
            np.zeros(side.tensor_nbytes, np.uint8)
            for side in sides
            for _ in range(side.num_tensors)
        ]

    with Transfers(wrap=lambda backend: fail_at(backend, descriptor)) as transfers:
        task = transfers.submit(plan, zeros("src"), zeros("dst"))
        with pytest.raises(LLMException) as caught:
            task.wait()
    return caught.value, task


# From two layers of the last stage (heads 2 and 3, 8 tokens per block) to heads 0 to 3 with 16
# tokens per block. A block of 8 tokens is 2 heads of 8 runs; 20 tokens are 16 + 16 + 8 runs of K,
# then as many of V.
STAGE = cache("block token head dim", 4, range(4, 6), range(2, 4), block=9, token=8)
ALL = cache("block head token dim", 12, range(6), range(4), block=5, token=16)
REPEATED = kvplan.plan(
    Transfer(Rows(STAGE, [5, 0, 7]), Rows(ALL, [3, 1]), num_tokens=20), local="dst"
)


@pytest.mark.parametrize(
    ("descriptor", "name"),
    [
        (0, "layer 0>4 (4 of the model) tensor 0>8 block 5>3 K head 2 token 0"),
        (13, "layer 0>4 (4 of the model) tensor 0>8 block 5>3 K head 3 token 5"),
        (16, "layer 0>4 (4 of the model) tensor 0>8 block 0>3 K head 2 token 8"),
        (40 + 32 + 7, "layer 0>4 (4 of the model) tensor 1>9 block 7>1 V head 3 token 19"),
        (80 + 24, "layer 1>5 (5 of the model) tensor 2>10 block 0>3 K head 3 token 8"),
    ],
)
def test_a_run_of_a_repeated_segment_is_named(descriptor: int, name: str) -> None:
    error, task = fails_at(REPEATED, descriptor)
    assert str(error.origin) == name
    assert f"descriptor {descriptor} ({name})" in str(error)
    assert error.unconfirmed == ((descriptor, 160),)
    first, second, *_ = task.explain().splitlines()
    done = [min(descriptor, 80), max(descriptor - 80, 0)]
    assert first == f"layer 0 (4 of the model)  {done[0]}/80 desc  640 B"
    assert second == f"layer 1 (5 of the model)  {done[1]}/80 desc  640 B"


# From one tensor with the keys and values of three layers, to two tensors per layer. Sources are
# sorted: 2, 5.
BLOCKS = cache("block layer kv token head dim", 1, range(3, 6), range(4), block=6, token=8)
APART = cache("block token head dim", 6, range(3, 6), range(4), block=6, token=8)
SPLIT = kvplan.plan(Transfer(Rows(BLOCKS, [5, 2]), Rows(APART, [1, 4])), local="dst")


@pytest.mark.parametrize(
    ("plan", "descriptor", "name"),
    [
        (SPLIT, 3, "layer 0>0 (3 of the model) tensor 0>1 block 5>1 V heads 0..3 tokens 0..7"),
        (SPLIT, 8, "layer 2>2 (5 of the model) tensor 0>4 block 2>4 K heads 0..3 tokens 8..15"),
        (
            kvplan.plan(Transfer(Rows(APART, [5, 2]), Rows(BLOCKS, [1, 4])), local="dst"),
            6,
            "layer 1>1 (4 of the model) tensor 3>0 block 2>4 V heads 0..3 tokens 8..15",
        ),
    ],
)
def test_a_view_of_a_tensor_is_named(plan: Plan, descriptor: int, name: str) -> None:
    error, _ = fails_at(plan, descriptor)
    assert str(error.origin) == name
    assert f"descriptor {descriptor} ({name})" in str(error)


def test_layers_that_move_in_one_piece_are_named() -> None:
    error, task = fails_at(
        kvplan.plan(Transfer(Rows(BLOCKS, [5, 2]), Rows(BLOCKS, [1, 4])), local="dst"), 1
    )
    name = "layers 0..2>0..2 (3..5 of the model) tensor 0>0 block 5>1 K+V heads 0..3 tokens 0..7"
    assert str(error.origin) == name
    assert task.explain().splitlines()[0] == "layers 0..2 (3..5 of the model)  1/2 desc  3 KiB"


WHOLE = kvplan.plan(Transfer(Rows(BLOCKS, [5, 2]), Rows(BLOCKS, [1, 4])), local="dst")


@pytest.mark.parametrize("descriptor", range(14))
def test_each_group_counts_its_own_descriptors(descriptor: int) -> None:
    error, task = fails_at(joined({"whole": WHOLE, "split": SPLIT}), descriptor)
    assert error.unconfirmed == ((descriptor, 14),)
    done = [min(2, descriptor), *(min(4, max(0, descriptor - number)) for number in (2, 6, 10))]
    assert re.findall(r"^part .*| (\d+/\d+) desc", task.explain(), re.MULTILINE) == [
        "",
        f"{done[0]}/2",
        "",
        *(f"{item}/4" for item in done[1:]),
    ]


def test_a_layer_outside_of_the_task_is_refused_with_both_numbers() -> None:
    plan = kvplan.plan(Transfer(Rows(STAGE, [1]), Rows(STAGE, [2])), local="dst")
    tensors = [np.zeros(STAGE.tensor_nbytes, np.uint8) for _ in range(8)]
    with Transfers() as transfers:
        task = transfers.layered(plan, tensors[:4], tensors[4:])
        with refused(LLMStatusCode.LLM_PARAM_INVALID, r"\[0, 2\) \(4\.\.5 of the model\)"):
            task.ready(4)
        for layer in task.layers:
            task.ready(layer)
        task.wait()
        assert task.explain().splitlines()[1] == "layer 1 (5 of the model)  2/2 desc  256 B"
