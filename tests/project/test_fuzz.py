"""A short `make fuzz`: changed frames for the parser, server and client of transport tcp."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_fuzzer_finds_nothing() -> None:
    process = subprocess.run(
        ["make", "fuzz", "FUZZ_COUNT=30000", "FUZZ_SECONDS=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    assert "parser: 30000 inputs" in process.stdout
