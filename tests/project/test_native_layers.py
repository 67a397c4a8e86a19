"""Includes of the C sources: only from lower folders, and never in a circle."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kvnative/src"
# Folders of one row do not include each other; a folder may include those of earlier rows.
FOLDERS = [["core"], ["host"], ["process"], ["device"], ["acl", "cuda", "tcp", "ucx"], ["hccl"]]

_INCLUDE = re.compile(r'^#include "(\w+/\w+)\.h"', re.MULTILINE)

pytestmark = pytest.mark.skipif(not SOURCES.exists(), reason="an installed tree has no C sources")


def units() -> dict[str, set[str]]:
    """Return the other units that each unit includes: a unit is a source with its header."""
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.[ch]"):
        unit = str(path.relative_to(SOURCES).with_suffix(""))
        found.setdefault(unit, set()).update(_INCLUDE.findall(path.read_text()))
    names = set(found)
    return {unit: (included & names) - {unit} for unit, included in found.items()}


def folder(unit: str) -> str:
    return unit.partition("/")[0]


def rank(unit: str) -> int:
    (row,) = [index for index, folders in enumerate(FOLDERS) if folder(unit) in folders]
    return row


def upward(included: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    for unit, others in included.items():
        for other in others:
            if folder(other) != folder(unit) and rank(other) >= rank(unit):
                yield unit, other


def circles(included: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of units that include one another, directly or through others."""
    reached: dict[str, set[str]] = {}
    for unit, others in included.items():
        seen: set[str] = set()
        left = list(others)
        while left:
            other = left.pop()
            if other not in seen:
                seen.add(other)
                left += included[other]
        reached[unit] = seen
    return {
        frozenset(other for other in included if unit in reached[other] and other in reached[unit])
        for unit in included
        if unit in reached[unit]
    }


def test_every_folder_has_its_row() -> None:
    listed = {item for row in FOLDERS for item in row}
    assert {path.parent.name for path in SOURCES.rglob("*.[ch]")} == listed


def test_no_folder_includes_one_above() -> None:
    assert set(upward(units())) == set()


def test_no_files_include_one_another() -> None:
    assert circles(units()) == set()


def test_upward_includes_and_circles_are_detected() -> None:
    included = {"core/a": {"host/b"}, "host/b": {"core/c"}, "core/c": {"core/a"}, "tcp/d": set()}
    assert set(upward(included)) == {("core/a", "host/b")}
    assert circles(included) == {frozenset({"core/a", "host/b", "core/c"})}
    assert set(upward({"tcp/d": {"acl/e"}, "acl/e": set()})) == {("tcp/d", "acl/e")}


def test_runtimes_of_devices_are_called_through_the_table_of_operations() -> None:
    """Only the folder of a runtime calls it; all others, also `hccl`, use `kvn_device_ops`."""
    owner = {"aclrt": "acl", "cu": "cuda"}
    calls = {
        (str(path.relative_to(SOURCES)), name)
        for path in SOURCES.rglob("*.[ch]")
        for name, runtime in re.findall(r"->((aclrt|cu)[A-Z]\w+)\b", path.read_text())
        if path.parent.name != owner[runtime]
    }
    assert calls == set()


def atomics(text: str) -> set[str]:
    """Return the names of the fields and variables that a source declares atomic."""
    kind = r"^\s*(?:static )?(?:atomic_\w+|_Atomic(?:\(\w+\)| \w+)) \*?(\w+)(?:\[\w+\])?;"
    return set(re.findall(kind, text, re.MULTILINE))


def test_every_atomic_has_a_row_on_memory_ordering() -> None:
    page = (ROOT / "docs/internals/memory-ordering.md").read_text()
    declared = set().union(*(atomics(path.read_text()) for path in SOURCES.rglob("*.[ch]")))
    assert len(declared) > 30
    explained = set(re.findall(r"\w+", page))
    assert sorted(declared - explained) == []


def test_declarations_of_atomics_are_found() -> None:
    text = "    atomic_bool lonely; /* x */\nstatic _Atomic uint64_t *pages;\n    atomic_int stop;"
    assert atomics(text) == {"lonely", "pages", "stop"}
