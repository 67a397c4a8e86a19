"""kvplan as users install it: an sdist, a wheel built from it, an environment with that wheel."""

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
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        command, cwd=cwd, env=users_environment() | switches, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def users_environment() -> dict[str, str]:
    """Return the environment without PYTHONPATH, which would precede installed packages."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


def one(folder: Path, pattern: str) -> Path:
    """Return the only matching file."""
    (found,) = folder.glob(pattern)
    return found


def built(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist, and the wheel built from that sdist, not from the tree.

    The build reuses compiled files and build tools of this environment: isolated builds take half
    a minute, and `make wheels` tests them.
    """

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
        run(command, KVPLAN_BUILD_CACHE=str(ROOT / "build/cache"))

    return _once(factory, "dist", build)


def installed(factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the wheel, its requirements and pytest.

    The requirements are links to the packages of this environment, so no test depends on a network
    or a package index. `make wheels` lets pip find them.
    """

    def install(folder: Path) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        python = folder / "bin/python"
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        run([*pip, "--no-deps", "--no-index", one(built(factory), "*.whl")])
        site = Path(
            run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])[:-1]
        )
        (wheel,) = metadata.distributions(path=[str(site)])
        for package in _required([*(wheel.requires or ()), "pytest"]):
            for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                (site / top).symlink_to(Path(str(package.locate_file(top))))

    return _once(factory, "clean environment", install) / "bin/python"


def _required(requirements: list[str]) -> list[metadata.Distribution]:
    """Return the installed packages that requirements name, and their own requirements."""
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
    """Return a folder that is made once per run: the first process makes it, others wait."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # shared by all processes
    folder = base / name
    with (base / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():  # not made yet
            make(folder)
            lock.write("made")
    return folder
