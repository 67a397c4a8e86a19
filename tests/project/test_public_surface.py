"""What is public is typed, and its docstrings say every attribute, and what a call raises itself.

What raises is read from the code: a `raise`, or a call of a function or method that is found by its
name and raises in turn. What is handed in (callbacks, objects of other classes) is not followed.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType
from typing import Any

import pytest

from kvplan import LlmDataDist

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^\.\. auto(module|class|function|exception):: ([\w.]+)", re.MULTILINE)
SECTION = r"^{title}:\n((?:(?:    .*)?\n?)*)"
NEVER = {
    "AssertionError",  # a mistake of ours
    "AttributeError",
    "NotImplementedError",
    "StopAsyncIteration",
    "StopIteration",
}
"""What a protocol of Python wants, or what nobody is told of."""

NEVER_THERE = {
    # No number of tensors is given that could be wrong.
    "kvplan.planning.side.Side.usual_tensors_per_layer": {"LLMException"},
    # What peers say of their caches was checked when it came.
    "kvplan.engine.cache_api.CacheOperations.caches": {"TypeError", "ValueError"},
    # Addresses come as columns of uint64.
    "kvplan.hixl.hixl.Hixl.plan_transfer": {"ValueError"},
    # Registered memory lies below 2**64.
    "kvplan.transport.transport.Transport.metadata": {"ValueError"},
    # The cluster id was checked when the object was made.
    "kvplan.llm_datadist.v2.llm_datadist.LLMDataDist.init": {"ValueError"},
}
"""What the code of a function seems to raise, and does not."""


def public_objects() -> dict[str, Any]:
    """Every class and function that the reference names, by its own name."""
    found = {}
    for page in sorted((ROOT / "docs/reference/api").glob("*.md")):
        for kind, name in DIRECTIVE.findall(page.read_text()):
            for member in members(name) if kind == "module" else [resolve_name(name)]:
                if inspect.isclass(member) or inspect.isfunction(member):
                    found[f"{member.__module__}.{member.__qualname__}"] = member
    return found


def members(name: str) -> list[Any]:
    """What is public of a module: its `__all__`, or what it has of its own."""
    module = import_module(name)
    own = (
        label for label, value in vars(module).items() if getattr(value, "__module__", "") == name
    )
    names = getattr(module, "__all__", own)
    return [getattr(module, name) for name in names if not name.startswith("_")]


OBJECTS = public_objects()
CLASSES = {name: public for name, public in OBJECTS.items() if inspect.isclass(public)}


def methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The public methods and properties of a class and its bases, with the class that has them."""
    for base in kind.__mro__:
        if base.__module__.startswith("kv"):
            for name, var in vars(base).items():
                function = plain(var)
                if function is not None and not name.startswith("_"):
                    yield f"{base.__module__}.{base.__qualname__}.{name}", function


def plain(value: object) -> FunctionType | None:
    """The function of a method, whatever decorates it."""
    value = (
        getattr(value, "fget", None)
        or getattr(value, "func", None)
        or getattr(value, "__func__", value)
    )
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None


def section(value: object, title: str) -> str:
    """The text of a section of a docstring; empty: it has none."""
    found = re.search(SECTION.format(title=title), inspect.getdoc(value) or "", re.MULTILINE)
    return found[1] if found else ""


