"""Values that are block tables, and values that are refused instead of guessed."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, DataType, LLMException, Plan, Rows, Transfer
from kvplan.planning.blocks import is_empty, sorted_pairs

DESC = CacheDesc(2, (8, 4), DataType.DT_INT8)


class Block(IntEnum):
    FIRST = 5
    SECOND = 2


class Lying(Sequence[int]):
    """A sequence whose length is smaller than its number of elements."""

    def __init__(self, *blocks: int) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return 1

    def __getitem__(self, position: Any) -> Any:
        return self.blocks[position]


class Scalar:
    """A tensor of one element, as some libraries have it: an index, and readable by NumPy."""

    def __init__(self, value: int | bool) -> None:
        self.value = value

    def __index__(self) -> int:
        return int(self.value)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray[Any, Any]:
        return np.array(self.value)


def plan(src_blocks: Any, dst_blocks: Any = (0, 1)) -> Plan:
    return kvplan.plan(Transfer(Rows(DESC, src_blocks), Rows(DESC, dst_blocks)), local="dst")


INTEGER_TYPES = [
    f"{order}{kind}{width}" for order in "<>" for kind in "iu" for width in (1, 2, 4, 8)
]

SAME: list[Any] = [
    [5, 2],
    (5, 2),
    range(5, -1, -3),
    [np.int8(5), np.uint64(2)],
    [5, np.int64(2)],
    list(Block),
    deque([5, 2]),
    array("q", [5, 2]),
    *(np.array([5, 2], dtype=kind) for kind in INTEGER_TYPES),
    Lying(5, 2),
    [Scalar(5), 2],
    [np.array(5), 2],
    np.array([5, 9, 2, 9])[::2],
    np.array([2, 5])[::-1],
    np.array([[5, 9], [2, 9]])[:, 0],
    np.array([5, 2]).view(np.ndarray),
    np.ma.array([5, 2]),
    np.broadcast_to(np.array([5, 2]), (1, 2))[0],
]


def without_address(value: object) -> str:
    """Return the repr without addresses, so that all processes agree on the names of tests."""
    return repr(value).split(" at 0x")[0]


@pytest.mark.parametrize("blocks", SAME, ids=without_address)
def test_every_kind_of_integers_is_the_same_table(blocks: Any) -> None:
    expected = plan([5, 2])
    assert plan(blocks) == expected
    assert kvplan.plan(
        Transfer(Rows(DESC, [0, 1]), Rows(DESC, blocks)), local="dst"
    ) == kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [5, 2])), local="dst")
    for column in (expected.part.segments.src_offsets, plan(blocks).part.segments.src_offsets):
        assert column.flags.c_contiguous
        assert column.dtype == np.uint64


NOT_A_TABLE: list[Any] = [
    5,
    5.0,
    "52",
    b"\x05\x02",
    bytearray(b"\x05\x02"),
    "",
    b"",
    {5, 2},
    set(),
    {5: 2},
    {},
    iter([5, 2]),
    (block for block in (5, 2)),
    [5.0, 2],
    [5, None],
    ["5", "2"],
    [[5], [2]],
    [5, [2]],
    [(5, 2)],
    [5, 2j],
    [True, False],
    [5, True],
    [5, False],
    [np.True_, 2],
    [5, Scalar(True)],
    [np.array(True), np.array(False)],
    [np.array([5]), 2],
    [np.array([5]), np.array([2])],
    [5, object()],
    [2**64, "2"],
    [2**64, 2.0],
    np.array(5),
    np.array([[5, 2]]),
    np.empty((0, 2), dtype=int),
    np.array([5.0, 2.0]),
    np.array([True, False]),
    np.array(["5", "2"]),
    np.array([5, 2], dtype=object),
    np.array([5, 2], dtype="m8[s]"),
    np.array([(5,), (2,)], dtype=[("block", int)]),
]


@pytest.mark.parametrize("blocks", NOT_A_TABLE, ids=without_address)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_value_that_is_not_a_sequence_of_integers_is_named(side: str, blocks: Any) -> None:
    tables = {"src": [0, 1], "dst": [0, 1]} | {side: blocks}
    with pytest.raises(TypeError, match=rf"{side}\.blocks"):
        plan(*tables.values())


OUT_OF_RANGE: list[tuple[Any, int]] = [
    (np.array([0, -1], dtype=np.int8), -1),
    (np.array([0, 8], dtype=np.uint8), 8),
    (np.array([0, 2**63], dtype=np.uint64), 2**63),
    (np.array([0, 2**64 - 1], dtype=np.uint64), 2**64 - 1),
    (np.array([0, -(2**63)], dtype=">i8"), -(2**63)),
    (np.ma.array([0, 9], mask=[False, True]), 9),
    ([0, 2**63], 2**63),
    ([0, 2**64], 2**64),
    ([0, -(2**100)], -(2**100)),
    (range(0, 16, 8), 8),
    ([0, np.uint64(2**63)], 2**63),
]


@pytest.mark.parametrize(("blocks", "value"), OUT_OF_RANGE, ids=repr)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_an_index_out_of_range_is_named_in_any_kind_of_table(
    side: str, blocks: Any, value: int
) -> None:
    tables = {"src": [0, 1], "dst": [0, 1]} | {side: blocks}
    with pytest.raises(LLMException) as raised:
        plan(*tables.values())
    assert f"{side}.blocks[1]={value} is out of range [0, 8)" in str(raised.value)

    # A table of one block is checked without NumPy's reductions.
    alone = {"src": [0], "dst": [0]} | {side: blocks[1:]}
    with pytest.raises(LLMException) as raised:
        plan(*alone.values())
    assert f"{side}.blocks[0]={value} is out of range [0, 8)" in str(raised.value)


@given(st.lists(st.integers(-3, 12), min_size=1, max_size=6))
def test_a_source_table_is_accepted_if_and_only_if_it_is_in_range(blocks: list[int]) -> None:
    in_range = all(0 <= block < 8 for block in blocks)
    kinds: list[Callable[[list[int]], Any]] = [list, tuple, np.array]
    for kind in kinds:
        if in_range:
            assert plan(kind(blocks), range(len(blocks))).part.num_slices == len(blocks)
            continue
        with pytest.raises(LLMException) as raised:
            plan(kind(blocks), range(len(blocks)))
        position = next(i for i, block in enumerate(blocks) if not 0 <= block < 8)
        assert f"src.blocks[{position}]={blocks[position]} " in str(raised.value)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=10), st.booleans())
def test_a_destination_table_is_accepted_if_and_only_if_it_is_distinct(
    blocks: list[int], large: bool
) -> None:
    # A large cache takes another way of counting.
    desc = CacheDesc(2, (100_000 if large else 8, 4), DataType.DT_INT8)
    sources = [0] * len(blocks)
    if len(set(blocks)) == len(blocks):
        assert kvplan.plan(
            Transfer(Rows(desc, sources), Rows(desc, blocks)), local="dst"
        ).part.num_slices == len(blocks)
        return
    with pytest.raises(LLMException) as raised:
        kvplan.plan(Transfer(Rows(desc, sources), Rows(desc, blocks)), local="dst")
    message = str(raised.value)
    pairs = [(i, j) for j in range(len(blocks)) for i in range(j) if blocks[i] == blocks[j]]
    assert any(
        f"dst.blocks[{j}]={blocks[j]} is already dst.blocks[{i}]" in message for i, j in pairs
    )


def test_a_plan_does_not_change_with_the_callers_table() -> None:
    src, dst = np.array([5, 2]), np.array([0, 1])
    made = plan(src, dst)
    before = made.to_dict()
    src[:] = 7
    dst[:] = 7
    assert made.to_dict() == before == plan([5, 2], [0, 1]).to_dict()


def test_a_source_without_blocks_is_a_slot() -> None:
    slots = CacheDesc(2, (3, 8), DataType.DT_INT8)
    for nothing in (None, (), [], np.empty(0, dtype=int), np.empty(0)):
        assert (
            kvplan.plan(Transfer(Rows(slots, nothing), Rows(DESC, [3, 1])), local="dst").kind
            == "C2B"
        )


@pytest.mark.parametrize("blocks", [1, 2, 511, 512, 4000])
@pytest.mark.parametrize("count", [4096, 1 << 16, (1 << 16) + 1, 1 << 33])
@pytest.mark.parametrize("repeats", [False, True])
def test_pairs_are_in_order_however_they_are_sorted(blocks: int, count: int, repeats: bool) -> None:
    rng = np.random.default_rng(blocks)
    src = rng.integers(0, count // 8 if repeats else count, blocks)
    dst = rng.permutation(blocks).astype(np.int64)
    found = sorted_pairs(src, dst, count)
    assert [*zip(*found, strict=True)] == sorted(zip(src, dst, strict=True))


@pytest.mark.parametrize("blocks", [None, 5, [0], (0,), np.zeros(1, int), iter([])])
def test_only_a_table_without_blocks_is_empty(blocks: object) -> None:
    assert not is_empty(blocks)
    assert all(map(is_empty, ([], (), np.empty(0, int))))
