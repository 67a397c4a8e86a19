"""Requests of whole rows, lowered without a plan: equal to the plan, or left to the planner."""

from __future__ import annotations

import pickle
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvnative._rows import RowLowering
from kvplan import (
    CacheDesc,
    DataType,
    HostMemory,
    KvCacheExtParam,
    LLMException,
    Plan,
    Rows,
    Shard,
    Transfer,
    Transfers,
)
from kvplan.execution.binding import bind
from kvplan.execution.rows import RowRequests
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.side import Side, side
from tests.execution.row_requests import ROW, cache, columns, forms
from tests.support.plans import lower_natively

rows = st.integers(-2, 40)
tables = st.lists(rows, min_size=0, max_size=90) | st.lists(
    st.integers(0, 30), min_size=1, max_size=30, unique=True
)
runs = st.tuples(st.integers(0, 20), st.integers(1, 12)).map(
    lambda item: [*range(item[0], sum(item))]
)


@given(st.data(), st.integers(1, 40), st.integers(1, 40))
def test_a_request_is_lowered_as_its_plan_is_or_left_to_the_planner(
    data: st.DataObject, src_count: int, dst_count: int
) -> None:
    """Requests are lowered like their plan, and none that the planner refuses is lowered."""
    (source, src), (target, dst) = cache(src_count), cache(dst_count)
    src_rows, dst_rows = data.draw(tables | runs), data.draw(tables | runs)
    if data.draw(st.booleans()):
        count = min(len(src_rows), len(dst_rows))
        src_rows, dst_rows = src_rows[:count], dst_rows[:count]
    given_rows = data.draw(forms)(src_rows), data.draw(forms)(dst_rows)
    bound = lower_natively(
        RowRequests(), "pull_blocks", "B2B", source, target, src, dst, *given_rows
    )
    try:
        plan = kvplan.plan(
            Transfer(Rows(source, given_rows[0]), Rows(target, given_rows[1])),
            local="dst",
        )
    except (LLMException, TypeError):
        assert bound is None
        return
    if bound is None:  # pairs of rows need source rows
        assert plan.kind != "B2B" or plan.nbytes == 0
        return
    assert columns(bound[1]) == columns(bind(plan, src, dst, one_space=True))
    assert bound[0].nbytes == plan.nbytes
    assert bound[0] == plan
    assert bound[0].part.tables is not None
    assert bound[0].part.tables.src.tolist() == src_rows
    assert bound[0].explain() == plan.explain()


@pytest.mark.parametrize("form", [list, np.array])
def test_a_caller_may_change_its_tables_after_the_request(form: Any) -> None:
    (source, src), (target, dst) = cache(8), cache(8)
    src_rows, dst_rows = form([1, 2]), form([5, 3])
    bound = lower_natively(
        RowRequests(), "pull_blocks", "B2B", source, target, src, dst, src_rows, dst_rows
    )
    assert bound is not None
    src_rows[:] = dst_rows[:] = form([0, 0])
    tables = bound[0].part.tables
    assert tables is not None
    assert (tables.src.tolist(), tables.dst.tolist()) == ([1, 2], [5, 3])


layers = st.sampled_from([range(1), range(1, 3), range(3), range(2, 3), range(4), None])
ALIKE = [range(1), range(0, 1, 2), range(0, 1, 7)]
"""Values that equal others in Python; the planner accepts only the first of them."""


@given(layers, layers, st.sampled_from([None, 1, 2, 3]), st.booleans(), st.data())
def test_some_layers_are_lowered_as_their_plan_is(
    read: range | None,
    written: range | None,
    tensors: int | None,
    by_layer: bool,
    data: st.DataObject,
) -> None:
    (source, src), (target, dst) = cache(9, 6), cache(9, data.draw(st.sampled_from([6, 6, 4])))
    ext_param = KvCacheExtParam(read, written, tensors)
    src_rows = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True))
    dst_rows = data.draw(st.permutations(range(9)))[: len(src_rows)]
    arguments = "push_blocks", "B2B", source, target, src, dst, src_rows, dst_rows, ext_param
    requests = RowRequests()
    bound = [lower_natively(requests, *arguments, by_layer=by_layer) for _ in range(2)][1]
    try:
        plan = kvplan.plan(
            Transfer(Rows(source, src_rows), Rows(target, dst_rows), layers=ext_param),
            local="src",
            by_layer=by_layer,
        )
    except LLMException:
        assert bound is None
        return
    assert bound is not None
    assert columns(bound[1]) == columns(bind(plan, src, dst, one_space=True))
    assert bound[0].nbytes == plan.nbytes
    assert bound[0] == plan


