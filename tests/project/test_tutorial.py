"""The programs of the tutorial, run as a reader runs them: their output is that of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from doctest import ELLIPSIS, OutputChecker
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs/tutorial"
FILE = re.compile(r"`([\w.]+\.py)`[^`\n]*:[^`]*\n\n```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORT = "26000"  # the port of the page; a test uses a free one


def read(page: str) -> tuple[dict[str, str], list[str]]:
    """Return the files of a page, and the outputs that it shows."""
    text = (TUTORIAL / page).read_text()
    return dict(FILE.findall(text)), SHOWN.findall(text)


def is_shown(shown: str, printed: str) -> bool:
    return OutputChecker().check_output(shown, printed, ELLIPSIS)


@pytest.mark.parametrize("page", ["1-two-processes.md", "2-paged-blocks.md"])
def test_two_processes(page: str, tmp_path: Path) -> None:
    sources, (shown, *of_prefill) = read(page)
    python = [sys.executable, "-W", "error"]
    (tmp_path / "prefill.py").write_text(sources["prefill.py"].replace(PORT, "0"))
    prefill = subprocess.Popen(
        [*python, "prefill.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert prefill.stdout is not None
        prefill_output = prefill.stdout.readline()
        port = prefill_output.strip().rpartition(":")[2]
        (tmp_path / "decode.py").write_text(sources["decode.py"].replace(PORT, port))
        decode = subprocess.run(
            [*python, "decode.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert (decode.returncode, decode.stderr) == (0, "")
        assert is_shown(shown, decode.stdout), decode.stdout
        prefill_output += prefill.communicate(timeout=120)[0]
        assert prefill.returncode == 0
        assert all(is_shown(item.replace(PORT, port), prefill_output) for item in of_prefill), (
            prefill_output
        )
    finally:
        prefill.kill()
        prefill.wait()


def test_a_block_table(tmp_path: Path) -> None:
    sources, (shown,) = read("4-test-a-block-table.md")
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fetching.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_shown(shown, done.stdout), done.stdout
