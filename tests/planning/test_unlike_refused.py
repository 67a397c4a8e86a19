"""Pulls between unlike caches that only seem to match are refused."""

import kvplan
from kvplan import CacheDesc, DataType, LLMStatusCode, Rows, Transfer
from kvplan.layout import Shard
from tests.support.refusals import refused


def cache(shape, axes, shard=None, tensors=2):
    return CacheDesc(tensors, shape, DataType.DT_FLOAT16, kv_tensor_format=axes, shard=shard)


def test_the_same_layers_of_a_deeper_model_are_refused():
    src, dst = (cache((8, 4, 2, 8), "NHD", Shard(range(1), num_layers=total)) for total in (8, 12))
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "layer 0 of 8.*layer 0 of 12"):
        kvplan.plan(Transfer(Rows(src, [0]), Rows(dst, [1])), local="dst")


def test_a_slot_that_cannot_fill_blocks_of_another_layout_is_refused():
    src = cache((3, 16, 2, 8), "slot token head dim")
    dst = cache((9, 2, 4, 8), "HND")
    assert (
        kvplan.plan(Transfer(Rows(src), Rows(dst, [0, 1, 2, 3])), local="dst").nbytes
        == 2 * 16 * 2 * 8 * 2
    )
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "16 tokens fills at most 4"):
        kvplan.plan(Transfer(Rows(src), Rows(dst, [0, 1, 2, 3, 4])), local="dst")
