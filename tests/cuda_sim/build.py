"""Build the stand-in for libcuda.so.1: ``python -m tests.cuda_sim.build [variant]``.

The library lies beside libkvsim_core.so, which it needs and whose sources are in tests/ascend_sim.
A process that also loads simulated Ascend libraries has one core: that of the first library.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.ascend_sim.build import CFLAGS

HERE = Path(__file__).resolve().parent
CORE = HERE.parent / "ascend_sim"
KERNELS = HERE.parents[1] / "kvnative" / "src" / "cuda"
ROOT = HERE.parents[1] / "build" / "cuda_sim"
CXXFLAGS = (
    *("-std=c++17", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas"),
)
# tools/sanitize sets this variable: kernels and threads of streams are sanitized like other code.
SANITIZE = tuple(f"-fsanitize={item}" for item in filter(None, [os.environ.get("KVPLAN_SANITIZE")]))
SANITIZE += ("-fno-sanitize-recover=all",) * bool(SANITIZE)
LIBRARY = "libcuda.so.1"
CORE_LIBRARY = "libkvsim_core.so"

# Versions of drivers, as cuDriverGetVersion returns them.
VARIANTS = {"12.4": 12040, "12.8": 12080, "13.0": 13000}
DEFAULT = "13.0"


@functools.cache
def build(variant: str = DEFAULT) -> Path:
    """Build a variant unless it is up to date.

    Returns:
        The library's path, which serves as KVPLAN_CUDA_LIBRARY.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r}: known are {', '.join(VARIANTS)}")
    home = ROOT / variant
    (ROOT / "objects").mkdir(parents=True, exist_ok=True)
    with (ROOT / f".{variant}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = home / "stamp"
        wanted = _digest(_everything(), str(VARIANTS[variant]))
        if not stamp.exists() or stamp.read_text() != wanted:
            _build(VARIANTS[variant], home)
            stamp.write_text(wanted)
    return home / LIBRARY


def _kernels() -> list[Path]:
    """Return the sources of the kernels: NVRTC compiles them for GPUs, the build for the host."""
    return sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*_kernel.h")])


def _everything() -> list[Path]:
    ours = [path for path in HERE.iterdir() if path.suffix in (".c", ".cpp", ".h", ".cu")]
    return sorted([*CORE.glob("core*.[ch]"), CORE / "sim.h", *ours, *_kernels(), Path(__file__)])


def _digest(sources: list[Path], *flags: str) -> str:
    digest = hashlib.sha256(repr((CFLAGS, CXXFLAGS, SANITIZE, flags)).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _build(version: int, home: Path) -> None:
    """Link beside the old library, then rename: running programs keep the old one."""
    home.mkdir(exist_ok=True)
    core, cuda = sorted(CORE.glob("core_*.c")), sorted([*HERE.glob("*.c"), *HERE.glob("*.cpp")])
    sources = [*core, *cuda]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda source: _compile(source, version), sources)
        objects = dict(zip(sources, made, strict=True))
    _link(home / CORE_LIBRARY, [objects[item] for item in core])
    _link(home / LIBRARY, [*[objects[item] for item in cuda], home / CORE_LIBRARY])


def _compile(source: Path, version: int) -> Path:
    """Compile unless another variant, or an earlier build, has the same object."""
    text = source.read_text()
    define = f"-DKVSIM_CUDA={version}"
    defines = [define] if "KVSIM_CUDA" in text.replace("KVSIM_CUDA_", "") else []
    is_cpp = source.suffix == ".cpp"
    headers = [*CORE.glob("*.h"), *HERE.glob("*.h")]
    kernels = [*_kernels(), *HERE.glob("*.cu")] if is_cpp else []
    digest = _digest([source, *sorted(headers), *kernels], *defines)
    made = ROOT / "objects" / f"{source.stem}-{digest[:16]}.o"
    if not made.exists():
        partial = made.with_suffix(f".{os.getpid()}.{version}")
        compiler = ("g++", *CXXFLAGS) if is_cpp else ("gcc", *CFLAGS)
        includes = (f"-I{CORE}", f"-I{KERNELS.parent}")
        _run(*compiler, *SANITIZE, *defines, *includes, "-c", str(source), "-o", str(partial))
        partial.replace(made)
    return made


def _link(made: Path, inputs: list[Path]) -> None:
    flags = ("-Wl,--no-as-needed", "-Wl,-z,defs,-z,nodelete", "-Wl,-rpath,$ORIGIN")
    partial = made.with_suffix(f".{os.getpid()}")
    _run(
        *("g++", "-shared", "-pthread", *SANITIZE, *flags, f"-Wl,-soname,{made.name}"),
        *("-o", str(partial), *map(str, inputs)),
    )
    partial.replace(made)


def _run(*command: str) -> None:
    environment = os.environ | {"LD_PRELOAD": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    sys.stdout.write(f"{build(*sys.argv[1:2])}\n")
