"""Every descriptor of a plan is in exactly one band of its picture, and the band says what it is.

What a page says is compared with what the reference's oracles move, and with the plan's origins:
neither shares arithmetic with the bands.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, Plan, Rows, Transfer
from kvplan.inspection.bands import NEW, OLD, SAME, Bands, bands_of
from kvplan.inspection.contents import tokens_of
from kvplan.inspection.picture import pictures
from tests.planning.test_unlike import planned
from tests.planning.test_unlike import transfers as unlike_transfers
from tests.planning.transfers import Example, transfers
from tests.support.plans import joined

Span = tuple[int, int]
FP16 = CacheDesc(4, (64, 16, 8, 128), DataType.DT_FLOAT16, kv_tensor_format="NHD")


def embedded(document: str) -> list[dict[str, Any]]:
    """The pictures of a page, their columns as the page's script reads them."""
    found = re.search(r'<script type="application/json" id="plan">(.*?)</script>', document)
    assert found is not None
    read: list[dict[str, Any]] = json.loads(found[1])["pictures"]
    for picture in read:
        packed = picture["columns"]
        columns = {
            name: [it] * picture["count"] if isinstance(it, int) else it
            for name, it in packed.items()
        }
        picture["columns"] = {
            name: columns[it] if isinstance(it, str) else it for name, it in columns.items()
        }
    return read


def rows_of(columns: dict[str, list[int]], band: int) -> Iterator[Span]:
    """Which rows a band joins: those of equal rank, or all where one side has a single one."""
    src, dst = (
        range(columns[f"{it}_first"][band], columns[f"{it}_last"][band] + 1)
        for it in ("src", "dst")
    )
    if len(src) == len(dst):
        yield from zip(src, dst, strict=True)
    else:
        assert 1 in (len(src), len(dst))
        yield from ((a, b) for a in src for b in dst)


@given(transfers(), st.sampled_from(Coalesce))
def test_a_page_joins_the_rows_that_the_reference_moves(
    example: Example, coalesce: Coalesce
) -> None:
    plan = example.plan(coalesce)
    (picture,) = embedded(plan.to_html())
    columns = picture["columns"]
    drawn = [pair for band in range(picture["count"]) for pair in rows_of(columns, band)]
    assert {*drawn} == {(it.src_row, it.dst_row) for it in example.moves}
    tensors = [
        tuple(map(int, pair.split()[:3:2]))
        for _, text in picture["layers"]
        for pair in re.sub("^tensors? ", "", text).split(", ")
    ]
    assert tensors == example.tensor_pairs


@given(transfers(), st.sampled_from(Coalesce))
def test_bands_of_bytes_are_all_of_the_plan_once(example: Example, coalesce: Coalesce) -> None:
    assert_is_all_of(example.plan(coalesce))


@given(unlike_transfers(), st.booleans())
def test_bands_between_unlike_caches_are_all_of_the_plan_once(
    transfer: Any, coalesce: bool
) -> None:
    assert_is_all_of(planned(transfer, coalesce))


def assert_is_all_of(plan: Plan) -> None:
    """Rows, tokens, heads, bytes and descriptors of the bands are those of the plan's origins."""
    bands = bands_of(plan).bands
    drawn: Counter[tuple[Span, Span, str]] = Counter()
    tokens: dict[tuple[Span, Span], set[int]] = {}
    heads: dict[tuple[Span, Span], set[int]] = {}
    for band in zip(*(it.tolist() for it in bands), strict=True):
        it = Bands(*band)
        key = (it.src_first, it.src_last), (it.dst_first, it.dst_last)
        drawn[(*key, "runs")] += int(it.runs)
        drawn[(*key, "bytes")] += int(it.nbytes)
        if it.head_first >= 0:
            heads.setdefault(key, set()).update(range(it.head_first, it.head_last + 1))
        if it.token_first >= 0:
            tokens.setdefault(key, set()).update(range(it.token_first, it.token_last + 1))
    wanted: Counter[tuple[Span, Span, str]] = Counter()
    of_tokens: dict[tuple[Span, Span], set[int]] = {}
    of_heads: dict[tuple[Span, Span], set[int]] = {}
    for run in range(plan.part.segments.num_runs):
        origin = plan.origin(run)
        key = origin.src_rows, origin.dst_rows
        wanted[(*key, "runs")] += 1
        wanted[(*key, "bytes")] += plan.part.run_at(run)[2]
        if origin.heads is not None:
            of_heads.setdefault(key, set()).update(range(origin.heads[0], origin.heads[1] + 1))
        for first, last in origin.tokens:
            of_tokens.setdefault(key, set()).update(range(first, last + 1))
    assert drawn == wanted
    assert heads == of_heads
    assert {key: (min(it), max(it)) for key, it in tokens.items()} == {
        key: (min(it), max(it)) for key, it in of_tokens.items()
    }


