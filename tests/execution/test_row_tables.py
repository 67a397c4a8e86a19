"""Block tables of whole rows: those that are lowered, and those that are left to the planner."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvnative._process import Peer
from kvnative._rows import RowLowering
from kvplan import Rows, Transfer
from kvplan.execution.binding import bind
from kvplan.execution.rows import RowRequests
from tests.execution.row_requests import ROW, cache, columns, forms
from tests.native.writers import Here
from tests.support.plans import lower_natively

HOSTILE = [-1, -(2**63), 2**63 - 1, 2**63, 2**64, 10**30, 2**31, True]


@given(
    st.integers(1, 200), st.integers(1, 200), st.booleans(),
    st.sampled_from([1, 8, 2**31, 2**32 - 1]), st.sampled_from([0, 1, 2, 24, 25, 63, 64, 65, 90]),
    st.randoms(use_true_random=False), st.sampled_from([0, 0, 1, 3]), forms,
)  # fmt: skip
def test_hostile_block_tables_are_left_to_the_planner(
    src_count: int, dst_count: int, is_one: bool, stride: int, count: int, random: Random,
    wrong: int, form: Any,
) -> None:  # fmt: skip
    """Tables have few or many rows; the sides may be one cache, or differ in their sizes."""
    src_rows: list[int] = [random.randrange(src_count) for _ in range(count)]
    dst_rows = random.sample(range(max(count, dst_count)), count)
    if is_one and random.random() < 0.8:
        src_rows = [row for row in src_rows if row not in dst_rows] or src_rows
        dst_rows = dst_rows[: len(src_rows)]
    for _ in range(min(wrong, count)):
        table = random.choice([src_rows, dst_rows])
        if table:
            value = random.choice([*HOSTILE, src_count, dst_count, *src_rows, *dst_rows])
            table[random.randrange(len(table))] = value
    bases = np.array([1 << 40], np.uint64), np.array([1 << 50], np.uint64)
    sides = [(item, 1, stride, stride, 0, False) for item in (src_count, dst_count)]
    nbytes = src_count * stride, dst_count * stride
    lowers = RowLowering(*bases, *sides, stride, (), None, *nbytes, is_one, True)
    good = (
        len(src_rows) > 0
        and all(type(row) is int and 0 <= row < src_count for row in src_rows)
        and all(type(row) is int and 0 <= row < dst_count for row in dst_rows)
        and len({*dst_rows}) == len(dst_rows)
        and not (is_one and {*src_rows} & {*dst_rows})
    )
    with suppress(OverflowError):  # larger than any array
        src_rows, dst_rows = form(src_rows), form(dst_rows)
    found = lowers.lower(src_rows, dst_rows)
    if type(src_rows) is not np.ndarray:
        assert (found is not None) is good
    if found is not None and good:
        assert found[1] == len(src_rows)
        read = [
            (src + at, dst + at)
            for src, dst, nbytes in zip(*columns(found[0]), strict=True)
            for at in range(0, nbytes, stride)
        ]
        assert read == [
            ((1 << 40) + src * stride, (1 << 50) + dst * stride)
            for src, dst in sorted(zip(map(int, src_rows), map(int, dst_rows), strict=True))
        ]


@pytest.mark.parametrize("others", [0, 70], ids=["few", "many"])
def test_exactly_the_conflicting_small_tables_are_left_to_the_planner(
    others: int,
) -> None:
    """The conflicting row may have any position in the table."""
    base = np.array([1 << 40], np.uint64)
    count = 4 + 2 * others
    side = count, 1, 8, 8, 0, False
    nbytes = 8 * count, 8 * count
    inside = RowLowering(base, base, side, side, 8, (), None, *nbytes, is_one=True)
    read, written = range(4, 4 + others), range(4 + others, count)
    for size in (1, 2, 3):
        tables = [*product(range(4), repeat=size)]
        for src, dst in product(tables, tables):
            found = inside.lower([src[0], *read, *src[1:]], [dst[0], *written, *dst[1:]])
            good = len({*dst}) == size and not {*src} & {*dst}
            assert (found is not None) is good, (src, dst)


def test_uninitialized_rows_move_nothing() -> None:
    rows = RowLowering.__new__(RowLowering)
    assert rows.lower([0], [0]) is None
    assert rows.move_now(Peer(os.getpid()), b"", None, {}, 0, None, [0], [0], 1 << 16) == 0


@pytest.mark.parametrize("count", [64, 65, 128, 3000])
def test_only_few_rows_of_each_side_are_moved_at_once(count: int) -> None:
    """The scratch memory is on the stack, so both sides must have few rows."""
    here, peer = Here(), Peer(os.getpid())
    peer.attach(here.generations.fd, here.generations.inode, here.generations.num_slots)
    one, many = (1, count, count, 1, 0, False), (count, 1, 1, 1, 0, False)
    table = [*range(count)]
    for sides, tables in (((one, many), ([0], table)), ((many, one), (table, [0]))):
        rows = RowLowering(*here.sides, *sides, 1, (), None, count, count)
        here.dst[:] = 0
        moved = rows.move_now(
            peer, here.registered, None, {0: here}, 0, here, *tables, 1 << 16, count
        )
        assert moved == here.dst.sum() // 7 == (count if count <= 64 else 0)


ODD = [
    np.array([1, 2], dtype=item)
    for item in ("m8[s]", "M8[s]", ">i8", "f8", "c16", "g", "O", "S8", "U2", "?")
]
ODD += [np.array([(1,), (2,)], dtype=[("a", item)]) for item in ("i8", "m8[s]")]
ODD += [np.ma.array([1, 2], mask=[True, False]), np.array([True, False]), np.ones((2, 1), np.int64)]
if hasattr(np.dtypes, "StringDType"):
    ODD.append(np.array(["1", "2"], dtype=np.dtypes.StringDType()))


@pytest.mark.parametrize("table", ODD, ids=lambda value: str(value.dtype))
def test_an_array_of_other_types_is_left_to_the_planner(table: Any) -> None:
    """Some of these arrays have no buffer."""
    (source, src), (target, dst) = cache(5), cache(4)
    for src_rows, dst_rows in ((table, [1, 2]), ([1, 2], table)):
        arguments = "pull_blocks", "B2B", source, target, src, dst, src_rows, dst_rows
        assert lower_natively(RowRequests(), *arguments) is None


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", "iu")
def test_block_tables_are_arrays_of_integers_of_any_width(kind: str, width: int) -> None:
    (source, src), (target, dst) = cache(200), cache(200)
    there, here = [100, 0, 7, 127], [1, 126, 0, 5]
    tables = [np.array(value, f"{kind}{width}") for value in (there, here)]
    base, one = np.array([1 << 40], np.uint64), (200, 1, ROW, ROW, 0, False)
    direct = RowLowering(base, base, one, one, ROW, (), None, 200 * ROW, 200 * ROW)
    expected = direct.lower(there, here)
    for given_rows in (tables, [np.repeat(table, 3)[::3] for table in tables]):
        found = direct.lower(*given_rows)  # does not copy a table before
        assert found is not None
        assert columns(found[0]) == columns(expected[0])
        arguments = "pull_blocks", "B2B", source, target, src, dst, *given_rows
        bound = lower_natively(RowRequests(), *arguments)
        assert bound is not None
        plan = kvplan.plan(Transfer(Rows(source, there), Rows(target, here)), local="dst")
        assert columns(bound[1]) == columns(bind(plan, src, dst, one_space=True))
        assert bound[0] == plan
    tables[0][1] = np.iinfo(tables[0].dtype).max  # of uint8 255; of uint64 the largest value
    if width != 1 or kind == "u":
        assert lower_natively(RowRequests(), *arguments[:6], *tables) is None
