"""Tests of the current device of a program's threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvplan.device.choice import current_device, open_accelerator
from tests.ascend.simulator import Controls
from tests.device.compute import compute_on


@pytest.mark.parametrize("number", [0, 2])
def test_the_current_device_is_that_of_the_thread_for_the_requested_accelerator(
    simulator: Controls, number: int
) -> None:
    kind = simulator.accelerator
    choices = "auto", kind, "none", "cuda" if kind == "ascend" else "ascend"
    device = open_accelerator(kind, 3)
    assert device is not None
    compute = compute_on(simulator, number)
    try:
        assert [current_device(choice) for choice in choices] == [number, number, 0, 0]
        with ThreadPoolExecutor(1) as thread:
            assert [*thread.map(current_device, choices)] == [0] * 4
    finally:
        compute.close()
        device.close()


def test_another_accelerator_is_asked_only_if_the_first_has_no_devices(
    ascend: Controls, cuda: Controls
) -> None:
    """An engine would open the second accelerator only if the first one has no devices.

    The first may have devices although no thread has set one current.
    """
    compute = compute_on(cuda, 2)
    try:
        ascend.add_fault("aclrtGetDevice:1=107002")
        assert current_device("auto") == 0
        assert ascend.faults_left() == 0
        ascend.add_fault("aclrtGetDeviceCount:1=507000")
        assert current_device("auto") == 2
        assert ascend.faults_left() == 0
    finally:
        compute.close()
