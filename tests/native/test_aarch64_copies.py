"""The copies of aarch64, compiled for it and emulated: that they are right, not how fast."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O3", "-Wall", "-Wextra", "-Werror", "-static")


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
    missing = [it for it in (compiler, emulator) if shutil.which(it) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    found = run(compiler, tmp_path / "copies", emulator)
    assert found == ["memcpy", "nt-ldnp", "dc-zva"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_same_program_here(tmp_path: Path) -> None:
    assert run("cc", tmp_path / "copies")[0] == "memcpy"
