"""An interrupt anywhere in a call leaves only listed objects, and the next call works."""

from __future__ import annotations

import json
import os

import pytest

from tests.support import zygote


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
    process = zygote.run("tests.engine.interrupted_calls", call, str(step), environment=os.environ)
    assert process.returncode == 0, process.stderr
    left = json.loads(process.stdout)
    assert left.pop("interrupts") >= fewest
    assert left == {"next_call": {}, "registrations": 0, "caches": 0, "leases": 0}
