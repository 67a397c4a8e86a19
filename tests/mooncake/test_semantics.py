"""The same program on kvplan's engine and on Mooncake's: differences of outcomes have reasons.

`outcomes.json` has those of Mooncake 0.3.13 over TCP. `make bench-peers` installs it, and then the
last test runs the program on it again.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvplan.mooncake import engine
from tests.mooncake.semantics import ROWS, World

ROOT = Path(__file__).parents[2]
OUTCOMES: dict[str, Any] = json.loads((Path(__file__).parent / "outcomes.json").read_text())
PEERS = ROOT / "build/peers"

DIFFERENCES = {
    "an_engine_that_is_not_initialized": "below 0",
    "more_than_2048_descriptors": [0, 0],
}
"""Outcomes of kvplan that differ: docs/reference/mooncake-differences.md has the reasons."""


def test_every_row_has_an_outcome_of_mooncake() -> None:
    assert ROWS.keys() == OUTCOMES.keys()
    page = (ROOT / "docs/reference/mooncake-differences.md").read_text()
    for row in DIFFERENCES:
        assert f"`{row}`" in page


@pytest.mark.parametrize("row", ROWS)
def test_an_outcome_is_that_of_mooncake(row: str) -> None:
    world = World(engine)
    found = json.loads(json.dumps(ROWS[row](world), default=repr))
    world.here.close()
    world.there.close()
    assert found == DIFFERENCES.get(row, OUTCOMES[row])


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.exists(), reason="make bench-peers installs Mooncake")
@pytest.mark.parametrize("row", ROWS)
def test_the_recorded_outcome_is_that_of_an_installed_mooncake(row: str) -> None:
    libraries = {str(path.parent) for path in (PEERS / "system").rglob("lib*.so.*")}
    done = subprocess.run(
        [PEERS / "bin/python", Path(__file__).parent / "semantics.py", "mooncake.engine", row],
        env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert found == ([] if OUTCOMES[row] == "died" else [[row, OUTCOMES[row]]])