def test_refused_values_that_equal_layers_are_left_to_the_planner() -> None:
    (source, src), (target, dst) = cache(9, 6), cache(9, 6)
    requests = RowRequests()
    for _ in range(2):
        for read in ALIKE:
            for written in ALIKE:
                bound = lower_natively(requests,
                    "push_blocks", "B2B", source, target, src, dst, [1], [2],
                    KvCacheExtParam(read, written),
                )  # fmt: skip
                assert (bound is not None) is (read.step == written.step == 1)


@given(
    st.dictionaries(
        st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1
    )
)
def test_copies_inside_a_cache_are_lowered_as_their_plan_is(blocks: dict[int, list[int]]) -> None:
    """Blocks that are both read and written are left to the planner."""
    own, memory = cache(9)
    read = [block for block, to in blocks.items() for _ in to]
    written = [*chain(*blocks.values())]
    bound = lower_natively(
        RowRequests(), "copy_blocks", "B2B", own, own, memory, memory, read, written
    )
    try:
        plan = kvplan.plan(Transfer(Rows(own, read), Rows(own, written)))
    except LLMException:
        assert bound is None
        return
    if bound is None:
        assert {*read} & {*written}
        return
    assert columns(bound[1]) == columns(bind(plan, memory, memory, one_space=True))
    assert bound[0] == plan


