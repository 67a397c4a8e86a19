"""Every fact of a text is true: tables are executed, rows and summaries are counted.

The expected values come from block tables and moves of rows only, not from offsets or segments.
"""

from __future__ import annotations

import re
from collections import Counter
from random import Random
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, Plan, Rows, Transfer
from tests.planning.test_unlike import planned
from tests.planning.test_unlike import transfers as unlike_transfers
from tests.planning.transfers import Example, transfers
from tests.planning.unlike import expected
from tests.support.plans import joined

coalescings = st.sampled_from(Coalesce)
limits = st.one_of(st.none(), st.integers(1, 30))

WIDTH = 120


def texts(plan: Plan, limit: int | None) -> list[str]:
    return [plan.explain("tree", limit), plan.explain("table", limit)]


def assert_narrow(text: str) -> None:
    assert max(map(len, text.splitlines())) <= WIDTH, text


def run_of(cells: list[str], local: str) -> tuple[int, int, int, int, int]:
    """Return tensor and offset at src and at dst, and the bytes, of a row of a table."""
    places = [re.fullmatch(r"t(\d+)\+0x([0-9a-f]+)", cell) for cell in cells[-3:-1]]
    at = [(int(place[1]), int(place[2], 16)) for place in places if place]
    src, dst = at[::-1] if local == "dst" else at
    return *src, *dst, int(cells[-1])


def execute_table(plan: Plan, src: list[np.ndarray], dst: list[np.ndarray]) -> None:
    """Execute a table row by row."""
    lines = plan.explain("table", limit=None).splitlines()
    assert len(lines) == 1 + plan.num_descriptors
    widths = [max(map(len, column)) for column in zip(*map(str.split, lines), strict=True)]
    assert {*map(len, lines)} == {sum(widths) + 2 * (len(widths) - 1)}  # the smallest width
    before = [tensor.copy() for tensor in src]
    for index, line in enumerate(lines[1:]):
        cells = line.split()
        assert int(cells[0]) == index
        source, src_at, target, dst_at, nbytes = run_of(cells, plan.local)
        flat = dst[target].reshape(-1).view(np.uint8)
        read = before[source].reshape(-1).view(np.uint8)
        flat[dst_at : dst_at + nbytes] = read[src_at : src_at + nbytes]


@given(transfers(), coalescings, limits)
def test_executing_the_rows_of_a_table_fulfils_the_request(
    example: Example, how: Coalesce, limit: int | None
) -> None:
    plan = example.plan(how)
    src, dst = example.memory()
    wanted = example.apply(src, dst)
    execute_table(plan, src, dst)
    assert all(np.array_equal(a, b) for a, b in zip(dst, wanted, strict=True))
    for text in texts(plan, limit):
        assert_narrow(text)


def test_the_number_of_the_last_row_fits_its_column() -> None:
    """The first of three runs has the highest offsets, and the last tensor has runs 9 to 11."""
    desc = CacheDesc(4, (16, 64), DataType.DT_FLOAT16)
    transfer = Transfer(Rows(desc, [9, 5, 1]), Rows(desc, [8, 4, 2]), coalesce=Coalesce.NONE)
    plan = kvplan.plan(transfer, local="dst")
    lines = plan.explain("table", limit=None).splitlines()
    assert lines[-1].startswith("11 ")
    assert {*map(len, lines)} == {len(lines[0])}


@given(unlike_transfers(), coalescings, limits)
def test_executing_a_table_of_unlike_caches_fulfils_the_request(transfer, how, limit) -> None:  # type: ignore[no-untyped-def]
    plan = planned(transfer, how)
    src, dst, *arguments = transfer
    source, target = src.tensors(1), dst.tensors(2)
    wanted = expected(src, dst, source, target, *arguments)
    execute_table(plan, source, target)
    assert all(np.array_equal(a, b) for a, b in zip(target, wanted, strict=True))
    for text in texts(plan, limit):
        assert_narrow(text)


ROW = re.compile(
    r"(?P<src>\d+(?:-\d+)?)(?:\+0x\w+)? +-> (?P<dst>\d+(?:-\d+)?)(?:\+0x\w+)?  "
    r".*?(?P<word>token|position)s? (?P<spans>[\d., ]+)$"
)


