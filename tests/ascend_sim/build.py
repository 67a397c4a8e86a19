"""Build the simulated Ascend libraries: ``python -m tests.ascend_sim.build [variant]``.

A variant is a tree like that of an installed CANN, so its path serves as ASCEND_HOME_PATH. All
libraries of a variant share libkvsim_core.so, which lies beside them. Each library has the sources
of one prefix: ``core_*.c``, ``acl_*.c``, ``hccl_*.c``, ``hixl_*.c``.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1] / "build" / "ascend_sim"
CFLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes"),
)


class Library(NamedTuple):
    """A shared object: its sources and dependencies."""

    name: str
    prefix: str
    needs: tuple[str, ...]


class Variant(NamedTuple):
    """The libraries and the version of one kind of installation."""

    cann: str
    defines: tuple[str, ...]
    libraries: tuple[Library, ...]


CORE = Library("libkvsim_core.so", "core_", ())
ACL_RT = Library("libacl_rt.so", "acl_", (CORE.name,))
# Since 8.5, a library of the old name exists for old links; it has no symbols of its own.
ASCENDCL = Library("libascendcl.so", "", (ACL_RT.name,))
ASCENDCL_ALONE = Library("libascendcl.so", "acl_", (CORE.name,))
HCOMM = Library("libhcomm.so", "hccl_", (CORE.name,))
HCCL = Library("libhccl.so", "", (HCOMM.name,))
HCCL_ALONE = Library("libhccl.so", "hccl_", (CORE.name,))
HIXL = Library("libcann_hixl.so", "hixl_", (CORE.name, HCOMM.name))

# KVSIM_CANN is the version as a number. KVSIM_BATCH says how batch copies behave: 0 absent, 1
# available, 2 refused, 3 only the calls of 9.1.
OLD = ("-DKVSIM_CANN=801", "-DKVSIM_BATCH=0")
NEW = ("-DKVSIM_CANN=805", "-DKVSIM_BATCH=1")
REFUSING = ("-DKVSIM_CANN=805", "-DKVSIM_BATCH=2")
ONLY_V2 = ("-DKVSIM_CANN=901", "-DKVSIM_BATCH=3")
OLD_HIXL = ("-DKVSIM_CANN=900", "-DKVSIM_BATCH=1")
NEWEST = ("-DKVSIM_CANN=901", "-DKVSIM_BATCH=1")

VARIANTS = {
    "8.1": Variant("8.1.RC1", OLD, (CORE, ASCENDCL_ALONE, HCCL_ALONE)),
    "8.5": Variant("8.5.0", NEW, (CORE, ACL_RT, ASCENDCL, HCOMM, HCCL)),
    "hccl-only": Variant("8.5.0", NEW, (CORE, ACL_RT, ASCENDCL, HCCL_ALONE)),
    "batch-unsupported": Variant("8.5.0", REFUSING, (CORE, ACL_RT, ASCENDCL, HCOMM, HCCL)),
    "batch-v2": Variant("9.1.0", ONLY_V2, (CORE, ACL_RT, ASCENDCL, HCOMM, HCCL)),
    "9.0": Variant("9.0.0", OLD_HIXL, (CORE, ACL_RT, ASCENDCL, HCOMM, HCCL, HIXL)),
    "9.1": Variant("9.1.0", NEWEST, (CORE, ACL_RT, ASCENDCL, HCOMM, HCCL, HIXL)),
}


@functools.cache
def build(variant: str = "8.5") -> Path:
    """Build a variant unless it is up to date.

    Returns:
        The path for ASCEND_HOME_PATH; the libraries are in its ``lib64``.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r}: known are {', '.join(VARIANTS)}")
    home = ROOT / variant
    ROOT.mkdir(parents=True, exist_ok=True)
    with (ROOT / f".{variant}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = home / "stamp"
        wanted = _fingerprint(VARIANTS[variant])
        if not stamp.exists() or stamp.read_text() != wanted:
            _build(VARIANTS[variant], home)
            stamp.write_text(wanted)
    return home


@functools.cache
def build_large_pages() -> Path:
    """Build the library that a process preloads to have pages of 64 KiB; return its path."""
    ROOT.mkdir(parents=True, exist_ok=True)
    source = HERE / "large_pages.c"
    made = ROOT / f"large_pages-{_digest([source])[:16]}.so"
    if not made.exists():
        partial = made.with_suffix(f".{os.getpid()}")
        _run("gcc", *CFLAGS, "-shared", str(source), "-o", str(partial))
        partial.replace(made)
    return made


def _fingerprint(variant: Variant) -> str:
    return _digest(sorted([*HERE.glob("*.[ch]"), HERE / "build.py"]), *variant.defines)


def _digest(sources: Iterable[Path], *flags: str) -> str:
    digest = hashlib.sha256(repr((CFLAGS, flags)).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _build(variant: Variant, home: Path) -> None:
    """Link in another folder, then rename: running programs keep the old libraries."""
    made = home / "lib64.new"
    shutil.rmtree(made, ignore_errors=True)
    for folder in (ROOT / "objects", made, home / "lib64"):
        folder.mkdir(parents=True, exist_ok=True)
    needed = [
        (source, () if library is CORE else variant.defines)
        for library in variant.libraries
        for source in _sources(library)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(zip(needed, pool.map(_compile, needed), strict=True))
    for library in variant.libraries:
        defines = () if library is CORE else variant.defines
        _link(library, [objects[source, defines] for source in _sources(library)], made)
    for path in made.iterdir():
        path.replace(home / "lib64" / path.name)
    made.rmdir()
    for place in ("runtime", "share/info/runtime"):
        (home / place).mkdir(parents=True, exist_ok=True)
        (home / place / "version.info").write_text(f"Version={variant.cann}\n")


def _sources(library: Library) -> list[Path]:
    return sorted(HERE.glob(f"{library.prefix}*.c")) if library.prefix else []


def _compile(needed: tuple[Path, tuple[str, ...]]) -> Path:
    """Compile unless another variant, or an earlier build, has the same object."""
    source, defines = needed
    digest = _digest([source, *sorted(HERE.glob("*.h"))], *defines)
    made = ROOT / "objects" / f"{source.stem}-{digest[:16]}.o"
    if not made.exists():
        partial = made.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        _run("gcc", *CFLAGS, *defines, "-c", str(source), "-o", str(partial))
        partial.replace(made)
    return made


def _link(library: Library, objects: list[Path], folder: Path) -> None:
    flags = ("-Wl,--no-as-needed", "-Wl,-z,defs,-z,nodelete", "-Wl,-rpath,$ORIGIN")
    needs = [folder / name for name in library.needs]
    _run(
        *("gcc", "-shared", "-pthread", *flags, f"-Wl,-soname,{library.name}"),
        *("-o", str(folder / library.name), *map(str, [*objects, *needs])),
    )


def _run(*command: str) -> None:
    environment = os.environ | {"LD_PRELOAD": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    sys.stdout.write(f"{build(*sys.argv[1:2])}\n")
