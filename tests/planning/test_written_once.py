"""Overlapping writes are found exactly, without expanding the repeats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, DataType, LLMStatusCode, Part, Plan, Rows, Transfer
from kvplan.planning.invariants import MAX_COMPARED, check_invariants
from kvplan.planning.segments import Segments
from tests.support.refusals import refused

INT8, FP16 = DataType.DT_INT8, DataType.DT_FLOAT16
SPACE = CacheDesc(1, (1, 600), INT8)
OPAQUE = kvplan.plan(Transfer(Rows(SPACE, [0]), Rows(SPACE, [0])), local="dst").part


def holding(segments: Segments) -> Part:
    return replace(OPAQUE, segments=segments, num_slices=segments.num_runs)


@st.composite
def tables(draw: st.DrawFn) -> Segments:
    """Draw up to six segments with up to two levels of repeats, unordered, within 600 bytes."""
    rows = draw(st.integers(1, 6))
    columns = [
        draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows))
        for low, high in ((0, 40), (1, 6))
    ]
    # Often on a grid, like the segments of the planner.
    grid = draw(st.sampled_from([1, 1, 4, 12]))
    levels = draw(st.integers(0, 2))
    repeats = [
        (
            draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows)),
            1,
            draw(st.integers(0, 8) | st.sampled_from([12, 24, 48])),
        )
        for _ in range(levels)
    ]
    starts = [column * grid % 200 for column in columns[0]]
    return Segments([0] * rows, starts, columns[1], repeats)


@given(tables())
@example(  # the second reaches into the next row of the first
    Segments([0, 0], [0, 12], [10, 8], [([2, 2], 1, 16)])
)
@example(  # the last row of the first reaches into the next one, which contains the second
    Segments([0, 0], [40, 98], [12, 4], [([2, 1], 1, 48)])
)
@example(  # the third is in a later row of the first, behind one that ends before it
    Segments([0, 0, 0], [0, 24, 48], [4, 4, 4], [([3, 1, 1], 1, 48)])
)
def test_exactly_the_overlapping_writes_are_refused(segments: Segments) -> None:
    written = [
        start + sum(step * stride for step, (_, _, stride) in zip(steps, levels, strict=True)) + i
        for start, nbytes, levels in (
            (start, nbytes, [(repeat.counts[row], *repeat[1:]) for repeat in segments.repeats])
            for row, (_, start, nbytes) in enumerate(segments)
        )
        for steps in np.ndindex(*(int(count) for count, *_ in levels))
        for i in range(nbytes)
    ]
    if len(set(written)) == len(written):
        check_invariants(holding(segments))
    else:
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "write the same destination bytes"):
            check_invariants(holding(segments))


@given(tables())
def test_a_table_with_repeats_describes_its_runs(segments: Segments) -> None:
    """Each answer about the short form equals the answer about the expanded form."""
    runs = segments.expanded()
    columns = segments.runs_at(np.arange(segments.num_runs))
    assert [*zip(*(column.tolist() for column in columns), strict=True)] == [*runs]
    assert segments.total_nbytes == runs.total_nbytes
    counts = segments.runs().astype(np.int64)
    assert counts.sum() == segments.num_runs == len(runs)
    first = np.cumsum(counts) - counts
    for short, long in zip(segments.ends(), runs.ends(), strict=True):
        assert short.tolist() == np.maximum.reduceat(long, first).tolist()


def test_the_runs_that_write_one_byte_are_named() -> None:
    """Run 4 is the second one of segment 1, and run 9 is the only one of segment 2."""
    segments = Segments([0] * 3, [0, 100, 104], [4] * 3, [([3, 3, 1], 1, 20), ([1, 2, 1], 1, 4)])
    message = "runs 4 and 9 write the same destination bytes, from dst offset 104"
    with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
        check_invariants(holding(segments))


MILLION = 2**20
"""A number of tokens: with 8 heads, they are eight million runs."""


def rows_of(axes: str, tokens: int) -> CacheDesc:
    lengths = {"block": MILLION // tokens, "token": tokens, "head": 8, "dim": 64}
    shape = tuple(lengths[word] for word in axes.split())
    return CacheDesc(2, shape, FP16, kv_tensor_format=axes)


NHD, HND = "block token head dim", "block head token dim"


@pytest.mark.parametrize(
    ("src", "dst", "num_tokens"),
    [
        (rows_of(NHD, 16), rows_of(HND, 16), MILLION),
        (rows_of(NHD, 16), rows_of(HND, 64), MILLION - 15),  # the last block has one token of 64
        (rows_of(HND, 16), rows_of(NHD, 64), MILLION - 1),
        (rows_of(NHD, 16), rows_of("head block token dim", 16), MILLION),
    ],
)
def test_a_plan_of_a_million_tokens_is_restored_whole(
    src: CacheDesc, dst: CacheDesc, num_tokens: int
) -> None:
    blocks = np.random.default_rng(7)
    plan = kvplan.plan(
        Transfer(
            Rows(src, blocks.permutation(src.batch_size)),
            Rows(dst, blocks.permutation(dst.batch_size)),
            num_tokens=num_tokens,
        ),
        local="dst",
    )
    assert plan.part.segments.num_runs == num_tokens * 8
    again = Plan.from_dict(plan.to_dict())
    assert again == plan
    assert again.fingerprint == plan.fingerprint


def test_too_many_interleaved_runs_to_compare_are_refused() -> None:
    half = MAX_COMPARED // 2 + 1
    space = CacheDesc(1, (1, 4 * half), INT8)
    apart = Segments([0, 0], [0, 2 * half], [1, 1], [([half, half], 1, 2)])
    woven = Segments([0, 0], [0, 3], [1, 1], [([half, half], 1, 2)])
    one = kvplan.plan(Transfer(Rows(space, [0]), Rows(space, [0])), local="dst").part
    check_invariants(replace(one, segments=apart, num_slices=2 * half))
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "segments with overlapping extents have"):
        check_invariants(replace(one, segments=woven, num_slices=2 * half))
