"""The README, the Makefile and CI name the same commands, and the versions agree."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import kvplan

ROOT = Path(__file__).parents[2]
COMMANDS = ["make demo", "make test"]


def test_the_readme_gives_the_two_commands() -> None:
    commands = re.findall(r"^\$? ?(make \w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
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


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kvplan.__version__ == metadata.version("kvplan")
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_switch_of_setup_is_documented() -> None:
    setup = (ROOT / "setup.py").read_text()
    switches = set(re.findall(r'"(KVPLAN_\w+)"', setup))
    assert len(switches) == 6
    docstring = setup.split('"""')[1]
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in switches if name not in docstring or name not in contributing] == []


def test_every_module_has_its_stub() -> None:
    native = ROOT / "kvnative"
    modules = {path.stem for path in native.glob("*.pyx")}
    assert modules
    assert modules - {path.stem for path in native.glob("*.pyi")} == set()
