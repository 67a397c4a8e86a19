"""Tests of the current device of a program's threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvnative._acl import AclLibrary
from kvnative._cuda import CudaLibrary
from kvnative._device import Device, DeviceError, DeviceLibrary
from kvplan.device.choice import current_device, open_accelerator
from tests.ascend.simulator import Controls
from tests.device.compute import compute_on


@pytest.fixture
def library(simulator: Controls) -> DeviceLibrary:
    return (AclLibrary if simulator.accelerator == "ascend" else CudaLibrary).load()


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


def test_devices_that_cannot_be_counted_are_an_error(
    simulator: Controls, library: DeviceLibrary
) -> None:
    calls = {"ascend": ("aclrtGetDeviceCount", 507899), "cuda": ("cuDeviceGetCount", 999)}
    call, code = calls[simulator.accelerator]
    simulator.add_fault(f"{call}:1={code}")
    with pytest.raises(DeviceError, match=f"^{call}: {code} "):
        library.device_count()
    assert library.device_count() == 8


def test_threads_that_open_a_device_at_once_share_it(library: DeviceLibrary) -> None:
    start = threading.Barrier(4)

    def open_device(_: int) -> Device:
        start.wait()
        return library.device(6)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            devices = [*threads.map(open_device, range(4))]
            assert len({id(device) for device in devices}) == 1
            devices[0].close()
