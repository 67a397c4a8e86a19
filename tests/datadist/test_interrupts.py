"""A KeyboardInterrupt between any two steps of a call leaves nothing of the call behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datadist.machine import Machine

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "interrupts"),
    [
        ("index", 1500),
        ("gather", 500),
        pytest.param("layers", 1500, marks=pytest.mark.slow),
    ],
)
def test_a_storm_of_interrupts_leaves_nothing_in_flight(
    machine: Machine, kind: str, interrupts: int
) -> None:
    arguments = (machine.name, kind, str(interrupts))
    command = (sys.executable, "-m", "tests.datadist.interrupted_process", *arguments)
    process = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert json.loads(process.stdout) == {
        "in_flight": [0, 0],
        "caches": 0,
        "unlinked": "LLM_SUCCESS",
        "finalized_at_once": True,
    }
