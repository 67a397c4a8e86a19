"""Plant bugs in rooms of kvplan, one at a time, and print how many of them the rooms' tests detect.

A bug is one small change of the source: another comparison, a number plus one, a missing
statement, `src` for `dst`. Bugs are planted in a copy of the tree; the seed chooses a sample of
all possible ones. An undetected bug means a missing test, or an equivalent program: read the list
to decide. Exits with 1 if too few were detected.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "mutants"
TREE = ("kvplan", "kvnative", "include", "tests", "tools", "docs", "examples", "benchmarks")
FILES = ("pyproject.toml", "setup.py", "conftest.py", "pytest_kvplan.py", "README.md")
# Arguments of pytest for each room: its own tests, and tests of rooms above that specify its use.
# Quick tests come first, because the first failure ends the run.
ROOMS = {
    "addressed": "tests/addressed tests/hixl -k 'not ascend'",
    "cli": "tests/cli",
    "control": "tests/control tests/links -k 'not ucx and not ascend'",
    "debug": "tests/debug",
    "device": "tests/device tests/cuda",
    "engine": "tests/engine tests/datadist tests/links -k 'not ucx and not ascend'",
    "execution": "tests/execution tests/transport -k 'not ucx'",
    "hixl": "tests/hixl -k 'not ascend'",
    "inspection": "tests/inspection -k 'not readme and not browser'",
    "links": "tests/links tests/datadist -k 'not ucx and not ascend'",
    "llm_datadist": "tests/llm_datadist",
    "mooncake": "tests/mooncake tests/addressed",
    "nixl": "tests/nixl tests/addressed",
    "observe": "tests/observe",
    "planning": "tests/planning tests/inspection",
    "recording": "tests/recording tests/debug",
    "run": "tests/run",
    "serving": "tests/serving",
    "system": "tests/addressed tests/engine tests/transport -k 'not ucx and not ascend'",
    "tensors": "tests/planning tests/addressed tests/engine -k 'not ucx and not ascend'",
    "testing": "tests/testing",
    "transport": "tests/transport tests/links -k 'not ucx and not ascend'",
    "vllm": "tests/vllm",
}
OPERATORS = dict(
    item.split(":")
    for item in (
        *("Lt:<=", "LtE:<", "Gt:>=", "GtE:>", "Eq:!=", "NotEq:==", "Is:is not", "IsNot:is"),
        *("In:not in", "NotIn:in", "And:or", "Or:and", "Add:-", "Sub:+", "Mult://", "FloorDiv:*"),
        *("Div:*", "Mod://", "BitOr:&", "BitAnd:|", "LShift:>>", "RShift:<<"),
    )
)
OTHERS = {"src": "dst", "source": "target", "first": "last", "min": "max"}
OTHERS |= {other: one for one, other in OTHERS.items()}
SAID = ("log", "_log", "_LOG", "logger", "log_operation", "invalid")  # calls whose texts may change


class Mutant(NamedTuple):
    """A change of the bytes [start, end) of a file."""

    path: Path
    line: int
    start: int
    end: int
    text: str

    def plant(self) -> bytes:
        """Change the file in the copy; return its original content."""
        source = (COPY / self.path).read_bytes()
        changed = source[: self.start] + self.text.encode() + source[self.end :]
        (COPY / self.path).write_bytes(changed)
        return source

    def shown(self, source: bytes) -> str:
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.path}:{self.line}: {before}  ->  {self.text}"


class Finder(ast.NodeVisitor):
    """All mutants of one file."""

    def __init__(self, path: Path) -> None:
        source = (COPY / path).read_bytes()
        self.found: list[Mutant] = []
        self._path = path
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        tree = ast.parse(source)
        self._names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
        self.visit(tree)

    def _add(self, node: ast.expr | ast.stmt, text: str) -> None:
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        self.found.append(Mutant(self._path, node.lineno, start, end, text))

    def visit(self, node: ast.AST) -> None:
        """Add the mutants at `node` and below it, except in messages."""
        name = type(getattr(node, "op", None)).__name__
        if _is_said(node):
            return
        match node:
            case (
                ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assert() | ast.keyword(arg="strict")
            ):
                return
            case ast.Raise() | ast.Delete() | ast.Expr(value=ast.Call() | ast.Await()):
                self._add(node, "pass")
            case ast.Compare(ops=[operator]):
                left, right = map(ast.unparse, (node.left, node.comparators[0]))
                self._add(node, f"({left}) {OPERATORS[type(operator).__name__]} ({right})")
            case ast.BoolOp():
                values = (f"({ast.unparse(item)})" for item in node.values)
                self._add(node, f"({f' {OPERATORS[name]} '.join(values)})")
            case ast.BinOp() if name in OPERATORS:
                left, right = map(ast.unparse, (node.left, node.right))
                self._add(node, f"(({left}) {OPERATORS[name]} ({right}))")
            case ast.UnaryOp(op=ast.Not()):
                self._add(node, f"({ast.unparse(node.operand)})")
            case ast.Constant(value=bool() | int() | float() as value):
                self._add(node, str(not value if isinstance(value, bool) else value + 1))
            case ast.Name(ctx=ast.Load()) if other := self._other(node.id):
                self._add(node, other)
            case ast.Attribute(ctx=ast.Load()) if other := self._other(node.attr):
                self._add(node, f"{ast.unparse(node.value)}.{other}")
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, ast.AST):
                        self.visit(item)

    def _other(self, name: str) -> str | None:
        other = "_".join(OTHERS.get(word, word) for word in name.split("_"))
        return other if other != name and other in {*self._names, "min", "max"} else None


def _is_said(node: ast.AST) -> bool:
    """Return True for a message: a text, or a call that logs or refuses."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Expr):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.JoinedStr) or getattr(node, "id", "") in SAID


