"""The pair for the official package, run as a reader would: two processes through the launcher."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import examples
from tests.support.installation import users_environment
from tests.support.ports import free_port

FOLDER = Path(examples.__file__).parent
PREFILL, DECODE = "llm_datadist_prefill.py", "llm_datadist_decode.py"
PATIENCE = 60.0


def launched(
    script: Path, *arguments: str, python: Path | str = sys.executable
) -> subprocess.Popen[str]:
    tree = {"PYTHONPATH": str(FOLDER.parent)} if python == sys.executable else {}
    return subprocess.Popen(
        [python, "-W", "error", "-m", "kvplan.run", script.name, *arguments],
        cwd=script.parent,
        env=users_environment() | tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Pair:
    """Exit status and output of both programs, after their end."""

    def __init__(self, folder: Path, python: Path | str = sys.executable) -> None:
        first, second, scheduler = (free_port() for _ in range(3))
        arguments = (
            f"--prefill=127.0.0.1:{first} --decode=127.0.0.1:{second} "
            f"--scheduler=127.0.0.1:{scheduler}"
        )
        with launched(folder / PREFILL, *arguments.split(), python=python) as prefill:
            try:
                assert prefill.stdout is not None
                waiting = prefill.stdout.readline()
                with launched(folder / DECODE, *arguments.split(), python=python) as decode:
                    try:
                        self.decode = decode.communicate(timeout=PATIENCE)
                        rest, errors = prefill.communicate(timeout=PATIENCE)
                    finally:
                        decode.kill()
            finally:
                prefill.kill()
        self.prefill = waiting + rest, errors
        self.status = prefill.returncode, decode.returncode


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with both programs and no other file of this project."""
    for name in (PREFILL, DECODE):
        shutil.copy(FOLDER / name, tmp_path)
    return tmp_path


@pytest.mark.slow  # needs the wheel
def test_the_pair_transfers_in_both_modes(copied: Path, python: Path) -> None:
    pair = Pair(copied, python)
    assert pair.prefill == ("prefill: waiting for decode\nprefill: all was sent\n", "")
    blocks, slot = 6 * 3 * 8 * 2 * 16, 6 * 32 * 2 * 16
    output, warned = pair.decode
    assert output == (
        f"decode: pull_blocks: {blocks} numbers, all in their places\n"
        f"decode: pull_cache: {slot} numbers, all in their places\n"
        "decode: pull_cache again: the key is gone\n"
        f"decode: push_blocks: {blocks} numbers, all in their places\n"
        f"decode: transfer_cache_async: {blocks} numbers, all in their places\n"
    )
    # The line about the missing key; the program configures no logging.
    (line,) = warned.splitlines()
    assert 'error="no cache has CacheKey' in line
    assert pair.status == (0, 0)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "what"),
    [
        (DECODE, "src_blocks=MINE, dst_blocks", "src_blocks=[4, 5, 8], dst_blocks", "pull_blocks"),
        (PREFILL, "src_batch_index=1)", "src_batch_index=2)", "pull_cache"),
        (PREFILL, "src_blocks=MINE, dst_blocks", "src_blocks=THEIRS, dst_blocks", "push_blocks"),
        (PREFILL, "(result[both], first", "(0 * result[both], first", "transfer_cache_async"),
        (PREFILL, "configs, MINE, THEIRS)", "configs, MINE, [7, 8, 3])", "transfer_cache_async"),
    ],
)  # fmt: skip
def test_the_pair_detects_wrong_bytes(
    name: str, right: str, wrong: str, what: str, copied: Path
) -> None:
    source = (FOLDER / name).read_text()
    assert source.count(right) == 1
    (copied / name).write_text(source.replace(right, wrong))
    pair = Pair(copied)
    assert pair.status[1] == 1
    assert f"FAILED: {what}: " in pair.decode[1]
    assert pair.status[0] == 1, "prefill ended well, though decode did not"


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_the_programs_use_only_official_names(name: str) -> None:
    """Except for their class of tensors, the programs need only packages of an Ascend user."""
    tree = ast.parse((FOLDER / name).read_text())
    tree.body = [
        item for item in tree.body if not isinstance(item, ast.ClassDef) or item.name != "Tensors"
    ]
    imported = {
        module.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [name.name for name in node.names]
        )
    }
    ours = imported - sys.stdlib_module_names
    assert ours <= {"llm_datadist", "numpy", "llm_datadist_prefill"}
    assert "kvplan" not in ast.unparse(tree.body[1:])


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_the_help_of_a_program_is_its_first_line(name: str) -> None:
    with launched(FOLDER / name, "--help") as program:
        out, _ = program.communicate(timeout=PATIENCE)
    assert program.returncode == 0
    assert (FOLDER / name).read_text().splitlines()[0].removeprefix('"""') in out
