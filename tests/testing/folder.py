"""A user's folder of tests, and the output of pytest in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ALREADY_IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
"""The warning of pytest about a plugin, if another pytest runs in the process."""


class Folder:
    """A user's folder of tests, run by a pytest of its own without the settings of this project."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.path = pytester.path
        self._pytester = pytester

    def write(self, code: str, name: str = "test_it.py") -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(code))
        return file

    def run(self, *options: str, code: int = 0) -> str:
        """Run pytest in this process, which has imported kvplan and NumPy; return its output."""
        found = self._pytester.runpytest_inprocess(
            "-q", "-p", "no:cacheprovider", "-W", ALREADY_IMPORTED, *options
        )
        assert found.ret == code, str(found.stdout)
        return str(found.stdout)

    def run_alone(self, *options: str, **environment: str) -> str:
        """Run pytest in a process of its own, and return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
            cwd=self.path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def errors(output: str) -> list[str]:
    """Return the lines that pytest has printed behind `E`."""
    found = re.findall(r"^E(?:   (.*))?$", output, re.MULTILINE)
    return [entry.rstrip() for entry in found]