@given(unlike_transfers(), st.booleans())
def test_a_band_begins_and_ends_at_its_tokens(transfer: Any, coalesce: bool) -> None:
    src, dst, _, _, src_token, dst_token, _ = transfer
    drawn = bands_of(planned(transfer, coalesce))
    for name, cache, shift in (("src", src, 0), ("dst", dst, dst_token - src_token)):
        size = cache.tokens
        assert drawn.parts[["src", "dst"].index(name)] == size
        begin, end = (getattr(drawn.bands, f"{name}_{it}") for it in ("from", "to"))
        one_span = [it for it in range(len(begin)) if it not in drawn.tokens]
        for band in one_span:
            assert begin[band] == (int(drawn.bands.token_first[band]) + shift) % size
            assert end[band] == (int(drawn.bands.token_last[band]) + shift) % size + 1


@given(transfers(), st.sampled_from(Coalesce))
def test_a_band_of_bytes_begins_and_ends_where_they_do(
    example: Example, coalesce: Coalesce
) -> None:
    drawn = bands_of(example.plan(coalesce))
    strides = example.src.stride, example.dst.stride
    for which, (name, stride) in enumerate(zip(("src", "dst"), strides, strict=True)):
        written = {
            getattr(it, f"{name}_row") * stride + getattr(it, f"{name}_start") + byte
            for it in example.moves
            for byte in range(it.nbytes)
        }
        step = stride // drawn.parts[which]
        columns = (getattr(drawn.bands, f"{name}_{it}") for it in ("first", "from", "last", "to"))
        shown: set[int] = set()
        for first, begin, last, end in zip(*(it.tolist() for it in columns), strict=True):
            shown.update(range(first * stride + begin * step, last * stride + end * step))
        assert shown == written


@given(unlike_transfers(), st.booleans())
def test_a_band_says_keys_or_values_as_the_origins_do(transfer: Any, coalesce: bool) -> None:
    plan = planned(transfer, coalesce)
    names = ["", "K", "V", "K+V"]
    said = {names[it] for it in bands_of(plan).bands.kv.tolist()} - {""}
    known = {plan.origin(it).kv for it in range(plan.part.segments.num_runs)}
    if "kv" in plan.part.split or plan.part.tensors_per_layer == 2:
        assert not said or known <= {*said, "K", "V"}
    else:
        letters = {letter for it in known - {""} for letter in it.split("+")}
        assert letters == {letter for it in said for letter in it.split("+")}


@given(st.permutations(range(12)), st.permutations(range(12)), st.sampled_from(Coalesce))
def test_entries_and_tokens_that_are_out_of_order_are_all_named(
    src: list[int], dst: list[int], coalesce: Coalesce
) -> None:
    """Runs of rows whose places in the block table are in another order."""
    plan = kvplan.plan(Transfer(Rows(FP16, src), Rows(FP16, dst), coalesce=coalesce), local="dst")
    drawn = bands_of(plan)
    part = plan.part
    runs = {(rows[1][0], rows[1][1]): [*part.segments][i] for i in range(len(part.segments))
            for rows in [part.rows(i)]}  # fmt: skip
    for band in range(len(drawn.bands.state)):
        key = int(drawn.bands.dst_first[band]), int(drawn.bands.dst_last[band])
        _, offset, nbytes = runs[key]
        spans = tokens_of(plan, offset, offset + nbytes - 1)
        wanted = ", ".join(f"{a}..{b}" for a, b in spans[:3]) + (", ..." * (len(spans) > 3))
        plain = f"{drawn.bands.token_first[band]}..{drawn.bands.token_last[band]}"
        assert drawn.tokens.get(band, plain) == wanted
        entries = [dst.index(it) for it in range(key[0], key[1] + 1)]
        assert drawn.bands.entry_first[band] == min(entries)
        assert drawn.bands.entry_last[band] == max(entries)
        assert (band in drawn.entries) is (
            entries != [*range(entries[0], entries[0] + len(entries))]
        )


def test_too_many_bands_are_joined_and_none_is_lost() -> None:
    table = np.arange(0, 64, 2)
    plan = kvplan.plan(Transfer(Rows(FP16, table), Rows(FP16, table[::-1].copy())), local="dst")
    whole, joined = bands_of(plan), bands_of(plan, most=10)
    assert (len(whole.bands.state), len(joined.bands.state)) == (32, 8)
    assert (whole.joined, joined.joined) == (0, 32)
    for name in ("runs", "nbytes", "segments"):
        assert getattr(joined.bands, name).sum() == getattr(whole.bands, name).sum()
    assert joined.bands.src_first.tolist() == [*range(0, 64, 8)]
    assert joined.bands.src_last.tolist() == [*range(6, 64, 8)]


