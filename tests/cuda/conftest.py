from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvnative._cuda import CudaLibrary
from kvnative._device import Device
from tests.ascend.fixtures import sim_folder, sim_log
from tests.cuda.side import Other, Side
from tests.cuda_sim.simulator import CudaControls, cuda_simulator
from tests.datadist.conftest import idle, make_engine, make_peer, pair, peer, user
from tests.datadist.machine import Machine, machine_of
from tests.device.compute import Compute, compute_on
from tests.support.left import check_nothing_left

__all__ = [
    "cuda_simulator",
    "idle",
    "make_engine",
    "make_peer",
    "pair",
    "peer",
    "sim_folder",
    "sim_log",
    "user",
]


COLUMNS_NBYTES = 8192 * 28  # bytes of a launch's descriptors


@pytest.fixture
def machine(cuda_simulator: CudaControls, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Controls of the simulated device of a machine kind, for fixtures of tests/datadist."""
    machine = machine_of(getattr(request, "param", "cuda"), cluster_id=2)
    before = machine.left()  # what an earlier failed test has left
    yield machine
    gc.collect()
    check_nothing_left(machine.left, before)


@pytest.fixture
def device(cuda_simulator: CudaControls) -> Iterator[Device]:
    """Device 3 of eight in its primary context. A test that leaks resources fails.

    Resources that the device keeps are freed with the device, which pytest still references.
    """
    device = CudaLibrary.load().device(3)
    yield device
    device.close()
    gc.collect()
    check_nothing_left(lambda: besides_launches(cuda_simulator.left()) | {"streams": 0}, {})


PAGES = 3  # of control words


def besides_launches(left: dict[str, int]) -> dict[str, int]:
    """Return the leaks other than a device's kernel and the memory that launches read."""
    columns = left.get("device_bytes", 0) // COLUMNS_NBYTES
    kept = {"modules": 1, "pinned": PAGES + columns, "device_bytes": columns * COLUMNS_NBYTES}
    return {kind: count for kind, count in left.items() if count > kept.get(kind, 0)}


@pytest.fixture
def side(cuda_simulator: CudaControls) -> Iterator[Side]:
    """This process on device 0. A test that leaks resources fails."""
    side = Side(0)
    yield side
    assert side.close() == {}


@pytest.fixture(scope="module")
def process_of_other() -> Iterator[list[Other]]:
    """A process that tests reuse; starting one takes longer than most tests."""
    kept: list[Other] = []
    yield kept
    for item in kept:
        item.close()


@pytest.fixture
def other(cuda_simulator: CudaControls, process_of_other: list[Other]) -> Iterator[Other]:
    """The owner of memory, on device 0, too. A test that leaks resources there fails."""
    if process_of_other and not process_of_other[0].dead:
        other = process_of_other[0]
        other.run("side = Side(0)")
    else:
        process_of_other[:] = [other := Other()]
    yield other
    if other.dead:
        other.close()
    else:
        assert other.call("close") == {}


@pytest.fixture
def compute(cuda_simulator: CudaControls, device: Device) -> Iterator[Compute]:
    made = compute_on(cuda_simulator)
    yield made
    made.close()
