"""Makes kvplan importable without a network: from a checkout, and wheels brought along."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

from tools.cuda_tries.notes import Notes

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build/try_cuda"
BUILD_S, INSTALL_S = 240, 60
_PROBE = "import kvplan.engine, kvnative._cuda"


class UnpreparedError(Exception):
    """kvplan cannot be imported; the message says what to do."""


def prepare(notes: Notes, wheels: Path | None, *, build: bool) -> None:
    """Let this process, and those that it starts, import kvplan.

    Args:
        notes: takes what was done.
        wheels: a folder of wheels to use besides what is installed.
        build: whether to compile the checkout in any case.

    Raises:
        UnpreparedError: it cannot be imported.
    """
    if wheels is not None:
        install(notes, wheels)
    if missing := missing_packages():
        raise UnpreparedError(
            f"{', '.join(missing)} must be there: install them, or bring their wheels for Python "
            f"{sys.version_info[0]}.{sys.version_info[1]} and name their folder with --wheels"
        )
    reason = why_not_importable()
    if reason or build:  # what is installed goes before the checkout
        look_in(ROOT, first=build)
        reason = why_not_importable()
        if (ROOT / "setup.py").exists() and (build or reason):
            compile_in_place(notes)
            reason = why_not_importable()
    if reason:
        raise UnpreparedError(f"kvplan cannot be imported: {reason}")


def install(notes: Notes, wheels: Path) -> None:
    """Install each by itself, into a folder of this tool: one that does not fit spoils no other."""
    site = PLACE / "site"
    given = sorted(wheels.glob("*.whl"))
    if not given:
        raise UnpreparedError(f"--wheels {wheels}: no wheel is there")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    pip += ["--no-cache-dir", "--disable-pip-version-check", "--upgrade", "--target", str(site)]
    for item in given:
        began = time.monotonic()
        problem = run([*pip, str(item)], INSTALL_S, PLACE / "pip.log")
        took = f"{time.monotonic() - began:.1f} s"
        notes.add(
            f"wheel {item.name.split('-')[0]}", "refused" if problem else "ok", problem or took
        )
    look_in(site, first=True)


def look_in(folder: Path, *, first: bool) -> None:
    """Let this process, and those that it starts, import from there."""
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    paths.insert(0 if first else len(paths), str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if str(folder) not in sys.path or first:
        sys.path.insert(0 if first else len(sys.path), str(folder))
    importlib.invalidate_caches()


def missing_packages() -> list[str]:
    """Return the packages that kvplan needs to run, and that are missing or too old."""
    project = ROOT / "pyproject.toml"
    needs = tomllib.loads(project.read_text())["project"]["dependencies"]
    missing = []
    for need in needs:
        name, _, least = need.partition(">=")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(need)
        else:
            if numbers(version) < numbers(least):
                missing.append(f"{need} (and not {version})")
    return missing


def numbers(version: str) -> list[int]:
    return [int(match) for match in re.findall(r"\d+", version)]


def why_not_importable() -> str:
    """Return the last line of what Python says; empty if kvplan can be imported."""
    return run([sys.executable, "-P", "-c", _PROBE], INSTALL_S, PLACE / "import.log")


def compile_in_place(notes: Notes) -> None:
    """Compile as `make` does, with the Cython and setuptools that are installed."""
    began = time.monotonic()
    log = PLACE / "build.log"
    problem = run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"], BUILD_S, log
    )
    took = f"{time.monotonic() - began:.1f} s"
    if problem:
        notes.add("compile kvplan", "refused", f"{problem} ({log} has all of it)")
        return
    notes.add("compile kvplan", "ok", took)


def run(command: list[str], limit_s: float, log: Path) -> str:
    """Run it in the checkout; returns its last line where it fails, and else nothing."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w+") as file:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"it did not end within {limit_s:.0f} s"
        file.seek(0)
        lines = file.read().strip().splitlines() or [f"it exited with {code}"]
    return lines[-1] if code else ""
