"""pytest as a program of `zygote.run`, which has imported what all tests need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import zygote

IMPORTED = ("hypothesis.strategies", "sybil.parsers.markdown", "kvplan.engine.datadist")


def run(*arguments: str | Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python -m pytest -q -p no:cacheprovider ARGUMENTS` in a process of its own."""
    return zygote.run(
        "tests.support.suite",
        *map(str, arguments),
        imported=IMPORTED,
        environment={**os.environ, **environment},
        timeout_s=None,  # each test has its own
    )


def main(*arguments: str) -> None:
    imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-W", imported, *arguments]))
