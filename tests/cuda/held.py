"""Copies that wait on a stream, behind an event that has not come."""

from __future__ import annotations

from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._task import Gate, Task
from tests.ascend.acl_cases import Case
from tests.ascend.simulator import Log
from tests.datadist.layers import wait_until
from tests.device.compute import Compute, handle_of

LAUNCH, SINGLE, MODULE = "cuLaunchKernel", "cuMemcpyAsync", "cuModuleLoadDataEx"


def take_point(device: Device, compute: Compute) -> Gate:
    return device.take_event(handle_of(compute.event()))


def begin(executor: Executor, case: Case, after: Gate, log: Log, launches: int = 1) -> Task:
    """Submit a case; return when its launches are on a stream and wait there."""
    log.restart()
    task = executor.submit(case.descriptors, after=after)
    wait_until(lambda: len(log.calls(LAUNCH)) >= launches)
    return task
