"""Pools: no byte has two owners, all bytes come back, and exhaustion names what is free."""

from __future__ import annotations

from itertools import groupby
from unittest.mock import Mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvnative._host import Arena
from kvplan import LLMStatusCode, Placement
from kvplan.engine.pools import Pool, PoolConfig, Pools
from tests.support.refusals import refused

from .caches import tried

PAGE = 1 << 10
PAGES = 12


def pool(pages: int = PAGES) -> Pool:
    return Pool(Arena(pages * PAGE), page_shift=10)


class PoolMachine(RuleBasedStateMachine):
    """A pool, and a list of the owner of each page."""

    spans = Bundle("spans")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(PAGES * PAGE)
        self.pool = Pool(self.arena, page_shift=10)
        self.owners: list[int | None] = [None] * PAGES
        self.last = 0

    def holes(self) -> dict[int, int]:
        """Return the first page and the length of each hole."""
        found: dict[int, int] = {}
        start = 0
        for is_free, run in groupby(self.owners, lambda owner: owner is None):
            pages = len(list(run))
            if is_free:
                found[start] = pages
            start += pages
        return found

    @rule(target=spans, pages=st.integers(1, 6), missing_nbytes=st.integers(0, PAGE - 1))
    def take(self, pages: int, missing_nbytes: int):
        fitting = {first: size for first, size in self.holes().items() if size >= pages}
        span, status = tried(lambda: self.pool.take(pages * PAGE - missing_nbytes))
        if span is None:
            assert (status, fitting) == (LLMStatusCode.LLM_OUT_OF_MEMORY, {})
            return []
        first = (span.address - self.arena.address) // PAGE
        assert span.nbytes == pages * PAGE
        assert fitting[first] == min(fitting.values())
        self.last += 1
        self.owners[first : first + pages] = [self.last] * pages
        return [span, self.last]

    @rule(taken=consumes(spans))
    def give_back(self, taken) -> None:
        if taken:
            number = taken[1]
            taken.clear()  # the last reference to the span
            self.owners = [None if owner == number else owner for owner in self.owners]

    @invariant()
    def accounts_agree(self) -> None:
        assert self.pool.free_nbytes == self.owners.count(None) * PAGE


TestPoolMachine = PoolMachine.TestCase


def test_exhaustion_names_the_requested_and_the_free_bytes():
    item = pool(8)
    spans: list[object] = [item.take(PAGE) for _ in range(8)]
    exhausted = "LLM_OUT_OF_MEMORY"
    with refused(exhausted, "1 bytes requested; .* 8192 bytes has 0 free in 0 spans.* of 0"):
        item.take(1)
    for freed in (1, 2, 3, 6):
        spans[freed] = None
    with refused(exhausted, "5000 bytes requested; .* has 4096 free in 2 spans.* of 3072"):
        item.take(5000)
    assert item.take(3 * PAGE)


def test_the_whole_pool_can_be_taken_again_and_again():
    item = pool()
    for _ in range(50):
        spans = [item.take(2 * PAGE) for _ in range(PAGES // 2)]
        assert item.free_nbytes == 0
        spans.reverse()
        del spans
        whole = item.take(PAGES * PAGE)
        del whole


def test_a_part_of_a_page_is_not_used():
    array = Pool(Arena(2 * PAGE + 7), page_shift=10)
    assert array.nbytes == array.free_nbytes == 2 * PAGE


@pytest.mark.parametrize("pages", ["auto", "collapse"])
def test_no_huge_page_is_made_for_pools_that_are_closed(monkeypatch, pages):
    background = Mock()
    monkeypatch.setattr("kvplan.engine.pools.background_pages", lambda: background)
    pools = Pools([], {Placement.HOST: PoolConfig(1 << 16)}, pages=pages)
    pools.take(Placement.DEVICE, 100)  # without a pool: an allocation of its own
    begun = {call.args[1] for call in background.add.call_args_list}
    assert len(begun) == (pages == "collapse")
    pools.close()
    assert {call.args[0] for call in background.cancel.call_args_list} == begun


def test_a_span_outlives_its_pool():
    span = pool().take(100)
    span.view(100)[:3] = b"abc"
    assert bytes(span.view(4)) == b"abc\0"


@pytest.mark.parametrize(
    ("size", "shift", "error"),
    [
        (1 << 20, 9, "page_shift=9 is out of range \\[10, 30\\]"),
        (1 << 20, 31, "page_shift=31"),
        ((1 << 16) - 1, 16, "memory_size=65535 is out of range \\[65536"),
        (-1, 16, "memory_size=-1"),
        (2**63, 16, "memory_size=9223372036854775808"),
    ],
)
def test_configs_are_checked(size, shift, error):
    with refused("LLM_PARAM_INVALID", error):
        PoolConfig(size, shift)


def test_configs_are_whole_numbers():
    with pytest.raises(TypeError, match="memory_size"):
        PoolConfig("5")
    with pytest.raises(TypeError, match="page_shift"):
        PoolConfig(1 << 20, True)