def run(tests: str, limit_s: float | None = None) -> bool:
    """Return True if all tests pass in the copy within the limit."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, "--timeout", "60", *shlex.split(tests)],
        cwd=COPY,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a group with the processes of tests, to kill them all
    )
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def try_room(room: str, sample: int, seed: int) -> tuple[int, list[str]]:
    """Return the number of planted bugs, and the undetected ones."""
    began = time.monotonic()
    if not run(ROOMS[room]):
        sys.exit(f"these tests fail in {COPY} without a planted bug: {ROOMS[room]}")
    limit_s = 60 + 2 * (time.monotonic() - began)
    paths = sorted((COPY / "kvplan" / room).rglob("*.py"))
    every = [mutant for path in paths for mutant in Finder(path.relative_to(COPY)).found]
    chosen = sorted(random.Random(seed).sample(every, min(sample, len(every))))
    survivors = []
    for mutant in chosen:
        source = mutant.plant()
        try:
            is_seen = not run(ROOMS[room], limit_s)
        finally:
            (COPY / mutant.path).write_bytes(source)
        print("seen    " if is_seen else "SURVIVED", mutant.shown(source), flush=True)
        survivors += [] if is_seen else [mutant.shown(source)]
    print(f"{len(chosen)} of {len(every)} possible ones in {room}", flush=True)
    return len(chosen), survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; default: all")
    parser.add_argument("--sample", type=int, default=40, help="bugs of each room")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=0, help="percent that must be detected")
    given = parser.parse_args()
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    for path in map(ROOT.joinpath, (*TREE, *FILES)):
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, COPY / path.name)
    rows = {item: try_room(item, given.sample, given.seed) for item in given.rooms or ROOMS}
    print(f"\n{'room':12}{'planted':>8}{'seen':>8}")
    planted = seen = 0
    for room, (count, survivors) in rows.items():
        print(f"{room:12}{count:8}{count - len(survivors):8}", *survivors, sep="\n  ")
        planted, seen = planted + count, seen + count - len(survivors)
    print(f"{'in all':12}{planted:8}{seen:8}")
    return 100 * seen < given.least * planted


if __name__ == "__main__":
    sys.exit(main())
