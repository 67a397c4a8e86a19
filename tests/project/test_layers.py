"""The layers: what an import loads, imports for types, circles, and the lines of each room.

import-linter sees neither Cython's imports nor those below `if TYPE_CHECKING`.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

MAX_LINES = {
    "addressed": 794,
    "cli": 3800,
    "control": 3649,
    "debug": 798,
    "device": 1242,
    "engine": 8225,
    "execution": 3260,
    "hixl": 1090,
    "inspection": 1989,
    "kvplan": 1712,
    "links": 4029,
    "llm_datadist": 3832,
    "mooncake": 613,
    "nixl": 1853,
    "observe": 1669,
    "planning": 5712,
    "recording": 1718,
    "run": 428,
    "serving": 3008,
    "system": 472,
    "tensors": 1092,
    "testing": 473,
    "transport": 8015,
    "vllm": 2088,
}
"""Lines of each room. Only a commit that says why may raise one."""

TRANSFER_MODULES = [
    "engine/gather", "engine/operation", "engine/pairs", "engine/ranges", "engine/resolve",
    "engine/shares", "engine/transfers", "execution/gather_task",
]  # fmt: skip
MAX_TRANSFER_LINES = 2503
"""Lines of the modules that make a transfer of names.

The number may only fall; it was 4,411 before there was one path.
"""

MAX_MODULES_IN_CIRCLES = 0
"""Number of modules in circles, imports for types included. It may only fall."""

TYPES_FROM_ABOVE = ["kvplan.status -> planning"]
"""Imports for types from a room above or beside. The list may only shrink."""


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_kvplan_loads_neither_the_native_layer_nor_sockets() -> None:
    loaded = python("import sys, kvplan; print(*sys.modules)").split()
    assert not {"kvnative", "kvplan.engine", "zmq", "asyncio"} & set(loaded)
    assert "kvplan.inspection.svg" not in loaded


def test_neither_kvplan_nor_an_engine_loads_libraries_of_the_command() -> None:
    loaded = python("import sys, kvplan; kvplan.LlmDataDist; print(*sys.modules)").split()
    assert "kvplan.engine.datadist" in loaded
    assert not {"kvplan.cli", "click", "rich"} & set(loaded)


def test_a_command_loads_only_its_own_libraries() -> None:
    loaded = python(
        "import sys; from kvplan.cli import main; main(['--help']); print(*sys.modules)"
    ).split()
    assert not {"kvnative", "zmq", "rich", "kvplan.engine"} & set(loaded)


def test_every_name_of_kvplan_can_be_imported() -> None:
    names = python("import kvplan\nfor name in kvplan.__all__: print(getattr(kvplan, name))")
    assert names


def test_planning_and_execution_need_no_sockets() -> None:
    used = "kvplan.execute, kvplan.HostMemory, kvplan.plan"
    loaded = python(f"import sys, kvplan; {used}; print(*sys.modules)").split()
    assert not {"kvplan.engine", "zmq"} & set(loaded)


def test_plans_are_made_and_read_without_the_native_layer() -> None:
    imported = python(
        "import sys; sys.modules['kvnative'] = None  # as if it were not installed\n"
        "import importlib, pkgutil, kvplan.planning, kvplan.inspection\n"
        "for room in (kvplan.planning, kvplan.inspection):\n"
        "    for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print(*sys.modules)"
    ).split()
    assert {"kvplan.planning.plan", "kvplan.types", "kvplan.status"} <= set(imported)
    assert not {"zmq", "socket", "multiprocessing"} & set(imported)


def test_the_native_layer_knows_nothing_of_kvplan() -> None:
    sources = [path for kind in ("py", "pyx", "pxd", "pyi") for path in native_files(kind)]
    upward = re.compile(r"^\s*(from|import|cimport)\s+kvplan\b", re.MULTILINE)
    assert [path.name for path in sources if upward.search(path.read_text())] == []


def native_files(kind: str) -> list[Path]:
    found = sorted((ROOT / "kvnative").glob(f"*.{kind}"))
    assert found, f"no kvnative/*.{kind}: the search is wrong"
    return found


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def names_of(node: ast.AST) -> Iterator[str]:
    """Yield the modules that one import names, and those that it may name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(tree: ast.AST, *, with_types: bool = False) -> Iterator[str]:
    """Yield the imports at the top level of a module, with or without those for types."""
    for node in ast.iter_child_nodes(tree):
        yield from names_of(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if with_types or not is_for_types(node):
            yield from imported(node, with_types=with_types)


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that reach themselves."""
    found = set()
    for start in graph:
        seen: set[str] = set()
        left = [start]
        while left:
            more = graph.get(left.pop(), set()) - seen
            seen |= more
            left += more
        if start in seen:
            found.add(start)
    return found


@cache
def library() -> dict[str, ast.Module]:
    """Return the syntax trees of kvplan by module."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in (ROOT / "kvplan").rglob("*.py")
    }