def numbers(text: str) -> list[int]:
    """Return the numbers in a text such as `4-5` or `16..31, 0..15`."""
    found = []
    for part in text.replace("..", "-").split(", "):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def rows_of(plan: Plan) -> list[tuple[list[int], list[int], str, list[int]]]:
    """Return all rows of a tree: blocks at src and dst, and tokens or positions."""
    lines = plan.explain(limit=None).splitlines()
    lines = [re.sub(r".*-- tensor \d+ -> \d+( [KV]\+?V?)?  ", "", line) for line in lines]
    rows = [ROW.search(line) for line in lines if not line.endswith("...")]
    listed = sum(row is not None for row in rows) + sum(line.endswith("...") for line in lines)
    assert listed == len(plan.part.segments) or (
        plan.part.tables is not None and len(plan.part.tables.dst) == 1
    )
    return [
        (numbers(row["src"]), numbers(row["dst"]), row["word"], numbers(row["spans"]))
        for row in rows
        if row
    ]


def some_tables(seed: int) -> tuple[list[int], list[int]]:
    """Return block tables with runs in either direction, like those of allocators."""
    random = Random(seed)
    count = random.randint(1, 40)
    result = []
    for _ in range(2):
        blocks: list[int] = []
        free = [*range(60)]
        while len(blocks) < count:
            start, length = random.randrange(len(free)), random.choice([1, 1, 2, 6])
            part, free[start : start + length] = free[start : start + length], []
            blocks += part[::-1] if random.random() < 0.3 else part
        result.append(blocks[:count])
    return result[0], result[1]


def tables() -> st.SearchStrategy[tuple[list[int], list[int]]]:
    return st.integers(0, 10**6).map(some_tables)


FORMATS = {
    "NHD": CacheDesc(4, (60, 4, 2, 2), DataType.DT_INT8, kv_tensor_format="NHD"),
    "none": CacheDesc(4, (60, 8), DataType.DT_INT8),
}


