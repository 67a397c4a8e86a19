"""Clashes of memory extents, and sizes that are too small, compared with a check byte by byte."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvnative._extents import extents_clash, first_below

TOP = 2**64 - 1

starts = st.lists(st.integers(0, 40), max_size=6)
sizes = st.integers(1, 12)


def u64(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(starts, sizes, starts, sizes, st.sampled_from([0, TOP - 60]))
@example([0, 8], 8, [16], 8, 0)  # adjacent
@example([8, 0], 9, [], 1, 0)  # overlap each other
@example([10], 4, [8, 9], 3, 0)  # overlaps a source; sources may overlap each other
@example([5], 4, [5], 4, 0)  # the same place
def test_a_clash_is_a_byte_that_is_written_and_used_again(dst, dst_nbytes, src, src_nbytes, base):
    written = [byte for start in dst for byte in range(start, start + dst_nbytes)]
    read = {byte for start in src for byte in range(start, start + src_nbytes)}
    clash = len(set(written)) < len(written) or not read.isdisjoint(written)
    given_dst, given_src = (
        u64([base + tensor for tensor in dst]),
        u64([base + tensor for tensor in src]),
    )
    assert extents_clash(given_dst, dst_nbytes, given_src, src_nbytes) is clash
    assert given_dst.tolist() == [base + tensor for tensor in dst]
    assert given_src.tolist() == [base + tensor for tensor in src]


def test_many_extents_in_any_order_and_at_the_top_of_memory():
    order = np.random.default_rng(0).permutation(4000).astype(np.uint64)
    bases = np.uint64(TOP - 4000 * 16 + 1) + order * np.uint64(16)  # the last one ends at 2**64
    dst, src = bases[:2000], bases[2000:]
    assert not extents_clash(dst, 16, src, 16)
    assert extents_clash(dst, 17, src, 16)
    assert extents_clash(dst, 16, src, 17)


@given(st.lists(st.integers(0, TOP), max_size=9), st.integers(0, TOP))
def test_the_first_that_is_too_small(values, least):
    expected = next((i for i, value in enumerate(values) if value < least), -1)
    assert first_below(u64(values), least) == expected


@pytest.mark.parametrize("wrong", [np.zeros(2, np.int64), np.zeros((2, 2), np.uint64)[:, 0], [1]])
def test_only_columns_are_taken(wrong):
    column = u64([1, 2])
    with pytest.raises((TypeError, ValueError), match=r"^values: "):
        first_below(wrong, 1)
    with pytest.raises((TypeError, ValueError), match=r"^dst_bases: "):
        extents_clash(wrong, 1, column, 1)
    with pytest.raises((TypeError, ValueError), match=r"^src_bases: "):
        extents_clash(column, 1, wrong, 1)
