"""Contract 1: the invariants of a plan, for random transfers of every operation."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Coalesce, Plan
from kvplan.planning import reference
from kvplan.planning.invariants import check_invariants
from tests.planning.transfers import Example, Tensors, transfers

coalescings = st.sampled_from(Coalesce)


def written_by(plan: Plan, example: Example) -> Tensors:
    src, dst = example.memory()
    reference.execute(plan, src, dst)
    return dst


def assert_same(actual: Tensors, expected: Tensors) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@given(transfers(), coalescings)
def test_execution_follows_the_specification(example: Example, how: Coalesce) -> None:
    expected = example.apply(*example.memory())
    assert_same(written_by(example.plan(how), example), expected)


@given(transfers(), coalescings)
def test_every_byte_is_in_bounds_and_written_once(example: Example, how: Coalesce) -> None:
    plan = example.plan(how)
    writes = np.zeros(example.dst.tensor_nbytes, dtype=int)
    for src, dst, nbytes in plan.part.segments:
        assert nbytes > 0
        assert src + nbytes <= example.src.tensor_nbytes
        assert dst + nbytes <= example.dst.tensor_nbytes
        writes[dst : dst + nbytes] += 1
    assert writes.max() == 1
    assert len(set(plan.part.dst_tensors)) == len(plan.part.dst_tensors)
    assert set(plan.part.src_tensors) <= set(range(example.src.num_tensors))
    assert set(plan.part.dst_tensors) <= set(range(example.dst.num_tensors))
    check_invariants(plan.part)


@given(transfers(), coalescings)
def test_a_plan_copies_as_many_bytes_as_requested(example: Example, how: Coalesce) -> None:
    plan = example.plan(how)
    assert plan.nbytes == example.nbytes
    assert plan.part.num_slices == len(example.moves)
    assert (
        list(zip(plan.part.src_tensors, plan.part.dst_tensors, strict=True)) == example.tensor_pairs
    )
    assert plan.num_descriptors == len(example.tensor_pairs) * len(plan.part.segments)


@given(transfers())
def test_coalescing_changes_segments_but_no_byte(example: Example) -> None:
    none, caller, in_order = (
        example.plan(how) for how in (Coalesce.NONE, Coalesce.CALLER_ORDER, Coalesce.SORTED)
    )
    assert len(none.part.segments) == len(example.moves) == none.part.num_slices
    assert len(caller.part.segments) <= len(none.part.segments)
    assert len(in_order.part.segments) <= len(none.part.segments)
    assert example.plan(True) == in_order
    assert example.plan(False) == none
    verdicts = {none.diff(other).splitlines()[-1] for other in (caller, in_order)}
    assert all("equivalent" in verdict for verdict in verdicts)


@given(transfers())
def test_coalescing_leaves_no_neighbours_that_could_merge(example: Example) -> None:
    for how in (Coalesce.CALLER_ORDER, Coalesce.SORTED):
        segments = list(example.plan(how).part.segments)
        for (src, dst, nbytes), (next_src, next_dst, _) in pairwise(segments):
            assert (src + nbytes, dst + nbytes) != (next_src, next_dst)


@given(transfers())
def test_sorted_segments_do_not_depend_on_the_order_of_the_request(example: Example) -> None:
    segments = list(example.plan(Coalesce.SORTED).part.segments)
    assert segments == sorted(segments)


@given(transfers(), coalescings)
def test_json_gives_the_same_plan_back(example: Example, how: Coalesce) -> None:
    plan = example.plan(how)
    document = json.loads(json.dumps(plan.to_dict()))
    again = Plan.from_dict(document)
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert hash(again) == hash(plan)
    assert again.to_dict() == document == plan.to_dict()


@given(transfers(), st.data())
def test_slices_by_layer_copy_the_same_bytes_as_the_plan(
    example: Example, data: st.DataObject
) -> None:
    plan = example.plan()
    layers = plan.part.src_layers
    cut = data.draw(st.integers(layers.start, layers.stop))
    pieces = [
        plan.for_layers(part)
        for part in (range(layers.start, cut), range(cut, layers.stop))
        if len(part)
    ]
    src, dst = example.memory()
    expected = example.apply(src, dst)
    for piece in reversed(pieces):
        reference.execute(piece, src, dst)
    assert_same(dst, expected)
    assert sum(piece.nbytes for piece in pieces) == plan.nbytes
    assert sum(piece.num_descriptors for piece in pieces) == plan.num_descriptors
    assert [pair for piece in pieces for pair in piece.part.layers] == list(plan.part.layers)
    assert plan.for_layers(layers) == plan


@given(transfers())
def test_layers_name_every_tensor_pair_once(example: Example) -> None:
    plan = example.plan()
    assert [pair for layer in plan.part.layers for pair in layer.tensors] == example.tensor_pairs
    assert [layer.src_layer for layer in plan.part.layers] == list(plan.part.src_layers)
    assert [layer.dst_layer for layer in plan.part.layers] == list(plan.part.dst_layers)
    for layer in plan.part.layers:
        for src, dst in layer.tensors:
            assert src // plan.part.tensors_per_layer == layer.src_layer
            assert dst // plan.part.tensors_per_layer == layer.dst_layer


@given(transfers(), coalescings)
def test_descriptors_run_one_by_one_by_their_origin(example: Example, how: Coalesce) -> None:
    plan = example.plan(how)
    src, dst = example.memory()
    expected = example.apply(src, dst)
    segments = list(plan.part.segments)
    for index in range(plan.num_descriptors):
        origin = plan.origin(index)
        src_offset, dst_offset, nbytes = segments[index % len(segments)]
        assert origin.src_tensor // plan.part.tensors_per_layer == origin.src_layer
        assert origin.dst_tensor // plan.part.tensors_per_layer == origin.dst_layer
        # The rows are exactly those that hold the bytes of the segment.
        for first, last, offset, stride in (
            (*origin.src_rows, src_offset, example.src.stride),
            (*origin.dst_rows, dst_offset, example.dst.stride),
        ):
            assert first * stride <= offset < (first + 1) * stride
            assert last * stride < offset + nbytes <= (last + 1) * stride
        flat_src, flat_dst = (
            side[tensor].reshape(-1)
            for side, tensor in ((src, origin.src_tensor), (dst, origin.dst_tensor))
        )
        flat_dst[dst_offset : dst_offset + nbytes] = flat_src[src_offset : src_offset + nbytes]
    assert_same(dst, expected)


@given(transfers(), coalescings)
def test_columns_have_the_form_that_lowering_needs(example: Example, how: Coalesce) -> None:
    segments = example.plan(how).part.segments
    for column in (segments.src_offsets, segments.dst_offsets, segments.nbytes):
        assert column.dtype == np.dtype(np.uint64)
        assert column.dtype.isnative
        assert column.shape == (len(segments),)
        assert column.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


@given(transfers(), coalescings)
def test_every_plan_can_be_read(example: Example, how: Coalesce) -> None:
    plan = example.plan(how)
    table = plan.explain("table", limit=None).splitlines()
    assert len(table) == 1 + plan.num_descriptors
    assert repr(plan).startswith(f"<Plan {plan.operation} {plan.kind} L")
    tree = plan.explain(limit=None)
    (first, *_), *_ = pairs = plan.part.layer(0).tensors
    assert f"-- tensor {first} -> {pairs[0][1]} " in tree
    if len(pairs) > 2:  # the others in a single comparison
        (src, dst), (src_end, dst_end) = pairs[1], pairs[-1]
        assert f"-- tensors {src}..{src_end} -> {dst}..{dst_end}   same " in tree
    elif len(pairs) == 2:
        assert "-- tensor {} -> {}   same ".format(*pairs[1]) in tree
    # The other layers equal the first, and share its line.
    assert ("`-- layer" in tree.splitlines()[-1]) is (len(plan.part.layers) > 1)
    assert plan.diff(plan).splitlines()[-1] == "  verdict: identical"
