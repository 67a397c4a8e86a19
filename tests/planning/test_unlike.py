"""Pulls between caches of one model that lie differently: every byte is where its meaning says."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan import CacheDesc, DataType, Plan, execute, plan_pull_blocks, reference
from tests.planning.unlike import caches, expected, models
from tests.support.refusals import refused


@st.composite
def transfers(draw):
    model = draw(models)
    src, dst = draw(caches(model)), draw(caches(model))
    assume(set(src.layers) & set(dst.layers) and set(src.heads) & set(dst.heads))
    src_blocks = draw(
        st.lists(st.integers(0, src.rows - 1), min_size=1, max_size=src.rows, unique=True)
    )
    dst_blocks = draw(
        st.lists(st.integers(0, dst.rows - 1), min_size=1, max_size=dst.rows, unique=True)
    )
    src_has, dst_has = len(src_blocks) * src.tokens, len(dst_blocks) * dst.tokens
    src_token = draw(st.integers(0, src_has - 1))
    dst_token = draw(st.integers(0, dst_has - 1))
    num_tokens = draw(st.integers(1, min(src_has - src_token, dst_has - dst_token)))
    return src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens


@given(transfers(), st.booleans())
def test_every_element_arrives_where_its_axes_say(transfer, coalesce):
    src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens = transfer
    source, target = src.tensors(1), dst.tensors(2)
    plan = plan_pull_blocks(
        src.desc,
        dst.desc,
        src_blocks,
        dst_blocks,
        num_tokens=num_tokens,
        src_token=src_token,
        dst_token=dst_token,
        coalesce=coalesce,
    )
    wanted = expected(
        src, dst, source, target, src_blocks, dst_blocks, src_token, dst_token, num_tokens
    )
    by_reference = [it.copy() for it in target]
    reference.execute(plan, source, by_reference)
    by_native = [it.copy() for it in target]
    execute(plan, source, by_native)
    for a, b, c in zip(wanted, by_reference, by_native, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    assert plan.nbytes == plan.num_tensor_pairs * plan.segments.expanded().nbytes.sum()


def test_another_data_type_is_refused_of_tokens_too():
    """Which tokens are moved says nothing of what their elements are."""
    half, bf16, fp8 = (
        CacheDesc(2, (4, 4, 2, 8), DataType[f"DT_{it}"], kv_tensor_format="block token head dim")
        for it in ("FLOAT16", "BF16", "FLOAT8_E5M2")
    )
    for wrong in (bf16, fp8):
        with refused("LLM_PARAM_INVALID", "differ in data type: src is DT_FLOAT16"):
            plan_pull_blocks(half, wrong, [0], [1], num_tokens=3)
    again = plan_pull_blocks(half, bf16, [0], [1], num_tokens=3, reinterpret=True)
    assert again.nbytes == 2 * 3 * 2 * 8 * 2
    assert "REINTERPRETED" in again.explain()
    assert Plan.from_dict(again.to_dict()) == again
    with refused("LLM_PARAM_INVALID", "differ in data type: src is DT_FLOAT16"):
        plan_pull_blocks(half, fp8, [0], [1], num_tokens=3, reinterpret=True)