@cache
def tree(value: type | FunctionType) -> ast.AST:
    """The source of a function or a class."""
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def fields(kind: type) -> list[str]:
    """Of a dataclass, a struct or a named tuple, the public ones."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = [*getattr(kind, "__struct_fields__", getattr(kind, "_fields", ()))]
    return [name for name in names if not name.startswith("_")]


def described(kind: type) -> set[str]:
    """Names of the sections Attributes and Args, and fields with a text below them."""
    lines = section(kind, "Attributes") + section(kind, "Args")
    names = set(re.findall(r"\w+", " ".join(re.findall(r"^    (\w[\w, ]*):", lines, re.MULTILINE))))
    body = tree(kind).body  # type: ignore[attr-defined]
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            names.add(ast.unparse(field.target))
    return names


@cache
def raised(function: FunctionType, owner: type | None) -> frozenset[str]:
    """Names of the exceptions that a function raises, or functions that it calls by name."""
    return frozenset(_raised(function, owner, frozenset()))


def _raised(function: FunctionType, owner: type | None, above: frozenset[object]) -> set[str]:
    generated = function.__code__.co_filename.startswith("<")
    if function in above or generated or not function.__module__.startswith("kv"):
        return set()
    names: set[str] = set()
    for node in outside_of_try(tree(function)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            names.update(exception_of(node.exc, function, owner).split(" | "))
        if isinstance(node, ast.Call):
            for called, kind in callees(node.func, function, owner):
                names |= _raised(called, kind, above | {function})
    if any("_returns_status" in ast.unparse(item) for item in tree(function).decorator_list):  # type: ignore[attr-defined]
        names &= {"TypeError"}  # all others become numbers
    return names - NEVER - {""}


def outside_of_try(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function but those whose errors it catches, and functions inside of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(child, ast.Try) and child.handlers:
            for part in [*child.handlers, *child.orelse, *child.finalbody]:
                yield from outside_of_try(part)
            continue
        yield child
        yield from outside_of_try(child)


def exception_of(value: ast.expr, function: FunctionType, owner: type | None) -> str:
    """The class that is raised, or the classes that a function makes; empty: what was caught."""
    if isinstance(value, ast.Call):
        for made, _ in callees(value.func, function, owner):
            return str(made.__annotations__.get("return", ""))
        value = value.func
    name = ast.unparse(value)
    return name if name.endswith(("Error", "Exception")) else ""


def callees(
    called: ast.expr, function: FunctionType, owner: type | None
) -> Iterator[tuple[FunctionType, type | None]]:
    """The functions that a call by name runs: a function, a constructor, or a method of self."""
    if isinstance(called, ast.Name):
        item = function.__globals__.get(called.id)
        if isinstance(item, FunctionType):
            yield item, None
        elif inspect.isclass(item) and not issubclass(item, BaseException):
            for name in ("__init__", "__post_init__", "__new__"):
                if method := plain(inspect.getattr_static(item, name, None)):
                    yield method, item
    elif (
        owner is not None
        and isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id in ("self", "cls")
        and (method := plain(inspect.getattr_static(owner, called.attr, None)))
    ):
        yield method, owner


@pytest.mark.parametrize("name", [name for name, kind in CLASSES.items() if fields(kind)])
def test_every_attribute_is_described(name: str) -> None:
    kind = CLASSES[name]
    assert [field for field in fields(kind) if field not in described(kind)] == []


def test_errors_are_said_where_they_are_raised() -> None:
    functions = {
        name: (public, None) for name, public in OBJECTS.items() if isinstance(public, FunctionType)
    } | {name: (item, kind) for kind in CLASSES.values() for name, item in methods(kind)}
    silent = {}
    for name, (value, kind) in functions.items():
        names = raised(value, kind)
        assert names >= NEVER_THERE.get(name, set()), f"{name} has a row that says nothing"
        of_all = set() if kind is None else said_of_all(kind)
        if missing := names - NEVER_THERE.get(name, set()) - said(value) - of_all:
            silent[name] = sorted(missing)
    assert NEVER_THERE.keys() <= functions.keys()
    assert silent == {}


def said(value: object) -> set[str]:
    """The names in its section Raises."""
    return set(re.findall(r"\w+", section(value, "Raises")))


def said_of_all(kind: type) -> set[str]:
    """The names in the paragraph of a class that says what every method raises."""
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        if paragraph.startswith("Every method raises"):
            return set(re.findall(r"\w+", paragraph))
    return set()


def test_an_engine_has_few_public_members() -> None:
    names = [item for item in dir(LlmDataDist) if not item.startswith("_")]
    assert len(names) <= 50, names


def test_a_class_documents_only_the_errors_of_its_constructor() -> None:
    bases = {
        item for kind in CLASSES.values() for item in kind.__mro__ if item.__module__[:2] == "kv"
    }
    mixed = [
        base.__qualname__
        for base in bases
        if section(base, "Raises")
        and not dataclasses.is_dataclass(base)
        and not {"__init__", "__new__", "__call__"} & set(vars(base))
    ]
    assert mixed == []


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_attribute_has_a_type(name: str) -> None:
    """Type checkers need not infer one from a value, which each does in its own way."""
    untyped = set()
    for base in CLASSES[name].__mro__:
        if base.__module__.startswith("kvplan"):  # kvnative has stubs
            untyped |= untyped_attributes(base)
    assert sorted(untyped) == []


@cache
def untyped_attributes(kind: type) -> frozenset[str]:
    """Public attributes that methods of a class set, and that nothing declares."""
    declared = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    declared |= {name for base in kind.__mro__ for name in vars(base)}  # descriptors, constants
    given = set()
    for function in (node for node in ast.walk(tree(kind)) if isinstance(node, ast.FunctionDef)):
        parameters = {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)}
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign):
                declared |= own_attributes(node.target)
            elif isinstance(node, ast.Assign) and ast.unparse(node.value) not in parameters:
                given |= {name for target in node.targets for name in own_attributes(target)}
    return frozenset(item for item in given - declared if not item.startswith("_"))


def own_attributes(target: ast.expr) -> set[str]:
    """Names that are assigned to: `self.name`, also several at once."""
    if isinstance(target, ast.Tuple):
        return {name for elt in target.elts for name in own_attributes(elt)}
    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
        return {target.attr}
    return set()
