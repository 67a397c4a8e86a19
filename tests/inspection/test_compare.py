"""The first difference of two plans, run by run: layers before sizes before blocks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import kvplan
from kvplan import CacheDesc, DataType, Plan, Rows, Transfer
from kvplan.inspection.compare import compare

DESC = CacheDesc(4, (64, 4, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")


def made(src: list[int], dst: list[int], desc: CacheDesc = DESC) -> Plan:
    return kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")


GOOD = made([1, 2, 3], [7, 9, 8])


def shifted(plan: Plan, by: int) -> Plan:
    """Return the plan with the source layers shifted, and one layer less."""
    part = plan.part
    return Plan([replace(part, src_tensors=range(by, 4), dst_tensors=range(4 - by))])


@pytest.mark.parametrize(
    ("other", "lines"),
    [
        (made([1, 2, 3], [7, 9, 8]), []),
        (
            made([1, 3, 2], [7, 9, 8]),
            ["src blocks: 8 of 12 runs differ; the first is layer 0, run 1: block 2 > block 9 in "
             "A, and layer 0, run 1: block 3 > block 9 in B",
             "cause: src_blocks[1] and src_blocks[2] are swapped (2 and 3)"],
        ),
        (
            made([1, 2, 3], [7, 9, 5]),
            ["dst blocks: 4 of 12 runs differ; the first is layer 0, run 2: block 3 > block 8 in "
             "A, and layer 0, run 2: block 3 > block 5 in B",
             "cause: dst_blocks[2] is 5, and was 8"],
        ),
        (
            made([1, 2, 3, 4], [7, 9, 8, 0]),
            ["only in B: 4 runs; the first is layer 0, run 3: block 4 > block 0",
             "cause: 1 block more at the end of both block tables"],
        ),
    ],
)  # fmt: skip
def test_the_first_run_that_differs_is_named(other: Plan, lines: list[str]) -> None:
    found = compare(GOOD, other)
    assert found[: len(lines)] == lines
    assert bool(found) == bool(lines)


def test_a_wrong_layer_comes_first_even_if_all_blocks_differ() -> None:
    """Plans of two requests differ in all blocks, but a wrong layer matters more."""
    found = compare(made([1, 2], [3, 4]), shifted(made([5, 6], [7, 8]), 2))  # keys and values
    assert found[0] == (
        "layers: 4 of 4 runs differ; the first is layer 0, run 0: block 1 > block 3 in A, and "
        "layer 0, run 0 from layer 1: block 5 > block 7 in B"
    )
    assert found[3] == "only in A: 4 runs; the first is layer 1, run 0: block 1 > block 3"
    assert "cause: layers are shifted by +1" in found[-1]


def test_blocks_of_another_size_are_named() -> None:
    other = CacheDesc(4, (64, 2, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")
    found = compare(made([1], [2]), made([1], [2], other))
    assert found[0].startswith("sizes: 4 of 4 runs differ; the first is layer 0, run 0")
    assert "cache: src.shape: (64, 4, 2, 8) -> (64, 2, 2, 8)" in found


def test_a_run_has_a_size_unless_it_is_a_whole_block_at_the_destination() -> None:
    small, large = (
        CacheDesc(4, (64, tokens, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")
        for tokens in (2, 4)
    )
    whole, halves = (
        kvplan.plan(Transfer(Rows(small, blocks), Rows(large, [3])), local="dst")
        for blocks in ([1, 2], [1, 5])
    )
    first, extra, *_ = compare(whole, halves)
    assert first.endswith("run 0: block 1-2 > block 3 in A, and layer 0, run 0: block 1 > block 3, "
                          "64 B in B")  # fmt: skip
    assert extra.endswith("run 1: block 5 > block 3+0x40, 64 B")


@pytest.mark.parametrize("apart", ["src", "dst"])
def test_blocks_with_gaps_on_one_side_have_their_own_numbers(apart: str) -> None:
    gaps = replace(DESC, row_stride=2 * DESC.row_nbytes)
    src, dst = (gaps, DESC) if apart == "src" else (DESC, gaps)
    good, bad = (
        kvplan.plan(Transfer(Rows(src, blocks), Rows(dst, [7, 9, 8])), local="dst")
        for blocks in ([1, 2, 3], [1, 2, 5])
    )
    assert compare(good, good) == []
    texts = [re.sub(r", \d+ B", "", line) for line in compare(good, bad)]
    assert texts[0] == (
        "src blocks: 4 of 12 runs differ; the first is layer 0, run 2: block 3 > block 8 in A, and "
        "layer 0, run 2: block 5 > block 8 in B"
    )


def test_parts_do_not_matter() -> None:
    """A plan with other parts that moves the same bytes is equal."""
    part = GOOD.part
    cut = [
        replace(part, src_tensors=range(i, i + 2), dst_tensors=range(i, i + 2), name=str(i))
        for i in (0, 2)
    ]
    assert compare(GOOD, Plan(cut)) == []


@pytest.mark.parametrize("count", [15, 16, 17, 60])
def test_runs_of_different_tensors_are_not_confused(count: int) -> None:
    blocks = [*range(count)]
    other = [*blocks[:-1], 63]
    found = compare(made(blocks, blocks), made(other, blocks))
    last = count - 1
    assert found[0] == (
        f"src blocks: 4 of {4 * count} runs differ; the first is layer 0, run {last}: block {last} "
        f"> block {last} in A, and layer 0, run {last}: block 63 > block {last} in B"
    )
