from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.ascend.fixtures import device, sim_folder, sim_log, simulator
from tests.ascend.hccl_sides import make_side, one, two
from tests.ascend.simulator import Controls
from tests.datadist.conftest import engine, idle, make_engine, make_peer, pair, peer, user
from tests.datadist.machine import Machine, machine_of

__all__ = [
    "device",
    "engine",
    "idle",
    "make_engine",
    "make_peer",
    "make_side",
    "one",
    "pair",
    "peer",
    "sim_folder",
    "sim_log",
    "simulator",
    "two",
    "user",
]


@pytest.fixture
def machine(simulator: Controls) -> Iterator[Machine]:
    """The simulated device, for the fixtures of tests/datadist."""
    machine = machine_of("ascend", cluster_id=2)
    before = machine.left()  # what an earlier failed test has left
    yield machine
    gc.collect()
    assert {kind for kind, count in machine.left().items() if count > before.get(kind, 0)} == set()
