"""kvplan as users have it: an sdist, the wheel made of it, an environment with that wheel."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def run(command: list[str | Path], cwd: Path | None = None, **switches: str) -> str:
    """Run a command that must succeed; returns what it printed."""
    done = subprocess.run(
        command, cwd=cwd, env=users_environment() | switches, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def users_environment() -> dict[str, str]:
    """Without PYTHONPATH, which would put the tree in front of what is installed."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


def one(folder: Path, pattern: str) -> Path:
    """Return the only file that matches."""
    (found,) = folder.glob(pattern)
    return found


def built(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist, and the wheel built from that sdist, not from the tree.

    What this environment's own build has compiled is not compiled again. With the tools of this
    environment: two isolated ones take half a minute, and `make wheels` has them.
    """

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
        run(command, KVPLAN_BUILD_CACHE=str(ROOT / "build/cache"))

    return _once(factory, "dist", build)


def installed(factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment that has the wheel, what it needs, and pytest.

    The requirements are links to the packages of this environment: no test depends on a network or
    on a package index, and `make wheels` lets pip find them.
    """

    def install(folder: Path) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        python = folder / "bin/python"
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        run([*pip, "--no-compile", "--no-deps", "--no-index", one(built(factory), "*.whl")])
        site = Path(
            run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])[:-1]
        )
        (wheel,) = metadata.distributions(path=[str(site)])
        for package in _required([*(wheel.requires or ()), "pytest"]):
            for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                (site / top).symlink_to(Path(str(package.locate_file(top))))

    return _once(factory, "clean environment", install) / "bin/python"


def _required(requirements: list[str]) -> list[metadata.Distribution]:
    """Return the packages of this environment that requirements name, and all that those need."""
    found: dict[str, metadata.Distribution] = {}
    while requirements:
        requirement = Requirement(requirements.pop())
        name = canonicalize_name(requirement.name)
        if name in found or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        found[name] = metadata.distribution(name)
        assert requirement.specifier.contains(found[name].version, prereleases=True)
        requirements += found[name].requires or ()
    return [*found.values()]


def _once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that the first process of this run to ask has made; others wait for it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all processes
    folder = base / name
    with (base / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():  # nobody has made it
            make(folder)
            lock.write("made")
    return folder
