"""Copies and swaps inside one engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvplan import (
    Cache,
    CacheDesc,
    DataType,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
    Placement,
    Rows,
    Transfer,
)
from tests.support.refusals import refused


def desc(placement: Placement = Placement.DEVICE, rows: int = 4) -> CacheDesc:
    return CacheDesc(2, (rows, 8), DataType.DT_INT16, placement)


def filled(engine: LlmDataDist, cache: Cache) -> Cache:
    for number, array in enumerate(engine.arrays(cache)):
        array[:] = np.arange(array.size).reshape(array.shape) + 1 + 1000 * number
    return cache


@pytest.mark.parametrize(("src", "dst"), [*product(Placement, repeat=2)])
def test_a_slot_is_copied_between_all_placements(
    engine: LlmDataDist, src: Placement, dst: Placement
) -> None:
    source = filled(engine, engine.allocate_cache(desc(src)))
    target = engine.allocate_cache(desc(dst))
    engine.copy_cache(source, target, 1, 2)
    for from_, to in zip(engine.arrays(source), engine.arrays(target), strict=True):
        assert (to[2] == from_[1]).all()
        assert not to[[0, 1, 3]].any()


def test_a_part_is_copied_to_the_same_offset(engine: LlmDataDist) -> None:
    cache = filled(engine, engine.allocate_cache(desc()))
    engine.copy_cache(cache, cache, 0, 3, offset=4, size=6)
    assert engine.arrays(cache)[1][3].tolist() == [1025, 1026, 1003, 1004, 1005, 1030, 1031, 1032]


def test_a_block_is_copied_to_many(engine: LlmDataDist) -> None:
    cache = filled(engine, engine.allocate_blocks_cache(desc(rows=8)))
    before = [array.copy() for array in engine.arrays(cache)]
    engine.copy_blocks(cache, {0: [3, 5], 7: [1]})
    for now, then in zip(engine.arrays(cache), before, strict=True):
        then[[3, 5]], then[1] = then[0], then[7]
        assert (now == then).all()


def test_an_empty_copy_moves_no_bytes(engine: LlmDataDist) -> None:
    cache, host = (engine.allocate_blocks_cache(desc(item)) for item in reversed(Placement))
    engine.copy_blocks(cache, {})
    engine.submit(Transfer(Rows(cache, []), Rows(cache, []))).wait()
    engine.swap_blocks(cache, host, {})
    assert engine.plan(Transfer(Rows(cache, []), Rows(cache, []))).nbytes == 0


@pytest.mark.parametrize("src", Placement)
def test_blocks_are_swapped_in_and_out(engine: LlmDataDist, src: Placement) -> None:
    (other,) = set(Placement) - {src}
    source = filled(engine, engine.allocate_blocks_cache(desc(src)))
    target = engine.allocate_blocks_cache(desc(other))
    engine.swap_blocks(source, target, {0: 2, 3: 0})
    for from_, to in zip(engine.arrays(source), engine.arrays(target), strict=True):
        assert (to[[2, 0]] == from_[[0, 3]]).all()
        assert not to[[1, 3]].any()


def test_memory_without_an_id_is_swapped(engine: LlmDataDist) -> None:
    host = [np.full((4, 8), 6, np.int16) for _ in range(2)]
    outside = Cache(desc(Placement.HOST), -1, tuple(array.ctypes.data for array in host))
    inside = engine.allocate_blocks_cache(desc())
    engine.swap_blocks(outside, inside, {1: 1})
    assert (engine.arrays(inside)[1][1] == 6).all()


def test_plan_and_submit_make_the_same_plan(engine: LlmDataDist) -> None:
    cache = filled(engine, engine.allocate_blocks_cache(desc()))
    plan = engine.plan(Transfer(Rows(cache, [0]), Rows(cache, [1])))
    assert engine.arrays(cache)[0][1, 0] == 9
    task = engine.submit(Transfer(Rows(cache, [0]), Rows(cache, [1])))
    task.wait()
    assert task.plan == plan
    assert engine.arrays(cache)[0][1, 0] == 1


def test_a_swap_is_submitted(engine: LlmDataDist) -> None:
    source = filled(engine, engine.allocate_blocks_cache(desc(Placement.HOST)))
    target = engine.allocate_blocks_cache(desc(Placement.DEVICE))
    task = engine.submit(Transfer(Rows(source, [0]), Rows(target, [3])))
    task.wait()
    assert task.plan == engine.plan(Transfer(Rows(source, [0]), Rows(target, [3])))
    for from_, to in zip(engine.arrays(source), engine.arrays(target), strict=True):
        assert (to[3] == from_[0]).all()
        assert not to[:3].any()


REFUSALS: dict[str, Callable[[LlmDataDist, Cache, Cache], object]] = {
    "slots of a paged cache": lambda value, slots, blocks: value.copy_cache(slots, blocks),
    "blocks of slots": lambda value, slots, blocks: value.copy_blocks(slots, {0: [1]}),
    "swap of slots": lambda value, slots, blocks: value.swap_blocks(slots, blocks, {0: 0}),
    "swap within one placement": lambda value, slots, blocks: value.swap_blocks(
        blocks, blocks, {0: 1}
    ),
    "slot out of range": lambda value, slots, blocks: value.copy_cache(slots, slots, 4, 0),
    "offset out of range": lambda value, slots, blocks: value.copy_cache(slots, slots, 0, 1, 16),
    "size out of range": lambda value, slots, blocks: value.copy_cache(slots, slots, 0, 1, 8, 9),
    "block out of range": lambda value, slots, blocks: value.copy_blocks(blocks, {0: [4]}),
    "order matters": lambda value, slots, blocks: value.copy_blocks(blocks, {0: [1], 1: [2]}),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_impossible_copies_are_refused(engine: LlmDataDist, name: str) -> None:
    slots, blocks = engine.allocate_cache(desc()), engine.allocate_blocks_cache(desc())
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        REFUSALS[name](engine, slots, blocks)


def test_the_call_for_the_other_kind_of_cache_is_named(engine: LlmDataDist) -> None:
    slots, blocks = engine.allocate_cache(desc()), engine.allocate_blocks_cache(desc())
    host = engine.allocate_cache(replace(desc(), placement=Placement.HOST))
    with pytest.raises(LLMException, match="copy_cache needs a contiguous one; copy_blocks takes"):
        engine.copy_cache(slots, blocks)
    with pytest.raises(LLMException, match=r"needs a paged one, or no blocks\.sources: "):
        engine.copy_blocks(slots, {0: [1]})
    with pytest.raises(LLMException, match="contiguous cache; swap_blocks needs a paged one, or"):
        engine.swap_blocks(host, blocks, {0: 1})


@pytest.mark.parametrize("wrong", [None, 1, "cache", [1, 2]])
def test_values_that_are_not_caches_are_refused(engine: LlmDataDist, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^src="):
        engine.copy_cache(wrong, wrong)
    with pytest.raises(TypeError, match=r"^dst="):
        engine.copy_cache(engine.allocate_cache(desc()), wrong)
    with pytest.raises(TypeError, match=r"^src="):
        engine.copy_blocks(wrong, {0: [1]})
    with pytest.raises(TypeError, match=r"^cache="):
        engine.arrays(wrong)
