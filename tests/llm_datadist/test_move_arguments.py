"""Block tables: long ones become arrays, under the rules of short ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvplan.llm_datadist.conversion import indices_of, last_wins, table_of

LENGTHS = (3, 64, 500)


class Block(int):
    pass


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_table_has_the_given_blocks(length: int, kind: type) -> None:
    for blocks in (range(length), [2**63 - 1] * length, [2**64 - 1] * length):
        assert list(table_of("blocks", kind(blocks))) == list(blocks)
    mixed = [Block(7), *range(length)]
    assert list(table_of("blocks", kind(mixed))) == [7, *range(length)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "wrong", [-1, -(2**63), 2**64, 1.0, None, "1", True, np.int64(1), [1]], ids=repr
)
def test_one_wrong_block_is_refused(length: int, wrong: Any) -> None:
    for take in (indices_of, table_of):
        with pytest.raises(TypeError, match="blocks"):
            take("blocks", [*range(length), wrong])


@pytest.mark.parametrize(
    "wrong",
    [range(99), np.arange(99), "1" * 99, {1: 2}, iter([1])],
    ids=lambda value: type(value).__name__,
)
def test_only_lists_and_tuples_are_tables(wrong: Any) -> None:
    with pytest.raises(TypeError, match="blocks"):
        table_of("blocks", wrong)
    assert table_of("blocks", None) == table_of("blocks", ()) == []


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("far", [0, 2**40, 2**63 - 1, 2**64 - 1])
def test_the_last_source_of_a_repeated_destination_wins(length: int, far: int) -> None:
    src, dst = [*range(length)], [far, *range(1, length)]
    taken = last_wins(table_of("src", src), table_of("dst", dst))
    assert [list(item) for item in taken] == [src, dst]
    src, dst = [*src, length], [*dst, far]
    source_of = dict(zip(dst, src, strict=True))
    for pair_of_tables in ((table_of("src", src), table_of("dst", dst)), (src, dst)):
        remaining = zip(*last_wins(*pair_of_tables), strict=True)
        assert {int(to): int(block) for block, to in remaining} == source_of
    assert last_wins([1, 2], [3]) == ([1, 2], [3])
