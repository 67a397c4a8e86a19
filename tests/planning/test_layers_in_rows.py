"""Layers by their number in the model: where rows hold several, or nobody says how many."""

import numpy as np
import pytest

from kvplan import (
    CacheDesc,
    DataType,
    KvCacheExtParam,
    plan_gather,
    plan_pull_blocks,
    plan_pull_cache,
    reference,
)
from kvplan.layout import Shard
from tests.support.refusals import refused

NHD = "block token head dim"


def grouped(num_tensors, inside, layers, num_layers=8):
    """Blocks of `inside` layers each, in so many tensors."""
    return CacheDesc(
        num_tensors,
        (3, inside, 2),
        DataType.DT_INT8,
        kv_tensor_format="block layer token",
        shard=None if layers is None else Shard(layers, None, num_layers),
    )


def numbered(desc, layers):
    """Tensors whose elements say which layer of the model they are."""
    inside = desc.shape[1]
    return [
        np.full(desc.shape, np.array(layers[i * inside : (i + 1) * inside])[:, None], np.uint8)
        for i in range(desc.num_tensors)
    ]


@pytest.mark.parametrize("num_tokens", [None, 2])
@pytest.mark.parametrize(
    ("num_tensors", "inside", "src_layers", "dst_layers"),
    [
        (3, 2, range(6), range(1, 7)),
        (3, 2, range(6), range(2, 8)),
        (1, 4, range(4), range(2, 6)),
        (2, 4, range(8), range(8)),
        (4, 1, range(4), range(2, 6)),
    ],
)
def test_whole_rows_of_several_layers_go_by_the_model_s_numbers(
    num_tensors, inside, src_layers, dst_layers, num_tokens
):
    src, dst = (grouped(num_tensors, inside, it) for it in (src_layers, dst_layers))
    plan = plan_pull_blocks(src, dst, [2], [1], num_tokens=num_tokens)
    source = numbered(src, src_layers)
    target = [np.full(dst.shape, 99, np.uint8) for _ in range(num_tensors)]
    reference.execute(plan, source, target)
    found = np.concatenate([it[1, :, 0] for it in target]).tolist()
    assert found == [it if it in src_layers else 99 for it in dst_layers]


def test_a_shard_of_all_layers_is_the_cache_that_has_no_shard():
    for src, dst in (
        (grouped(1, 8, range(8)), grouped(1, 8, None)),
        (grouped(2, 4, None), grouped(2, 4, range(8))),
    ):
        assert plan_pull_blocks(src, dst, [0], [1]).nbytes == 8 * 2


def test_models_of_other_numbers_of_layers_are_not_alike_tensor_by_tensor():
    with refused("LLM_PARAM_INVALID", "how many the model has"):
        plan_pull_blocks(grouped(2, 2, range(4), 4), grouped(4, 2, None), [0], [1])


def alone(num_tensors, shard=None, layout=NHD):
    shape = (4, 4, 1, 8) if "head" in layout else (4, 4, 8)
    return CacheDesc(num_tensors, shape, DataType.DT_BF16, kv_tensor_format=layout, shard=shard)


def test_a_gather_into_one_tensor_moves_it():
    """Keys and values have two tensors a layer by default; one tensor is a layer all the same."""
    (plan,) = plan_gather([alone(1)], alone(1), [[0]], [1])
    assert plan is not None
    assert plan.nbytes == alone(1).stride


@pytest.mark.parametrize("shard", [None, Shard(range(3), None, 3)])
def test_a_gather_forgets_no_tensor(shard):
    desc = alone(3, shard)
    (plan,) = plan_gather([desc], desc, [[0]], [1])
    assert plan is not None
    assert plan.nbytes == 3 * desc.stride


@pytest.mark.parametrize("layers", [range(4), range(6)])
def test_a_gather_takes_no_layers_of_another_model(layers):
    source = alone(2 * len(layers), Shard(layers, None, 8))
    with refused("LLM_PARAM_INVALID", "differ in how many layers the model has, 8 and 4"):
        plan_gather([source], alone(8), [[0]], [1])


def test_latents_are_not_the_keys_and_values_of_one_head():
    """As many tensors, of rows of one length: but one a layer, and two."""
    latents = alone(4, layout="block token dim")
    for src, dst in ((latents, alone(4)), (alone(4), latents)):
        with refused("LLM_PARAM_INVALID", "two tensors a layer, latents one"):
            plan_pull_blocks(src, dst, [0], [1])
        said = KvCacheExtParam(tensor_num_per_layer=1)
        assert len(plan_pull_blocks(src, dst, [0], [1], ext_param=said).layers) == 4


@pytest.mark.parametrize(
    ("tokens", "moved"), [({"src_token": 5}, 15), ({"dst_token": 5}, 11), ({"src_token": 7}, 13)]
)
def test_of_a_slot_without_a_number_of_tokens_the_rest_is_moved(tokens, moved):
    slots = CacheDesc(1, (2, 20, 8), DataType.DT_INT8, kv_tensor_format="slot token dim")
    blocks = CacheDesc(1, (8, 4, 8), DataType.DT_INT8, kv_tensor_format="block token dim")
    assert plan_pull_blocks(slots, blocks, None, [6, 1, 3, 4], **tokens).nbytes == moved * 8
    with refused("LLM_PARAM_INVALID", r"what the dst rows hold from dst_token=16 on"):
        plan_pull_blocks(slots, blocks, None, [6, 1, 3, 4], dst_token=16)


def test_states_that_lie_differently_have_no_tokens_to_count():
    src, dst = (
        CacheDesc(1, shape, DataType.DT_INT8, kv_tensor_format=axes)
        for shape, axes in (((4, 2, 6), "slot kv state"), ((4, 6, 2), "slot state kv"))
    )
    plan = plan_pull_cache(src, dst, src_batch_index=1, dst_batch_index=2)
    source, target = (
        [np.arange(48, dtype=np.uint8).reshape(4, 2, 6)],
        [np.zeros((4, 6, 2), np.uint8)],
    )
    reference.execute(plan, source, target)
    assert target[0][2].tolist() == source[0][1].T.tolist()