@pytest.mark.parametrize("count", [25, 30, 100])
def test_many_copies_of_a_row_are_ordered_as_in_their_plan(count: int) -> None:
    """Their destinations differ in one byte of the offset, or in two."""
    (source, src), (target, dst) = cache(3), cache(count)
    read, written = [1, 2, 1, 0, 1] * (count // 5), [*reversed(range(count))]
    bound = lower_natively(
        RowRequests(), "pull_blocks", "B2B", source, target, src, dst, read, written
    )
    plan = kvplan.plan(Transfer(Rows(source, read), Rows(target, written)), local="dst")
    assert bound is not None
    assert columns(bound[1]) == columns(bind(plan, src, dst, one_space=True))


def test_a_slot_is_a_row() -> None:
    (source, src), (target, dst) = cache(5, paged=False), cache(4, paged=False)
    requests = RowRequests()
    for there, here in ((4, 3), (0, 0), (2, 1)):
        bound = lower_natively(
            requests, "pull_cache", "C2C", source, target, src, dst, (there,), (here,)
        )
        plan = kvplan.plan(Transfer(Rows(source, slot=there), Rows(target, slot=here)), local="dst")
        assert bound is not None
        assert columns(bound[1]) == columns(bind(plan, src, dst, one_space=True))
        assert (bound[0] == plan, bound[0].nbytes) == (True, plan.nbytes)
    for there, here in ((5, 0), (0, 4), (-1, 0), (True, 0)):
        assert not lower_natively(
            requests, "pull_cache", "C2C", source, target, src, dst, (there,), (here,)
        )


def plan_of_rows() -> Plan:
    (source, src), (target, dst) = cache(9), cache(9)
    table = [3, 4, 8]
    bound = lower_natively(
        RowRequests(), "pull_blocks", "B2B", source, target, src, dst, table, [1, 2, 0]
    )
    assert bound is not None
    table[0] = 7  # a later change by the caller does not change the plan
    return bound[0]


def test_a_plan_of_rows_is_a_plan_like_others() -> None:
    (source, _), (target, _) = cache(9), cache(9)
    made = kvplan.plan(Transfer(Rows(source, [3, 4, 8]), Rows(target, [1, 2, 0])), local="dst")
    assert plan_of_rows() == made
    assert plan_of_rows().fingerprint == made.fingerprint
    assert Plan.from_dict(plan_of_rows().to_dict()) == made
    assert pickle.loads(pickle.dumps(plan_of_rows())) == made
    assert plan_of_rows().num_descriptors == made.num_descriptors
    assert repr(plan_of_rows()) == repr(made)
    assert plan_of_rows().for_layers(range(1)) == made.for_layers(range(1))
    with pytest.raises(AttributeError, match="no attribute 'segment'"):
        plan_of_rows().segment  # type: ignore[attr-defined]  # noqa: B018


def heads(layout: str, tokens: int = 3) -> tuple[Side, HostMemory]:
    """Return six blocks of two heads, in one tensor."""
    shape = (6, tokens, 2, 4) if layout == "NHD" else (6, 2, tokens, 4)
    desc = CacheDesc(1, shape, DataType.DT_INT8, kv_tensor_format=layout)
    return side("it", desc, paged=True), HostMemory.from_arrays([np.zeros(shape, np.int8)])


def test_refused_pairs_of_caches_are_left_to_the_planner() -> None:
    """The planner refuses rows of different sizes, and tokens without a layout."""
    requests = RowRequests()
    (plain, src), (other, dst), (nhd, of_heads) = cache(6, 1), cache(6, 1), heads("NHD")
    arguments = "pull_blocks", "B2B"
    assert not lower_natively(requests, *arguments, plain, nhd, src, of_heads, [1], [2])
    assert lower_natively(requests, *arguments, plain, other, src, dst, [1], [2])
    assert not lower_natively(requests, *arguments, plain, other, src, dst, [1], [2], num_tokens=1)
    for refused_of_opaque in ({"src_token": 1}, {"dst_token": 1}):
        assert not lower_natively(
            requests, *arguments, plain, other, src, dst, [1], [2], **refused_of_opaque
        )


@pytest.mark.parametrize(
    "tokens",
    [
        {"num_tokens": value} for value in (0, -1, True, 1.0, "1", np.int64(1), 10**30, 4)
    ] + [
        {name: value} for name in ("src_token", "dst_token")
        for value in (-1, False, 1.0, 0.0, 10**30)
    ] + [{"num_tokens": 1, "src_token": None}],
)  # fmt: skip
def test_unusual_numbers_of_tokens_are_left_to_the_planner(tokens: Any) -> None:
    (nhd, src), (hnd, dst) = heads("NHD"), heads("HND")
    arguments = "pull_blocks", "B2B", nhd, hnd, src, dst, [1], [2]
    assert lower_natively(RowRequests(), *arguments, num_tokens=3) is not None
    assert lower_natively(RowRequests(), *arguments, **tokens) is None


def test_slots_that_skip_tokens_on_both_sides_are_left_to_the_planner() -> None:
    desc = CacheDesc(1, (2, 8, 4), DataType.DT_INT8, kv_tensor_format="slot token dim")
    own = side("it", desc, paged=False)
    src, dst = (HostMemory.from_arrays([np.zeros((2, 8, 4), np.int8)]) for _ in range(2))
    arguments = "pull_cache", "C2C", own, own, src, dst, (0,), (1,)
    assert lower_natively(RowRequests(), *arguments, num_tokens=3) is not None
    assert lower_natively(RowRequests(), *arguments, num_tokens=3, dst_token=1) is None


def test_pieces_of_too_many_sizes_are_left_to_the_planner() -> None:
    """Blocks of 40 and 41 tokens are cut into two additional sizes with each block."""
    requests = RowRequests()
    sides, memories = [], []
    for tokens in (40, 41):
        desc = CacheDesc(1, (20, tokens, 2), DataType.DT_INT8, kv_tensor_format="block token dim")
        sides.append(side("it", desc, paged=True))
        memories.append(HostMemory.from_arrays([np.zeros(desc.shape, np.int8)]))
    arguments = "pull_blocks", "B2B", *sides, *memories, [*range(20)], [*range(20)]
    assert lower_natively(requests, *arguments, num_tokens=300) is not None
    assert lower_natively(requests, *arguments, num_tokens=800) is None


def test_tokens_move_inside_of_a_cache_only_between_different_blocks() -> None:
    (own, memory), requests = heads("NHD"), RowRequests()
    arguments = "copy_blocks", "B2B", own, own, memory, memory
    bound = lower_natively(requests, *arguments, [0, 5], [2, 1], num_tokens=4)
    transfer = Transfer(Rows(own, [0, 5]), Rows(own, [2, 1]), num_tokens=4)
    plan = kvplan.plan(transfer, local="dst")
    assert bound is not None
    assert columns(bound[1]) == columns(bind(plan, memory, memory, one_space=True))
    assert lower_natively(requests, *arguments, [0, 5], [2, 0], num_tokens=4) is None
    hnd, _ = heads("HND")  # shares the memory
    arguments = "copy_blocks", "B2B", own, hnd, memory, memory
    assert lower_natively(requests, *arguments, [0, 5], [2, 1], num_tokens=4) is None


def rows_of(**changes: Any) -> RowLowering:
    """Return rows of two tensors: 5 rows of 4 tokens, each two runs of 2 bytes, 3 bytes apart."""
    made: dict[str, Any] = {
        "src": (5, 4, 20, 5, 0, False),
        "dst": (5, 4, 20, 5, 0, False),
        "run": 2,
        "levels": ((2, 3, 3),),
        "kv": None,
        "src_nbytes": 100,
        "dst_nbytes": 100,
    } | changes
    return RowLowering(np.array([0], np.uint64), np.array([1 << 20], np.uint64), **made)


@pytest.mark.parametrize(
    "changes",
    [
        {"src_nbytes": 99}, {"dst_nbytes": 99}, {"run": 3}, {"run": 0}, {"run": 2**64 - 1},
        {"levels": ((2, 4, 3),)}, {"levels": ((3, 3, 3),)}, {"levels": ((0, 3, 3),)},
        {"levels": ((2**63, 2, 3),)}, {"levels": ((2, 2**64 - 1, 3),)},
        {"levels": ((1, 1, 1),) * 7},
        {"src": (6, 4, 20, 5, 0, False)}, {"dst": (5, 5, 20, 5, 0, False)},
        {"src": (0, 4, 20, 5, 0, False)}, {"src": (5, 0, 20, 5, 0, False)},
        {"src": (5, 4, 21, 5, 0, False)}, {"dst": (5, 4, 20, 5, 1, False)},
        {"src": (2**63, 4, 0, 5, 0, False)}, {"src": (5, 4, 2**64 - 1, 5, 0, False)},
    ],
)  # fmt: skip
def test_rows_that_reach_beyond_their_tensor_are_not_made(changes: Any) -> None:
    assert rows_of().lower([4], [0]) is not None
    with pytest.raises(ValueError, match="levels"):
        rows_of(**changes)


def test_wrong_numbers_of_a_template_are_refused() -> None:
    for changes, error in (
        ({"run": -1}, OverflowError),
        ({"src": (5, 4, 20, 5, 0)}, ValueError),
        ({"levels": ((2, 3),)}, ValueError),
        ({"kv": "ab"}, ValueError),
        ({"levels": None}, TypeError),
    ):
        with pytest.raises(error):
            rows_of(**changes)  # type: ignore[arg-type]


def test_memory_that_does_not_fit_or_overlaps_is_left_to_the_planner() -> None:
    requests = RowRequests()
    (source, src), (target, dst) = cache(6), cache(6)
    arguments = "pull_blocks", "B2B", source, target
    few = HostMemory.from_arrays([np.zeros((6, ROW), np.int8)])
    short = HostMemory.from_arrays([np.zeros((5, ROW), np.int8) for _ in range(2)])
    frozen = [np.zeros((6, ROW), np.int8) for _ in range(2)]
    for item in frozen:
        item.flags.writeable = False
    read_only = HostMemory.from_arrays(frozen)
    shifted = HostMemory(src.addresses + np.uint64(ROW), src.nbytes, writable=True, owner=src)
    for given_src, given_dst in (
        (few, dst), (src, few), (short, dst), (src, short), (src, shifted), (shifted, src),
    ):  # fmt: skip
        assert lower_natively(requests, *arguments, given_src, given_dst, [1], [2]) is None
    assert lower_natively(requests, *arguments, src, read_only, [1], [2]) is None
    assert lower_natively(requests, *arguments, read_only, dst, [1], [2]) is not None


def test_other_descriptions_of_the_same_memory_have_other_facts() -> None:
    """Cached facts belong to a pair of sides and to an operation."""
    requests = RowRequests()
    (source, src), (target, dst) = cache(6), cache(6)
    first = lower_natively(requests, "pull_blocks", "B2B", source, target, src, dst, [5], [0])
    assert first is not None
    again = side("it", CacheDesc(2, (6, ROW), DataType.DT_INT8), paged=True)
    assert (
        lower_natively(requests, "pull_blocks", "B2B", again, target, src, dst, [5], [0])
        is not None
    )
    smaller = side("it", CacheDesc(2, (4, ROW), DataType.DT_INT8), paged=True)
    assert (
        lower_natively(requests, "pull_blocks", "B2B", smaller, target, src, dst, [5], [0]) is None
    )
    pushed = lower_natively(requests, "push_blocks", "B2B", source, target, src, dst, [5], [0])
    assert pushed is not None
    assert pushed[0].operation == "push_blocks"
    for _ in range(3000):  # far more than the cache keeps
        other = HostMemory.from_arrays([np.zeros((6, ROW), np.int8) for _ in range(2)])
        assert (
            lower_natively(requests, "pull_blocks", "B2B", source, target, src, other, [5], [0])
            is not None
        )


def test_each_kind_of_request_between_two_memories_has_a_template() -> None:
    """Requests that differ in layers, tokens or heads have templates of their own."""
    desc = CacheDesc(
        2, (9, 3, 4, 2, 8), DataType.DT_INT8, kv_tensor_format="block layer token head dim",
        shard=Shard(layers=range(3), heads=range(2), num_layers=3, num_heads=2),
    )  # fmt: skip
    one, other = side("it", desc, paged=True), side("other", desc, paged=True)
    src, dst = (
        HostMemory.from_arrays([np.zeros(desc.shape, np.int8) for _ in range(2)]) for _ in "sd"
    )
    kinds: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((), {"by_layer": True}),
        ((), {"reinterpret": True}),
        ((), {"heads": range(1)}),
        ((), {"heads": range(1, 2)}),
        ((KvCacheExtParam(range(1, 2), range(1, 2)),), {}),
        ((KvCacheExtParam(range(1, 2), range(1, 2)),), {"by_layer": True}),
        ((ALL_LAYERS, 5), {}),
        ((ALL_LAYERS, 5), {"by_layer": True}),
    ]

    def lowered(requests: RowRequests, kind: int) -> tuple[Plan, list[list[int]]]:
        arguments, named = kinds[kind]
        both = "pull_blocks", "B2B", one, other, src, dst, [1, 2], [3, 5]
        bound = lower_natively(requests, *both, *arguments, **named)
        assert bound is not None, kinds[kind]
        return bound[0], columns(bound[1])

    alone = [lowered(RowRequests(), kind) for kind in range(len(kinds))]
    for before, after in product(range(len(kinds)), repeat=2):
        requests = RowRequests()
        assert lowered(requests, before) == alone[before]
        assert lowered(requests, after) == alone[after], (kinds[before], kinds[after])


@pytest.mark.parametrize("timeout_ms", [10**400, -1, float("nan"), "5"])
def test_a_wrong_deadline_is_refused(timeout_ms: Any) -> None:
    (source, src), (target, dst) = cache(6), cache(6)
    with Transfers(1) as transfers:
        bound = lower_natively(
            transfers.rows, "pull_blocks", "B2B", source, target, src, dst, [5], [0]
        )
        assert bound is not None
        with pytest.raises((OverflowError, ValueError, TypeError)):
            transfers.execute(bound[0], src, dst, timeout_ms, bound[1])
