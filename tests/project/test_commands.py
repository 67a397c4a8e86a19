"""The README, the Makefile and CI name the same commands, and the versions agree."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import kvplan

ROOT = Path(__file__).parents[2]
COMMANDS = ["make demo", "make test"]


def test_the_readme_gives_the_two_commands() -> None:
    commands = re.findall(r"^\| `(make \w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(COMMANDS) <= set(commands)


def test_every_command_of_the_readme_is_a_target_that_help_lists() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    targets = re.findall(r"^  (make \w+)", listed, re.MULTILINE)
    documents = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`(make \w+)`", documents)) | set(COMMANDS)
    assert named <= set(targets)


def test_ci_runs_the_readmes_test_command_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert lines == ["set -eu", 'cd "$(dirname "$0")/.."', "exec make test"]


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_failing_check_stops_no_other_and_is_reported_last(tmp_path: Path) -> None:
    """Stub programs stand for the checks, and stamps for their installation."""
    for name in ("setup.py", "pyproject.toml", "requirements/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    program(tmp_path / "tools/sanitize", 'echo "sanitized: $1"')
    for name in ("ruff", "cython-lint", "lint-imports", "python"):
        program(tmp_path / ".venv/bin" / name, "")
    program(tmp_path / ".venv/bin/mypy", "echo 'error: wrong type'; exit 1")
    program(tmp_path / ".venv/bin/pytest", "echo 'all passed'")
    for name in ("ready", "dev", "browser", "weights"):
        (tmp_path / ".venv" / name).touch()
    environment = {
        name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "TESTS")
    }
    done = subprocess.run(
        ["make", "test"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    for text in (
        "error: wrong type",
        "all passed",
        "sanitized: address,undefined",
        "sanitized: th",
    ):
        assert text in done.stdout
    assert done.returncode == 2
    assert "types] Error 1" in done.stderr
    assert "make test has failed" in done.stderr.splitlines()[-2]


def test_a_requested_python_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/pythons.py", "3.14t"],
        env={"PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "3.14t    not tried: no python3.14t; Debian's needs root and apt-get" in done.stdout
    assert (done.returncode, done.stderr) == (1, "")


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kvplan.__version__ == metadata.version("kvplan")
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_switch_of_setup_is_documented() -> None:
    setup = (ROOT / "setup.py").read_text()
    switches = set(re.findall(r'"(KVPLAN_\w+)"', setup))
    assert len(switches) == 7
    docstring = setup.split('"""')[1]
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in switches if name not in docstring or name not in contributing] == []


def test_every_module_has_its_stub() -> None:
    native = ROOT / "kvnative"
    modules = {path.stem for path in native.glob("*.pyx")}
    assert modules
    assert modules - {path.stem for path in native.glob("*.pyi")} == set()
