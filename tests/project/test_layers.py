"""What import-linter cannot see: Cython's imports, and what an import really loads."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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


def test_neither_kvplan_nor_an_engine_loads_what_only_the_command_needs() -> None:
    loaded = python("import sys, kvplan; kvplan.LlmDataDist; print(*sys.modules)").split()
    assert "kvplan.engine.datadist" in loaded
    assert not {"kvplan.cli", "click", "rich"} & set(loaded)


def test_a_command_loads_what_it_needs_and_no_more() -> None:
    loaded = python(
        "import sys; from kvplan.cli import main; main(['--help']); print(*sys.modules)"
    ).split()
    assert not {"kvnative", "zmq", "rich", "kvplan.engine"} & set(loaded)


def test_every_name_of_kvplan_can_be_had() -> None:
    names = python("import kvplan\nfor name in kvplan.__all__: print(getattr(kvplan, name))")
    assert names


def test_planning_and_execution_need_no_sockets() -> None:
    used = "kvplan.execute, kvplan.HostMemory, kvplan.plan"
    loaded = python(f"import sys, kvplan; {used}; print(*sys.modules)").split()
    assert not {"kvplan.engine", "zmq"} & set(loaded)


def test_plans_are_made_and_read_where_the_native_layer_cannot_be_imported() -> None:
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


def imported(tree: ast.AST, *, types: bool = False) -> Iterator[str]:
    """Yield what the import of a module imports; with `types`, what only type checkers import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (it.name for it in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{it.name}" for it in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not types:
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported(node, types=types)


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """What reaches itself."""
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


WITHOUT_CIRCLES = ("planning", "inspection", "debug", "recording", "testing")
"""Rooms whose modules are in no circle, imports of types included."""


@pytest.mark.parametrize("types", [False, True], ids=["imports", "types"])
def test_no_modules_import_one_another(types: bool) -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "kvplan").rglob("*.py")
    }
    graph = {
        name: ({*imported(ast.parse(path.read_text()), types=types)} & set(files)) - {name}
        for name, path in files.items()
    }
    if types:
        del graph["kvplan.status"]  # an LLMException has the origins of missing bytes
    packages = {name for name, path in files.items() if path.name == "__init__.py"}
    assert sum(map(len, graph.values())) > 300
    # The import of a module imports its package, too: imports of the package make no circle.
    found = in_circles({name: them - packages for name, them in graph.items()})
    assert {name for name in found if not types or name.split(".")[1] in WITHOUT_CIRCLES} == set()


def test_a_circle_would_be_seen() -> None:
    source = "import a\nif TYPE_CHECKING:\n    import b\ndef f():\n    import c\nfrom d import e"
    assert {*imported(ast.parse(source))} == {"a", "d", "d.e"}
    assert in_circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == {"a", "b", "c"}
