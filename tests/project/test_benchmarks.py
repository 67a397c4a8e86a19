"""Benchmarks: unmeasured rows, the table of the page, and C programs without warnings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import page
from benchmarks.table import Blank, Row, Run, Topic, Unmeasured, format_table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("source", ["limits.c", "sockets.c", "exchange.c"])
def test_the_c_programs_have_no_warnings(source: str) -> None:
    strict = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    compiler = shutil.which("cc") or "gcc"
    subprocess.run([compiler, *strict, ROOT / "benchmarks" / source], check=True)


def test_a_row_that_cannot_be_measured_names_the_missing_requirement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = Topic()

    @topic.row("over_peer")
    def over_peer(run: Run, name: str) -> Row:
        raise Unmeasured("the peers are not installed: make bench-peers")

    @topic.row("other")
    def other(run: Run, name: str) -> Row:
        return Row(name, 3, "GB/s", 2, "at least", 1.25, cases={"pull 64": 1.23456})

    @topic.row("broken")
    def broken(run: Run, name: str) -> Row:
        raise OSError("an end says nothing\nand more")

    monkeypatch.setattr(command, "ROWS", topic)
    rows_json: list[str] = []  # each row is kept as soon as it is measured: a killed run loses none
    *rows, failed = command.measure(list(topic), True, rows_json.append)
    assert failed == Blank("broken", "failed: an end says nothing", met=False)
    assert [row.met for row in rows] == [True, True]
    assert len(rows_json) == 3
    assert (
        rows_json[:2]
        == [row.to_json() for row in rows]
        == [
            '{"name": "over_peer", "unmeasured": "the peers are not installed: make bench-peers"}',
            '{"name": "other", "value": 3, "unit": "GB/s", "limit": 2, "ratio": 1.5, '
            '"sense": "at least", "target": 1.25, "met": true, "cases": {"pull 64": 1.2346}}',
        ]
    )
    assert list(format_table(rows))[1].endswith(
        "not measured: the peers are not installed: make bench-peers"
    )


def test_a_run_replaces_the_table_of_the_page_and_nothing_else(tmp_path: Path) -> None:
    rows: list[Row | Blank] = [
        Row("pull", 9.0, "us", 6.0),
        Row("push", 3.0, "GB/s", 2.0, "at least", 1.25),
        Blank("over_peer", "no peer"),
        Row("count", 4, "calls", 8, target=None),
    ]

    def pull() -> None:
        """Pull blocks.

        Details.
        """

    measures = {"pull": pull, "push": pull, "count": pull, "over_peer": pull, "left_out": pull}
    run = tmp_path / "bench.jsonl"
    run.write_text(
        "\n".join([json.dumps(page.machine(quick=True)), *(row.to_json() for row in rows)])
    )
    shown = tmp_path / "performance.md"
    shown.write_text(f"# Before\n\n{page.BEGIN}\n| old |\n{page.END}\n\n## After\n")
    page.write(run, measures, shown)
    text = shown.read_text()
    assert text.startswith(f"# Before\n\n{page.BEGIN}\n\nMachine: ")
    assert text.endswith(f"{page.END}\n\n## After\n")
    assert "| old |" not in text
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `pull` | Pull blocks. | 9 us | 6 us | 1.50 | at most 1 | **missed** |",
        "| `push` | Pull blocks. | 3 GB/s | 2 GB/s | 1.50 | at least 1.25 | met |",
        "| `count` | Pull blocks. | 4 calls | 8 calls | 0.50 |  |  |",
    ]
    assert "Not measured (no peer): `over_peer`." in text
    assert "Not measured (not asked for in this run): `left_out`." in text
    page.write(run, measures, shown)  # a second write changes nothing
    assert shown.read_text() == text


def test_a_run_of_some_rows_replaces_these_and_names_its_machine(tmp_path: Path) -> None:
    def measured() -> None:
        """Measure a time."""

    def replace(some: bool, *rows: Row | Blank) -> list[str]:
        lines = [json.dumps(page.machine(quick=False, some=some)), *(row.to_json() for row in rows)]
        run.write_text("\n".join(lines))
        page.write(run, measures, shown)
        return [line for line in shown.read_text().splitlines() if "`" in line]

    measures = dict.fromkeys(["first", "second", "third", "fourth"], measured)
    run, shown = tmp_path / "bench.jsonl", tmp_path / "performance.md"
    shown.write_text(f"{page.BEGIN}\n{page.END}\n")
    replace(
        False,
        Row("first", 1, "us", 1),
        Blank("second", "no peer"),
        Row("third", 3, "us", 1),
        Blank("fourth", "no peer"),
    )
    lines = replace(
        True, Blank("first", "no peer"), Row("second", 2, "us", 1), Row("third", 4, "us", 1)
    )
    assert [line.split(" |")[:3] for line in lines[1:4]] == [
        ["| `first`", " Measure a time.", " 1 us"],
        ["| `second`", " Measure a time.", " 2 us"],
        ["| `third`", " Measure a time.", " 4 us"],
    ]
    assert lines[4] == "Not measured (no peer): `fourth`."
    assert re.fullmatch(r"Measured later \(.+ cores, .+\): `second`, `third`\.", lines[5])
    again = replace(True, Row("third", 5, "us", 1))
    assert [line.split(" |")[2] for line in again[1:4]] == [" 1 us", " 2 us", " 5 us"]
    assert again[5] == lines[5].replace(", `third`", "")
    assert again[6].endswith(": `third`.")
    assert len(again) == 7


def test_the_page_has_a_table_of_rows_that_exist() -> None:
    text = page.PAGE.read_text()
    assert text.index(page.BEGIN) < text.index(page.END)
    made = text.partition(page.BEGIN)[2].partition(page.END)[0]
    named = set(re.findall(r"^\| `(\w+)` \|", made, re.MULTILINE))
    assert len(named) > 20
    assert named <= set(command.ROWS)


def test_every_row_has_one_name_and_one_topic() -> None:
    assert sum(map(len, command.TOPICS)) == len(command.ROWS)


@pytest.mark.slow
def test_benchmarks_tools_and_examples_use_names_that_exist() -> None:
    """Most programs run on request only, so nothing else would notice a removed name.

    The options are those of `make types`, whose cache is shared.
    """
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--explicit-package-bases",
            "benchmarks",
            "tools",
            "examples",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert re.search(r"\(checked [0-9]+ source files\)|no issues found", checked.stdout), checked
    gone = re.compile(r"\[(attr-defined|call-arg|name-defined|import-not-found)\]$")
    # Modules from other environments (`make bench-peers`, `make wheels`, `make vllm`, `make
    # sglang`), of users, and from `python -m kvplan.run`.
    elsewhere = re.compile(
        r' module named "(nixl_cu1[23]|mooncake\.engine|elftools\..+|cupy|torch|aiohttp'
        r"|transformers|safetensors\.numpy|vllm\..+|sglang\..+|hixl|llm_datadist"
        r'|llm_datadist_prefill)" '
    )
    lines = [line for line in checked.stdout.splitlines() if not elsewhere.search(line)]
    assert [line for line in lines if gone.search(line)] == []


def test_the_appendix_of_the_page_stays_short() -> None:
    shown = (Path(__file__).parents[2] / "docs/internals/performance.md").read_text()
    appendix = shown.partition("\n## Appendix")[2].splitlines()
    assert 10 < len(appendix) <= 100
