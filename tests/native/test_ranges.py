"""Ranges put in order, merged and compared natively: against the same in Python."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvnative._ranges import TransferOpDesc, address_columns, arrange, first_overlap, locate

numbers = st.one_of(st.integers(0, 40), st.integers(2**63, 2**63 + 40), st.integers(0, 2**64 - 64))
rows = st.lists(st.tuples(numbers, numbers, st.integers(1, 9), st.integers(0, 2)), max_size=300)


def columns(rows: list[tuple[int, ...]], width: int) -> list[np.ndarray]:
    return [np.array([row[i] for row in rows], dtype=np.uint64) for i in range(width)]


@given(rows)
@example([(0, 10, 5, 0), (5, 15, 5, 1), (10, 20, 5, 1)])  # go on across groups, and within one
def test_arrange(given_rows: list[tuple[int, int, int, int]]) -> None:
    src, dst, nbytes, groups = columns(given_rows, 4)
    found = arrange(src, dst, nbytes, groups)
    merged: list[list[int]] = []
    for a, b, n, g in sorted(given_rows, key=lambda given_row: (given_row[3], given_row[0])):
        if merged and merged[-1][3] == g:
            last = merged[-1]
            if (last[0] + last[2], last[1] + last[2]) == (a, b):
                last[2] += n
                continue
        merged.append([a, b, n, g])
    assert [
        list(column) for column in zip(*(entry.tolist() for entry in found), strict=True)
    ] == merged
    alone = arrange(src, dst, nbytes)
    assert alone[3] is None
    assert int(alone[2].sum()) == int(nbytes.sum())


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
        (lambda value: arrange(value, value, value[:1]), ValueError),
        (lambda value: arrange(value, value, value, value[:1]), ValueError),
        (lambda value: arrange(value, value, value.astype(np.int64)), TypeError),
        (lambda value: first_overlap(value, value[:1]), ValueError),
        (lambda value: first_overlap(value, [1, 2]), TypeError),
        (lambda value: locate(value, value[:1], value, value), ValueError),
        (lambda value: locate(value, value, value, value[:1]), ValueError),
        (lambda value: address_columns([TransferOpDesc(1, 2, 3), value]), TypeError),
        (lambda value: address_columns(iter(())), TypeError),
    ],
)
def test_misuse(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(np.array([1, 2], np.uint64))
