"""Every descriptor of a plan is in exactly one band of its picture, and the titles are true.

Titles and places are compared with the moves of the oracles of the reference, and with the origins
of the plan. Neither shares arithmetic with the bands.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, KvCacheExtParam, Plan, Rows, Shard, Transfer
from kvplan.inspection.bands import Bands, Places
from kvplan.inspection.svg import layer_texts
from kvplan.planning.contents import tokens_of
from kvplan.planning.texts import spans_text
from tests.planning.test_unlike import planned
from tests.planning.test_unlike import transfers as unlike_transfers
from tests.planning.transfers import Example, transfers

Span = tuple[int, int]
FP16 = CacheDesc(4, (64, 16, 8, 128), DataType.DT_FLOAT16, kv_tensor_format="NHD")


def ends(side: Places, band: int) -> Span:
    return int(side.first[band]), int(side.last[band])


def rows_of(bands: Bands, band: int) -> Iterator[Span]:
    """Return the pairs of rows of a band: of equal rank, or all if a side has a single row."""
    src, dst = (range(low, high + 1) for low, high in map(ends, (bands.src, bands.dst), [band] * 2))
    if len(src) == len(dst):
        yield from zip(src, dst, strict=True)
    else:
        assert 1 in (len(src), len(dst))
        yield from ((a, b) for a in src for b in dst)


def test_a_band_of_segments_of_several_heads_names_all_of_them() -> None:
    """The axes have another order, so each head is a segment."""
    src, dst = (
        CacheDesc(2, shape, DataType.DT_FLOAT16, kv_tensor_format=axes)
        for shape, axes in (
            ((4, 8, 5, 3), "block dim token head"),
            ((4, 3, 5, 8), "block head token dim"),
        )
    )
    plan = kvplan.plan(Transfer(Rows(src, [1]), Rows(dst, [2])), local="dst")
    assert len(plan.part.segments) == 3
    assert Bands(plan.part).text(range(1)).split("; ")[1] == "heads 0..2"


@pytest.mark.parametrize("row_stride", [None, 300, 320])
def test_a_band_names_its_head_in_blocks_that_lie_apart(row_stride: int | None) -> None:
    one, three = (
        CacheDesc(
            2, (4, len(heads), 5, 8), DataType.DT_FLOAT16, kv_tensor_format="block head token dim",
            shard=Shard(heads=heads, num_heads=3), row_stride=apart,
        )
        for heads, apart in ((range(1, 2), None), (range(3), row_stride))
    )  # fmt: skip
    plan = kvplan.plan(Transfer(Rows(one, [1]), Rows(three, [2])), local="dst")
    assert Bands(plan.part).text(range(1)).split("; ")[1] == "head 1"


def test_each_layer_names_its_tensors_and_separate_keys_and_values() -> None:
    inside, opaque = (
        CacheDesc(6, shape, DataType.DT_FLOAT16, kv_tensor_format=axes)
        for shape, axes in (((8, 2, 4, 2, 8), "block kv token head dim"), ((8, 64), None))
    )
    two, five = KvCacheExtParam(range(1, 2), range(1)), KvCacheExtParam(tensor_num_per_layer=5)
    ten = CacheDesc(10, (8, 64), DataType.DT_FLOAT16)
    assert [
        layer_texts(kvplan.plan(Transfer(Rows(of, [1]), Rows(of, [2]), layers=layers)).part)[0]
        for of, layers in ((FP16, two), (inside, two), (opaque, two), (ten, five))
    ] == [
        "layer 1 → 0: tensors 2 → 0 K, 3 → 1 V",
        "layer 1 → 0: tensor 1 → 0",
        "layer 1 → 0: tensors 2 → 0, 3 → 1",
        "layer 0 → 0: tensors 0 → 0, 1 → 1, 2 → 2, 3 → 3, and 1 more",
    ]


@pytest.mark.parametrize(
    ("table", "label"),
    [([3, 1, 2], "1–2, 0"), ([4, 2, 3, 1], "3, 1–2, 0"), ([3, 1, 4, 2], "1, 3, 0, …")],
)
def test_a_box_names_the_first_three_stretches_of_the_table(table: list[int], label: str) -> None:
    plan = kvplan.plan(Transfer(Rows(FP16, table), Rows(FP16, table)), local="dst")
    assert Bands(plan.part).label(0) == label


@given(transfers(), st.sampled_from(Coalesce))
def test_bands_join_the_rows_that_the_reference_moves(example: Example, coalesce: Coalesce) -> None:
    plan = example.plan(coalesce)
    bands = Bands(plan.part)
    drawn = [pair for band in range(len(bands)) for pair in rows_of(bands, band)]
    assert {*drawn} == {(move.src_row, move.dst_row) for move in example.moves}
    tensors = [
        tuple(map(int, pair.split()[:3:2]))
        for text in layer_texts(plan.part)
        for pair in re.sub("^.*: tensors? ", "", text).split(", ")
    ]
    assert tensors == example.tensor_pairs


@given(transfers(), st.sampled_from(Coalesce))
def test_bands_of_bytes_cover_the_plan_once(example: Example, coalesce: Coalesce) -> None:
    assert_covers(example.plan(coalesce))


@given(unlike_transfers(), st.booleans())
def test_bands_between_unlike_caches_cover_the_plan_once(transfer: Any, coalesce: bool) -> None:
    assert_covers(planned(transfer, coalesce))


def numbers(text: str, word: str) -> set[int]:
    """Return the numbers that a title names after `word`; the texts must have no ellipsis."""
    found = re.search(rf"{word}s? ([^;]*)", text)
    spans = [part.split("..") for part in found[1].split(", ")] if found else []
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}


def assert_covers(plan: Plan) -> None:
    """Check that rows, contents and bytes in all titles are those of the origins."""
    bands = Bands(plan.part)
    drawn: Counter[tuple[Span, Span]] = Counter()
    texts: dict[tuple[Span, Span], list[str]] = {}
    for band in range(len(bands)):
        text = bands.text(range(band, band + 1))
        key = ends(bands.src, band), ends(bands.dst, band)
        count = re.search(r" in ([\d,]+) descriptors?", text)
        assert count is not None
        drawn[key] += int(count[1].replace(",", ""))
        texts.setdefault(key, []).append(text)
    wanted: Counter[tuple[Span, Span]] = Counter()
    tokens: dict[tuple[Span, Span], set[int]] = {}
    heads: dict[tuple[Span, Span], set[int]] = {}
    for run in range(plan.part.segments.num_runs):
        origin = plan.origin(run)
        key = origin.src_rows, origin.dst_rows
        wanted[key] += 1
        for low, high in origin.tokens:
            tokens.setdefault(key, set()).update(range(low, high + 1))
        if origin.heads is not None:
            heads.setdefault(key, set()).update(range(origin.heads[0], origin.heads[1] + 1))
    assert drawn == wanted
    for key, said in texts.items():
        if not any(", ..." in text for text in said):
            assert set().union(*(numbers(text, "token") for text in said)) == tokens.get(key, set())
        found = set().union(*(numbers(text, "head") for text in said))
        assert found == heads.get(key, set())


@given(unlike_transfers(), st.booleans())
def test_a_band_has_the_bounds_of_its_tokens(transfer: Any, coalesce: bool) -> None:
    src, dst, _, _, src_token, dst_token, _ = transfer
    bands = Bands(planned(transfer, coalesce).part)
    for side, parts, cache, shift in (
        (bands.src, bands.parts[0], src, 0),
        (bands.dst, bands.parts[1], dst, dst_token - src_token),
    ):
        size = cache.tokens
        assert parts == size
        for band in range(len(bands)):
            said = re.search(r"; tokens? ([^;]*)", bands.text(range(band, band + 1)))
            assert said is not None
            if "," in said[1]:
                continue  # not in order
            first, last = (int(said[1].split("..")[number]) + shift for number in (0, -1))
            assert (side.begin[band], side.end[band]) == (first % size, last % size + 1)


@given(transfers(), st.sampled_from(Coalesce))
def test_a_band_of_bytes_has_the_bounds_of_its_bytes(example: Example, coalesce: Coalesce) -> None:
    bands = Bands(example.plan(coalesce).part)
    for name, stride, parts in zip(
        ("src", "dst"), (example.src.stride, example.dst.stride), bands.parts, strict=True
    ):
        written = {
            getattr(move, f"{name}_row") * stride + getattr(move, f"{name}_start") + byte
            for move in example.moves
            for byte in range(move.nbytes)
        }
        step, shown = stride // parts, set[int]()
        for first, last, begin, end in zip(*getattr(bands, name), strict=True):
            shown.update(range(first * stride + begin * step, last * stride + end * step))
        assert shown == written


@given(unlike_transfers(), st.booleans())
def test_a_band_names_keys_or_values_like_the_origins(transfer: Any, coalesce: bool) -> None:
    plan = planned(transfer, coalesce)
    bands = Bands(plan.part)
    said = "".join(bands.text(range(band, band + 1)) + ";" for band in range(len(bands)))
    found = {letter for match in re.findall(r"; ([KV+]+);", said) for letter in match.split("+")}
    if "kv" in plan.part.split or plan.part.tensors_per_layer == 2:
        assert not found  # the text of the slider names the kind
    else:
        known = {plan.origin(number).kv for number in range(plan.part.segments.num_runs)} - {""}
        assert found == {letter for item in known for letter in item.split("+")}


@given(st.permutations(range(12)), st.permutations(range(12)), st.sampled_from(Coalesce))
def test_all_entries_and_tokens_out_of_order_are_named(
    src: list[int], dst: list[int], coalesce: Coalesce
) -> None:
    """Runs of rows have another order in the block table."""
    plan = kvplan.plan(Transfer(Rows(FP16, src), Rows(FP16, dst), coalesce=coalesce), local="dst")
    bands = Bands(plan.part)
    runs = {plan.part.rows(index)[1]: segment for index, segment in enumerate(plan.part.segments)}
    for band in range(len(bands)):
        low, high = ends(bands.dst, band)
        _, offset, nbytes = runs[low, high]
        text = bands.text(range(band, band + 1))
        assert (
            f"; {spans_text('token', tokens_of(plan.part, offset, offset + nbytes - 1))};" in text
        )
        if ", ..." not in text:
            entries = {dst.index(number) for number in range(low, high + 1)}
            of = re.search(r"; entr(?:y|ies) (.*) of 12 in", text)
            assert of is not None
            assert numbers(f"entry {of[1]}", "entry") == entries


def test_neighbours_that_share_a_mark_are_counted() -> None:
    table = np.arange(0, 64, 2)
    plan = kvplan.plan(Transfer(Rows(FP16, table), Rows(FP16, table[::-1].copy())), local="dst")
    bands = Bands(plan.part)
    assert len(bands) == 32
    assert bands.text(range(4, 8)) == (
        "4 runs, from blocks 8 to 14 → blocks 48 to 54; entries 4..7 of 32 in the block table"
    )


def test_each_band_names_all_heads_however_its_runs_repeat() -> None:
    """Runs of one token and of two begin at the same place of a block, but repeat otherwise."""
    src, dst = (
        CacheDesc(2, shape, DataType.DT_FLOAT16, kv_tensor_format=axes)
        for shape, axes in (
            ((3, 2, 3, 2), "block head token dim"),
            ((3, 2, 2, 2), "block head dim token"),
        )
    )
    plan = kvplan.plan(Transfer(Rows(src, [1, 2]), Rows(dst, [2, 0, 1]), num_tokens=5), local="dst")
    bands = Bands(plan.part)
    texts = [bands.text(range(band, band + 1)).split("; ")[1:3] for band in range(len(bands))]
    assert texts == [["heads 0..1", f"token {number}"] for number in range(5)]


def test_a_slot_that_is_cut_into_blocks_is_called_a_slot() -> None:
    slots = CacheDesc(
        4, (3, 64, 8, 128), DataType.DT_FLOAT16, kv_tensor_format="slot token head dim"
    )
    plan = kvplan.plan(Transfer(Rows(slots, slot=2), Rows(FP16, [4, 5, 0])), local="dst")
    first, last = (Bands(plan.part).text(range(i, i + 1)).split("; ")[0] for i in range(2))
    assert (first, last) == ("slot 2 → blocks 4–5", "slot 2 → block 0")


@pytest.mark.parametrize(("src", "dst"), [(0, 1), (63, 0)])
def test_one_block_is_one_band(src: int, dst: int) -> None:
    bands = Bands(kvplan.plan(Transfer(Rows(FP16, [src]), Rows(FP16, [dst])), local="dst").part)
    assert len(bands) == 1
    assert (ends(bands.src, 0), ends(bands.dst, 0)) == ((src, src), (dst, dst))
