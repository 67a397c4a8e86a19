"""Deadlines and cancellation of streams that hang: calls return soon, and channels still work."""

from __future__ import annotations

import time

import pytest

from kvnative._backend import KVN_CANCELLED, KVN_FAILED, KVN_NO_DEVICE_MEMORY, KVN_OK, KVN_TIMEOUT
from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._task import Task
from tests.ascend.acl_cases import (
    BATCH_ASYNC,
    DIRECTIONS,
    FOREVER,
    HAS_BATCH,
    UNTOUCHED,
    Case,
    between,
)
from tests.ascend.simulator import Controls, Log
from tests.native.scatter import indices

SOON = 30.0  # seconds: an abort takes about 10 ms, and without it nothing ends
ABORT, CREATE, DESTROY = "aclrtStreamAbort", "aclrtCreateStream", "aclrtDestroyStreamForce"


def call_of(direction: str) -> str:
    """Return the call that copies in a direction, after the fallback if there is one."""
    batch = HAS_BATCH and direction != "device_to_device"
    return BATCH_ASYNC if batch else "aclrtMemcpyAsync"


def warm_executor(
    device: Device, simulator: Controls, direction: str = "host_to_device"
) -> Executor:
    """Return an executor whose device has fallen back where necessary."""
    executor = Executor(device.backend(direction))
    assert executor.run(between(device, simulator, direction, [8]).descriptors).status == KVN_OK
    return executor


def submit_until_faults(simulator: Controls, executor: Executor, *cases: Case) -> list[Task]:
    """Submit transfers; return when the injected faults have happened."""
    tasks = [executor.submit(case.descriptors) for case in cases]
    while simulator.faults_left():
        tasks[0].wait(1, give_up=False)
    return tasks


def assert_still_works(executor: Executor, case: Case) -> None:
    case.target[:] = UNTOUCHED
    for _ in range(3):  # so each channel is used
        report = executor.run(case.descriptors)
        assert (report.status, report.message) == (KVN_OK, "")
    case.assert_moved()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_deadline_ends_a_stream_that_hangs(
    device: Device, simulator: Controls, sim_log: Log, direction: str
) -> None:
    executor = warm_executor(device, simulator, direction)
    case = between(device, simulator, direction, [100] * 10)
    simulator.add_fault(f"{call_of(direction)}:1=hang")
    sim_log.restart()
    (task,) = submit_until_faults(simulator, executor, case)
    began = time.monotonic()
    report = task.wait(30)
    assert 0.03 <= time.monotonic() - began < SOON
    assert (report.status, report.failed, report.unconfirmed) == (KVN_TIMEOUT, None, ((0, 10),))
    assert report.message == (
        "the deadline passed: 0 of 1000 bytes were moved, 10 of 10 descriptors are not confirmed"
    )
    counts = sim_log.counts(ABORT, DESTROY)
    assert counts[ABORT] in (1, 2)  # the canceller helps if the channel's thread is late
    assert counts[DESTROY] == 1
    assert_still_works(executor, case)


def test_completed_parts_of_a_transfer_stay_confirmed(device: Device, simulator: Controls) -> None:
    executor = warm_executor(device, simulator, "device_to_device")
    case = between(device, simulator, "device_to_device", [100] * 400)
    simulator.add_fault("aclrtMemcpyAsync:1=hang")
    task = executor.submit(case.descriptors)
    while task.report.bytes_done < 300 * 100:  # three of four streams make progress
        task.wait(1, give_up=False)
    report = task.cancel()
    assert report.status == KVN_CANCELLED
    assert [last - first for first, last in report.unconfirmed] == [100]
    assert all(case.arrived(number) for number in set(range(400)) - indices(report.unconfirmed))


def test_a_waiting_batch_is_cancelled_at_once(device: Device, simulator: Controls) -> None:
    executor = warm_executor(device, simulator)
    call = call_of("host_to_device")
    cases = [
        between(device, simulator, "host_to_device", [400], seed=number) for number in range(4)
    ]
    simulator.add_fault(f"{call}:1=hang; {call}:2=hang")
    hanging = submit_until_faults(simulator, executor, *cases[:2])  # one on each channel
    behind = [executor.submit(case.descriptors) for case in cases[2:]]
    report = behind[0].cancel()
    assert (report.status, report.unconfirmed) == (KVN_CANCELLED, ((0, 1),))
    assert (cases[2].target == UNTOUCHED).all()
    for task in hanging:
        assert task.cancel().status == KVN_CANCELLED
    assert behind[1].wait(FOREVER).status == KVN_OK
    cases[3].assert_moved()


