"""Other versions of UCX than the tests run with, unpacked below build/ and kept there."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.transport.owner import ROOT

FOLDER = ROOT / "build" / "ucx"
ARCHIVES = Path("/var/cache/apt/archives")
DEBIAN = ("libucx0", "libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200")
PATIENCE = 120


class NotHereError(Exception):
    """A version cannot be had; the message says why."""


def wheel(version: str) -> tuple[str, ...]:
    """Words of a command that let a program find that version of the wheel.

    Raises:
        NotHereError: it cannot be downloaded.
    """
    target = FOLDER / version
    library = target / "libucx" / "lib" / "libucp.so.0"
    if not library.exists():
        pip = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-deps"]
        _run([*pip, "--target", str(target), f"libucx-cu12=={version}"])
    return "env", f"KVPLAN_UCX_LIBRARY={library}"


def debian() -> tuple[str, ...]:
    """Words of a command that let a program find the UCX of this Debian, which has RDMA.

    Raises:
        NotHereError: its packages cannot be had.
    """
    target = FOLDER / "debian"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            for package in DEBIAN:
                _run(["dpkg", "-x", str(_archive(package, Path(work))), f"{work}/unpacked"])
            (Path(work) / "unpacked").rename(target)
    (library,) = target.glob("usr/lib/*/libucp.so.0")
    return "env", f"KVPLAN_UCX_LIBRARY={library}", f"LD_LIBRARY_PATH={library.parent}"


def _archive(package: str, work: Path) -> Path:
    """The file of a package: what apt has kept, else downloaded."""
    for folder in (ARCHIVES, work):
        if files := sorted(folder.glob(f"{package}_*.deb")):
            return files[-1]
        if folder is ARCHIVES:
            _run(["apt-get", "download", "-qq", package], cwd=work)
    raise NotHereError(f"apt-get download {package} has brought nothing")


def _run(argv: list[str], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHereError(str(error)) from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise NotHereError(f"{' '.join(argv)}: {last}")
