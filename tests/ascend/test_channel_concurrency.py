"""Many threads use the channels of one device: submissions, cancellations and faults."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvnative._acl import AclLibrary
from kvnative._backend import KVN_CANCELLED, KVN_FAILED, KVN_OK, KVN_TIMEOUT
from kvnative._device import Device
from kvnative._executor import Executor
from tests.ascend.acl_cases import (
    BATCH_ASYNC,
    DIRECTIONS,
    FOREVER,
    HAS_BATCH,
    UNTOUCHED,
    VARIANT,
    between,
    mixed_sizes,
)
from tests.ascend.simulator import Controls, Log
from tests.native.scatter import indices

THREADS = 6


def run_in_threads(work: Callable[[int], None]) -> None:
    """Run `work` in several threads that begin together."""
    gate = threading.Barrier(THREADS)

    def begin(number: int) -> None:
        gate.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(begin, number) for number in range(THREADS)]:
            done.result()


def test_transfers_in_all_directions_at_once(device: Device, simulator: Controls) -> None:
    executors = {direction: Executor(device.backend(direction)) for direction in DIRECTIONS}

    def work(number: int) -> None:
        for turn in range(6):
            direction = DIRECTIONS[(number + turn) % 3]
            sizes = mixed_sizes(120, 500, seed=turn)
            case = between(device, simulator, direction, sizes, pinned=turn % 2 == 0)
            assert executors[direction].run(case.descriptors).status == KVN_OK
            case.assert_moved()

    run_in_threads(work)


def test_a_transfer_may_be_cancelled_at_any_moment(device: Device, simulator: Controls) -> None:
    """Descriptors that are not reported as unconfirmed have arrived, and none is written later."""
    direction = "device_to_device"
    executor = Executor(device.backend(direction))
    simulator.set("bandwidth", 50 << 20)

    def work(number: int) -> None:
        moments = random.Random(number)
        case = between(device, simulator, direction, mixed_sizes(100, 3000, seed=number))
        for _ in range(8):
            case.target[:] = UNTOUCHED
            task = executor.submit(case.descriptors)
            task.wait(moments.choice([0, 0.1, 1, 5]), give_up=False)
            report = task.cancel()
            assert report.status in (KVN_OK, KVN_CANCELLED)
            after = case.target.copy()
            unconfirmed = indices(report.unconfirmed)
            assert all(case.arrived(number) for number in set(range(100)) - unconfirmed)
            assert report.bytes_done == sum(
                int(case.nbytes[number]) for number in set(range(100)) - unconfirmed
            )
            assert (case.target == after).all()

    try:
        run_in_threads(work)
    finally:
        simulator.set("bandwidth", 0)


def test_two_threads_cancel_one_transfer(device: Device, simulator: Controls) -> None:
    executor = Executor(device.backend("device_to_device"))
    case = between(device, simulator, "device_to_device", [100] * 64)
    for _ in range(5):
        simulator.add_fault("aclrtMemcpyAsync:1=hang")
        task = executor.submit(case.descriptors)
        gate = threading.Barrier(3)

        def cancel(gate: threading.Barrier = gate) -> None:
            gate.wait()
            assert task.cancel().status == KVN_CANCELLED  # noqa: B023

        threads = [threading.Thread(target=cancel) for _ in range(2)]
        for thread in threads:
            thread.start()
        gate.wait()
        assert task.wait(FOREVER).status == KVN_CANCELLED
        for thread in threads:
            thread.join()
        simulator.clear_faults()


def test_faults_fail_only_their_transfers(device: Device, simulator: Controls) -> None:
    call = BATCH_ASYNC if HAS_BATCH else "aclrtMemcpyAsync"
    executor = Executor(device.backend("host_to_device"))
    kinds = ("507899", "sync:507899", "hang")
    simulator.add_fault(*(f"{call}:{5 + 7 * number}={kinds[number % 3]}" for number in range(9)))
    failed: list[int] = []

    def work(number: int) -> None:
        case = between(device, simulator, "host_to_device", [200] * 12, seed=number)
        for _ in range(12):
            case.target[:] = UNTOUCHED
            report = executor.run(case.descriptors, timeout_ms=100)
            unconfirmed = indices(report.unconfirmed)
            assert all(case.arrived(number) for number in set(range(12)) - unconfirmed)
            failed.append(report.status)

    run_in_threads(work)
    assert set(failed) <= {KVN_OK, KVN_FAILED, KVN_TIMEOUT}
    assert KVN_FAILED in failed
    case = between(device, simulator, "host_to_device", [200] * 12)
    simulator.clear_faults()
    assert executor.run(case.descriptors).status == KVN_OK


@pytest.mark.skipif(VARIANT != "batch-unsupported", reason="batch copies work, or are not there")
def test_falling_back_happens_once(device: Device, simulator: Controls, sim_log: Log) -> None:
    executor = Executor(device.backend("host_to_device"))
    sim_log.restart()

    def work(number: int) -> None:
        case = between(device, simulator, "host_to_device", [100] * 80, seed=number)
        for _ in range(3):
            assert executor.run(case.descriptors).status == KVN_OK
        case.assert_moved()
        assert device.fallback_reason.startswith("aclrtMemcpyBatchAsync: 207000")

    run_in_threads(work)
    assert 1 <= len(sim_log.calls("aclrtMemcpyBatchAsync")) <= 2  # once on each channel


def test_devices_and_backends_come_and_go(simulator: Controls) -> None:
    library = AclLibrary.load()

    def work(number: int) -> None:
        for turn in range(5):
            mine = library.device((number + turn) % 2)
            case = between(mine, simulator, "host_to_device", [100] * 5)
            assert Executor(mine.backend("host_to_device")).run(case.descriptors).status == KVN_OK

    run_in_threads(work)
    assert simulator.left() == {}
