"""C programs that test what no call from Python reaches in the sources of kvnative.

Each is compiled with the sources that it checks. The rest comes from libkvn.so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["Check", "compiled"]

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "kvnative/lib"
TIMEOUT_S = 60

Check = Callable[[str], None]
"""Runs one check of a program by its name. A failed check fails the test."""

_programs: dict[tuple[str, ...], Path] = {}  # by their sources


def compiled(folder: Path, source: str, *others: str) -> Check:
    """Compile a program of the tests, once in this process.

    Args:
        folder: folder of the program.
        source: path of the source with `main`, in the tree.
        others: sources that it is linked with, in kvnative/src.
    """
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    if (source, *others) not in _programs:
        _programs[source, *others] = _compile(folder, source, *others)
    program = _programs[source, *others]

    def check(name: str) -> None:
        ran = subprocess.run(
            [program, name], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert ran.returncode == 0, ran.stderr

    return check


def _compile(folder: Path, source: str, *others: str) -> Path:
    program = folder / Path(source).stem
    flags = ("-std=c11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")
    unused = ("-Wno-unused-function", "-ffunction-sections", "-Wl,--gc-sections")
    includes = (f"-I{ROOT / item}" for item in ("kvnative/src", "include", "tests/support/native"))
    # Not -Wl, which splits at commas: the path of a sanitized build contains one.
    library = (f"-L{LIBRARY}", "-Xlinker", "-rpath", "-Xlinker", str(LIBRARY), "-lkvn")
    sources = map(str, [ROOT / source, *(ROOT / "kvnative/src" / other for other in others)])
    command = ["cc", *flags, *unused, *includes, *sources, *library, "-o", str(program)]
    # A compiler with a sanitizer's allocator takes three times as long.
    environment = os.environ | {"LD_PRELOAD": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program
