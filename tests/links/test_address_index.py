"""Caches found by addresses, compared with a search byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvplan.links.address_index import AddressIndex, Extent
from tests.support.refusals import refused

extents = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 25)), max_size=7)
ranges = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 40)), min_size=1, max_size=8)


def column(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


@given(extents=extents, ranges=ranges)
@example(extents=[(1, 10), (3, 20)], ranges=[(1, 20)])  # the second ends later
@example(extents=[(1, 20), (3, 10)], ranges=[(1, 20)])  # the second lies inside of the first
@example(extents=[(5, 1), (1, 10), (10, 1)], ranges=[(5, 6)])  # a last byte is a whole extent
@example(extents=[(1, 10), (11, 10)], ranges=[(5, 12), (15, 6)])  # only the first range goes on
def test_ranges_are_cut_where_they_pass_from_one_to_the_next(
    extents: list[tuple[int, int]], ranges: list[tuple[int, int]]
) -> None:
    index = AddressIndex("it", [Extent(a, n, i, 0) for i, (a, n) in enumerate(extents)])
    held = {byte for a, n in extents for byte in range(a, a + n)}
    starts, nbytes = (column(*numbers) for numbers in zip(*ranges, strict=True))
    missing = [byte for a, n in ranges for byte in range(a, a + n) if byte not in held]
    if missing:
        with refused("LLM_KV_CACHE_NOT_EXIST", r"side range \d, \[0x"):
            index.cut("side", starts, starts + np.uint64(1000), nbytes)
        return
    cut = index.cut("side", starts, starts + np.uint64(1000), nbytes)
    assert (cut.others - cut.starts == 1000).all()
    assert cut.nbytes.all()
    found = sorted(
        (byte, index.extents[int(number)].cache)
        for number, start, size in zip(cut.extents, cut.starts, cut.nbytes, strict=True)
        for byte in range(int(start), int(start + size))
    )
    assert [byte for byte, _ in found] == sorted(b for a, n in ranges for b in range(a, a + n))
    for byte, i in found:
        reaching = [a + n for a, n in extents if a <= byte < a + n]
        assert extents[i][0] <= byte < sum(extents[i])
        assert sum(extents[i]) == max(reaching)


def test_the_end_of_the_address_space() -> None:
    index = AddressIndex("it", [Extent(2**64 - 8, 8, "last", 0)])
    last = column(2**64 - 8)
    assert index.cut("side", last, last, column(8)).nbytes.tolist() == [8]


@pytest.mark.parametrize(("address", "where"), [(90, "10 bytes below"), (150, "1 byte above")])
def test_the_nearest_is_named(address: int, where: str) -> None:
    index = AddressIndex("it", [Extent(100, 50, "a", 0), Extent(1000, 50, "b", 0)])
    with refused("LLM_KV_CACHE_NOT_EXIST", rf"\[0x64, 0x96\), and the byte is {where}"):
        index.cut("side", column(address), column(1), column(5))
