"""Each native allocation fails once, which is an error, and the next call works.

The process (allocations_process.py) fails if a call raised another exception or moved wrong bytes,
or if a descriptor, a thread or an allocation is left.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEADLINE_S = 120

pytestmark = [
    pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer is preloaded"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="wraps functions of glibc"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shim") / "failing_allocations.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    command = ["cc", *flags, str(HERE / "failing_allocations.c"), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


@pytest.mark.parametrize(
    ("operation", "least"),
    # Minimum number of allocations: with fewer, another library is counted.
    [("executed", 3), ("submitted", 3), ("layered", 6), ("guarded", 8), ("local", 4), ("tcp", 10)],
)
def test_each_allocation_fails_once(shim: Path, operation: str, least: int) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.native.allocations_process", operation],
        cwd=HERE.parents[1],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert found.returncode == 0, found.stderr
    outcomes = json.loads(found.stdout)
    assert len(outcomes) >= least
    assert sum(outcome != "SUCCESS" for outcome in outcomes) >= least // 2, found.stderr
