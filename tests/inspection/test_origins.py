"""The origin of a descriptor names the content of its bytes, by the names of the axes."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, DataType, Rows, Transfer
from kvplan.planning.contents import RequestOrder
from kvplan.planning.plan import Origin, Plan
from tests.planning.test_unlike import planned, transfers
from tests.planning.unlike import Cache


def assert_names(origin: Origin, plan: Plan, descriptor: int, cache: Cache, *, at: str) -> Any:
    """Check layers and heads of one side; return (row, token) of each element, and its kv."""
    sides = ["src", "dst"]
    pair, run = divmod(descriptor, plan.part.segments.num_runs)
    tensor, start = plan.part.pair(pair)[sides.index(at)]
    *offsets, nbytes = plan.part.run_at(run)
    first = start + offsets[sides.index(at)]
    tensors = [np.zeros_like(tensor) for tensor in cache.tensors(0)]
    tensors[tensor].reshape(-1).view(np.uint8)[first : first + nbytes] = 1
    found: dict[str, set[Any]] = {name: set() for name in ("layer", "kv", "head", "place")}
    for layer in cache.layers:
        for kv in range(cache.model.kv):
            rows, tokens, heads, _ = np.nonzero(cache.named(tensors, layer, kv))
            if len(rows):
                found["layer"].add(layer)
                found["kv"].add(kv)
            found["head"] |= {head + cache.heads.start for head in heads.tolist()}
            found["place"] |= {*zip(rows.tolist(), tokens.tolist(), strict=True)}
    assert origin.model_layer is not None
    local = origin.src_layer if at == "src" else origin.dst_layer
    for number in (origin.model_layer, local + cache.layers.start):
        assert {*range(number, number + origin.num_layers)} == found["layer"]
    rows_said = origin.src_rows if at == "src" else origin.dst_rows
    assert {*range(rows_said[0], rows_said[1] + 1)} == {row for row, _ in found["place"]}
    if origin.heads is not None:
        assert {*range(origin.heads[0], origin.heads[1] + 1)} == found["head"]
    if origin.kv:
        assert {"KV".index(part) for part in origin.kv.split("+")} == found["kv"]
    return found["place"]


@given(transfers(), st.booleans(), st.data())
def test_an_origin_names_layer_head_and_token_of_its_bytes(
    transfer: Any, coalesce: bool, data: st.DataObject
) -> None:
    src, dst, src_blocks, dst_blocks, src_token, dst_token, _ = transfer
    plan = planned(transfer, coalesce)
    descriptor = data.draw(st.integers(0, plan.num_descriptors - 1))
    origin = plan.origin(descriptor)
    read = assert_names(origin, plan, descriptor, src, at="src")
    written = assert_names(origin, plan, descriptor, dst, at="dst")
    said = {token for first, last in origin.tokens for token in range(first, last + 1)}
    assert said == {src_blocks.index(row) * src.tokens + token for row, token in read}
    assert said == {
        dst_blocks.index(row) * dst.tokens + token - dst_token + src_token for row, token in written
    }
    assert (origin.heads is not None) is ("head" in dst.axes)
    if dst.model.kv == 2 and "head" in dst.axes:
        assert origin.kv


SLOTS = {
    "slot token head dim": (3, 4, 5, 2),
    "slot head token dim": (3, 5, 4, 2),
    "slot token kv head dim": (3, 2, 2, 3, 2),
    "slot kv token head dim": (3, 2, 2, 3, 2),
}


@pytest.mark.parametrize("layout", SLOTS)
def test_a_chunk_of_a_slot_names_the_heads_and_parts_of_its_bytes(layout: str) -> None:
    """A chunk may continue from the last head of a token to the first head of the next."""
    shape = SLOTS[layout]
    desc = CacheDesc(1, shape, DataType.DT_UINT8, kv_tensor_format=layout)
    axes, places = layout.split(), np.indices(shape)
    for offset, end in combinations(range(math.prod(shape[1:]) + 1), 2):
        src, dst = Rows(desc, slot=0, offset=offset), Rows(desc, slot=1, offset=offset)
        origin = kvplan.plan(Transfer(src, dst, nbytes=end - offset)).origin(0)
        where = {
            axis: place[1].reshape(-1)[offset:end] for axis, place in zip(axes, places, strict=True)
        }
        assert origin.heads == (where["head"].min(), where["head"].max())
        if "kv" in where:
            assert origin.kv == "+".join("KV"[item] for item in sorted({*where["kv"].tolist()}))


def test_a_run_of_blocks_in_another_order_names_the_tokens_of_each() -> None:
    """The run begins and ends inside a block."""
    desc = CacheDesc(2, (8, 4, 2, 2), DataType.DT_INT8, kv_tensor_format="NHD")
    rows = Rows(desc, [1, 3, 2, 4], first_token=1)
    plan = kvplan.plan(Transfer(rows, rows, num_tokens=13), local="dst")
    assert plan.num_descriptors == 2
    assert plan.origin(0).tokens == ((1, 3), (8, 11), (4, 7), (12, 13))
    (run,) = plan.part.segments
    order = RequestOrder(plan.part)
    assert order.tokens(run[1], run[1] + run[2] - 1) == [*plan.origin(0).tokens]
