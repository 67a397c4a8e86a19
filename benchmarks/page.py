"""The table of docs/internals/performance.md, made from measured rows.

    make bench PAGE=1                                    # measure every row, write the table
    python -m benchmarks --page --from build/bench.jsonl # write it from a stored run

The table stands between two comments of the page. Everything else on the page stays as it is.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[1] / "docs/internals/performance.md"
BEGIN, END = "<!-- made by `make bench PAGE=1` -->", "<!-- end of what is made -->"

Record = dict[str, Any]
"""One line of build/bench.jsonl: the machine of a run, or one of its rows."""

Measures = Mapping[str, Callable[..., object]]
"""The function that measures each row, by the name of the row."""


def machine(quick: bool) -> Record:
    """Describe this machine and the run, before the run begins."""
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
    }


def table(records: Iterable[Record], measures: Measures) -> Iterator[str]:
    """Yield the lines of Markdown: the machine, the measured rows, then the unmeasured ones.

    Rows are described by the first line of their function's docstring.
    """
    blank: dict[str, list[str]] = {}
    missing = dict(measures)
    for record in records:
        missing.pop(record.get("name", ""), None)
        if "machine" in record:
            yield from heading(record)
        elif "unmeasured" in record:
            blank.setdefault(record["unmeasured"], []).append(f"`{record['name']}`")
        else:
            described, _, _ = (measures[record["name"]].__doc__ or "").partition("\n")
            yield row(record, described)
    if missing:
        blank["not asked for in this run"] = [f"`{name}`" for name in missing]
    for reason, names in blank.items():
        yield ""
        yield f"Not measured ({reason}): {', '.join(names)}."


def heading(record: Record) -> Iterator[str]:
    """Yield the description of the machine and the run, and the head of the table."""
    rounds = "a quarter of the rounds (`--quick`)" if record["quick"] else "all rounds"
    yield (
        f"Machine: {record['machine']}, {record['cores']} cores, {record['memory_gib']} GiB;"
        f" Linux {record['kernel']}, Python {record['python']}, NumPy {record['numpy']};"
        f" {record['day']}, {rounds}. Load average at the start: {record['load']}."
    )
    if record["load"] > record["cores"] / 2:
        yield "**Other work kept the machine busy: repeat a run before you trust a missed target.**"
    yield ""
    yield "| row | what | measured | limit | ratio | target | |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"


def row(record: Record, described: str) -> str:
    """Return one measured row."""
    unit, target = record["unit"], record["target"]
    asked = "" if target is None else f"{record['sense']} {target:g}"
    verdict = "" if target is None else "met" if record["met"] else "**missed**"
    figures = f"{record['value']:.4g} {unit} | {record['limit']:.4g} {unit} | {record['ratio']:.2f}"
    return f"| `{record['name']}` | {described} | {figures} | {asked} | {verdict} |"


def write(source: Path, measures: Measures, page: Path = PAGE) -> None:
    """Replace the table of `page` by that of the run in `source`."""
    records = [json.loads(line) for line in source.read_text().splitlines()]
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page={str(page)!r} has no lines {BEGIN!r} and {END!r}")
    page.write_text("\n".join([before + begin, "", *table(records, measures), "", end + after]))
