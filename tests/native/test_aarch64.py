"""All sources compile for aarch64.

`make arm64` runs whole rooms of tests there.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_all_sources_compile_for_aarch64() -> None:
    if shutil.which("aarch64-linux-gnu-gcc") is None:
        pytest.skip("needs aarch64-linux-gnu-gcc (Debian: gcc-aarch64-linux-gnu)")
    flags = ("-std=c11", "-D_GNU_SOURCE", "-O3", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    includes = (f"-I{ROOT / name}" for name in ("kvnative/src", "include"))
    sources = map(str, sorted((ROOT / "kvnative/src").rglob("*.c")))
    done = subprocess.run(
        ["aarch64-linux-gnu-gcc", *flags, *includes, *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
