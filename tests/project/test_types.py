"""Types of users' programs: mypy and pyright accept the examples and the documents."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from doctest import DocTestParser
from pathlib import Path

import pytest

from tests.support.installation import ROOT, users_environment

pytestmark = pytest.mark.slow  # needs the wheel

ANY_STUB = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"

STUBS = {
    # `python -m kvplan.run` makes these importable.
    "hixl": "from kvplan.hixl import *\n",
    "llm_datadist": "from kvplan.llm_datadist import *\n",
    "nixl_cu12": "from kvplan.nixl import *\n",  # has the same names
    # These are not installed beside the wheel.
    "prometheus_client": ANY_STUB,
    "torch": ANY_STUB,
}

MYPY = """
[mypy]
strict = true
allow_redefinition = true
explicit_package_bases = true
[mypy-documents.*]
disallow_untyped_defs = false
disallow_incomplete_defs = false
disallow_untyped_calls = false
"""
"""Documents leave out annotations of small helpers, and reuse names."""

NO_NODE = pytest.mark.skipif(
    shutil.which("node") is None, reason="pyright runs on node: apt install nodejs"
)


def programs_of(page: Path) -> str:
    """Return the Python code of a document, one block after another."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    parser = DocTestParser()
    sources = [
        [example.source for example in parser.get_examples(block)] or [block] for block in blocks
    ]
    return "".join(line for source in sources for line in source)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and the Python code of each document, outside of the project."""
    folder = tmp_path_factory.mktemp("programs")
    for example in (ROOT / "examples").glob("*.py"):
        if example.name != "__init__.py":
            shutil.copy(example, folder)
    (folder / "readme.py").write_text(programs_of(ROOT / "README.md"))
    documents = folder / "documents"
    documents.mkdir()
    (documents / "__init__.py").touch()
    for page in ROOT.glob("docs/**/*.md"):
        if source := programs_of(page):
            name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
            (documents / f"{name}.py").write_text(source)
    assert len([*documents.iterdir()]) > 15
    for name, text in STUBS.items():
        (folder / f"{name}.pyi").write_text(text)
    (folder / "mypy.ini").write_text(MYPY)
    return folder


def test_mypy_accepts_programs_of_users(python: Path, programs: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", f"--python-executable={python}", "."],
        cwd=programs,
        env=users_environment(),
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@NO_NODE
def test_pyright_accepts_programs_of_users(python: Path, programs: Path) -> None:
    checked = pyright(python, programs, "--level", "error", ".")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def pyright(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pyright for the packages of `python`, which it finds through PATH."""
    return subprocess.run(
        [sys.executable, "-m", "pyright", *arguments],
        cwd=folder,
        env=users_environment() | {"PATH": f"{python.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