@given(tables(), coalescings, st.sampled_from([*FORMATS]))
def test_rows_of_a_tree_name_their_part_of_the_request(
    given_tables: tuple[list[int], list[int]], how: Coalesce, of: str
) -> None:
    src, dst = given_tables
    desc = FORMATS[of]
    plan = kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst), coalesce=how), local="dst")
    size = 4 if of == "NHD" else 1
    held = []
    for src_rows, dst_rows, word, at in rows_of(plan):
        assert word == ("token" if of == "NHD" else "position")
        blocks = [position // size for position in at[::size]]
        assert [src[block] for block in blocks] == src_rows
        assert [dst[block] for block in blocks] == dst_rows
        held += at
    cut = plan.explain(limit=None).count("...\n")
    if not cut and (of == "NHD" or len(dst) > 1):
        assert sorted(held) == [*range(len(dst) * size)]


@given(unlike_transfers(), coalescings)
def test_rows_between_unlike_caches_name_their_tokens(transfer, how) -> None:  # type: ignore[no-untyped-def]
    src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens = transfer
    for src_rows, dst_rows, word, at in rows_of(planned(transfer, how)):
        assert word == "token"
        assert set(at) <= set(range(src_token, src_token + num_tokens))
        assert {src_blocks[position // src.tokens] for position in at} == set(src_rows)
        shifted = [position - src_token + dst_token for position in at]
        assert {dst_blocks[item // dst.tokens] for item in shifted} == set(dst_rows)


def runs_of(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Merge blocks that are adjacent on both sides, in their order."""
    runs: list[list[tuple[int, int]]] = []
    for src, dst in pairs:
        if runs and runs[-1][-1] == (src - 1, dst - 1):
            runs[-1].append((src, dst))
        else:
            runs.append([(src, dst)])
    return runs


@given(tables(), coalescings, st.integers(8, 16))
def test_a_summary_counts_the_segments(
    given_tables: tuple[list[int], list[int]], how: Coalesce, limit: int
) -> None:
    src, dst = given_tables
    desc = FORMATS["none"]
    plan = kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst), coalesce=how), local="dst")
    text = plan.explain(limit=limit)
    pairs = [*zip(src, dst, strict=True)]
    runs = runs_of(sorted(pairs) if how is Coalesce.SORTED else pairs)
    segments = len(pairs) if how is Coalesce.NONE else len(runs)
    if segments <= limit:
        assert "... " not in text
        return
    hidden = segments - limit // 2 - limit // 4
    assert f"... {hidden} more segment{'s' if hidden > 1 else ''}. Of all {segments}:" in text
    lengths = [len(run) for run in runs]
    found = re.search(r"(\d+) runs? of (\d+)(?: to (\d+))? blocks?", text)
    assert found
    assert int(found[1]) == len(runs)
    assert {int(group) for group in found.groups()[1:] if group} == {min(lengths), max(lengths)}
    if found := re.search(r"median ([\d.]+); (\d+) of one block alone", text):
        assert float(found[1]) == median(lengths)
        assert int(found[2]) == lengths.count(1)
    assert ("; in " in text) is (segments != len(runs))


@given(st.lists(st.one_of(tables(), st.just(([1, 2, 3], [4, 5, 6]))), min_size=1, max_size=4))
def test_groups_are_listed_once_and_each_is_named(
    of_groups: list[tuple[list[int], list[int]]],
) -> None:
    descs = [*FORMATS.values(), CacheDesc(2, (60, 4), DataType.DT_FLOAT16)]
    plans = {
        f"group {chr(97 + index)}": kvplan.plan(
            Transfer(Rows(descs[index % 2], src), Rows(descs[index % 2], dst)), local="dst"
        )
        for index, (src, dst) in enumerate(of_groups)
    }
    plan = joined(plans)
    for text in (*texts(plan, 16), *texts(plan, None)):
        assert_narrow(text)
        heads = [line for line in text.splitlines()[2:] if not line.startswith(" ")]
        labels = [part for head in heads for part in head.partition(" ")[2].split(", ")]
        assert sorted(labels) == sorted(plans)
    assert_narrow(plan.diff(joined({"group a": plans["group a"]})))


@given(transfers(), transfers())
def test_a_diff_of_any_two_is_narrow(old: Example, new: Example) -> None:
    assert_narrow(old.plan().diff(new.plan()))


@given(tables(), tables(), coalescings)
def test_a_cause_names_the_change_that_was_made(
    old: tuple[list[int], list[int]], new: tuple[list[int], list[int]], how: Coalesce
) -> None:
    desc = FORMATS["NHD"]
    plans = [
        kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst), coalesce=how), local="dst")
        for src, dst in (old, new)
    ]
    text = plans[0].diff(plans[1])
    assert_narrow(text)
    before, after = ({b: a for a, b in zip(*version, strict=True)} for version in (old, new))
    moved = [after[key] - before[key] for key in before.keys() & after.keys()]
    steps = Counter(step for step in moved if step)
    if found := re.search(r"(\d+) of (\d+) dst blocks from another", text):
        assert [int(group) for group in found.groups()] == [sum(steps.values()), len(moved)]
    if found := re.search(r"most often ([+-]\d+): (\d+)", text):
        assert steps[int(found[1])] == int(found[2]) == max(steps.values())
    if "In all" in text:
        for keys, what in (
            (before.keys() - after.keys(), "no longer written"),
            (after.keys() - before.keys(), "newly written"),
        ):
            found = re.search(rf"(\d+) {what}$", text, re.MULTILINE)
            assert not keys or f"{len(keys)} {what}" in text


@pytest.mark.parametrize("listed", [[7, 3], [3, 8], [6, 9]])
def test_tokens_are_not_named_if_a_document_has_another_block_table(
    listed: list[int],
) -> None:
    desc = FORMATS["NHD"]
    plan = kvplan.plan(Transfer(Rows(desc, [4, 5]), Rows(desc, [7, 8])), local="dst")
    assert plan.origin(0).tokens == ((0, 7),)
    assert "tokens 0..7" in plan.explain()
    document = plan.to_dict()
    document["parts"][0]["tables"]["dst"] = listed
    other = Plan.from_dict(document)
    assert other.origin(0).tokens == ()
    assert "  token" not in other.explain()
