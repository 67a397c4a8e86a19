"""Draw the rooms of kvplan and their imports: docs/pictures/rooms.svg and its table.

    python tools/rooms.py [--before REVISION] [--out FILE.svg]

The left half is REVISION, the right half is this tree. A box is a room (a package of kvplan) with
its lines. The rows are the layers of the import contract in pyproject.toml, the highest first. A
line leads from each room to each room that it imports; its width grows with the number of
importing modules. Dashed red lines are imports upwards.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VALUES = "values"  # the modules beside the rooms, which most rooms import
FACADE = {"kvplan", "kvplan.__main__"}  # names of all rooms, for users; not a room
WIDTH, TOP, STEP, BOX = 560, 60, 58, (96, 36)
# Places from left to right of rooms that have a row of their own, in turns.
ALONE = (0.5, 0.22, 0.78)
STYLE = """
text{font:12px sans-serif;fill:#1b1d20;text-anchor:middle}.title{font-weight:bold;font-size:14px}
.small{font-size:10px;fill:#5f636b}rect{fill:#eef1f5;stroke:#8a94a3}
path{fill:none;stroke:#5f7fa8;stroke-opacity:.55}.up{stroke:#b3261e;stroke-dasharray:5 3}
"""


def rows_of(folder: Path) -> list[list[str]]:
    """Return the rooms of each layer of the import contract, the highest first, then VALUES."""
    linted = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [re.findall(r"\w+", layer) for layer in linted["contracts"][0]["layers"]]
    rooms = [[name for name in row if (folder / "kvplan" / name).is_dir()] for row in layers]
    return [*filter(None, rooms), [VALUES]]


def measure(folder: Path) -> dict[str, Any]:
    """Return the rooms, imports and import cycles of the kvplan in `folder`."""
    sys.path.insert(0, str(folder))
    import grimp

    graph = grimp.build_graph("kvplan", cache_dir=None)
    rows = rows_of(folder)
    packages = {path.parent.name for path in (folder / "kvplan").glob("*/__init__.py")}
    if unplaced := packages - {room for row in rows for room in row}:
        raise SystemExit(f"pyproject.toml: no layer has {sorted(unplaced)}")

    def room_of(name: str) -> str:
        first = name.partition(".")[0]
        return first if first in packages else VALUES

    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in (folder / "kvplan").rglob("*.py"):
        room = room_of(path.relative_to(folder / "kvplan").parts[0])
        files[room] += 1
        lines[room] += len(path.read_text().splitlines())
    imports: Counter[str] = Counter()
    imported: dict[str, set[str]] = {}
    for module in graph.modules - FACADE:
        imported[module] = graph.find_modules_directly_imported_by(module) - FACADE
        for other in imported[module]:
            upper, lower = (room_of(name.partition(".")[2]) for name in (module, other))
            imports[f"{upper} {lower}"] += upper != lower
    circles = sorted((len(circle) for circle in circles_of(imported)), reverse=True)
    return {"rows": rows, "files": files, "lines": lines, "imports": imports, "circles": circles}


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
    middle = left + WIDTH / 2
    size = thousands(sum(facts["lines"].values()))
    yield f'<text class="title" x="{middle}" y="20">{title}: {size}</text>'
    said = f"modules in circles, with imports for types and inside of functions: {circles}"
    yield f'<text class="small" x="{middle}" y="36">{said}</text>'
    places = places_of(facts["rows"], left)
    for pair, count in sorted(facts["imports"].items()):
        upper, lower = pair.split()
        if count and lower != VALUES:
            yield edge(upper, lower, count, places)
    for room, (x, y) in places.items():
        name = "types, status, layout, ..." if room == VALUES else room
        width = BOX[0] if room != VALUES else 170
        yield f'<rect x="{x - width / 2:g}" y="{y}" width="{width}" height="{BOX[1]}" rx="4"/>'
        yield f'<text x="{x:g}" y="{y + 15}">{name}</text>'
        size = thousands(facts["lines"][room])
        yield f'<text class="small" x="{x:g}" y="{y + 29}">{size}</text>'


def thousands(lines: int) -> str:
    """Return a number of lines to the hundred, which most commits leave as they find it."""
    return f"{lines / 1000:.1f}k lines"


def places_of(rows: list[list[str]], left: float) -> dict[str, tuple[float, float]]:
    """Return the middle of the upper side of each box."""
    places = {}
    for at, row in enumerate(rows):
        for number, room in enumerate(row):
            across = (number + 0.5) / len(row)
            if len(row) == 1 and room != VALUES:
                across = ALONE[at % len(ALONE)]
            places[room] = (left + across * WIDTH, TOP + at * STEP)
    return places


def edge(upper: str, lower: str, count: int, places: Mapping[str, tuple[float, float]]) -> str:
    """Return the line for the imports of one room by another."""
    (x, y), (to_x, to_y) = places[upper], places[lower]
    down = to_y > y
    start, end = (y + BOX[1], to_y) if down else (y, to_y + BOX[1])
    bend = (end - start) / 2
    curve = f"M{x:g} {start:g}C{x:g} {start + bend:g} {to_x:g} {end - bend:g} {to_x:g} {end:g}"
    kind = "" if down else ' class="up"'
    title = f"<title>{upper} imports {lower}: {count}</title>"
    return f'<path{kind} d="{curve}" stroke-width="{min(1 + count / 8, 6):.1f}">{title}</path>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", default="03621ccd", help="the revision on the left")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures/rooms.svg")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", asked.before, "kvplan", "pyproject.toml"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        halves = [(f"before ({asked.before})", measured(Path(folder))), ("after", measured(ROOT))]
    num_rows = max(len(facts["rows"]) for _, facts in halves)
    width, height = 2 * WIDTH + 40, TOP + num_rows * STEP + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img" aria-label="rooms of kvplan and imports">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" style="fill:#fff;stroke:none"/>',
    ]
    for number, (title, facts) in enumerate(halves):
        lines += panel(title, facts, number * (WIDTH + 40))
    left_out = "most rooms import the lowest box; those lines are left out"
    lines.append(f'<text class="small" x="{width / 2}" y="{height - 10}">{left_out}</text>')
    asked.out.write_text("\n".join([*lines, "</svg>", ""]))
    print("\n".join(table([facts for _, facts in halves])))


def measured(folder: Path) -> dict[str, Any]:
    """Measure a folder in a new process: this process has another kvplan on its path."""
    command = [sys.executable, __file__, "--measure", str(folder)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(printed)  # type: ignore[no-any-return]


def table(halves: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rooms as a table of Markdown."""
    yield "| room | files | lines |"
    yield "| --- | --- | --- |"
    for room in dict.fromkeys(room for facts in halves for row in facts["rows"] for room in row):
        files, lines = ([facts[key].get(room, 0) for facts in halves] for key in ("files", "lines"))
        changes = (
            f"{before:,} -> {after:,}"
            for values in (files, lines)
            for before, after in pairwise(values)
        )
        yield f"| `{room}` | {' | '.join(changes)} |"


if __name__ == "__main__":
    main()
