"""docs/reference/command.md: every output is real; numbers of a machine are not compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from doctest import DocTestParser
from pathlib import Path
from typing import Any

import pytest

from kvplan.cli import COMMANDS, main
from kvplan.cli.common import ExitCode
from tests.cli.peer import Peer
from tests.support.zygote import ROOT

DOCUMENT = (ROOT / "docs/reference/command.md").read_text()
BLOCK = re.compile(
    r"^(<!-- of this machine -->\n)?```console\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
ADDRESS = "127.0.0.1:16000"


def steps(*, of_this_machine: bool) -> list[tuple[str, str]]:
    """Yield each command line, with its output."""
    found = []
    for marked, block in BLOCK.findall(DOCUMENT):
        if bool(marked) is of_this_machine:
            parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
            found += list(zip(parts[1::2], parts[2::2], strict=True))
    assert found
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where a shell finds `kvplan` and the plans of the document."""
    folder = tmp_path_factory.mktemp("command")
    names: dict[str, Any] = {}
    block = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)[0]
    exec("".join(example.source for example in DocTestParser().get_examples(block)), names)
    for name in ("plan", "other"):
        names[name].save(folder / f"{name}.json")
    kvplan = folder / "kvplan"
    kvplan.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m kvplan "$@"\n')
    kvplan.chmod(0o755)
    return folder


def shell(line: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=os.environ
        | {"PATH": f"{folder}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(("line", "expected"), steps(of_this_machine=False))
def test_a_block_of_the_page_is_the_output_of_the_command(
    line: str, expected: str, folder: Path
) -> None:
    assert shell(line, folder) == expected


@pytest.mark.parametrize(("line", "expected"), steps(of_this_machine=True))
def test_a_block_of_a_machine_has_the_same_lines(line: str, expected: str, folder: Path) -> None:
    with closing(Peer()) as peer:
        peer.run(
            """
            desc = CacheDesc(
                64, (256, 16, 8, 128), DataType.DT_BF16, Placement.HOST,
                kv_tensor_format="block token head dim",
            )
            engine.allocate_blocks_cache(desc, BlocksCacheKey(7, 3))
            """
        )
        printed = shell(line.replace(ADDRESS, peer.address), folder)
    assert masked(printed) == masked(expected)


def masked(text: str) -> list[str]:
    """Return the text of each line up to its first number; the rest depends on the machine."""
    lines = [line for line in text.splitlines() if not re.match(r" {10}|  to do", line)]
    return [re.sub(r"(?<=\S)\s{2,}.*|[0-9].*", "", line) for line in lines]


def test_the_page_has_every_command_and_exit_code() -> None:
    listed = set(re.findall(r"^\| \[`kvplan (\w+)`\]", DOCUMENT, re.MULTILINE))
    assert listed == set(COMMANDS)
    codes = {int(match) for match in re.findall(r"^\| (\d+) \|", DOCUMENT, re.MULTILINE)}
    assert codes == set(ExitCode)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"kvplan {name}" in said.split("Example")[-1]
    assert COMMANDS[name].help.endswith(".")
