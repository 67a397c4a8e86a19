"""`python -m benchmarks`: print one table, and write the same rows as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import (
    copying,
    engines,
    gpu,
    hixl,
    latency,
    layerwise,
    leases,
    links,
    lmcache,
    lowering,
    network,
    notifying,
    observing,
    one_host,
    page,
    pages,
    peers_memory,
    planning,
    recording,
    serving,
    surfaces,
)
from benchmarks.table import Blank, Row, Run, Unmeasured, format_table

TOPICS = (
    planning.TOPIC,
    lowering.TOPIC,
    copying.TOPIC,
    peers_memory.TOPIC,
    engines.TOPIC,
    leases.TOPIC,
    serving.TOPIC,
    hixl.TOPIC,
    recording.TOPIC,
    layerwise.TOPIC,
    links.TOPIC,
    network.TOPIC,
    latency.TOPIC,
    notifying.TOPIC,
    one_host.TOPIC,
    surfaces.TOPIC,
    lmcache.TOPIC,
    observing.TOPIC,
    pages.TOPIC,
    gpu.TOPIC,
)
ROWS = {name: measure for topic in TOPICS for name, measure in topic.items()}
"""Rows in the order of the table. A new topic is a new file, and its name above."""

JSON_LINES = Path(__file__).parents[1] / "build/bench.jsonl"


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure kvplan. Each figure has a limit that is measured in the same run.",
        epilog=f"Rows: {', '.join(ROWS)}. Also written, as JSON lines, to build/{JSON_LINES.name}.",
    )
    parser.add_argument("--only", metavar="NAME", action="append", help="this row (repeatable)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument(
        "--page",
        action="store_true",
        help="replace the table of docs/internals/performance.md; with --only, these rows of it",
    )
    parser.add_argument(
        "--from", dest="kept", metavar="FILE", type=Path, help="with --page: use this run"
    )
    parsed = parser.parse_args()
    if parsed.kept and not parsed.page:
        parser.error(f"--from {parsed.kept}: needs --page")
    unknown = sorted(set(parsed.only or ()) - set(ROWS))
    if unknown:
        parser.error(f"--only {unknown[0]}: expected one of {', '.join(ROWS)}")
    return parsed


def measure(names: list[str], quick: bool, keep: Callable[[str], object]) -> list[Row | Blank]:
    """Measure row after row, and keep each as a line of JSON; stderr shows progress.

    Dots are steps of a slow row.
    """
    run = Run(quick, say=lambda _: print(".", end="", file=sys.stderr, flush=True))
    rows: list[Row | Blank] = []
    with run.opened:
        for number, name in enumerate(names, 1):
            print(f"[{number}/{len(names)}] {name} ...", end="", file=sys.stderr, flush=True)
            start = time.perf_counter()
            try:
                rows.append(ROWS[name](run, name))
            except Unmeasured as error:
                rows.append(Blank(name, str(error)))
            except Exception as error:  # a row that fails must not stop the others
                traceback.print_exc()
                reason, _, _ = str(error).partition("\n")
                rows.append(Blank(name, f"failed: {reason}", met=False))
            keep(rows[-1].to_json())
            print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Print the table; return 1 if --check is given and a target is missed."""
    asked = arguments()
    if asked.kept:
        page.write(asked.kept, ROWS)
        return 0
    machine = json.dumps(page.machine(asked.quick, some=bool(asked.only)))
    JSON_LINES.parent.mkdir(exist_ok=True)
    with JSON_LINES.open("w", buffering=1) as kept:
        print(machine, file=kept)
        rows = measure(asked.only or list(ROWS), asked.quick, partial(print, file=kept))
    if asked.page:
        page.write(JSON_LINES, ROWS)
    print("\n".join(format_table(rows)))
    return int(asked.check and not all(row.met for row in rows))


if __name__ == "__main__":
    sys.exit(main())
