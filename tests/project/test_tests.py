"""Assertions in tests: each test has one, or calls something that has one.

A test without an assertion passes as long as the code does not raise. What counts: `assert`,
`pytest.raises`, `pytest.fail`, `refused`, NumPy's `assert_...`, code for another process that
asserts, a process that must exit with 0 (`check=True`). A call of a helper in tests/ that does one
of these counts, too. Helpers are found by name: functions in the same file or imported; methods of
the same class, or of any class if the name says that the method checks or waits.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from tools.mutants import ROOMS

TESTS = Path(__file__).parents[1]
LOOKS = {"raises", "warns", "fail", "refused"}
LOOKING = re.compile("check|expect|wait|has_|must_|refuse|until")
REMOTE = re.compile(r"(^|[:;])\s*assert\b", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """The functions and methods that a file defines, and the names that it imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions = {item.name: item for item in tree.body if isinstance(item, Function)}
        classes = [item for item in tree.body if isinstance(item, ast.ClassDef)]
        self.methods = [item for of in classes for item in of.body if isinstance(item, Function)]
        both = [*self.functions.values(), *self.methods]
        self.tests = [end for end in both if end.name.startswith("test_")]
        self.imported = {
            alias.asname or alias.name: item.module
            for item in tree.body
            if isinstance(item, ast.ImportFrom) and item.module
            for alias in item.names
        }


class Tree:
    """All files below a folder of tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules = {
            ".".join(["tests", *path.relative_to(folder).with_suffix("").parts]): Module(
                ast.parse(path.read_text())
            )
            for path in sorted(folder.rglob("*.py"))
        }
        self.methods: dict[str, list[tuple[str, Function]]] = {}
        for name, module in self.modules.items():
            for method in module.methods:
                self.methods.setdefault(method.name, []).append((name, method))
        self._known: dict[int, bool] = {}

    def blind(self) -> list[str]:
        """Return the tests without an assertion, by pytest's names without their class."""
        return [
            f"{name}::{test.name}"
            for name, module in self.modules.items()
            if name.rpartition(".")[2].startswith("test_")
            for test in module.tests
            if not self._looks(name, test)
        ]

    def _looks(self, module: str, function: Function) -> bool:
        if (known := self._known.get(id(function))) is None:
            self._known[id(function)] = False  # for a function that calls itself
            known = any(self._is_look(module, node) for node in ast.walk(function))
            self._known[id(function)] = known
        return known

    def _is_look(self, module: str, node: ast.AST) -> bool:
        match node:
            case ast.Assert():
                return True
            case ast.Raise():
                return "AssertionError" in ast.dump(node)
            case ast.Constant(str(text)):
                return REMOTE.search(text) is not None
            case ast.keyword("check", ast.Constant(True)):
                return True
            case ast.Call(ast.Name(name)):
                return name in LOOKS or self._function_looks(module, name)
            case ast.Call(ast.Attribute(of, name)):
                if name in LOOKS or name.startswith("assert_"):
                    return True
                is_own = isinstance(of, ast.Name) and of.id == "self"
                return (is_own or LOOKING.match(name) is not None) and any(
                    self._looks(*item) for item in self.methods.get(name, ())
                )
        return False

    def _function_looks(self, module: str, name: str) -> bool:
        here = self.modules.get(module)
        if here is None:
            return False
        if name in here.functions:
            return self._looks(module, here.functions[name])
        return name in here.imported and self._function_looks(here.imported[name], name)


def test_every_test_has_an_assertion() -> None:
    blind = Tree(TESTS).blind()
    assert not blind, "\n".join(blind)


@pytest.mark.parametrize(
    ("body", "sees"),
    [
        ("call()", False),
        ("helper()", True),
        ("imported()", True),
        ("recursive()", False),
        ("self.own()", True),
        ("thing.wait_for()", True),
        ("thing.own()", False),
        ("'''Say that it asserts something.'''", False),
        ("peer.run('x = 1; assert x')", True),
        ("subprocess.run(command, check=True)", True),
        ("subprocess.run(command, check=False)", False),
        ("with refused('LLM_FAILED'): call()", True),
        ("np.testing.assert_array_equal(a, b)", True),
    ],
)
@pytest.mark.parametrize("method", [False, True])
def test_statements_that_look_at_a_result(
    tmp_path: Path, body: str, sees: bool, method: bool
) -> None:
    (tmp_path / "other.py").write_text("def imported():\n    raise AssertionError\n")
    own = "class TestOwn:\n    def own(self): assert True\n    def wait_for(self): assert True\n"
    test = f"    def test_it(self):\n        {body}\n" if method else ""
    function = "" if method else f"def test_it():\n    {body}\n"
    helpers = "def helper(): assert True\ndef recursive(): recursive()\n"
    imports = "from tests.other import imported\n"
    (tmp_path / "test_one.py").write_text(imports + helpers + own + test + function)
    assert Tree(tmp_path).blind() == ([] if sees else ["tests.test_one::test_it"])


def test_bugs_can_be_planted_in_every_room() -> None:
    """`make mutants` finds the tests of each package of kvplan."""
    root = TESTS.parent
    packages = {path.parent.name for path in (root / "kvplan").glob("*/__init__.py")}
    assert set(ROOMS) == packages
    for tests in ROOMS.values():
        paths = [item for item in shlex.split(tests) if item.startswith("tests/")]
        assert paths
        assert all((root / path).exists() for path in paths), paths