def test_joined_bands_are_of_one_state() -> None:
    table = np.arange(0, 64, 2)
    plan = kvplan.plan(Transfer(Rows(FP16, table), Rows(FP16, table[::-1].copy())), local="dst")
    states = np.repeat([SAME, OLD, SAME], [28, 1, 3])
    joined = bands_of(plan, states, most=4)
    assert joined.at is not None
    assert joined.bands.segments.tolist() == [8, 8, 8, 4, 1, 3]
    assert joined.bands.state.tolist() == [SAME, SAME, SAME, SAME, OLD, SAME]
    assert joined.at[1].tolist() == [62, 46, 30, 14, 6, 4]


def test_a_comparison_has_what_both_plans_have_once() -> None:
    old = kvplan.plan(Transfer(Rows(FP16, [4, 5, 9, 20]), Rows(FP16, [7, 8, 2, 30])), local="dst")
    new = kvplan.plan(Transfer(Rows(FP16, [5, 4, 9, 21]), Rows(FP16, [7, 8, 2, 30])), local="dst")
    (picture,) = pictures(old, new)
    bands = picture.drawn.bands
    rows = zip(bands.src_first, bands.dst_first, bands.dst_last, bands.state, strict=True)
    assert sorted(tuple(map(int, it)) for it in rows) == sorted(
        [(4, 7, 8, OLD), (5, 7, 7, NEW), (4, 8, 8, NEW), (9, 2, 2, SAME), (20, 30, 30, OLD),
         (21, 30, 30, NEW)]
    )  # fmt: skip
    assert picture.verdict.startswith("different bytes - 393,216 destination bytes")


@pytest.mark.parametrize("changed", ["src", "dst"])
def test_the_same_bytes_of_other_rows_are_not_the_same(changed: str) -> None:
    narrow, wide = (CacheDesc(2, (4, it), DataType.DT_INT8) for it in (8, 16))
    rows = {"src": Rows(narrow), "dst": Rows(narrow)}
    old, new = (
        kvplan.plan(Transfer(**it, nbytes=8, reinterpret=True), local="dst")
        for it in (rows, rows | {changed: Rows(wide)})
    )
    assert old.part.segments == new.part.segments
    (picture,) = pictures(old, new)
    assert picture.drawn.bands.state.tolist() == [OLD, NEW]
    assert picture.drawn.bands._asdict()[f"{changed}_to"].tolist() == [2, 1]
    assert picture.drawn.parts == ((2, 1) if changed == "src" else (1, 2))


@given(unlike_transfers(), unlike_transfers())
def test_plans_of_other_caches_are_compared_too(a: Any, b: Any) -> None:
    old, new = planned(a, True), planned(b, True)
    if old == new:
        return
    (picture,) = embedded(old.to_html(diff=new))
    bands = pictures(old, new)[0].drawn.bands
    runs = [int(bands.runs[bands.state == it].sum()) for it in (SAME, OLD, NEW)]
    assert runs[0] + runs[1] == old.part.segments.num_runs
    assert runs[0] + runs[2] == new.part.segments.num_runs
    assert picture["count"] == len(bands.state)


def test_groups_are_compared_by_name() -> None:
    plan = kvplan.plan(Transfer(Rows(FP16, [4, 5]), Rows(FP16, [7, 8])), local="dst")
    other = kvplan.plan(Transfer(Rows(FP16, [4, 6]), Rows(FP16, [7, 8])), local="dst")
    old, new = joined({"a": plan, "b": plan}), joined({"a": other, "c": plan})
    made = pictures(old, new)
    assert [(it.name, it.verdict.partition(" - ")[0]) for it in made] == [
        ("a", "different bytes"),
        ("b", "only in the old plan"),
        ("c", "only in the new plan"),
    ]
    assert [{*it.drawn.bands.state.tolist()} for it in made] == [{OLD, NEW}, {OLD}, {NEW}]


@pytest.mark.parametrize(("src", "dst"), [(0, 1), (63, 0)])
def test_one_block_is_one_band(src: int, dst: int) -> None:
    plan = kvplan.plan(Transfer(Rows(FP16, [src]), Rows(FP16, [dst])), local="dst")
    bands = bands_of(plan).bands
    assert (bands.src_first.tolist(), bands.dst_first.tolist()) == ([src], [dst])
