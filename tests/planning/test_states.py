"""States of Mamba and linear attention, described for each rank of tensor parallelism."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

import kvplan
from kvplan import DataType, KvCacheExtParam, LlmDataDist, LlmRole, Rows, Shard, Transfer
from kvplan.tensors.states import Columns, convolution_caches, rank_heads, recurrent_cache
from tests.support.refusals import refused


class Known(NamedTuple):
    """A model, and the shapes of its states in vLLM 0.33 by the number of ranks.

    `MambaStateShapeCalculator` gives them without blocks: here (3, columns) for the convolution,
    and the shape of the recurrent state.
    """

    columns: dict[str, Columns]
    heads: int
    layout: str
    shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]


def mamba2(groups: int) -> dict[str, Columns]:
    return {"x": Columns(128, 64), "B": Columns(groups, 128), "C": Columns(groups, 128)}


KNOWN = {
    "Codestral Mamba": Known(
        mamba2(8),
        128,
        "block head dim state",
        {
            1: ((3, 10240), (128, 64, 128)),
            2: ((3, 5120), (64, 64, 128)),
            4: ((3, 2560), (32, 64, 128)),
            8: ((3, 1280), (16, 64, 128)),
        },
    ),
    "Bamba": Known(
        mamba2(1),
        128,
        "block head dim state",
        {
            1: ((3, 8448), (128, 64, 128)),
            2: ((3, 4352), (64, 64, 128)),
            4: ((3, 2304), (32, 64, 128)),
            8: ((3, 1280), (16, 64, 128)),
        },
    ),
    "Qwen3-Next": Known(
        {"q": Columns(16, 128), "k": Columns(16, 128), "v": Columns(32, 128)},
        32,
        "block head dim state",
        {
            1: ((3, 8192), (32, 128, 128)),
            2: ((3, 4096), (16, 128, 128)),
            4: ((3, 2048), (8, 128, 128)),
            8: ((3, 1024), (4, 128, 128)),
        },
    ),
    "Falcon Mamba": Known(
        {"x": Columns(8192, 1)},
        8192,
        "block head state",
        {
            1: ((3, 8192), (8192, 16)),
            2: ((3, 4096), (4096, 16)),
            4: ((3, 2048), (2048, 16)),
            8: ((3, 1024), (1024, 16)),
        },
    ),
    "Kimi Linear": Known(
        {"q": Columns(32, 128), "k": Columns(32, 128), "v": Columns(32, 128)},
        32,
        "block head dim state",
        {
            1: ((3, 12288), (32, 128, 128)),
            2: ((3, 6144), (16, 128, 128)),
            4: ((3, 3072), (8, 128, 128)),
            8: ((3, 1536), (4, 128, 128)),
        },
    ),
}


def zeros(*shape: int, dtype: Any = np.uint16) -> Any:
    """Return a tensor of three blocks."""
    return np.zeros((3, *shape), dtype)


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_each_rank_pulls_its_state_from_any_number_of_ranks(name: str, columns_first: bool) -> None:
    model = KNOWN[name]
    sides = {}
    for ranks, (conv, ssm) in model.shapes.items():
        shape = conv[::-1] if columns_first else conv
        for rank in range(ranks):
            shard = Shard(num_layers=1)
            caches = convolution_caches(
                [zeros(*shape)],
                model.columns,
                rank,
                ranks,
                columns_first=columns_first,
                shard=shard,
            )
            caches["ssm"] = recurrent_cache(
                [zeros(*ssm)], model.heads, rank, ranks, layout=model.layout, shard=shard
            )
            sides[ranks, rank] = {part: cache.desc for part, cache in caches.items()}
    for theirs, mine in ((2, 1), (1, 2), (4, 2), (8, 1)):
        sources = [sides[theirs, rank] for rank in range(theirs)]
        for rank in range(mine):
            near = [
                index for index in range(theirs) if index * mine // theirs == rank or theirs < mine
            ]
            plan = kvplan.plan(
                {
                    part: Transfer(
                        [Rows(sources[item][part], [1]) for item in near], Rows(desc, [2])
                    )
                    for part, desc in sides[mine, rank].items()
                },
                local="dst",
            )
            conv, ssm = model.shapes[mine]
            assert plan.nbytes == 2 * int(np.prod(conv) + np.prod(ssm))


@pytest.mark.parametrize("columns_first", [False, True])
def test_each_layer_has_all_of_its_positions(columns_first: bool) -> None:
    """The second of two layers moves to the first place of three."""
    columns, shape = {"x": Columns(4, 2), "B": Columns(2, 1)}, (3, 10)
    shape = shape[::-1] if columns_first else shape
    theirs = [np.arange(90, dtype=np.uint16).reshape(3, *shape) + 100 * layer for layer in (1, 2)]
    mine = [zeros(*shape) for _ in range(3)]
    sources, targets = (
        convolution_caches(states, columns, 0, 1, columns_first=columns_first)
        for states in (theirs, mine)
    )
    layers = KvCacheExtParam(range(1, 2), range(1), 1 if columns_first else 3)
    with LlmDataDist(1, LlmRole.MIX) as engine:
        engine.initialize()
        for part, source in sources.items():
            read, written = (
                engine.register_blocks_cache(*cache) for cache in (source, targets[part])
            )
            engine.run(Transfer(Rows(read, [1]), Rows(written, [2]), layers=layers))
    np.testing.assert_array_equal(mine[0][2], theirs[1][1])
    assert not any(state.any() for state in (mine[0][:2], *mine[1:]))


def test_elements_of_two_bytes_may_be_bfloat16() -> None:
    """NumPy has no such type, so the tensors do not name theirs."""
    conv, ssm = np.zeros((2, 3, 16), np.uint16), np.zeros((2, 4, 4, 8), np.uint16)
    bf16 = DataType.DT_BF16
    (x,) = convolution_caches([conv], {"x": Columns(4, 4)}, 0, 1, data_type=bf16).values()
    state = recurrent_cache([ssm], 4, 0, 1, data_type=bf16)
    assert [cache.desc.data_type for cache in (x, state)] == [bf16] * 2


def test_the_heads_of_a_rank() -> None:
    assert [rank_heads(8, rank, 4) for rank in range(4)] == [
        range(2), range(2, 4), range(4, 6), range(6, 8)
    ]  # fmt: skip
    assert [rank_heads(2, rank, 4).start for rank in range(4)] == [0, 0, 1, 1]
    assert rank_heads(1, 0, 1) == range(1)
    for wrong, reason in (
        ((8, 4, 4), r"rank=4 is out of range \[0, ranks=4\)"),
        ((8, 0, 0), r"rank=0 is out of range \[0, ranks=0\)"),
        ((8, 0, 3), "num_heads=8 and ranks=3: one must divide the other"),
        ((0, 0, 1), "num_heads=0 and ranks=1: one must divide the other"),
    ):
        with refused("LLM_PARAM_INVALID", reason):
            rank_heads(*wrong)


def test_a_state_that_ranks_share_counts_the_heads_of_the_model() -> None:
    state = recurrent_cache([np.zeros((2, 1, 4, 8), np.float16)], 2, 3, 4).desc
    assert state.shard is not None
    assert (state.shard.heads, state.shard.num_heads) == (range(1, 2), 2)


def test_states_of_another_shape_are_refused() -> None:
    columns = {"x": Columns(8, 4), "B": Columns(1, 6)}
    with refused(
        "LLM_PARAM_INVALID",
        r"tensors\[1\] has shape \(3, 3, 37\); rank 1 of 2 has 22 columns \(x 4 x 4, B 1 x 6\) in "
        "dimension 2 of 3",
    ):
        convolution_caches([zeros(3, 22), zeros(3, 37)], columns, 1, 2)
    with refused("LLM_PARAM_INVALID", r"has shape \(3, 3, 22\); .* in dimension 1 of 3"):
        convolution_caches([zeros(3, 22)], columns, 1, 2, columns_first=True)
    with refused("LLM_PARAM_INVALID", r"has shape \(3, 22\)"):
        convolution_caches([zeros(22)], columns, 1, 2)
    for wrong, name in (([3], "tensors[0]=3"), ([zeros(3, 22)], "columns['x']=(4, 4)")):
        of = cast(Any, columns if name.startswith("tensors") else {"x": (4, 4)})
        with pytest.raises(TypeError, match=re.escape(name)):
            convolution_caches(cast(Any, wrong), of, 1, 2)
    three, four = (
        convolution_caches([zeros(22, number)], columns, 1, 2, columns_first=True)["x"].desc
        for number in (3, 4)
    )
    with refused("LLM_PARAM_INVALID", "src and dst differ in axis state"):
        kvplan.plan(Transfer(Rows(three, [0]), Rows(four, [0])), local="dst")


@pytest.mark.parametrize("name", ["src.first_token", "dst.first_token", "num_tokens"])
def test_a_state_has_no_tokens_to_count(name: str) -> None:
    state = recurrent_cache([np.zeros((4, 4, 4, 8), np.float16)], 4, 0, 1).desc
    side, _, field = name.rpartition(".")
    rows = {end: Rows(state, [1], **{field: 1} if side == end else {}) for end in ("src", "dst")}
    number = None if side else 1
    with refused("LLM_PARAM_INVALID", f"num_tokens={number} and token offsets need an axis token"):
        kvplan.plan(Transfer(rows["src"], rows["dst"], num_tokens=number), local="dst")
