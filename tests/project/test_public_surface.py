"""The public surface: types, and docstrings of every attribute and of the errors of each call.

The raised errors are read from the code: a `raise`, or a call of a function or method that is found
by its name and raises in turn. Arguments that are called (callbacks, objects of other classes) are
not followed.
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
UNDOCUMENTED = {
    "AssertionError",  # a bug of kvplan
    "AttributeError",
    "NotImplementedError",
    "StopAsyncIteration",
    "StopIteration",
}
"""Exceptions that belong to protocols of Python, or to bugs, and are not documented."""

NOT_RAISED = {
    # The number of tensors is always valid.
    "kvplan.planning.side.Side.usual_tensors_per_layer": {"LLMException"},
    # The timeout is always valid.
    "kvplan.execution.awaitable.AwaitableTask.coroutine": {"TypeError", "ValueError"},
    "kvplan.execution.transfers.Transfers.layered": {"ValueError"},
    # The tuning and the nodes are always valid.
    "kvplan.execution.transfers.default_transfers": {"TypeError"},
    # A peer's descriptions of its caches were checked on arrival.
    "kvplan.engine.cache_api.CacheOperations.caches": {"TypeError", "ValueError"},
    # Addresses come as columns of uint64.
    "kvplan.hixl.hixl.Hixl.plan_transfer": {"ValueError"},
    # Registered memory lies below 2**64.
    "kvplan.transport.transport.Transport.metadata": {"ValueError"},
    # The cluster id was checked when the object was made.
    "kvplan.llm_datadist.v2.llm_datadist.LLMDataDist.init": {"ValueError"},
}
"""Exceptions that the code of a function seems to raise, but does not."""


def public_objects() -> dict[str, Any]:
    """Return every class and function that the reference names, by its own name."""
    found = {}
    for page in sorted((ROOT / "docs/reference/api").glob("*.md")):
        for kind, name in DIRECTIVE.findall(page.read_text()):
            for member in members(name) if kind == "module" else [resolve_name(name)]:
                if inspect.isclass(member) or inspect.isfunction(member):
                    found[f"{member.__module__}.{member.__qualname__}"] = member
    return found


def members(name: str) -> list[Any]:
    """Return the public members of a module: its `__all__`, or all that it defines."""
    module = import_module(name)
    own = (
        label for label, value in vars(module).items() if getattr(value, "__module__", "") == name
    )
    names = getattr(module, "__all__", own)
    return [getattr(module, name) for name in names if not name.startswith("_")]


OBJECTS = public_objects()
CLASSES = {name: public for name, public in OBJECTS.items() if inspect.isclass(public)}


def methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the public methods and properties of a class and its bases, by full names."""
    for base in kind.__mro__:
        if base.__module__.startswith("kv"):
            for name, var in vars(base).items():
                function = plain(var)
                if function is not None and not name.startswith("_"):
                    yield f"{base.__module__}.{base.__qualname__}.{name}", function


def plain(value: object) -> FunctionType | None:
    """Return the function of a method without its decorators."""
    value = (
        getattr(value, "fget", None)
        or getattr(value, "func", None)
        or getattr(value, "__func__", value)
    )
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None


def section(value: object, title: str) -> str:
    """Return the text of a section of a docstring, empty if the section is missing."""
    found = re.search(SECTION.format(title=title), inspect.getdoc(value) or "", re.MULTILINE)
    return found[1] if found else ""


@cache
def tree(value: type | FunctionType) -> ast.AST:
    """Return the syntax tree of a function or a class."""
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def fields(kind: type) -> list[str]:
    """Return the public fields of a dataclass, a struct or a named tuple."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = [*getattr(kind, "__struct_fields__", getattr(kind, "_fields", ()))]
    return [name for name in names if not name.startswith("_")]


def described(kind: type) -> set[str]:
    """Return the names in the sections Attributes and Args, and fields with a docstring."""
    lines = section(kind, "Attributes") + section(kind, "Args")
    names = set(re.findall(r"\w+", " ".join(re.findall(r"^    (\w[\w, ]*):", lines, re.MULTILINE))))
    body = tree(kind).body  # type: ignore[attr-defined]
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            names.add(ast.unparse(field.target))
    return names


@cache
def raised(function: FunctionType, owner: type | None) -> frozenset[str]:
    """Return the names of exceptions that a function, or one that it calls by name, raises."""
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
        names &= {"TypeError"}  # the others become statuses
    return names - UNDOCUMENTED - {""}


def outside_of_try(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without try bodies that have handlers, and inner functions."""
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
    """Return the raised class, or the classes that a function makes; empty for a caught error."""
    if isinstance(value, ast.Call):
        for made, _ in callees(value.func, function, owner):
            return str(made.__annotations__.get("return", ""))
        value = value.func
    name = ast.unparse(value)
    return name if name.endswith(("Error", "Exception")) else ""


def callees(
    called: ast.expr, function: FunctionType, owner: type | None
) -> Iterator[tuple[FunctionType, type | None]]:
    """Yield the functions that a call by name runs: a function, a constructor, a method of self."""
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


def test_raised_errors_are_documented() -> None:
    functions = {
        name: (public, None) for name, public in OBJECTS.items() if isinstance(public, FunctionType)
    } | {name: (item, kind) for kind in CLASSES.values() for name, item in methods(kind)}
    silent = {}
    for name, (value, kind) in functions.items():
        names = raised(value, kind)
        assert names >= NOT_RAISED.get(name, set()), f"{name} has a row that says nothing"
        common = set() if kind is None else errors_of_every_method(kind)
        if missing := names - NOT_RAISED.get(name, set()) - documented_errors(value) - common:
            silent[name] = sorted(missing)
    assert NOT_RAISED.keys() <= functions.keys()
    assert silent == {}


def documented_errors(value: object) -> set[str]:
    """Return the names in the section Raises."""
    return set(re.findall(r"\w+", section(value, "Raises")))


def errors_of_every_method(kind: type) -> set[str]:
    """Return the names in the paragraph of a class on what every method raises."""
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
    """Otherwise each type checker would infer a type from the value, in its own way."""
    untyped = set()
    for base in CLASSES[name].__mro__:
        if base.__module__.startswith("kvplan"):  # kvnative has stubs
            untyped |= untyped_attributes(base)
    assert sorted(untyped) == []


@cache
def untyped_attributes(kind: type) -> frozenset[str]:
    """Return the public attributes that methods of a class set, and no annotation declares."""
    declared = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    declared |= {name for base in kind.__mro__ for name in vars(base)}  # descriptors, constants
    set_by_methods = set()
    for function in (node for node in ast.walk(tree(kind)) if isinstance(node, ast.FunctionDef)):
        parameters = {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)}
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign):
                declared |= own_attributes(node.target)
            elif isinstance(node, ast.Assign) and ast.unparse(node.value) not in parameters:
                set_by_methods |= {
                    name for target in node.targets for name in own_attributes(target)
                }
    return frozenset(item for item in set_by_methods - declared if not item.startswith("_"))


def own_attributes(target: ast.expr) -> set[str]:
    """Return the names of assigned attributes (`self.name`), also of several at once."""
    if isinstance(target, ast.Tuple):
        return {name for elt in target.elts for name in own_attributes(elt)}
    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
        return {target.attr}
    return set()
