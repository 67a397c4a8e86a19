"""Small changes of a Python file that are plausible bugs, found in its syntax tree.

Another comparison or operator, a condition that always or never holds, a number plus one, a missing
statement or assignment, exchanged arguments, `src` for `dst`, the last item for the first. Texts of
messages and logs stay as they are.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

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


class Change(NamedTuple):
    """New text for the bytes [start, end) of a file."""

    line: int
    start: int
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def last_line(self, source: bytes) -> int:
        return source.count(b"\n", 0, self.end) + 1

    def shown(self, source: bytes) -> str:
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{before}  ->  {self.text}"


def changes(path: Path) -> list[Change]:
    """Return all small changes of a file."""
    return _Finder(path.read_bytes()).found


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes) -> None:
        self.found: list[Change] = []
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        tree = ast.parse(source)
        self._names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
        self.visit(tree)

    def _add(self, node: ast.expr | ast.stmt, *texts: str) -> None:
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        self.found += [Change(node.lineno, start, end, text) for text in texts]

    def visit(self, node: ast.AST) -> None:
        """Add the changes at `node` and below it, except in messages."""
        if _is_said(node):
            return
        match node:
            case (
                ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assert() | ast.keyword(arg="strict")
            ):
                return
            case ast.stmt():
                self._statement(node)
            case ast.expr():
                self._expression(node)
            case ast.comprehension():
                for test in node.ifs:
                    self._add(test, "True")
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, ast.AST):
                        self.visit(item)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case (
                ast.Raise()
                | ast.Delete()
                | ast.Break()
                | ast.Continue()
                | ast.AugAssign()
                | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
                | ast.Expr(value=ast.Call() | ast.Await())
            ):
                self._add(node, "pass")
            case ast.If():
                self._add(node.test, "True", "False")

    def _expression(self, node: ast.expr) -> None:
        name = type(getattr(node, "op", None)).__name__
        match node:
            case ast.Compare(ops=[operator]):
                left, right = map(ast.unparse, (node.left, node.comparators[0]))
                self._add(node, f"({left}) {OPERATORS[type(operator).__name__]} ({right})")
            case ast.BoolOp():
                values = (f"({ast.unparse(item)})" for item in node.values)
                self._add(node, f"({f' {OPERATORS[name]} '.join(values)})")
            case ast.BinOp(left=ast.JoinedStr()) | ast.BinOp(right=ast.JoinedStr()):
                pass
            case ast.BinOp() if name in OPERATORS:
                left, right = map(ast.unparse, (node.left, node.right))
                self._add(node, f"(({left}) {OPERATORS[name]} ({right}))")
            case ast.UnaryOp(op=ast.Not()):
                self._add(node, f"({ast.unparse(node.operand)})")
            case ast.IfExp():
                self._add(node.test, "True", "False")
            case ast.Subscript(slice=ast.Constant(value=0), ctx=ast.Load()):
                self._add(node, f"{ast.unparse(node.value)}[-1]")
            case ast.Call(args=[ast.Name() | ast.Attribute(), ast.Name() | ast.Attribute(), *_]):
                first, second, *rest = map(ast.unparse, [*node.args, *node.keywords])
                arguments = ", ".join([second, first, *rest])
                self._add(node, f"{ast.unparse(node.func)}({arguments})")
            case ast.Constant(value=bool() | int() | float() as value):
                self._add(node, str(not value if isinstance(value, bool) else value + 1))
            case ast.Name(ctx=ast.Load()) if other := self._other(node.id):
                self._add(node, other)
            case ast.Attribute(ctx=ast.Load()) if other := self._other(node.attr):
                self._add(node, f"{ast.unparse(node.value)}.{other}")

    def _other(self, name: str) -> str | None:
        other = "_".join(OTHERS.get(word, word) for word in name.split("_"))
        return other if other != name and other in {*self._names, "min", "max"} else None


def _is_said(node: ast.AST) -> bool:
    """Return True for a message: a text, or a call that logs or refuses."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Expr):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.JoinedStr) or getattr(node, "id", "") in SAID
