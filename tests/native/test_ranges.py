"""Ranges that native code sorts, merges and compares, checked against Python."""

from __future__ import annotations

import struct
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvnative._lower import Descriptors
from kvnative._ranges import (
    Pieces,
    TransferOpDesc,
    address_columns,
    choose,
    first_bad,
    first_overlap,
    locate,
    place,
)

numbers = st.one_of(st.integers(0, 40), st.integers(2**63, 2**63 + 40), st.integers(0, 2**64 - 64))
rows = st.lists(st.tuples(numbers, numbers, st.integers(1, 9), st.integers(0, 2)), max_size=300)


def columns(rows: list[tuple[int, ...]], width: int) -> list[np.ndarray]:
    return [np.array([row[i] for row in rows], dtype=np.uint64) for i in range(width)]


def copies(descriptors: Descriptors) -> list[tuple[int, int, int]]:
    """Return source, destination and size of each descriptor."""
    found = (descriptors.src.tolist(), descriptors.dst.tolist(), descriptors.nbytes.tolist())
    return list(zip(*found, strict=True))


@given(rows)
def test_overlaps(given_rows: list[tuple[int, int, int, int]]) -> None:
    starts, nbytes = columns([(a, n) for a, _, n, _ in given_rows], 2)
    found = first_overlap(starts, nbytes)

    def meet(i: int, j: int) -> bool:
        a, b = given_rows[i], given_rows[j]
        return a[0] < b[0] + b[2] and b[0] < a[0] + a[2]

    if found is None:
        assert not any(meet(i, j) for i, j in combinations(range(len(given_rows)), 2))
    else:
        assert found[0] != found[1]
        assert meet(*found)


def test_locate() -> None:
    firsts, lasts = np.array([10, 20, 40], np.uint64), np.array([19, 29, 49], np.uint64)

    def of(*ranges: tuple[int, int]) -> tuple[list[int], int, bool]:
        found, missing, passes = locate(firsts, lasts, *columns([*ranges], 2))
        return found.tolist()[: None if missing < 0 else missing], missing, passes

    assert of((10, 10), (49, 1), (20, 1)) == ([0, 2, 1], -1, False)
    assert of((19, 2)) == ([0], -1, True)
    for order in permutations([(10, 10), (19, 2), (40, 1)]):  # whichever of them passes
        assert of(*order)[1:] == (-1, True)
    assert of((20, 1), (30, 1), (9, 1)) == ([1], 1, False)
    assert of((9, 1)) == ([], 0, False)
    assert of() == ([], -1, False)
    nothing = np.empty(0, np.uint64)
    assert locate(nothing, nothing, *columns([(1, 1)], 2))[1] == 0


OWN = Pieces(*columns([(10, 19), (20, 29), (40, 49)], 2), None, 3)
PEER = Pieces(*columns([(100, 139), (140, 199), (200, 299)], 2), *columns([(1,), (0,), (1,)], 1), 2)


def test_placed_ranges_are_those_of_single_searches() -> None:
    given_rows = [(41, 210, 3), (10, 100, 4), (25, 150, 5), (14, 104, 2), (44, 213, 1)]
    found = place(OWN, PEER, *columns(given_rows, 3), True)
    assert found is not None
    descriptors, parts, pairs, clash = found
    # Adjacent ones are merged.
    assert copies(descriptors) == [(100, 10, 6), (150, 25, 5), (210, 41, 4)]
    assert parts == [(0, 1, 0), (1, 0, 1), (2, 1, 2)]
    assert pairs is not None
    assert [divmod(pair, 2) for pair in pairs.tolist()] == [(2, 1), (0, 1), (1, 0), (0, 1), (2, 1)]
    assert clash is None
    pushed = place(OWN, PEER, *columns([(45, 205, 1), (41, 210, 3)], 3), False)
    assert pushed is not None
    assert copies(pushed[0]) == [(41, 210, 3), (45, 205, 1)]
    assert pushed[1:] == ([(2, 1, 0)], None, None)


