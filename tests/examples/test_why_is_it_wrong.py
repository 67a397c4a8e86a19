"""Tests that each command of docs/how-to/why-is-it-wrong.md prints the documented output."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import examples
from kvplan.cli import main
from tests.examples.test_examples import run

pytestmark = pytest.mark.slow  # needs the wheel; an example in three processes, three times

ROOT = Path(examples.__file__).parents[1]
PAGE = ROOT / "docs/how-to/why-is-it-wrong.md"


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command of the page, and its documented output."""
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, printed = command.partition("\n")
            yield line, printed


def test_each_command_prints_the_documented_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands run in one folder, one after another, as a reader runs them."""
    checker, ran = doctest.OutputChecker(), 0
    for line, output in commands():
        program, *words = line.replace("/tmp", str(tmp_path)).split()
        if program == "python":
            done = run(*words)
            printed = done.stdout
            assert (done.returncode, done.stderr) == (0, "")
        else:
            assert program == "kvplan"
            for word in [word for word in words if "*" in word]:
                (path,) = tmp_path.glob(str(Path(word).relative_to(tmp_path)))
                words[words.index(word)] = str(path)
            main(words)
            printed = capsys.readouterr().out
        wanted = output.replace("  ...\n", "...")
        assert checker.check_output(wanted, printed, doctest.ELLIPSIS), f"{line}\n{printed}"
        ran += 1
    assert ran == 9
