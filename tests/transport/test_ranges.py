"""Ranges are found by bisection; here compared with a linear search."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.local.metadata import ArenaRef, Range
from kvplan.transport.ranges import RangeTable

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
