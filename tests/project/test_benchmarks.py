"""What a benchmark says where it cannot measure, and that its C programs compile without a word."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.table import Row, Run, Topic, Unmeasured, format_table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("source", ["limits.c", "sockets.c", "exchange.c"])
def test_the_c_programs_have_no_warnings(source: str) -> None:
    strict = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    compiler = shutil.which("cc") or "gcc"
    subprocess.run([compiler, *strict, ROOT / "benchmarks" / source], check=True)


def test_a_row_that_cannot_be_measured_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = Topic()

    @topic.row("over_peer")
    def over_peer(run: Run, name: str) -> Row:
        raise Unmeasured("the peers are not installed: make bench-peers")

    @topic.row("other")
    def other(run: Run, name: str) -> Row:
        return Row(name, 3, "GB/s", 2, "at least", 1.25, cases={"pull 64": 1.23456})

    monkeypatch.setattr(command, "ROWS", topic)
    rows = command.measure(list(topic), quick=True)
    assert [row.met for row in rows] == [True, True]
    assert [row.to_json() for row in rows] == [
        '{"name": "over_peer", "unmeasured": "the peers are not installed: make bench-peers"}',
        '{"name": "other", "value": 3, "unit": "GB/s", "limit": 2, "ratio": 1.5, '
        '"cases": {"pull 64": 1.2346}}',
    ]
    assert list(format_table(rows))[1].endswith(
        "not measured: the peers are not installed: make bench-peers"
    )


def test_every_row_has_one_name_and_one_topic() -> None:
    assert sum(map(len, command.TOPICS)) == len(command.ROWS)


@pytest.mark.slow
def test_benchmarks_and_tools_use_what_is_there() -> None:
    """Most run on request only: a name that has gone from kvplan would not be missed for long.

    With the options of `make types`, whose cache it then finds.
    """
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--explicit-package-bases", "benchmarks", "tools"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert re.search(r"\(checked [0-9]+ source files\)|no issues found", checked.stdout), checked
    gone = re.compile(r"\[(attr-defined|call-arg|name-defined|import-not-found)\]$")
    # What `make bench-peers` and `make wheels` install in environments of their own, or users have.
    elsewhere = re.compile(
        r' module named "(nixl_cu1[23]|mooncake\.engine|elftools\..+|cupy|torch)" '
    )
    lines = [it for it in checked.stdout.splitlines() if not elsewhere.search(it)]
    assert [it for it in lines if gone.search(it)] == []
