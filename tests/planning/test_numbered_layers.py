"""Shards of layers that do not follow each other, as groups of hybrid models have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvplan import CacheDesc, DataType, KvCacheExtParam, Plan, Shard, plan_gather, plan_pull_blocks
from kvplan.planning import reference
from tests.support.refusals import refused


def cache(layers: Sequence[int] | None, heads: Sequence[int] = range(2)) -> CacheDesc:
    """Keys and values of a layer in one tensor each."""
    count = 13 if layers is None else len(layers)
    shard = Shard(layers, heads, num_layers=13, num_heads=2)
    shape = (2, 4, 8, len(heads), 4)
    return CacheDesc(
        count, shape, DataType.DT_INT32, kv_tensor_format="kv block token head dim", shard=shard
    )


WINDOW = cache([0, 6, 12])


def test_numbers_that_follow_each_other_are_a_range() -> None:
    assert Shard([2, 3, 4], [0, 1], 8, 4) == Shard(range(2, 5), range(2), 8, 4)
    assert Shard(np.array([2, 3]), num_layers=np.int64(8)) == Shard(range(2, 4), num_layers=8)
    assert str(Shard([0, 6, 12], [1], 24, 4)) == "layers 0, 6, 12 of 24, head 1 of 4"
    assert str(Shard(range(0, 13, 6), num_layers=13)) == "layers 0, 6, 12 of 13"


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([0, 6, 6], "must ascend, each number once"),
        ([6, 0], "must ascend"),
        ([0, 13], r"must be one or more of \[0, 13\)"),
        ([-1, 4], r"must be one or more of \[0, 13\)"),
        ([], r"must be one or more of \[0, 13\)"),
    ],
)
def test_numbers_that_cannot_be_are_refused(layers: list[int], text: str) -> None:
    with refused("LLM_PARAM_INVALID", text):
        Shard(layers, num_layers=13)


def test_wrong_types_and_heads_apart_are_refused() -> None:
    for wrong in ("01", 5, [0, 1.5], [True, 2]):
        with pytest.raises(TypeError, match="layers"):
            Shard(wrong, num_layers=13)  # type: ignore[arg-type]
    with refused("LLM_PARAM_INVALID", r"heads=\[0, 2\] must follow each other"):
        Shard(heads=[0, 2], num_heads=4)


def filled(desc: CacheDesc) -> list[np.ndarray]:
    """Each element has the number of its layer in the model, and of its head."""
    shard = desc.shard
    assert shard is not None
    assert shard.layers is not None
    assert shard.heads is not None
    heads = 1000 * np.array(shard.heads, np.int32)[:, None]
    return [np.zeros(desc.shape, np.int32) + heads + layer for layer in shard.layers]


def assert_moves(plan: Plan, src: CacheDesc, dst: CacheDesc, layers: set[int]) -> None:
    target = [np.full(dst.shape, -1, np.int32) for _ in range(dst.num_tensors)]
    reference.execute(plan, filled(src), target)
    assert dst.shard is not None
    assert dst.shard.layers is not None
    for layer, found, wanted in zip(dst.shard.layers, target, filled(dst), strict=True):
        assert (found[:, 2] == (wanted[:, 2] if layer in layers else -1)).all()
    assert Plan.from_dict(plan.to_dict()) == plan


def test_the_same_numbers_are_moved_whatever_their_places() -> None:
    for src, dst, layers in (
        (WINDOW, WINDOW, {0, 6, 12}),
        (WINDOW, cache([6, 12]), {6, 12}),
        (cache([0, 6]), WINDOW, {0, 6}),
        (cache([2, 6, 12]), cache([0, 6, 12]), {6, 12}),
        (cache(range(5, 8)), WINDOW, {6}),
    ):
        assert_moves(plan_pull_blocks(src, dst, [1], [2]), src, dst, layers)


def test_layer_ranges_name_the_same_numbers() -> None:
    whole = cache(None)
    one = KvCacheExtParam(range(6, 7), range(1, 2))
    assert_moves(plan_pull_blocks(whole, WINDOW, [1], [2], ext_param=one), whole, WINDOW, {6})
    with refused("LLM_PARAM_INVALID", "layers 7 of the model, and .* is 6; they must be the same"):
        plan_pull_blocks(
            whole, WINDOW, [1], [2], ext_param=KvCacheExtParam(range(7, 8), range(1, 2))
        )


def test_numbers_that_are_apart_at_one_end_are_refused() -> None:
    text = "layers 0, 6, 12 of the model in common, which do not follow each other in src, 0..12"
    with refused("LLM_PARAM_INVALID", text):
        plan_pull_blocks(cache(None), WINDOW, [1], [2])
    with refused("LLM_PARAM_INVALID", "layers 0, 6, 12 of the model and dst 1, 3: none in common"):
        plan_pull_blocks(WINDOW, cache([1, 3]), [1], [2])


def test_texts_name_the_numbers() -> None:
    plan = plan_pull_blocks(WINDOW, cache([6, 12]), [1], [2])
    assert "(6, 12 of the model)" in plan.explain()
    assert plan.origin(plan.num_descriptors - 1).model_layer == 12


def test_a_gather_takes_each_number_from_its_stage() -> None:
    stages = [cache([0, 6]), cache([12])]
    first, second = plan_gather(stages, WINDOW, [[1], [1]], [2])
    assert first is not None
    assert second is not None
    assert first.nbytes == 2 * second.nbytes
    assert_moves(second, stages[1], WINDOW, {12})
    with refused("LLM_PARAM_INVALID", "no source has layers 12..12, heads 0..1 of the model"):
        plan_gather(stages[:1], WINDOW, [[1]], [2])
    with refused("LLM_PARAM_INVALID", "dst has layers 0, 6, 12 of the model, between which others"):
        plan_gather([cache(None)], WINDOW, [[1]], [2])
