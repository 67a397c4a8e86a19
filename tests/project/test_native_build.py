"""The built modules are what setup.py promises; run once more for the sanitizer build."""

import importlib
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import kvnative

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
    writable = Counter(
        symbol
        for library in LIBRARIES
        for symbol in {
            line.split()[-1]
            for line in symbols(library, "-t").splitlines()
            if len(line.split()) == 6 and line.split()[3] in (".data", ".bss")
        }
    )
    assert [name for name, copies in writable.items() if copies > 1 and is_ours(name)] == []


def is_ours(symbol: str) -> bool:
    """Whether the symbol comes from kvnative/src, not from Cython, the compiler or a sanitizer."""
    generated = ("__", "_", "completed", "ubsan", "asan", "*.L", ".L")
    return not symbol.startswith(generated)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_the_modules_under_test_are_of_the_build_asked_for(library: Path) -> None:
    module = importlib.import_module(f"kvnative.{library.name.split('.')[0]}")
    assert Path(str(module.__file__)) == library
    checked = "__asan_" in symbols(library, "-T")
    assert checked == ("address" in os.environ.get("KVPLAN_SANITIZE", ""))