def modules_in_circles(*, with_types: bool) -> set[str]:
    # Packages are left out: each is imported with its modules, so its imports form no circle.
    files = {name: tree for name, tree in library().items() if not name.endswith("__init__")}
    graph = {
        name: ({*imported(tree, with_types=with_types)} & files.keys()) - {name}
        for name, tree in files.items()
    }
    assert sum(map(len, graph.values())) > 300
    return in_circles(graph)


def test_no_modules_import_one_another() -> None:
    assert modules_in_circles(with_types=False) == set()


def test_few_modules_need_one_another_for_types() -> None:
    found = modules_in_circles(with_types=True)
    assert len(found) <= MAX_MODULES_IN_CIRCLES, sorted(found)


@cache
def levels() -> dict[str, int]:
    """Return the level of each room in import-linter's contract, 0 for the highest."""
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = linted["contracts"][0]["layers"]
    return {room: at for at, row in enumerate(layers) for room in re.findall(r"\w+", row)}


def types_from_above(module: str, tree: ast.AST) -> Iterator[str]:
    """Yield imports for types that go upwards, or sideways to another room."""
    at = levels()
    room = module.split(".")[1]
    for block in filter(is_for_types, ast.walk(tree)):
        found = {name for node in ast.walk(block) for name in names_of(node)}
        for other in sorted({name.split(".")[1] for name in found if name.startswith("kvplan.")}):
            if other != room and at.get(other, len(at)) <= at.get(room, -1):
                yield f"{module} -> {other}"


def test_few_types_come_from_above() -> None:
    found = [
        arrow
        for module, tree in library().items()
        if module != "kvplan.__init__"
        for arrow in types_from_above(module, tree)
    ]
    assert sorted(found) == TYPES_FROM_ABOVE


def test_an_import_for_types_from_above_is_detected() -> None:
    source = "if TYPE_CHECKING:\n    from kvplan.engine import engine\n    import kvplan.status"
    assert [*types_from_above("kvplan.links.links", ast.parse(source))] == [
        "kvplan.links.links -> engine"
    ]


def test_a_circle_is_detected() -> None:
    source = "import a\nif TYPE_CHECKING:\n    import b\ndef f():\n    import c\nfrom d import e"
    assert {*imported(ast.parse(source))} == {"a", "d", "d.e"}
    assert {*imported(ast.parse(source), with_types=True)} == {"a", "b", "d", "d.e"}
    assert in_circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == {"a", "b", "c"}


def lines_of_rooms() -> dict[str, int]:
    """Return the lines of each room, and of the files beside the rooms together."""
    found: dict[str, int] = {}
    for path in (ROOT / "kvplan").rglob("*.py"):
        room = path.relative_to(ROOT).parts[-2 if path.parent.name == "kvplan" else 1]
        found[room] = found.get(room, 0) + len(path.read_text().splitlines())
    return found


def test_no_room_grows() -> None:
    """A room that needs more lines takes them from another, or the commit says why not."""
    found = lines_of_rooms()
    assert found.keys() == MAX_LINES.keys()
    too_long = {room: lines for room, lines in found.items() if lines > MAX_LINES[room]}
    assert not too_long, f"{too_long} exceed MAX_LINES={MAX_LINES}"


def test_the_modules_of_transfers_do_not_grow() -> None:
    """The commit must say why if an addition to the one path replaces nothing."""
    paths = [ROOT / "kvplan" / f"{name}.py" for name in TRANSFER_MODULES]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= MAX_TRANSFER_LINES


def test_the_picture_of_the_rooms_agrees_with_the_tree() -> None:
    """`python tools/rooms.py` draws the picture again. Each room may differ by a tenth."""
    drawn = (ROOT / "docs/pictures/rooms.svg").read_text().partition(">after: ")[2]
    named = re.findall(r">([^<]+)</text>\n<text class=\"small\"[^>]*>([\d.]+)k lines<", drawn)
    lines = {name: round(float(size) * 1000) for name, size in named}
    lines["kvplan"] = lines.pop("types, status, layout, ...")
    found = lines_of_rooms()
    assert lines.keys() == found.keys()
    tolerance = {room: max(200, found[room] // 10) for room in found}
    assert {room for room in found if abs(lines[room] - found[room]) > tolerance[room]} == set()
