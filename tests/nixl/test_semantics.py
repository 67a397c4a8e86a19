"""The same program on kvplan's `nixl` and on NIXL: differences of outcomes have reasons.

`outcomes.json` has those of NIXL 1.5.1. `make bench-peers` installs it, and then the last test runs
the program on it again.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvplan.nixl import _api, _bindings
from tests.nixl.semantics import ROWS
from tests.nixl.world import World

ROOT = Path(__file__).parents[2]
OUTCOMES: dict[str, Any] = json.loads((Path(__file__).parent / "outcomes.json").read_text())
NIXL = ROOT / "build/peers/bin/python"

DIFFERENCES = {
    "ranges_that_overlap": "nixlInvalidParamError",
}
"""Outcomes of kvplan that differ: docs/reference/nixl-differences.md has the reasons."""


def outcome(row: str) -> Any:
    worlds = World(_api, _bindings)
    try:
        found = ROWS[row](worlds)
    except tuple(getattr(_bindings, name) for name in dir(_bindings) if "Error" in name) as error:
        return type(error).__name__
    return json.loads(json.dumps(found, default=repr))


def test_every_row_has_an_outcome_of_nixl() -> None:
    assert ROWS.keys() == OUTCOMES.keys()
    assert DIFFERENCES.keys() <= OUTCOMES.keys()


@pytest.mark.parametrize("row", ROWS)
def test_an_outcome_is_that_of_nixl(row: str) -> None:
    assert outcome(row) == DIFFERENCES.get(row, OUTCOMES[row])


def test_a_difference_is_explained() -> None:
    page = (ROOT / "docs/reference/nixl-differences.md").read_text()
    for row in DIFFERENCES:
        assert f"`{row}`" in page


@pytest.mark.slow
@pytest.mark.skipif(not NIXL.exists(), reason="make bench-peers installs NIXL")
@pytest.mark.parametrize("row", ROWS)
def test_the_recorded_outcome_is_that_of_an_installed_nixl(row: str) -> None:
    command = [NIXL, "-m", "tests.nixl.semantics", "nixl_cu12", row]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert found == [[row, OUTCOMES[row]]]
