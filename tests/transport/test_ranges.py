"""Ranges are found by bisection; a linear search is the oracle."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.local.metadata import ArenaRef, Range
from kvplan.transport.ranges import RangeTable, sized_tensors
from tests.support.refusals import refused

ARENA = ArenaRef(fd=3, inode=4, address=1, nbytes=100)
ranges = st.builds(
    Range,
    address=st.integers(1, 30),
    nbytes=st.integers(1, 12),
    slot=st.just(0),
    generation=st.just(1),
    writable=st.booleans(),
    arena=st.sampled_from([None, ARENA]),
    allocation=st.none(),
)
tensors = st.tuples(st.integers(0, 45), st.integers(1, 6))


@given(st.lists(ranges, max_size=6), st.lists(tensors, min_size=1, max_size=5), st.booleans())
def test_every_tensor_gets_a_range_that_holds_it(
    offered: list[Range], wanted: list[tuple[int, int]], writable: bool
) -> None:
    holding = [
        [
            range_
            for range_ in offered
            if range_.address <= start and start + size <= range_.address + range_.nbytes
        ]
        for start, size in wanted
    ]
    fitting = [[item for item in them if item.writable or not writable] for them in holding]
    starts, sizes = np.array(wanted, dtype=np.uint64).T.copy()
    try:
        used, which = RangeTable("peer 1", offered).locate(starts, sizes, writable=writable)
    except LLMException as error:
        assert not all(fitting)
        missing = error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        assert missing or any(holding[i] and not fitting[i] for i in range(len(wanted)))
        return
    assert all(fitting)
    assert set(which.tolist()) == set(range(len(used)))
    for k, them in zip(which.tolist(), fitting, strict=True):
        assert used[k] in them
        assert used[k].arena is not None or all(item.arena is None for item in them)


def test_a_range_that_ends_with_the_address_space() -> None:
    last = Range(2**64 - 10, 10, slot=0, generation=1, writable=True, arena=None, allocation=None)
    table = RangeTable("peer 1", [last])
    used, _ = table.locate(
        np.array([2**64 - 1], np.uint64), np.array([1], np.uint64), writable=False
    )
    assert used == [last]


def made(address: int, nbytes: int, *, writable: bool = True) -> Range:
    return Range(address, nbytes, 0, 1, writable, None, None)


def column(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


@pytest.mark.parametrize(
    ("starts", "sizes", "place"),
    [
        ([10, 20, 30], [1, 0, 0], 1),
        ([10, 2**64 - 4, 20], [1, 5, 1], 1),
        ([2**64 - 1, 10], [1, 0], 1),
        ([10, 10], [0, 1], 0),
    ],
)
def test_tensors_that_cannot_exist_are_named(
    starts: list[int], sizes: list[int], place: int
) -> None:
    table = RangeTable("peer 1", [made(1, 100), made(2**64 - 10, 10)])
    address = f"tensor {place} has address {starts[place]:#x} and nbytes {sizes[place]};"
    with refused("LLM_PARAM_INVALID", address):
        table.locate(column(*starts), column(*sizes), writable=False)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 20])
def test_an_address_in_no_range_lists_the_first_ranges(count: int) -> None:
    ranges = [made(100 * i, 10, writable=i % 2 == 0) for i in range(1, 1 + count)]
    text = ", ".join(map(str, ranges[:8])) or "none"
    more = f" and {count - 8} more" if count > 8 else ""
    for address in (99, 111, 100 * count + 10):
        with refused("LLM_KV_CACHE_NOT_EXIST", f"registered: {re.escape(text)}{more} .LLM"):
            RangeTable("peer 1", ranges[::-1]).locate(column(address), column(1), writable=True)


def test_memory_that_is_only_read_is_named() -> None:
    table = RangeTable("peer 1", [made(10, 90), made(200, 10, writable=False)])
    starts, sizes = column(20, 204), column(1, 2)
    used, which = table.locate(starts, sizes, writable=False)
    assert ([each.address for each in used], which.tolist()) == ([10, 200], [0, 1])
    text = r"tensor 1 at address 0xcc cannot be written: peer 1 has registered 0xc8\+10 "
    with refused("LLM_PARAM_INVALID", text):
        table.locate(starts, sizes, writable=True)


def test_of_ranges_that_begin_together_the_best_is_used() -> None:
    """Arenas are preferred, then writable memory, then the shortest that is long enough."""
    long, short = made(10, 90), made(10, 20)
    read_only = made(10, 20, writable=False)
    arena = Range(10, 90, 0, 1, False, ARENA, None)
    orders = [[long, short, read_only], [short, read_only, long], [read_only, long, short]]
    for order in orders:
        used, _ = RangeTable("peer 1", order).locate(column(10), column(5), writable=False)
        assert used == [short]
        for wanted in (True, False):
            used, _ = RangeTable("peer 1", [*order, arena]).locate(
                column(10), column(5), writable=wanted
            )
            assert used[0].writable if wanted else used == [arena]


@pytest.mark.parametrize(
    ("addresses", "nbytes", "sizes"),
    [
        ([1, 2, 3], 5, [5, 5, 5]),
        ((1, 2), [3, 4], [3, 4]),
        (column(7), column(8), [8]),
        (np.array([1, 2], np.int32), np.array([2**63], np.uint64), [2**63, 2**63]),
        ([2**64 - 1], [0], [0]),
    ],
)
def test_sizes_are_one_for_all_or_one_for_each(addresses: Any, nbytes: Any, sizes: Any) -> None:
    starts, found = sized_tensors(addresses, nbytes)
    assert starts.tolist() == [int(address) for address in addresses]
    assert found.tolist() == sizes
    assert starts.dtype == found.dtype == np.uint64
    assert starts is not addresses
    found[0] = 1  # columns of its own, to be changed


@pytest.mark.parametrize(
    ("addresses", "nbytes", "error", "text"),
    [
        ([], 5, LLMException, "addresses has 0 values and nbytes has 1"),
        ([1, 2, 3], [1, 2], LLMException, "addresses has 3 values and nbytes has 2"),
        ([1], [1, 2], LLMException, "addresses has 1 values and nbytes has 2"),
        ([1], [], LLMException, "addresses has 1 values and nbytes has 0"),
        ([-1], 1, LLMException, "addresses holds -1;"),
        ([1, 2**64], 1, LLMException, f"addresses holds {2**64};"),
        ([1], 2**64, LLMException, f"nbytes holds {2**64};"),
        (np.array([-1]), 1, LLMException, "addresses holds -1;"),
        ([1.0], 1, TypeError, "integer"),
        (np.array([1.0]), 1, TypeError, "addresses has dtype float64"),
        ([1], np.array([True]), TypeError, "nbytes has dtype bool"),
    ],
)
def test_what_is_no_address_or_size_is_named(
    addresses: Any, nbytes: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        sized_tensors(addresses, nbytes)
