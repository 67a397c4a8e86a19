"""The C programs of the benchmarks, compiled for this machine on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

_SOURCES = Path(__file__).parent
_BUILD = Path(__file__).parents[1] / "build"


def compiled(source: str, suffix: str, *flags: str) -> Path:
    """Return the program or library that is compiled from the file `source` of this folder.

    Raises:
        RuntimeError: no compiler was found.
    """
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler:
        raise RuntimeError("the physical limit is measured by C code: no cc in PATH and no CC set")
    command = [compiler, "-O3", "-march=native", "-std=c11", *flags]
    content = (_SOURCES / source).read_bytes() + " ".join(command).encode()
    name = f"{Path(source).stem}-{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
    built = _BUILD / name
    if not built.exists():
        _BUILD.mkdir(exist_ok=True)
        # Of two benchmarks at once the last rename wins; both files are equal.
        partial = built.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, str(_SOURCES / source), "-o", str(partial)], check=True)
        partial.rename(built)
    return built
