"""Overlapping memory is accepted if and only if the order of copies cannot change the result."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, LLMException, Rows, Shard, Transfer
from kvplan.execution.rows import are_apart
from tests.support.plans import joined
from tests.support.refusals import refused

ROWS, ROW, TENSORS = 3, 4, 2
DESC = CacheDesc(TENSORS, (ROWS, ROW), DataType.DT_UINT8)
NBYTES = DESC.tensor_nbytes
HEAP = 4 * NBYTES

starts = st.lists(st.integers(0, HEAP - NBYTES), min_size=TENSORS, max_size=TENSORS)


def is_order_free(copies: list[tuple[int, int]]) -> bool:
    """Return True if (src, dst) rows of ROW bytes each can be copied in any order, byte by byte."""
    writers: dict[int, int] = {}
    for i, (_, dst) in enumerate(copies):
        for byte in range(dst, dst + ROW):
            if writers.setdefault(byte, i) != i:
                return False
    return all(
        copies[writers[byte]][0] == copies[writers[byte]][1]
        for src, _ in copies
        for byte in range(src, src + ROW)
        if byte in writers
    )


@given(
    starts,
    starts,
    st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS),
    st.permutations(range(ROWS)),
    st.sampled_from([Coalesce.NONE, Coalesce.SORTED]),
)
@example([0, 12], [6, 30], [0], [0, 1, 2], Coalesce.NONE)  # a write begins inside a read range
@example([6, 30], [0, 18], [0], [1, 0, 2], Coalesce.NONE)  # a write ends inside a read range
def test_exactly_the_plans_that_depend_on_the_order_are_refused(
    src_starts, dst_starts, src_blocks, order, how
):
    dst_blocks = list(order)[: len(src_blocks)]
    plan = kvplan.plan(
        Transfer(Rows(DESC, src_blocks), Rows(DESC, dst_blocks), coalesce=how), local="dst"
    )
    heap = np.random.default_rng(0).integers(0, 256, HEAP, dtype=np.uint8)
    before = heap.copy()
    src, dst = ([heap[at : at + NBYTES] for at in side] for side in (src_starts, dst_starts))
    copies = [
        (s + ROW * a, d + ROW * b)
        for s, d in zip(src_starts, dst_starts, strict=True)
        for a, b in zip(src_blocks, dst_blocks, strict=True)
    ]
    said = ""
    try:
        kvplan.execute(plan, src, dst)
    except LLMException as error:
        said = str(error)
    accepted = not said
    assert accepted or "overlap in memory" in said
    # Merged rows are one copy, which must not write the bytes that it reads.
    if len(plan.part.segments) == len(src_blocks):
        assert accepted == is_order_free(copies)
    expected = before.copy()
    if accepted:
        assert is_order_free(copies)
        for s, d in copies:
            expected[d : d + ROW] = before[s : s + ROW]
    np.testing.assert_array_equal(heap, expected)


@pytest.mark.parametrize("axes", ["block kv token head dim", "block layer token head dim"])
def test_a_tensor_given_twice_is_refused_if_one_side_is_split(axes):
    """Keys and values, or two layers, go to two tensors, which are the same by mistake."""
    shard = Shard(range(2), None, 2) if "layer" in axes else Shard(range(1), None, 1)
    src = CacheDesc(1, (3, 2, 4, 2, 8), DataType.DT_UINT8, kv_tensor_format=axes, shard=shard)
    dst = CacheDesc(2, (3, 4, 2, 8), DataType.DT_UINT8, kv_tensor_format="NHD", shard=shard)
    plan = kvplan.plan(Transfer(Rows(src, [0, 2]), Rows(dst, [1, 0])), local="dst")
    assert plan.part.split
    source, one, two = (np.zeros(value, np.uint8) for value in (src.shape, dst.shape, dst.shape))
    kvplan.execute(plan, [source], [one, two])
    with refused("LLM_PARAM_INVALID", "dst tensors overlap in memory: .* write the same bytes"):
        kvplan.execute(plan, [source], [one, one])
    # A tensor that is only read may be given twice.
    back = kvplan.plan(Transfer(Rows(dst, [0, 2]), Rows(src, [1, 0])), local="dst")
    kvplan.execute(back, [one, one], [source])


@pytest.mark.parametrize(("blocks", "accepted"), [([1], True), ([0], False)])
@pytest.mark.parametrize("swapped", [False, True])
def test_groups_that_share_a_tensor_by_ranges_of_layers_write_it_once(
    blocks: list[int], accepted: bool, swapped: bool
) -> None:
    """The shared tensor is the second of one group, and the first of the other."""
    one = kvplan.KvCacheExtParam(tensor_num_per_layer=1)
    last, first = (replace(one, dst_layer_range=range(number, number + 1)) for number in (1, 0))
    layer = CacheDesc(1, (ROWS, ROW), DataType.DT_UINT8)
    plans = {
        "last": kvplan.plan(Transfer(Rows(layer, [0]), Rows(DESC, [0]), layers=last), local="dst"),
        "first": kvplan.plan(
            Transfer(Rows(layer, [0]), Rows(DESC, blocks), layers=first), local="dst"
        ),
    }
    unused, shared, other = (np.zeros(DESC.shape, np.uint8) for _ in range(3))
    sources = {
        "last": np.full(layer.shape, 7, np.uint8),
        "first": np.full(layer.shape, 9, np.uint8),
    }
    targets = {"last": [unused, shared], "first": [shared, other]}
    names = sorted(plans, reverse=swapped)
    plan = joined({name: plans[name] for name in names})
    arguments = (
        [sources[name] for name in names],
        [array for name in names for array in targets[name]],
    )
    if not accepted:
        with refused("LLM_PARAM_INVALID", "write the same bytes"):
            kvplan.execute(plan, *arguments)
        assert not shared.any()
        return
    kvplan.execute(plan, *arguments)
    assert shared.max(axis=1).tolist() == [7, 9, 0]
    assert not unused.any()
    assert not other.any()


@pytest.mark.parametrize(("block", "accepted"), [(2, True), (3, False)])
@pytest.mark.parametrize("swapped", [False, True])
def test_overlaps_are_found_behind_a_group_with_a_part_of_the_tensor(
    block: int, accepted: bool, swapped: bool
) -> None:
    """Three caches share four rows: all of them, the first two, and the last two."""
    heap = np.zeros((4, ROW), np.uint8)
    targets = {"all": heap, "first": heap[:2], "last": heap[2:]}
    blocks = {"all": block, "first": 0, "last": 1}
    source = CacheDesc(1, (1, ROW), DataType.DT_UINT8)
    names = sorted(targets, reverse=swapped)
    plan = joined(
        {
            name: kvplan.plan(
                Transfer(
                    Rows(source, [0]),
                    Rows(CacheDesc(1, targets[name].shape, DataType.DT_UINT8), [blocks[name]]),
                ),
                local="dst",
            )
            for name in names
        }
    )
    arguments = [np.ones((1, ROW), np.uint8)] * 3, [targets[name] for name in names]
    if accepted:
        kvplan.execute(plan, *arguments)
        assert heap.min(axis=1).tolist() == [1, 0, 1, 1]
        return
    with refused("LLM_PARAM_INVALID", "write the same bytes"):
        kvplan.execute(plan, *arguments)
    assert not heap.any()


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),  # rows
            st.integers(1, ROW),  # bytes of a row
            st.sampled_from([ROW, 2 * ROW]),  # bytes from one row to the next
            st.lists(st.integers(0, 40), min_size=1, max_size=3),  # addresses
        ),
        min_size=1,
        max_size=3,
    )
)
@example([(6, 2, 8, [0]), (2, 2, 8, [2, 32])])  # one lies between rows, the next one in a row
def test_tensors_are_apart_only_if_no_two_rows_share_a_byte(
    caches: list[tuple[int, int, int, list[int]]],
) -> None:
    descs = [
        CacheDesc(len(starts), (rows, nbytes), DataType.DT_UINT8, row_stride=stride)
        for rows, nbytes, stride, starts in caches
    ]
    used = [
        start + row * stride + byte
        for rows, nbytes, stride, starts in caches
        for start in starts
        for row in range(rows)
        for byte in range(nbytes)
    ]
    addresses = np.array([start for *_, starts in caches for start in starts], np.uint64)
    if are_apart(addresses, descs, [desc.num_tensors for desc in descs]):
        assert len({*used}) == len(used)


TWO_STARTS = st.lists(st.sampled_from([0, 6, 12, 24, 36]), min_size=TENSORS, max_size=TENSORS)
GROUPS = st.lists(
    st.tuples(
        TWO_STARTS,
        TWO_STARTS,
        st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=2),
        st.permutations(range(ROWS)),
    ),
    min_size=1,
    max_size=3,
)


@given(GROUPS, st.booleans())
@example(  # two groups that share both tensors of dst, and write different blocks of them
    [([0, 12], [24, 36], [0], [0, 1, 2]), ([0, 12], [24, 36], [1], [2, 1, 0])], False
)
def test_groups_are_refused_if_all_their_copies_would_be(
    drawn: list[tuple[list[int], list[int], list[int], list[int]]], apart: bool
) -> None:
    """The copies of all groups count together; with `apart`, the source is separate memory."""
    heap = np.random.default_rng(0).integers(0, 256, HEAP, dtype=np.uint8)
    other = np.random.default_rng(1).integers(0, 256, HEAP, dtype=np.uint8)
    from_ = other if apart else heap
    plans, src, dst, copies = {}, [], [], []
    for number, (src_starts, dst_starts, src_blocks, order) in enumerate(drawn):
        dst_blocks = order[: len(src_blocks)]
        plans[str(number)] = kvplan.plan(
            Transfer(Rows(DESC, src_blocks), Rows(DESC, dst_blocks)), local="dst"
        )
        src += [from_[at : at + NBYTES] for at in src_starts]
        dst += [heap[at : at + NBYTES] for at in dst_starts]
        copies += [
            (s + ROW * a + (HEAP if apart else 0), d + ROW * b)
            for s, d in zip(src_starts, dst_starts, strict=True)
            for a, b in zip(src_blocks, dst_blocks, strict=True)
        ]
    before = heap.copy()
    said = ""
    try:
        kvplan.execute(joined(plans), src, dst)
    except LLMException as error:
        said = str(error)
    assert bool(said) is not is_order_free(copies)
    if said:
        assert "overlap in memory" in said
        assert (heap == before).all()
    else:
        wanted = before.copy()
        for s, d in copies:
            origin = other if apart else before
            wanted[d : d + ROW] = origin[s % HEAP : s % HEAP + ROW]
        assert (heap == wanted).all()