def test_a_slow_transfer_is_stopped_in_the_middle(device: Device, simulator: Controls) -> None:
    executor = warm_executor(device, simulator)
    case = between(device, simulator, "host_to_device", [1 << 16] * 32)
    simulator.set("bandwidth", 1 << 15)  # otherwise it would take a minute
    try:
        began = time.monotonic()
        report = executor.run(case.descriptors, timeout_ms=20)
        assert time.monotonic() - began < SOON
    finally:
        simulator.set("bandwidth", 0)
    assert report.status == KVN_TIMEOUT
    assert_still_works(executor, case)


@pytest.mark.skipif(HAS_BATCH, reason="pageable memory is then copied without a stream")
def test_a_call_that_does_not_return_is_interrupted(device: Device, simulator: Controls) -> None:
    """A copy of pageable memory waits for the stream inside the call."""
    executor = warm_executor(device, simulator)
    case = between(device, simulator, "host_to_device", [100] * 10, pinned=False)
    simulator.add_fault("aclrtMemcpyAsync:4=hang")
    (task,) = submit_until_faults(simulator, executor, case)
    began = time.monotonic()
    report = task.wait(20)
    assert time.monotonic() - began < SOON
    assert (report.status, report.unconfirmed) == (KVN_TIMEOUT, ((0, 10),))
    assert report.message.endswith("10 of 10 descriptors are not confirmed")
    assert_still_works(executor, case)


def test_transfers_fail_until_a_new_stream_is_available(
    device: Device, simulator: Controls
) -> None:
    executor = warm_executor(device, simulator, "device_to_device")
    case = between(device, simulator, "device_to_device", [100] * 10)
    simulator.add_fault("aclrtMemcpyAsync:1=hang")
    (task,) = submit_until_faults(simulator, executor, case)
    simulator.add_fault(f"{CREATE}:1=207008")
    assert task.wait(5).status == KVN_TIMEOUT
    while simulator.faults_left():  # until the channel without a stream is used
        report = executor.run(case.descriptors)
    assert (report.status, report.code) == (KVN_NO_DEVICE_MEMORY, 207008)
    assert report.message.startswith(
        "no stream on device 3: aclrtCreateStream: 207008 (out of streams)"
    )
    assert report.unconfirmed == ((0, 10),)
    assert_still_works(executor, case)


@pytest.mark.parametrize("refused", [ABORT, DESTROY])
def test_one_of_abort_and_destroy_ends_a_stream(
    device: Device, simulator: Controls, refused: str
) -> None:
    executor = warm_executor(device, simulator)
    case = between(device, simulator, "host_to_device", [100] * 10)
    simulator.add_fault(f"{call_of('host_to_device')}:1=hang")
    (task,) = submit_until_faults(simulator, executor, case)
    simulator.add_fault(f"{refused}:1=207000")
    began = time.monotonic()
    assert task.wait(5).status == KVN_TIMEOUT
    assert time.monotonic() - began < SOON
    assert_still_works(executor, case)


def test_a_failure_is_reported_before_the_deadline_that_ends_the_rest(
    device: Device, simulator: Controls
) -> None:
    """A part fails at once and another hangs; the reported reason is the failure."""
    executor = warm_executor(device, simulator, "device_to_device")
    case = between(device, simulator, "device_to_device", [100] * 400)
    for timeout_ms in (5, 500, 20_000):  # on a busy machine the failure may not be known yet
        simulator.add_fault("aclrtMemcpyAsync:1=hang; aclrtMemcpyAsync:300=507899")
        (task,) = submit_until_faults(simulator, executor, case)
        report = task.wait(timeout_ms)
        if report.status != KVN_TIMEOUT:
            break
    assert (report.status, report.code) == (KVN_FAILED, 507899)
    assert report.failed in indices(report.unconfirmed)
    assert_still_works(executor, case)


def test_closing_an_executor_cancels_hanging_copies(device: Device, simulator: Controls) -> None:
    executor = warm_executor(device, simulator)
    case = between(device, simulator, "host_to_device", [100] * 10)
    simulator.add_fault(f"{call_of('host_to_device')}:1=hang")
    (task,) = submit_until_faults(simulator, executor, case)
    executor.close(cancel=True)
    assert task.report.status == KVN_CANCELLED


@pytest.mark.parametrize("fault", ["hang", "sync:507899"])
def test_a_failed_wait_inside_a_part_confirms_nothing(
    device: Device, simulator: Controls, fault: str
) -> None:
    """If a stream cannot hold all copies, the first are awaited before the others are issued."""
    executor = warm_executor(device, simulator, "device_to_device")
    case = between(device, simulator, "device_to_device", [10] * 6000)
    simulator.add_fault(f"aclrtMemcpyAsync:20={fault}")
    (task,) = submit_until_faults(simulator, executor, case)
    report = task.wait(20 if fault == "hang" else FOREVER)
    assert report.status == (KVN_TIMEOUT if fault == "hang" else KVN_FAILED)
    confirmed = set(range(6000)) - indices(report.unconfirmed)
    assert [item for item in confirmed if not case.arrived(item)] == []
    assert_still_works(executor, case)
