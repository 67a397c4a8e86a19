"""What is aarch64's own: its copies, compiled and emulated, and that all sources compile for it.

`make arm64` runs whole rooms of tests there.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O3", "-Wall", "-Wextra", "-Werror", "-static")


def need(*programs: str) -> None:
    missing = [it for it in programs if shutil.which(it) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (Debian: gcc-aarch64-linux-gnu, qemu-user)")


def run(compiler: str, target: Path, *emulator: str) -> list[str]:
    """Names of the strategies that the program has checked."""
    sources = [ROOT / "tests/native/copies_main.c", ROOT / "kvnative/src/host/copy.c"]
    includes = (f"-I{ROOT / it}" for it in ("kvnative/src", "include"))
    command = [compiler, *FLAGS, *includes, *map(str, sources), "-o", str(target)]
    subprocess.run(command, check=True)
    done = subprocess.run([*emulator, str(target)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_copies_of_aarch64(tmp_path: Path) -> None:
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    need(compiler, emulator)
    found = run(compiler, tmp_path / "copies", emulator)
    assert found == ["memcpy", "nt-ldnp", "dc-zva"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_same_program_here(tmp_path: Path) -> None:
    assert run("cc", tmp_path / "copies")[0] == "memcpy"


def test_all_sources_compile_for_it() -> None:
    need("aarch64-linux-gnu-gcc")
    flags = ("-std=c11", "-D_GNU_SOURCE", "-O3", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    includes = (f"-I{ROOT / it}" for it in ("kvnative/src", "include"))
    sources = map(str, sorted((ROOT / "kvnative/src").rglob("*.c")))
    done = subprocess.run(
        ["aarch64-linux-gnu-gcc", *flags, *includes, *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
