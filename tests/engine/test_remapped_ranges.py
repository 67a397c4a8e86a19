"""The caches that ranges of remapped memory touch, compared with a search byte by byte."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kvplan import CacheDesc, DataType
from kvplan.engine.engine import _checked_ranges, _touched
from kvplan.engine.registry import CacheRegistry
from tests.support.refusals import refused

from .caches import SLOTS

MEMORY = np.zeros(48, np.uint8)
BASE = MEMORY.ctypes.data


def test_a_range_touches_the_cache_of_each_of_its_bytes(
    registry: CacheRegistry,
) -> None:
    """Caches lie apart, side by side, inside of each other, and on the same bytes."""
    registry.allocate(SLOTS, paged=False)  # of a pool, which the program does not remap
    seen = set()
    for seed in range(60):
        random = Random(seed)
        held: dict[int, set[int]] = {}
        for _ in range(random.randrange(5)):
            nbytes, first = random.randrange(1, 9), random.randrange(24)
            starts = [first, first + nbytes + random.randrange(4)][: random.choice((1, 2))]
            desc = CacheDesc(len(starts), (1, nbytes), DataType.DT_UINT8)
            tensors = [BASE + start for start in starts]
            entry = registry.register(desc, tensors, paged=False, remote_accessible=False)
            held[entry.cache.cache_id] = {at + i for at in starts for i in range(nbytes)}
        for _ in range(10):
            ranges = [
                (random.randrange(40), random.randrange(1, 9)) for _ in range(random.choice((1, 2)))
            ]
            given = [(BASE + start, nbytes) for start, nbytes in ranges]
            bytes_of = [range(start, start + nbytes) for start, nbytes in ranges]
            every = set().union(*held.values())
            missing = [(i, at) for i, each in enumerate(bytes_of) for at in each if at not in every]
            entries = [entry for entry, _ in registry.entries()]
            seen.add((bool(missing), len(held)))
            if missing:
                (number, at), count = missing[0], len(held)
                text = (
                    rf"ranges\[{number}\]=\({given[number][0]:#x}, {given[number][1]}\): the byte "
                    f"at {BASE + at:#x} is in none of the {count} registered cache"
                )
                with refused("LLM_PARAM_INVALID", text):
                    _touched(entries, given)
            else:
                touched = [i for i, own in held.items() if own & set().union(*bytes_of)]
                assert _touched(entries, given) == touched
        for cache_id in held:
            registry.unregister(cache_id)
    assert seen >= {(False, count) for count in range(1, 5)}


@pytest.mark.parametrize(
    "ranges", [None, 5, "ab", b"ab", {1: 8}, [5], [(1,)], [(1, 2, 3)], ["ab"], [(1, 2), None]]
)
def test_values_other_than_sequences_of_ranges_are_refused(ranges: Any) -> None:
    with pytest.raises(TypeError, match=r"ranges.*must be .*\(address, nbytes\)"):
        _checked_ranges(ranges)


@pytest.mark.parametrize("span", [(0, 8), (8, 0), (2**64 - 8, 9)])
def test_ranges_outside_of_all_memory_are_refused(span: tuple[int, int]) -> None:
    with refused("LLM_PARAM_INVALID", r"ranges\[1\]=.*must be at least 1, and their sum at most"):
        _checked_ranges([(8, 8), span])
    with refused("LLM_PARAM_INVALID", "ranges is empty"):
        _checked_ranges([])
    assert _checked_ranges(((8, 1), [2**64 - 8, 8])) == [(8, 1), (2**64 - 8, 8)]
