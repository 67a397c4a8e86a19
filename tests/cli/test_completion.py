"""Completion: what the command says could come next, and a bash that asks it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan import TRANSPORT_COSTS
from kvplan.cli import COMMANDS
from tests.cli.running import ROOT, command, push


def words(line: str, cwd: Path) -> list[str]:
    """What could complete the last word of `line`."""
    given = line.split(" ")
    found = subprocess.run(
        [sys.executable, "-m", "kvplan"],
        cwd=cwd,
        env={
            "PYTHONPATH": str(ROOT),
            "_KVPLAN_COMPLETE": "bash_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(given) - 1),
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return found.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("plan.json", "other.json", "notes.txt"):
        push([7, 8, 2]).save(tmp_path / name)
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans/late.json").write_text("{}")
    return tmp_path


def test_commands_and_options(folder: Path) -> None:
    assert words("kvplan ", folder) == [f"plain,{name}" for name in COMMANDS]
    assert words("kvplan expl", folder) == ["plain,explain"]
    assert "plain,--transport" in words("kvplan explain --t", folder)


def test_plans_and_transports(folder: Path) -> None:
    assert words("kvplan explain ", folder) == [
        "plain,other.json",
        "plain,plan.json",
        "plain,plans/",
    ]
    assert words("kvplan diff other.json pl", folder) == ["plain,plan.json", "plain,plans/"]
    assert words("kvplan diff other.json plans/", folder) == ["plain,plans/late.json"]
    assert words("kvplan explain notes", folder) == ["file,notes"]  # the shell's own
    names = [f"plain,{it}" for it in TRANSPORT_COSTS if it.startswith("local")]
    assert words("kvplan estimate plan.json -t local", folder) == names
    assert words("kvplan ping 127.0.0.1:1 --transport l", folder) == ["plain,local"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str) -> None:
    done = command("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_KVPLAN_COMPLETE={shell}_complete" in done.stdout


def test_bash_completes_with_the_script(folder: Path) -> None:
    kvplan = folder / "kvplan"
    kvplan.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m kvplan "$@"\n')
    kvplan.chmod(0o755)
    program = (
        f"PATH={shlex.quote(str(folder))}:$PATH\n"
        'eval "$(kvplan completion bash)"\n'
        "COMP_WORDS=(kvplan explain pla); COMP_CWORD=2\n"
        "_kvplan_completion kvplan\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("plan.json\nplans/\n", "")
