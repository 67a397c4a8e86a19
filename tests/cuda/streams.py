"""Transfers that hang on the simulated GPU, and streams that wait for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvnative._backend import KVN_OK, KVN_PENDING
from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._report import Report
from kvnative._task import Task
from tests.ascend.acl_cases import FOREVER, UNTOUCHED, Case, between
from tests.cuda_sim.simulator import CudaControls
from tests.device.compute import CudaCompute

KERNEL, BATCH, SINGLE = "cuLaunchKernel", "cuMemcpyBatchAsync_v2", "cuMemcpyAsync"
SIZES = [100, 4096, 1, 30_000]


@pytest.fixture
def compute(cuda_simulator: CudaControls, device: Device) -> Iterator[CudaCompute]:
    made = CudaCompute(cuda_simulator)
    yield made
    cuda_simulator.end_hangs()
    made.close()


def held(
    device: Device,
    simulator: CudaControls,
    direction: str = "device_to_device",
    *,
    pinned: bool = True,
    call: str = KERNEL,
    sizes: list[int] = SIZES,
) -> tuple[Task, Case]:
    """Return a transfer whose first call was made and hangs."""
    case = between(device, simulator, direction, sizes, pinned=pinned)
    simulator.add_fault(f"{call}:1=hang")
    task = Executor(device.backend(direction)).submit(case.descriptors)
    while simulator.faults_left():
        task.wait(1, give_up=False)
    return task, case


def assert_moves(device: Device, case: Case) -> None:
    """Check that a later transfer succeeds after an abandoned one."""
    case.target[:] = UNTOUCHED
    executor = Executor(device.backend("device_to_device"))
    assert executor.submit(case.descriptors).wait(FOREVER).status == KVN_OK
    case.assert_moved()


def block(task: Task, stream: int) -> None:
    assert task.block_stream(stream) is None


def refusal(task: Task, stream: int) -> Report:
    report = task.block_stream(stream)
    assert report is not None
    return report


def assert_stream_waits(compute: CudaCompute, task: Task) -> None:
    assert task.wait(20, give_up=False).status == KVN_PENDING
    assert not compute.is_done
