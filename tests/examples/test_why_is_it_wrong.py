"""Each command of docs/how-to/why-is-it-wrong.md prints what the page says."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import examples
from kvplan.cli import main
from tests.examples.test_examples import run

pytestmark = pytest.mark.slow  # an example in three processes, three times

ROOT = Path(examples.__file__).parents[1]
PAGE = ROOT / "docs/how-to/why-is-it-wrong.md"


def commands() -> Iterator[tuple[str, str]]:
    """Yield the commands of the page, and what each prints."""
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, printed = command.partition("\n")
            yield line, printed


def test_each_command_prints_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one go, as a reader does."""
    checker, ran = doctest.OutputChecker(), 0
    for line, said in commands():
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
        wanted = said.replace("  ...\n", "...")
        assert checker.check_output(wanted, printed, doctest.ELLIPSIS), f"{line}\n{printed}"
        ran += 1
    assert ran == 9
