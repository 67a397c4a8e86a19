"""An interrupt anywhere in a call leaves only listed objects, and the next call works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("call", "step", "fewest"),
    [
        ("allocate", 11, 30),
        ("register", 17, 30),
        ("lease", 5, 10),
        ("record", 3, 10),
        ("initialize", 67, 5),
        pytest.param("initialize", 7, 50, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_call_leaves_nothing(call: str, step: int, fewest: int) -> None:
    command = (sys.executable, "-m", "tests.engine.interrupted_calls", call, str(step))
    process = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    left = json.loads(process.stdout)
    assert left.pop("interrupts") >= fewest
    assert left == {"next_call": {}, "registrations": 0, "caches": 0, "leases": 0}
