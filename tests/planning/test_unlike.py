"""Transfers between caches of one model with different layouts: every element keeps its meaning.

`make explore` runs these tests with 20,000 examples each.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, Plan, Rows, Transfer, execute, reference
from tests.planning.transfers import LOCALS
from tests.planning.unlike import caches, expected, models, of_one_request
from tests.support.refusals import refused


def tables(cache):
    rows = st.integers(0, cache.rows - 1)
    return st.lists(rows, min_size=1, max_size=cache.rows, unique=True)


@st.composite
def sides(draw, src_row="block", dst_row="block"):
    model = draw(models)
    src, dst = draw(caches(model, src_row)), draw(caches(model, dst_row))
    assume(set(src.layers) & set(dst.layers) and set(src.heads) & set(dst.heads))
    return src, dst


@st.composite
def sides_of_whole_tokens(draw):
    """Draw sides on which a token is one run, in rows of different sizes."""
    src = draw(caches(draw(models)))
    axes = ("block", "token", *(axis for axis in src.axes if axis not in ("block", "token")))
    return tuple(
        replace(src, axes=axes, rows=draw(st.integers(2, 9)), tokens=draw(st.integers(1, 6)))
        for _ in range(2)
    )


@st.composite
def transfers(draw, of=sides):
    src, dst = draw(of())
    src_blocks, dst_blocks = draw(tables(src)), draw(tables(dst))
    src_has, dst_has = len(src_blocks) * src.tokens, len(dst_blocks) * dst.tokens
    src_token = draw(st.integers(0, src_has - 1))
    dst_token = draw(st.integers(0, dst_has - 1))
    src_blocks, dst_blocks, last = of_one_request(
        src, dst, src_blocks, dst_blocks, src_token, dst_token
    )
    num_tokens = draw(st.integers(1, last))
    return src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens


def planned(transfer, coalesce, local="dst", *, by_layer=False):
    """Plan a transfer of blocks that was drawn."""
    src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens = transfer
    return kvplan.plan(
        Transfer(
            Rows(src.desc, src_blocks, first_token=src_token),
            Rows(dst.desc, dst_blocks, first_token=dst_token),
            num_tokens=num_tokens,
            coalesce=coalesce,
        ),
        local=local,
        by_layer=by_layer,
    )


def assert_moves(plan, src, dst, *arguments):
    """Check that NumPy and native code leave the bytes of the oracle in the destination."""
    source, target = src.tensors(1), dst.tensors(2)
    wanted = expected(src, dst, source, target, *arguments)
    for run in (reference.execute, execute):
        found = [item.copy() for item in target]
        run(plan, source, found)
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(a, b)
    assert plan.nbytes == plan.num_tensor_pairs * plan.part.segments.expanded().nbytes.sum()


def test_another_data_type_is_refused_for_tokens_too():
    """A number of tokens does not make their elements compatible."""
    half, bf16, fp8 = (
        CacheDesc(2, (4, 4, 2, 8), DataType[f"DT_{name}"], kv_tensor_format="block token head dim")
        for name in ("FLOAT16", "BF16", "FLOAT8_E5M2")
    )
    for wrong in (bf16, fp8):
        with refused("LLM_PARAM_INVALID", "differ in data type: src is DT_FLOAT16"):
            kvplan.plan(Transfer(Rows(half, [0]), Rows(wrong, [1]), num_tokens=3), local="dst")
    again = kvplan.plan(
        Transfer(Rows(half, [0]), Rows(bf16, [1]), num_tokens=3, reinterpret=True), local="dst"
    )
    assert again.nbytes == 2 * 3 * 2 * 8 * 2
    assert "REINTERPRETED" in again.explain()
    assert Plan.from_dict(again.to_dict()) == again
    with refused("LLM_PARAM_INVALID", "differ in data type: src is DT_FLOAT16"):
        kvplan.plan(
            Transfer(Rows(half, [0]), Rows(fp8, [1]), num_tokens=3, reinterpret=True), local="dst"
        )


@given(transfers(), st.booleans(), st.sampled_from(LOCALS))
def test_every_element_arrives_at_the_place_of_its_axes(transfer, coalesce, local):
    assert_moves(planned(transfer, coalesce, local), *transfer)


@pytest.mark.parametrize("outside", ["src", "dst", "both"])
def test_keys_and_values_may_lie_outside_the_blocks(outside):
    """Rows that hold the same axes in the same order differ in size if an axis is outside them."""
    inner, outer = (
        CacheDesc(1, shape, DataType.DT_UINT8, kv_tensor_format=f"{axes} token head dim")
        for shape, axes in (((4, 2, 3, 2, 4), "block kv"), ((2, 4, 3, 2, 4), "kv block"))
    )
    descs = {"src": inner, "dst": inner} | dict.fromkeys(
        ("src", "dst") if outside == "both" else (outside,), outer
    )
    plan = kvplan.plan(Transfer(*map(Rows, descs.values(), ([1, 3], [2, 0]))), local="dst")
    source = np.arange(192, dtype=np.uint8).reshape(descs["src"].shape)
    target = np.zeros(descs["dst"].shape, np.uint8)
    reference.execute(plan, [source], [target])
    blocks_first = [
        np.moveaxis(array, 1, 0) if desc is outer else array
        for array, desc in zip((source, target), descs.values(), strict=True)
    ]
    np.testing.assert_array_equal(blocks_first[1][[2, 0]], blocks_first[0][[1, 3]])
    assert not blocks_first[1][[1, 3]].any()


def merged(runs):
    """Merge neighbours that are adjacent on both sides."""
    found = []
    for src, dst, nbytes in runs:
        if found and found[-1][0] + found[-1][2] == src and found[-1][1] + found[-1][2] == dst:
            found[-1][2] += nbytes
        else:
            found.append([src, dst, nbytes])
    return [tuple(run) for run in found]


@given(st.one_of(transfers(), transfers(sides_of_whole_tokens)))
def test_neighbours_are_merged_in_the_order_of_the_request_or_of_the_source(transfer):
    each = planned(transfer, Coalesce.NONE).part
    assert each.segments.num_runs == each.num_slices
    for how in (Coalesce.CALLER_ORDER, Coalesce.SORTED):
        part = planned(transfer, how).part
        assert part.num_slices == each.num_slices
        if each.segments.repeats:
            assert part.segments == each.segments
        else:
            runs = sorted(each.segments) if how is Coalesce.SORTED else each.segments
            assert [*part.segments] == merged(runs)


@given(transfers(), st.booleans())
def test_a_push_layer_by_layer_is_the_same_push(transfer, coalesce):
    src, dst = transfer[:2]
    plan = planned(transfer, coalesce, "src", by_layer=True)
    assert len(plan.part.layers) == len(set(src.layers) & set(dst.layers))
    source, target = src.tensors(1), dst.tensors(2)
    wanted = expected(src, dst, source, target, *transfer[2:])
    for layer in reversed(plan.part.src_layers):
        reference.execute(plan.for_layers(range(layer, layer + 1)), source, target)
    for a, b in zip(wanted, target, strict=True):
        np.testing.assert_array_equal(a, b)


@given(st.data(), st.sampled_from(LOCALS))
def test_a_slot_is_cut_into_blocks_by_its_tokens(data, local):
    src, dst = data.draw(sides("slot"))
    slot = data.draw(st.integers(0, src.rows - 1))
    dst_blocks = data.draw(tables(dst))
    _, dst_blocks, last = of_one_request(src, dst, [slot], dst_blocks, 0, 0)
    num_tokens = data.draw(st.integers(1, last))
    plan = kvplan.plan(
        Transfer(Rows(src.desc, slot=slot), Rows(dst.desc, dst_blocks), num_tokens=num_tokens),
        local=local,
    )
    assert plan.kind == "C2B"
    assert_moves(plan, src, dst, [slot], dst_blocks, 0, 0, num_tokens)


@given(st.data(), st.sampled_from(LOCALS))
def test_a_slot_goes_to_a_slot_by_its_tokens(data, local):
    src, dst = data.draw(sides("slot", "slot"))
    slots = [data.draw(st.integers(0, side.rows - 1)) for side in (src, dst)]
    num_tokens = data.draw(st.integers(1, min(src.tokens, dst.tokens)))
    plan = kvplan.plan(
        Transfer(
            Rows(src.desc, slot=slots[0]), Rows(dst.desc, slot=slots[1]), num_tokens=num_tokens
        ),
        local=local,
    )
    assert plan.kind == "C2C"
    assert_moves(plan, src, dst, [slots[0]], [slots[1]], 0, 0, num_tokens)


@given(st.integers(1, 4), st.integers(1, 4), st.permutations(range(4)))
def test_packed_elements_move_by_whole_heads(src_tokens, dst_tokens, order):
    """Two 4-bit elements per byte are bytes of half the dimension; heads and tokens are swapped."""
    heads, packed, rows = 3, 4, 4
    src = CacheDesc(
        2, (rows, src_tokens, heads, 2 * packed), DataType.DT_INT4, kv_tensor_format="NHD"
    )
    dst = CacheDesc(
        2, (rows, heads, dst_tokens, 2 * packed), DataType.DT_INT4, kv_tensor_format="HND"
    )
    tokens = min(src_tokens, dst_tokens) * rows
    read, order = range(-(-tokens // src_tokens)), order[: -(-tokens // dst_tokens)]
    plan = kvplan.plan(Transfer(Rows(src, read), Rows(dst, order), num_tokens=tokens), local="dst")
    rng = np.random.default_rng(0)
    source = [
        rng.integers(0, 256, (rows, src_tokens, heads, packed), np.uint8, endpoint=False)
        for _ in range(2)
    ]
    target = [np.zeros((rows, heads, dst_tokens, packed), np.uint8) for _ in range(2)]
    reference.execute(plan, source, target)
    for there, written in zip(source, target, strict=True):
        request = there.reshape(-1, heads, packed)[:tokens]
        found = written[list(order)].transpose(0, 2, 1, 3).reshape(-1, heads, packed)
        np.testing.assert_array_equal(found[:tokens], request)
        assert not found[tokens:].any()


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        # Both innermost axes have 8 elements, so that only their names distinguish them.
        ((4, 4, 8, 8, "block token head dim"), (4, 4, 8, 8, "block token dim head")),
        ((4, 8, 2, 8, "block token head dim"), (4, 2, 8, 8, "block head dim token")),
        ((4, 2, 8, 8, "block head dim token"), (4, 8, 2, 8, "block token head dim")),
        # Both sides have the same innermost axis, but transfers cut that axis.
        ((4, 2, 8, 8, "block head dim token"), (4, 8, 2, 8, "block dim head token")),
        ((4, 4, 8, 8, "block token dim head"), (4, 8, 4, 8, "block dim token head")),
        (
            (4, 4, 2, 8, 2, "block token head dim layer"),
            (4, 2, 4, 8, 2, "block head token dim layer"),
        ),
    ],
)
def test_packed_elements_whose_innermost_axis_is_cut_have_no_address(src, dst):
    read, written = [
        CacheDesc(2, tuple(shape), DataType.DT_INT4, kv_tensor_format=axes)
        for *shape, axes in (src, dst)
    ]
    with refused("LLM_PARAM_INVALID", "innermost axis of packed DT_INT4"):
        kvplan.plan(Transfer(Rows(read, [0]), Rows(written, [1])))


def test_packed_elements_need_an_innermost_axis_of_whole_bytes():
    """With three 4-bit elements, the second head would begin in the middle of a byte."""
    read, written = [
        CacheDesc(2, shape, DataType.DT_INT4, kv_tensor_format=axes)
        for shape, axes in (((4, 4, 2, 3), "NHD"), ((4, 2, 4, 3), "HND"))
    ]
    with refused("LLM_PARAM_INVALID", "innermost axis of packed DT_INT4"):
        kvplan.plan(Transfer(Rows(read, [0]), Rows(written, [1])))


@pytest.mark.parametrize("axes", ["block state", "block token group"])
def test_states_and_scales_move_by_rows(axes):
    shape = (6, 8) if axes == "block state" else (6, 2, 4)
    desc = CacheDesc(1, shape, DataType.DT_FLOAT16, kv_tensor_format=axes)
    plan = kvplan.plan(Transfer(Rows(desc, [5, 1]), Rows(desc, [0, 2])), local="dst")
    source = [np.arange(48, dtype=np.uint16).reshape(6, 8)]
    target = [np.zeros((6, 8), np.uint16)]
    reference.execute(plan, source, target)
    assert target[0][[0, 2]].tolist() == source[0][[5, 1]].tolist()
    assert not target[0][[1, 3, 4, 5]].any()
