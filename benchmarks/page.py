"""The table of docs/internals/performance.md, made from measured rows.

    make bench PAGE=1                                    # measure every row, write the table
    python -m benchmarks --page --only request_64_us     # replace the line of one row
    python -m benchmarks --page --from build/bench.jsonl # write it from a stored run

The table stands between two comments of the page. Everything else on the page stays as it is.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[1] / "docs/internals/performance.md"
BEGIN, END = "<!-- made by `make bench PAGE=1` -->", "<!-- end of what is made -->"
NAME = re.compile(r"`(\w+)`")
BLANK, AGAIN = "Not measured", "Measured later"
"""Beginnings of the lines below the table; these lines end with names of rows."""

Record = dict[str, Any]
"""One line of build/bench.jsonl: the machine of a run, or one of its rows."""

Measures = Mapping[str, Callable[..., object]]
"""The function that measures each row, by the name of the row."""


def machine(quick: bool, some: bool = False) -> Record:
    """Describe this machine and the run of all rows, or of some, before the run begins."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "machine": model[1].strip() if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": round(os.getloadavg()[0], 1),
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "quick": quick,
        "some": some,
    }


def table(records: Sequence[Record], measures: Measures) -> Iterator[str]:
    """Yield the lines of Markdown: the machine, the measured rows, then the unmeasured ones."""
    run, *rows = records
    yield f"Machine: {described(run)}."
    yield from busy(run)
    yield ""
    yield "| row | what | measured | limit | ratio | target | |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    yield from measured(rows, measures).values()
    blank: dict[str, list[str]] = {}
    for record in rows:
        if "unmeasured" in record:
            blank.setdefault(record["unmeasured"], []).append(record["name"])
    if missing := [*measures.keys() - {record["name"] for record in rows}]:
        blank["not asked for in this run"] = sorted(missing)
    for reason, names in blank.items():
        yield from below(f"{BLANK} ({reason})", names)


def replaced(lines: Sequence[str], records: Sequence[Record], measures: Measures) -> Iterator[str]:
    """Yield the lines of an earlier table with the rows of a run of some, which is named below."""
    run, *rows = records
    new = measured(rows, measures)
    all_rows = {NAME.findall(line)[0]: line for line in lines if line.startswith("| `")} | new
    yield from takewhile(lambda line: not line.startswith("| `"), lines)
    yield from [all_rows[name] for name in measures if name in all_rows]
    for line in lines:
        if line.startswith((BLANK, AGAIN)):
            head, _, names = line.rpartition(": ")
            yield from below(head, [name for name in NAME.findall(names) if name not in new])
    yield from below(f"{AGAIN} ({described(run)})", [*new])
    yield from busy(run)


def below(head: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a line below the table, unless it names no row."""
    if names:
        yield from ("", f"{head}: {', '.join(f'`{name}`' for name in names)}.")


def described(run: Record) -> str:
    """Return the machine and the run in words."""
    rounds = "a quarter of the rounds (`--quick`)" if run["quick"] else "all rounds"
    return (
        f"{run['machine']}, {run['cores']} cores, {run['memory_gib']} GiB;"
        f" Linux {run['kernel']}, Python {run['python']}, NumPy {run['numpy']};"
        f" {run['day']}, {rounds}. Load average at the start: {run['load']}"
    )


def busy(run: Record) -> Iterator[str]:
    """Yield a warning if other work kept the machine busy."""
    if run["load"] > run["cores"] / 2:
        yield "**Other work kept the machine busy: repeat a run before you trust a missed target.**"


def measured(rows: Sequence[Record], measures: Measures) -> dict[str, str]:
    """Return the line of each measured row; the first line of the docstring describes the row."""
    lines = {}
    for record in rows:
        if "unmeasured" not in record:
            what, _, _ = (measures[record["name"]].__doc__ or "").partition("\n")
            lines[record["name"]] = row(record, what)
    return lines


def row(record: Record, what: str) -> str:
    """Return one measured row."""
    unit, target = record["unit"], record["target"]
    asked = "" if target is None else f"{record['sense']} {target:g}"
    verdict = "" if target is None else "met" if record["met"] else "**missed**"
    figures = f"{record['value']:.4g} {unit} | {record['limit']:.4g} {unit} | {record['ratio']:.2f}"
    return f"| `{record['name']}` | {what} | {figures} | {asked} | {verdict} |"


def write(source: Path, measures: Measures, page: Path = PAGE) -> None:
    """Replace the table of `page` by that of the run in `source`, or the rows that it measured."""
    records = [json.loads(line) for line in source.read_text().splitlines()]
    before, begin, rest = page.read_text().partition(BEGIN)
    made, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page={str(page)!r} has no lines {BEGIN!r} and {END!r}")
    if records[0].get("some"):
        lines = replaced(made.strip().splitlines(), records, measures)
    else:
        lines = table(records, measures)
    page.write_text("\n".join([before + begin, "", *lines, "", end + after]))