@pytest.mark.parametrize("pulls", [True, False])
@given(st.lists(st.tuples(st.integers(1, 59), numbers.filter(bool), st.integers(1, 9)), min_size=1))
@example([(10, 110, 5), (15, 115, 5), (20, 120, 5)])  # continue within a piece, and into the next
def test_placed_ranges_are_sorted_and_merged(
    pulls: bool, given_rows: list[tuple[int, int, int]]
) -> None:
    """They are sorted by local extent and source, even if they cross several local extents."""
    firsts = np.array([0, 20, 40], np.uint64)
    own = Pieces(firsts, firsts + np.uint64(19), None, 3)
    peer = Pieces(*columns([(0, 2**64 - 1)], 2), None, 1)
    inside = [(a, b, min(n, 20 - a % 20)) for a, b, n in given_rows]
    found = place(own, peer, *columns(inside, 3), pulls)
    assert found is not None
    wanted = [(a // 20, *((b, a) if pulls else (a, b)), n) for a, b, n in inside]
    merged: list[list[int]] = []
    for copy in sorted(wanted, key=lambda copy: copy[:2]):
        if merged and merged[-1][0] == copy[0]:
            last = merged[-1]
            if (last[1] + last[3], last[2] + last[3]) == copy[1:3]:
                last[3] += copy[3]
                continue
        merged.append([*copy])
    assert copies(found[0]) == [tuple(row[1:]) for row in merged]
    assert found[0].total_nbytes == sum(row[3] for row in merged)
    extents = [row[0] for row in merged]
    assert found[1] == [(each, 0, extents.index(each)) for each in sorted({*extents})]


@pytest.mark.parametrize("left", [1, 8, 9, 17])
def test_each_column_is_whole_however_many_ranges_are_merged(left: int) -> None:
    whole = Pieces(*columns([(0, 2**64 - 1)], 2), None, 1)
    for count in range(left, 70):
        runs = [left * i // count for i in range(count)]
        given_rows = [(1 + i + 100 * run, 10_001 + i + 100 * run, 1) for i, run in enumerate(runs)]
        found = place(whole, whole, *columns(given_rows, 3), True)
        assert found is not None
        starts = [runs.index(run) + 100 * run + 1 for run in range(left)]
        wanted = [(start + 10_000, start, runs.count(run)) for run, start in enumerate(starts)]
        assert copies(found[0]) == wanted


def test_ranges_that_cannot_be_placed() -> None:
    for local, remote, nbytes in (
        (9, 100, 1),
        (15, 100, 6),
        (30, 100, 1),
        (40, 99, 1),
        (40, 139, 2),
    ):
        assert place(OWN, PEER, *columns([(10, 100, 1), (local, remote, nbytes)], 3), True) is None
    both = place(OWN, PEER, *columns([(10, 100, 4), (13, 120, 2)], 3), True)
    assert both is not None
    assert both[3] == (0, 1)
    apart = place(OWN, PEER, *columns([(10, 100, 4), (13, 120, 2)], 3), False)
    assert apart is not None
    assert apart[3] is None
    with pytest.raises(ValueError, match="at least 1 range"):
        place(OWN, PEER, *columns([], 3), True)
    with pytest.raises(ValueError, match="range 1 was written to since it was checked"):
        place(OWN, PEER, *columns([(10, 100, 4), (14, 104, 0)], 3), True)


def test_the_first_impossible_range_is_found() -> None:
    for bad in ((1, 1, 0), (0, 1, 1), (1, 0, 1), (2**64 - 1, 1, 2), (1, 2**64 - 1, 2)):
        assert first_bad(*columns([(1, 1, 1), bad, (0, 0, 0)], 3)) == 1
    assert first_bad(*columns([(2**64 - 1, 1, 1), (1, 2**64 - 5, 5)], 3)) == -1


def of_3(*rows: tuple[int, int]) -> np.ndarray:
    return np.array([(*row, 0) for row in rows], np.uint64)


def test_chosen_rows() -> None:
    local, remote = of_3((10, 4), (20, 5)), of_3((70, 5), (80, 4), (90, 5))
    found = choose(local, remote, *columns([(1, 2), (0, 1), (1, 0)], 2))
    assert [column.tolist() for column in found[:3]] == [[20, 10, 20], [90, 80, 70], [5, 4, 5]]
    assert found[3:] == (14, -1)
    for wrong in ((0, 0), (2, 0), (0, 3), (2**64 - 1, 0)):
        assert choose(local, remote, *columns([(1, 0), wrong], 2))[4] == 1
    whole = choose(local, local)
    assert (whole[0].tolist(), whole[3:]) == ([10, 20], (9, -1))
    assert choose(local[:0], local[:0])[3:] == (0, -1)
    (one,) = columns([(0,)], 1)
    for one_sided in ((None, one), (one, None)):
        with pytest.raises(TypeError, match="or None twice"):
            choose(local, remote, *one_sided)
    with pytest.raises(ValueError, match="remote: expected 2 rows"):
        choose(local, remote)
    with pytest.raises(ValueError, match="remote: expected 1 rows or indices"):
        choose(local, remote, one, columns([(0,), (0,)], 1)[0])


@pytest.mark.parametrize("kind", "bBhHiIlLqQ")
def test_indices_of_every_width(kind: str) -> None:
    """Columns may be strided or unaligned. A negative index is beyond every list."""
    local, remote = of_3((10, 4), (20, 5)), of_3((70, 5), (80, 4), (90, 5))
    table = np.zeros(4, np.dtype([("pad", "u1"), ("at", kind)]))
    table["at"] = [1, 0, 1, 0]
    ours, theirs = table["at"][:3], np.array([2, 1, 0], kind)[::-1]
    found = choose(local, remote, ours, theirs)
    assert [column.tolist() for column in found[:3]] == [[20, 10, 20], [70, 80, 90], [5, 4, 5]]
    last = np.array([2**15 if kind == "H" else -1 if kind.islower() else 2**8 - 1]).astype(kind)
    assert choose(local, remote, last, theirs[:1])[4] == 0
    assert choose(local, remote, ours[:0], theirs[:0])[3:] == (0, -1)


@pytest.mark.parametrize("kind", ["?", "e", "d", "D", ">i4", "S1"])
def test_values_that_are_not_indices(kind: str) -> None:
    rows = of_3((10, 4))
    with pytest.raises(TypeError, match="remote_indices has items of format"):
        choose(rows, rows, np.zeros(1, np.int8), np.zeros(1, kind))


def test_values_that_are_not_rows() -> None:
    rows = of_3((10, 4), (20, 5))
    for wrong in (rows.astype(np.int64), rows[:, :2], rows.reshape(-1), rows[::-1]):
        with pytest.raises(TypeError, match="remote: expected a contiguous array of uint64"):
            choose(rows, wrong)
    with pytest.raises(ValueError, match="local_indices has 2 dimensions; it must have 1"):
        choose(rows, rows, np.zeros((1, 1), np.int8), np.zeros(1, np.int8))


def test_columns_of_objects() -> None:
    descs = [TransferOpDesc(i, 2**64 - 1 - i, 3 * i) for i in range(100)]
    found = address_columns(descs)
    assert [entry.tolist() for entry in found] == [
        [getattr(desc, name) for desc in descs] for name in ("local_addr", "remote_addr", "len")
    ]
    assert [len(column) for column in address_columns(())] == [0, 0, 0]

    class Derived(TransferOpDesc):
        pass

    assert address_columns([Derived(1, 2, 3)])[2].tolist() == [3]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda value: place(OWN, PEER, value, value, value[:1], True), ValueError),
        (lambda value: place(OWN, PEER, value, value, value.astype(np.int64), True), TypeError),
        (lambda value: first_overlap(value, value[:1]), ValueError),
        (lambda value: first_overlap(value, [1, 2]), TypeError),
        (lambda value: locate(value, value[:1], value, value), ValueError),
        (lambda value: locate(value, value, value, value[:1]), ValueError),
        (lambda value: address_columns([TransferOpDesc(1, 2, 3), value]), TypeError),
        (lambda value: address_columns(iter(())), TypeError),
    ],
)
def test_wrong_arguments_are_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(np.array([1, 2], np.uint64))


def view(letter: str, *shape: int) -> memoryview:
    size = int(np.prod(shape)) * struct.calcsize(letter)
    return memoryview(bytearray(size)).cast("B").cast(letter, shape)


COLUMN = ("Q", 2), [("d", 2), ("Q", 1, 2), ("Q", 1)]
ROWS = ("Q", 2, 3), [("d", 2, 3), ("Q", 6)]
INDICES = ("i", 2), [("d", 2), ("i", 1, 2), ("i", 1)]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (first_bad, [COLUMN] * 3),
        (first_overlap, [COLUMN] * 2),
        (locate, [COLUMN] * 4),
        (choose, [ROWS, ROWS, INDICES, INDICES]),
    ],
)
def test_a_refused_call_holds_no_argument(call: Any, arguments: list[Any]) -> None:
    for at, (_, refused) in enumerate(arguments):
        for wrong in refused:
            views = [view(*right) for right, _ in arguments]
            views[at] = view(*wrong)
            with pytest.raises((TypeError, ValueError)):
                call(*views)
            for held in views:
                held.release()  # raises while a call holds the memory
