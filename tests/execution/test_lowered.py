"""Requests of every shape, lowered without a plan: equal to their plan, in the same order.

`make explore` runs these tests with 20,000 examples each.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnative._lower import Descriptors
from kvplan import DataType, HostMemory, KvCacheExtParam, LLMException, Plan
from kvplan.execution.binding import bind
from kvplan.execution.rows import RowRequests
from kvplan.planning.blocks import RequestBlocks
from kvplan.planning.kinds import plan_rows
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.part import Kind, Operation
from kvplan.planning.side import Side, side
from tests.planning.transfers import block_to_block, slot_to_blocks, slot_to_slot
from tests.planning.unlike import Cache, Model, caches, models, of_one_request, parts
from tests.support.plans import lower_natively

OPERATIONS: dict[Kind, tuple[Operation, Operation]] = {
    "B2B": ("pull_blocks", "push_blocks"),
    "C2B": ("pull_blocks", "push_blocks"),
    "C2C": ("pull_cache", "push_cache"),
}
ROWS: dict[Kind, tuple[str, str]] = {
    "B2B": ("block", "block"),
    "C2B": ("slot", "block"),
    "C2C": ("slot", "slot"),
}


class Request(NamedTuple):
    """A request between two memories."""

    operation: Operation
    kind: Kind
    source: Side
    target: Side
    src: HostMemory
    dst: HostMemory
    src_rows: Any
    dst_rows: Any
    ext_param: KvCacheExtParam
    more: dict[str, Any]

    def bound(self, requests: RowRequests) -> tuple[Plan, Descriptors] | None:
        return lower_natively(requests, *self[:-1], **self.more)

    def planned(self) -> tuple[Plan, Descriptors]:
        more = {name: item for name, item in self.more.items() if name != "by_layer"}
        part = plan_rows(
            self.operation, self.kind, self.source, self.target, self.src_rows, self.dst_rows,
            self.ext_param, self.more.get("by_layer", False), **more,
        )  # fmt: skip
        plan = Plan([part])
        return plan, bind(plan, self.src, self.dst, one_space=True)


def columns(descriptors: Descriptors) -> list[list[int]]:
    return [getattr(descriptors, name).tolist() for name in ("src", "dst", "nbytes")]


def memory(cache: Side) -> HostMemory:
    arrays = [np.zeros(cache.tensor_nbytes, np.uint8) for _ in range(cache.num_tensors)]
    return HostMemory.from_arrays(arrays)


def assert_lowered_as_planned(request: Request) -> None:
    """Check that the request is lowered like its plan, or is left to the planner."""
    requests = RowRequests()
    bound = [request.bound(requests) for _ in range(2)][1]  # the second one finds the template
    try:
        plan, descriptors = request.planned()
    except (LLMException, ValueError, TypeError):
        assert bound is None
        return
    if bound is None:
        # Copies inside of a cache are compared by their addresses; a request without bytes is not
        # lowered.
        assert request.src is request.dst or plan.nbytes == 0
        return
    assert columns(bound[1]) == columns(descriptors)
    lowered, part = bound[0].part, plan.part
    assert "segments" not in vars(lowered)
    for name in (
        "nbytes", "nbytes_per_tensor", "num_slices", "num_descriptors", "split", "src_tensors",
        "dst_tensors", "tensors_per_layer", "reinterpret", "coalesce",
    ):  # fmt: skip
        assert getattr(lowered, name) == getattr(part, name), name
    assert "segments" not in vars(lowered)
    assert bound[0] == plan
    if part.tables is None:
        assert lowered.tables is None
    else:
        assert lowered.tables is not None
        for found, wanted in zip(lowered.tables, part.tables, strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert lowered.by_rows == part.by_rows


forms = st.sampled_from(
    [list, tuple, RequestBlocks, np.array, lambda value: np.array(value, np.int32)]
)
layer_ranges = st.none() | st.tuples(st.integers(0, 2), st.integers(1, 3)).map(
    lambda value: range(value[0], sum(value))
)


def now_and_then(draw: st.DrawFn) -> bool:
    return draw(st.integers(0, 15)) == 15


@st.composite
def pairs(draw: st.DrawFn, kind: Kind) -> tuple[Cache, Cache]:
    """Draw caches that differ in everything, or only in a few properties, as in most cases."""
    model: Model = draw(models)
    if now_and_then(draw):
        model = replace(model, dim=2 * model.dim, data_type=DataType.DT_INT4)
    src_row, dst_row = ROWS[kind]
    src, dst = draw(caches(model, src_row)), draw(caches(model, dst_row))
    alike = draw(st.booleans())
    if alike or draw(st.booleans()):  # one layout
        axes = tuple(dst_row if axis == src_row else axis for axis in src.axes)
        dst = replace(dst, axes=axes)
    if alike or not set(src.heads) & set(dst.heads):
        dst = replace(dst, heads=src.heads)
    if alike or not set(src.layers) & set(dst.layers):
        dst = replace(dst, layers=src.layers)
    if draw(st.booleans()):
        dst = replace(dst, tokens=src.tokens)
    if draw(st.integers(0, 3)) == 0:  # more rows than are compared in pairs
        src, dst = replace(src, rows=100), replace(dst, rows=90)
    if now_and_then(draw):
        data_type = draw(st.sampled_from([DataType.DT_INT8, DataType.DT_FLOAT16, DataType.DT_BF16]))
        dst = replace(dst, model=replace(model, data_type=data_type))
    return src, dst


@st.composite
def tables(draw: st.DrawFn, cache: Cache, *, distinct: bool) -> list[int]:
    if cache.row == "slot":
        return [draw(st.integers(0, cache.rows - 1))]
    random = Random(draw(st.integers(0, 2**32)))  # Hypothesis' own tables are mostly short
    count = random.randint(1, cache.rows)
    first = random.randint(0, cache.rows - count)
    rows = [*range(first, first + count)] if random.random() < 0.4 else [*range(cache.rows)]
    if random.random() < 0.6:
        random.shuffle(rows)
    rows = rows[:count]
    if not distinct and random.random() < 0.3:
        rows = random.choices(rows, k=count)
    return sorted(rows, reverse=random.random() < 0.5) if random.random() < 0.3 else rows


@st.composite
def requests_of_unlike(draw: st.DrawFn) -> Request | None:
    kind = draw(st.sampled_from([*ROWS]))
    src, dst = draw(pairs(kind))
    try:
        source, target = (
            side(name, item.desc, paged=item.row == "block")
            for name, item in (("src", src), ("dst", dst))
        )
    except (LLMException, ValueError):  # a tensor cannot have a part of a byte
        return None
    src_rows, dst_rows = draw(tables(src, distinct=False)), draw(tables(dst, distinct=True))
    tokens = [
        draw(st.integers(0, item.tokens)) if draw(st.booleans()) else 0 for item in (src, dst)
    ]
    if kind == "C2C":  # begins at the first token
        tokens = [0, 0]
    num_tokens: int | None = draw(st.integers(0, 30) | st.none())
    if not now_and_then(draw):  # a valid request
        cut = of_one_request(src, dst, src_rows, dst_rows, *tokens)
        src_rows, dst_rows = cut[0] or src_rows, cut[1] or dst_rows
        if kind == "B2B" and src.tokens == dst.tokens and draw(st.booleans()):
            count = min(len(src_rows), len(dst_rows))
            src_rows, dst_rows, tokens, num_tokens = (
                src_rows[:count],
                dst_rows[:count],
                [0, 0],
                None,
            )
        elif cut[2] > 0:
            whole = kind != "B2B" and draw(st.booleans())
            num_tokens = None if whole else draw(st.integers(1, cut[2]))
    for table, cache in ((src_rows, src), (dst_rows, dst)):
        if now_and_then(draw):
            wrong = draw(st.integers(-1, 8))
            table[:] = [wrong] if cache.row == "slot" else [*table, wrong]
    ext_param = (
        draw(st.builds(KvCacheExtParam, layer_ranges, layer_ranges, st.none()))
        if now_and_then(draw)
        else ALL_LAYERS
    )
    source_memory = memory(source)
    is_one = src == dst and draw(st.booleans())
    given_rows = (
        draw(forms)(item) if cache.row == "block" else tuple(item)
        for item, cache in ((src_rows, src), (dst_rows, dst))
    )
    return Request(
        draw(st.sampled_from(OPERATIONS[kind])),
        kind,
        source,
        target,
        source_memory,
        source_memory if is_one else memory(target),
        *given_rows,
        ext_param,
        {
            "num_tokens": num_tokens,
            "src_token": tokens[0],
            "dst_token": tokens[1],
            "reinterpret": now_and_then(draw),
            "by_layer": draw(st.booleans()),
            "heads": None
            if kind == "C2C" or draw(st.integers(0, 5))
            else draw(parts(src.model.heads)),
        },
    )


@given(requests_of_unlike())
def test_requests_between_unlike_caches_are_lowered_as_their_plans(request: Request | None) -> None:
    if request is not None:
        assert_lowered_as_planned(request)


@given(
    st.data(), st.sampled_from(["B2B", "B2B", "C2B"]), st.integers(1, 6), st.integers(0, 9),
    st.sampled_from([list, RequestBlocks, np.array]),
)  # fmt: skip
def test_many_rows_of_one_layout_are_ordered_and_merged_as_in_their_plans(
    data: st.DataObject, kind: Kind, tokens: int, skipped: int, form: Any
) -> None:
    """Sources may be read twice, blocks may have different sizes, and tokens may be left over."""
    model = Model(2, 1, 2, 2, DataType.DT_INT8)
    whole = range(2), range(2)
    src = Cache(model, (ROWS[kind][0], "token", "head", "dim"), 150, tokens, *whole)
    if kind == "C2B":
        src = replace(src, rows=3, tokens=100)
    other = data.draw(st.sampled_from([tokens, tokens, 2 * tokens, 5]))
    dst = Cache(model, ("block", "token", "head", "dim"), 140, other, *whole)
    src_rows = data.draw(tables(src, distinct=False))
    dst_rows = data.draw(tables(dst, distinct=True))
    src_token, dst_token = data.draw(st.sampled_from([(0, 0), (skipped, 0), (skipped, skipped)]))
    src_rows, dst_rows, most = of_one_request(src, dst, src_rows, dst_rows, src_token, dst_token)
    num_tokens = data.draw(st.none() | st.integers(max(most - 9, 1), max(most, 1)))
    source, target = side("src", src.desc, paged=kind == "B2B"), side("dst", dst.desc, paged=True)
    assert_lowered_as_planned(
        Request(
            "push_blocks",
            kind,
            source,
            target,
            memory(source),
            memory(target),
            form(src_rows) if kind == "B2B" else tuple(src_rows),
            form(dst_rows),
            ALL_LAYERS,
            {"num_tokens": num_tokens, "src_token": src_token, "dst_token": dst_token},
        )
    )


@given(slot_to_slot() | block_to_block() | slot_to_blocks(), st.booleans(), st.booleans())
def test_rows_of_unknown_layout_are_lowered_as_their_plans(
    transfer: Any, by_layer: bool, reinterpret: bool
) -> None:
    src, dst = transfer.transfer.src, transfer.transfer.dst
    paged, from_blocks = dst.blocks is not None, bool(src.blocks)
    source = side("src", transfer.src, paged=from_blocks)
    target = side("dst", transfer.dst, paged=paged)
    read = src.blocks if from_blocks else (src.slot or 0,)
    written = dst.blocks if paged else (dst.slot or 0,)
    verb = {"dst": "pull", "src": "push", "both": "copy"}[transfer.local]
    operation: Operation = f"{verb}_{'blocks' if paged else 'cache'}"
    kind: Kind = "B2B" if from_blocks else "C2B" if paged else "C2C"
    more = {"by_layer": by_layer, "reinterpret": reinterpret}
    layers = transfer.transfer.layers
    ranges = layers.src_layer_range, layers.dst_layer_range
    if any(isinstance(span, tuple) for span in ranges):  # another notation for ranges
        ranges = tuple(  # type: ignore[assignment]
            span
            if not isinstance(span, tuple)
            else None
            if span[0] < 0
            else range(span[0], span[1] + 1)
            for span in ranges
        )
        layers = KvCacheExtParam(*ranges, layers.tensor_num_per_layer)
    memories = memory(source), memory(target)
    assert_lowered_as_planned(
        Request(operation, kind, source, target, *memories, read, written, layers, more)
    )


def copied(
    src: Cache, dst: Cache, src_rows: Any, dst_rows: Any, kind: Kind = "B2B", **more: Any
) -> tuple[Plan, Descriptors] | None:
    """Compare a request to blocks with its plan, and return the descriptors."""
    source, target = side("src", src.desc, paged=kind == "B2B"), side("dst", dst.desc, paged=True)
    request = Request(
        "pull_blocks", kind, source, target, memory(source), memory(target), src_rows, dst_rows,
        ALL_LAYERS, more,
    )  # fmt: skip
    assert_lowered_as_planned(request)
    return request.bound(RowRequests())


def blocks_of(rows: int, *axes: str, tokens: int = 4) -> Cache:
    return Cache(Model(2, 1, 2, 2, DataType.DT_INT8), axes, rows, tokens, range(2), range(2))


NHD, HND = ("block", "token", "head", "dim"), ("block", "head", "token", "dim")


@pytest.mark.parametrize("blocks", range(1, 6))
@pytest.mark.parametrize("missing", [0, 1, 3])
def test_blocks_of_a_lease_beyond_the_other_table_are_left_out(blocks: int, missing: int) -> None:
    cache, table = blocks_of(9, *NHD), [*range(blocks)]
    tokens = 4 * blocks - missing
    leased = RequestBlocks([8, 6, 7, 5, 4])
    for src_rows, dst_rows in ((leased, table), (table, leased)):
        assert copied(cache, cache, src_rows, dst_rows, num_tokens=tokens) is not None


def test_a_lease_of_whole_rows_must_have_as_many_blocks() -> None:
    cache, leased = blocks_of(9, *NHD), RequestBlocks([8, 6, 7])
    assert copied(cache, cache, leased, [0, 1, 2]) is not None
    assert copied(cache, cache, leased, [0, 1]) is None
    assert copied(cache, cache, [0, 1], leased) is None


@pytest.mark.parametrize(("blocks", "fits"), [(2, True), (3, False), (4, False)])
@pytest.mark.parametrize("form", [list, RequestBlocks])
def test_no_block_is_left_out_of_a_table_that_is_longer_than_a_slot(
    form: Any, blocks: int, fits: bool
) -> None:
    slots, cache = blocks_of(3, "slot", "token", "head", "dim", tokens=8), blocks_of(9, *NHD)
    bound = copied(slots, cache, (1,), form([8, 6, 7, 5][:blocks]), "C2B", num_tokens=7)
    assert (bound is not None) is fits


@pytest.mark.parametrize("tokens", [5, 7, 8, 9, 13])
@pytest.mark.parametrize("axes", [NHD, HND])
def test_whole_blocks_decide_if_there_are_as_many_partial_ones(
    axes: tuple[str, ...], tokens: int
) -> None:
    """A last block that is partly filled is cut differently from the whole blocks."""
    count = -(-tokens // 4)
    cache = blocks_of(9, *axes)
    assert copied(cache, cache, [7, 5, 6, 1][:count], [3, 8, 0, 2][:count], num_tokens=tokens)


@pytest.mark.parametrize("src_rows", [15, 20, 300, 9000])
@pytest.mark.parametrize("dst_rows", [30, 300, 9000])
def test_sources_that_are_read_twice_are_ordered_by_their_destinations(
    src_rows: int, dst_rows: int
) -> None:
    """The offsets differ in one or more bytes, depending on the number of rows."""
    src, dst = blocks_of(src_rows, *NHD, tokens=1), blocks_of(dst_rows, *NHD, tokens=1)
    read = [value * (src_rows // 14) for value in (*range(14, -1, -1), *range(15)) if value < 14]
    written = [index * (dst_rows // 30) for index in range(len(read), 0, -1)]
    assert copied(src, dst, read, written) is not None


@pytest.mark.parametrize("skipped", [(0, 0), (1, 0), (0, 3), (2, 1), (5, 1)])
@pytest.mark.parametrize("count", [3, 200, 1000])
def test_blocks_that_begin_at_different_tokens_are_two_pieces_each(
    count: int, skipped: tuple[int, int]
) -> None:
    cache = blocks_of(count + 2, *NHD)
    src_rows, dst_rows = [*range(count, 0, -1)], [*range(1, count + 1)]
    more = {"src_token": skipped[0], "dst_token": skipped[1]}
    tokens = 4 * count - max(skipped)
    assert copied(cache, cache, src_rows, dst_rows, num_tokens=tokens, **more) is not None


@pytest.mark.parametrize("count", [64, 65, 127, 128, 3000])
def test_one_side_may_have_few_rows_and_the_other_many(count: int) -> None:
    """Scratch memory suffices for both sides, below and above the number of rows on the stack."""
    large, small = blocks_of(3, *NHD, tokens=count), blocks_of(count + 2, *NHD, tokens=1)
    rows = [*range(count, 0, -1)]
    assert copied(large, small, [1], rows, num_tokens=count) is not None
    assert copied(small, large, rows, [1], num_tokens=count) is not None


@pytest.mark.parametrize("num_tokens", [8, 7])
def test_keys_and_values_are_paired_apart_only_if_more_than_two_axes_remain(
    num_tokens: int,
) -> None:
    model = Model(2, 2, 2, 2, DataType.DT_INT8)
    orders = ("kv", "token", "head"), ("token", "kv", "head"), ("head", "token", "kv")
    first, second, third = (
        Cache(model, ("block", *order, "dim"), 9, 4, range(2), range(2)) for order in orders
    )
    for src, dst, split in ((first, second, ()), (second, first, ()), (first, third, ("kv",))):
        lowered = copied(src, dst, [7, 5], [3, 8], num_tokens=num_tokens)
        assert lowered is not None
        assert lowered[0].part.split == split


VARIED: list[dict[str, Any]] = [
    {},
    {"by_layer": True},
    {"num_tokens": 6},
    {"heads": range(1)},
    {"heads": range(1, 2)},
    {"reinterpret": True},
    {"ext_param": KvCacheExtParam(range(1), range(1))},
    {"ext_param": KvCacheExtParam(range(1, 2), range(1, 2))},
    {"src_token": 1, "num_tokens": 6},
]


@pytest.mark.parametrize("before", VARIED, ids=repr)
def test_cached_facts_of_two_memories_belong_to_one_kind_of_request(before: dict[str, Any]) -> None:
    """Cached facts must not be used for other heads, other layers, or copies as bytes."""
    (source, src), (target, dst) = (
        (item := side("it", cache.desc, paged=True), memory(item))
        for cache in (blocks_of(9, *NHD), blocks_of(9, *HND))
    )
    arguments = "pull_blocks", "B2B", source, target, src, dst, [7, 5], [3, 8]

    def request(ext_param: KvCacheExtParam = ALL_LAYERS, **more: Any) -> Request:
        return Request(*arguments, ext_param, more)

    for varied in VARIED:
        known = RowRequests()
        request(**before).bound(known)
        found, alone = (request(**varied).bound(value) for value in (known, RowRequests()))
        assert (found is None) == (alone is None), varied
        if found is not None and alone is not None:
            assert columns(found[1]) == columns(alone[1]), varied
            assert found[0] == alone[0], varied
