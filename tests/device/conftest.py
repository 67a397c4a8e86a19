"""Tests here run on a device of each kind, which its simulator stands in for."""

from __future__ import annotations

import pytest

from tests.ascend.fixtures import sim_folder, sim_log
from tests.ascend.fixtures import simulator as ascend
from tests.ascend.simulator import Controls
from tests.cuda_sim.simulator import cuda_simulator as cuda

__all__ = ["ascend", "cuda", "sim_folder", "sim_log"]


@pytest.fixture(params=["ascend", "cuda"])
def simulator(request: pytest.FixtureRequest) -> Controls:
    """The simulated driver and runtime that this process, and those that it starts, find."""
    found: Controls = request.getfixturevalue(request.param)
    return found
