"""Draw the rooms of kvplan and their imports: docs/pictures/rooms.svg and its table.

    python tools/rooms.py [--before REVISION] [--out FILE.svg]

The left half is REVISION, the right half is this tree. A box is a room (a package of kvplan) with
its files and lines. A line leads from each room to each room that it imports; its width grows with
the number of importing modules. Dashed red lines are imports upwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROWS = {  # top to bottom, in the order of the import contract, with places from left to right
    "run": (0, 0.1),
    "testing": (0, 0.36),
    "vllm": (0, 0.63),
    "cli": (0, 0.9),
    "llm_datadist": (1, 0.1),
    "hixl": (1, 0.37),
    "serving": (1, 0.63),
    "engine": (2, 0.5),
    "recording": (3, 0.14),
    "links": (3.6, 0.84),
    "control": (4.6, 0.84),
    "transport": (4.6, 0.5),
    "device": (5.6, 0.64),
    "execution": (6.6, 0.5),
    "debug": (6.6, 0.12),
    "planning": (7.6, 0.38),
    "inspection": (8.6, 0.38),
    "values": (9.6, 0.5),
}
FACADE = {"kvplan", "kvplan.__main__"}  # names of all rooms, for users; not a room
WIDTH, TOP, STEP, BOX = 560, 60, 62, (104, 36)
STYLE = """
text{font:12px sans-serif;fill:#1b1d20;text-anchor:middle}.title{font-weight:bold;font-size:14px}
.small{font-size:10px;fill:#5f636b}rect{fill:#eef1f5;stroke:#8a94a3}
path{fill:none;stroke:#5f7fa8;stroke-opacity:.55}.up{stroke:#b3261e;stroke-dasharray:5 3}
"""


def measure(folder: Path) -> dict[str, Any]:
    """Return the rooms, imports and import cycles of the kvplan in `folder`."""
    sys.path.insert(0, str(folder))
    import grimp

    graph = grimp.build_graph("kvplan", cache_dir=None)
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in (folder / "kvplan").rglob("*.py"):
        parts = path.relative_to(folder / "kvplan").parts
        files[room_of(parts[0])] += 1
        lines[room_of(parts[0])] += len(path.read_text().splitlines())
    imports: Counter[str] = Counter()
    imported: dict[str, set[str]] = {}
    for module in graph.modules - FACADE:
        imported[module] = graph.find_modules_directly_imported_by(module) - FACADE
        for other in imported[module]:
            upper, lower = (room_of(name.partition(".")[2]) for name in (module, other))
            imports[f"{upper} {lower}"] += upper != lower
    circles = sorted((len(circle) for circle in circles_of(imported)), reverse=True)
    return {"files": files, "lines": lines, "imports": imports, "circles": circles}


def room_of(name: str) -> str:
    """Return the room of a module by its name below kvplan; loose modules are `values`."""
    first = name.partition(".")[0]
    return first if first in ROWS else "values"


def circles_of(imported: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Return the largest sets of modules that import each other, including imports for types."""
    reach = {module: reached(module, imported) for module in imported}
    found = {
        frozenset(other for other in reach[module] if module in reach[other]) for module in imported
    }
    return {circle for circle in found if len(circle) > 1}


def reached(module: str, imported: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that `module` imports, at any depth."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        new = imported[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def panel(title: str, facts: Mapping[str, Any], left: float) -> Iterator[str]:
    """Yield one half of the picture."""
    circles = ", ".join(map(str, facts["circles"])) or "none"
    files, lines = sum(facts["files"].values()), sum(facts["lines"].values())
    middle = left + WIDTH / 2
    yield f'<text class="title" x="{middle}" y="20">{title}: {files} files, {lines:,} lines</text>'
    said = f"modules in circles, types included: {circles}"
    yield f'<text class="small" x="{middle}" y="36">{said}</text>'
    for pair, count in sorted(facts["imports"].items()):
        upper, lower = pair.split()
        if count and lower != "values":
            yield edge(upper, lower, count, left)
    for room in ROWS:
        if not facts["files"].get(room):
            continue
        x, y = place(room, left)
        size = f"{facts['files'][room]} files, {facts['lines'][room]:,}"
        name = "types, status, layout, ..." if room == "values" else room
        width = BOX[0] if room != "values" else 170
        yield f'<rect x="{x - width / 2}" y="{y}" width="{width}" height="{BOX[1]}" rx="4"/>'
        yield f'<text x="{x}" y="{y + 15}">{name}</text>'
        yield f'<text class="small" x="{x}" y="{y + 29}">{size}</text>'


def place(room: str, left: float) -> tuple[float, float]:
    """Return the middle of the upper side of a box."""
    row, across = ROWS[room]
    return left + across * WIDTH, TOP + row * STEP


def edge(upper: str, lower: str, count: int, left: float) -> str:
    """Return the line for the imports of one room by another."""
    (x, y), (to_x, to_y) = place(upper, left), place(lower, left)
    down = ROWS[lower][0] >= ROWS[upper][0]
    start, end = (y + BOX[1], to_y) if down else (y, to_y + BOX[1])
    bend = (end - start) / 2
    curve = f"M{x} {start}C{x} {start + bend} {to_x} {end - bend} {to_x} {end}"
    kind = "" if down else ' class="up"'
    title = f"<title>{upper} imports {lower}: {count}</title>"
    return f'<path{kind} d="{curve}" stroke-width="{min(1 + count / 8, 6):.1f}">{title}</path>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", default="5661c1e1", help="the revision on the left")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures/rooms.svg")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", asked.before, "kvplan"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        halves = [(f"before ({asked.before})", measured(Path(folder))), ("after", measured(ROOT))]
    width, height = 2 * WIDTH + 40, TOP + round(9.6 * STEP) + BOX[1] + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img" aria-label="rooms of kvplan and imports">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" style="fill:#fff;stroke:none"/>',
    ]
    for number, (title, facts) in enumerate(halves):
        lines += panel(title, facts, number * (WIDTH + 40))
    left_out = "every room imports the lowest box; those lines are left out"
    lines.append(f'<text class="small" x="{width / 2}" y="{height - 10}">{left_out}</text>')
    asked.out.write_text("\n".join([*lines, "</svg>", ""]))
    print("\n".join(table([facts for _, facts in halves])))


def measured(folder: Path) -> dict[str, Any]:
    """Measure a folder in a new process: this process has another kvplan on its path."""
    command = [sys.executable, __file__, "--measure", str(folder)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(printed)  # type: ignore[no-any-return]


def table(halves: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rooms as a table of Markdown."""
    yield "| room | files | lines |"
    yield "| --- | --- | --- |"
    for room in ROWS:
        files, lines = ([facts[key].get(room, 0) for facts in halves] for key in ("files", "lines"))
        changes = (
            f"{before:,} -> {after:,}"
            for values in (files, lines)
            for before, after in pairwise(values)
        )
        yield f"| `{room}` | {' | '.join(changes)} |"


if __name__ == "__main__":
    main()
