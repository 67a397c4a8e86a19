"""The built modules are what setup.py promises; run once more for the sanitizer build."""

import importlib
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvnative

SANITIZERS = {"address": "__asan_", "undefined": "__ubsan_", "thread": "__tsan_"}
LIBRARIES = sorted(Path(kvnative.__file__).parent.glob("*.so"))


def symbols(library: Path, *options: str) -> str:
    return subprocess.run(
        ["objdump", *options, library], capture_output=True, text=True, check=True
    ).stdout


def test_there_is_something_to_look_at() -> None:
    assert {library.name.split(".")[0] for library in LIBRARIES} >= {"_lower", "_executor", "_host"}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_a_module_shows_nothing_but_its_init_function(library: Path) -> None:
    name = library.name.split(".")[0]
    shown = [
        line.split()[-1]
        for line in symbols(library, "-T").splitlines()
        if " g " in line and "*UND*" not in line
    ]
    # The sanitizer adds its own globals; what counts is that none of ours leaks out.
    assert [symbol for symbol in shown if "asan" not in symbol] == [f"PyInit_{name}"]


def test_no_writable_state_exists_twice() -> None:
    """A C source that two modules link has two copies of its statics: only constants may be."""
    copies = Counter(state for library in LIBRARIES for state in writable_state(library))
    assert [state for state, count in copies.items() if count > 1] == []


def test_no_struct_is_defined_by_two_headers() -> None:
    """A source would take one for the other. Each backend has a kvn_request of its own."""
    root = Path(kvnative.__file__).parents[1]
    headers = [*root.glob("kvnative/src/**/*.h"), *root.glob("include/kvnative/*.h")]
    definition = re.compile(r"^(?:typedef )?(?:struct|union|enum) (\w+)\s*\{", re.MULTILINE)
    found = Counter(name for it in headers for name in definition.findall(it.read_text()))
    assert len(found) > 50
    assert {name for name, count in found.items() if count > 1} == {"kvn_request"}


def writable_state(library: Path) -> Iterator[tuple[str, str]]:
    """(C source, name) of each writable file-scope object from kvnative/src."""
    source = ""
    for line in symbols(library, "-t").splitlines():
        match line.split():
            case [_, "l", "df", "*ABS*", _, *name]:
                source = "".join(name)  # its static symbols follow; no name: the hidden ones of all
            case [_, "l", "O", ".data" | ".bss", _, *_, name]:
                # Cython's and the C runtime's own begin with an underscore.
                if not source.startswith(("_", "crt")) and not name.startswith("__"):
                    yield source, name


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_the_modules_under_test_are_of_the_build_asked_for(library: Path) -> None:
    module = importlib.import_module(f"kvnative.{library.name.split('.')[0]}")
    assert Path(str(module.__file__)) == library
    imported = symbols(library, "-T")
    checks = {name for name, mark in SANITIZERS.items() if mark in imported}
    assert checks == set(filter(None, os.environ.get("KVPLAN_SANITIZE", "").split(",")))
