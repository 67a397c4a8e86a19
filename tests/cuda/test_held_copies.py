"""Copies behind an event on a CUDA device: the GPU keeps the order, and lets go of what it holds.

They are launches of the kernel, put on a stream behind the event when they are submitted; what only
the driver's own copies move waits on the host. Over the stand-in for the driver.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvnative._backend import KVN_CANCELLED, KVN_OK, KVN_PENDING, KVN_TIMEOUT, KVN_UNMAPPED
from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._task import Task
from tests.ascend.acl_cases import DIRECTIONS, FOREVER, UNTOUCHED, Case, between
from tests.ascend.simulator import Log
from tests.cuda.held import LAUNCH, MODULE, SINGLE, begin, taken
from tests.cuda_sim.simulator import CudaControls
from tests.datadist.layers import wait_until
from tests.device.compute import Compute, compute_on, handle_of
from tests.native.writers import Here

ISSUES = (LAUNCH, SINGLE, "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")
ORDERED = 4  # transfers of a direction that wait on streams
MAX_LAUNCHES, MAX_DESCRIPTORS = 16, 8192  # on a stream at one time; of a launch
A_WHILE = 20  # milliseconds in which a transfer would be through that comes after nothing
MIB = 1 << 20


def waits(task: Task, case: Case) -> bool:
    report = task.wait(A_WHILE, give_up=False)
    return report.status == KVN_PENDING and bool((case.target == UNTOUCHED).all())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [20, 300], ids=["few", "many"])
class TestOnTheStream:
    def test_the_host_has_no_part_in_the_beginning(
        self,
        device: Device,
        cuda_simulator: CudaControls,
        compute: Compute,
        sim_log: Log,
        direction: str,
        count: int,
    ) -> None:
        executor = Executor(device.backend(direction))
        case = between(device, cuda_simulator, direction, [100] * count)
        compute.hold()
        task = begin(executor, case, taken(device, compute), sim_log)
        assert waits(task, case)
        issued = len(sim_log.calls(*ISSUES))
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()
        assert len(sim_log.calls(*ISSUES)) == issued == (1 if count == 20 else 2)

    def test_given_up_before_its_event(
        self,
        device: Device,
        cuda_simulator: CudaControls,
        compute: Compute,
        sim_log: Log,
        direction: str,
        count: int,
    ) -> None:
        executor = Executor(device.backend(direction))
        compute.hold()
        cases = []
        for _ in range(ORDERED + 1):  # so each stream is replaced
            case = between(device, cuda_simulator, direction, [100] * count)
            task = begin(executor, case, taken(device, compute), sim_log)
            report = task.wait(0) if len(cases) % 2 else task.cancel()
            assert report.status == (KVN_TIMEOUT if len(cases) % 2 else KVN_CANCELLED)
            assert report.bytes_done == 0
            assert report.message.endswith("; the event that it comes after has not come")
            cases.append(case)
        compute.release()
        compute.wait()
        compute.settle()  # the launches have begun, and ended
        assert all((case.target == UNTOUCHED).all() for case in cases)
        task = executor.submit(case.descriptors, after=taken(device, compute))
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()


def test_nothing_is_loaded_behind_a_wait(
    device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
) -> None:
    """To load may wait for all work of the context, and so for the event."""
    compute.hold()
    case = between(device, cuda_simulator, "device_to_device", [100] * 300)
    gate = taken(device, compute)
    assert sim_log.counts(MODULE, "cuFuncLoad") == {MODULE: 1, "cuFuncLoad": 2}
    task = begin(Executor(device.backend("device_to_device")), case, gate, sim_log)
    assert sim_log.counts(MODULE, "cuFuncLoad") == {MODULE: 0, "cuFuncLoad": 0}
    compute.release()
    assert task.wait(FOREVER).status == KVN_OK
    case.assert_moved()


class TestWhatWaitsOnTheHost:
    def test_descriptors_that_the_kernel_reaches_go_first(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """Pinned, pageable and pinned memory: the pageable is not begun before the event."""
        parts = [
            between(device, cuda_simulator, "device_to_host", [100] * 3, pinned=flag, seed=number)
            for number, flag in enumerate([True, False, True])
        ]

        def column(side: int, offsets: str) -> Any:
            return np.concatenate(
                [getattr(part, offsets) + np.uint64(part.sides[side].address) for part in parts]
            )

        descriptors = Descriptors.from_columns(
            column(1, "dst_offsets"),
            column(0, "src_offsets"),
            np.concatenate([part.nbytes for part in parts]),
        )
        executor = Executor(device.backend("device_to_host"))
        compute.hold()
        sim_log.restart()
        given_up = executor.submit(descriptors, after=taken(device, compute))
        task = executor.submit(descriptors, after=taken(device, compute))
        wait_until(lambda: len(sim_log.calls(LAUNCH)) == 2)
        assert given_up.cancel().status == KVN_CANCELLED
        assert all(waits(task, part) for part in parts)
        assert sim_log.calls(SINGLE) == []
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        for part in parts:
            part.assert_moved()
        # More where it is asked whether memory is pinned for 2 MiB at a time.
        assert len(sim_log.calls(SINGLE)) >= 3

    def test_more_than_a_stream_takes(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """The rest comes when those before are through; or is given up with them."""
        count = MAX_LAUNCHES * MAX_DESCRIPTORS + 5
        case = between(device, cuda_simulator, "device_to_device", [1] * count)
        executor = Executor(device.backend("device_to_device"))
        compute.hold()
        task = begin(executor, case, taken(device, compute), sim_log, MAX_LAUNCHES)
        assert waits(task, case)
        assert len(sim_log.calls(LAUNCH)) == MAX_LAUNCHES
        assert task.cancel().status == KVN_CANCELLED
        task = begin(executor, case, taken(device, compute), sim_log, MAX_LAUNCHES)
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()
        # Those that were given up have the columns until their event has come.
        assert len(sim_log.calls(LAUNCH)) > MAX_LAUNCHES

    @pytest.mark.parametrize("is_given_up", [True, False])
    def test_a_driver_that_refuses_the_kernel(
        self,
        device: Device,
        cuda_simulator: CudaControls,
        compute: Compute,
        sim_log: Log,
        is_given_up: bool,
    ) -> None:
        cuda_simulator.add_fault(f"{MODULE}:1=218")
        executor = Executor(device.backend("device_to_device"))
        case = between(device, cuda_simulator, "device_to_device", [100] * 20)
        compute.hold()
        sim_log.restart()
        task = executor.submit(case.descriptors, after=taken(device, compute))
        assert waits(task, case)
        assert sim_log.calls(*ISSUES) == []
        if is_given_up:
            assert task.cancel().status == KVN_CANCELLED
        compute.release()
        if is_given_up:
            compute.settle()
            assert (case.target == UNTOUCHED).all()
        else:
            assert task.wait(FOREVER).status == KVN_OK
            case.assert_moved()
            assert device.fallback_reason.startswith("the driver does not take the copy kernel")


class TestTheWay:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_large_descriptors_use_the_kernel_too(
        self,
        device: Device,
        cuda_simulator: CudaControls,
        compute: Compute,
        sim_log: Log,
        direction: str,
    ) -> None:
        executor = Executor(device.backend(direction))
        case = between(device, cuda_simulator, direction, [9 * MIB])
        compute.hold()
        task = begin(executor, case, taken(device, compute), sim_log)
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()
        assert sim_log.calls(*ISSUES[1:]) == []

    def test_the_kernel_is_loaded_before_anything_of_ours_waits(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """As to load it may wait for all work of the context."""
        case = between(device, cuda_simulator, "device_to_device", [100] * 20)
        event = handle_of(compute.event())
        sim_log.restart()
        point = device.take_event(event)
        executor = Executor(device.backend("device_to_device"))
        assert executor.submit(case.descriptors, after=point).wait(FOREVER).status == KVN_OK
        calls = [call.name for call in sim_log.calls(MODULE, "cuStreamWaitEvent")]
        assert calls[0] == MODULE
        assert calls.count(MODULE) == 1

    def test_nothing_is_allocated_while_one_of_ours_waits(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """To allocate may wait for all work of the context, and so for the event."""
        executor = Executor(device.backend("device_to_device"))
        compute.hold()
        cases = [
            between(device, cuda_simulator, "device_to_device", [100] * count)
            for count in (20, 300, 300, 3 * MAX_DESCRIPTORS)
        ]
        tasks = [begin(executor, cases[0], taken(device, compute), sim_log)]
        sim_log.restart()
        for case, launches in zip(cases[1:], (1, 2, 5), strict=True):
            tasks.append(executor.submit(case.descriptors, after=taken(device, compute)))
            wait_until(lambda to=launches: len(sim_log.calls(LAUNCH)) >= to)
        allocated = sim_log.counts("cuMemAlloc_v2", "cuMemHostAlloc", "cuMemFree_v2", MODULE)
        assert not any(allocated.values())
        compute.release()
        for task, case in zip(tasks, cases, strict=True):
            assert task.wait(FOREVER).status == KVN_OK
            case.assert_moved()

    def test_without_columns_launches_are_small(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """16 launches of many descriptors wait; what else comes has its own in its parameters."""
        executor = Executor(device.backend("device_to_device"))
        compute.hold()
        large = between(device, cuda_simulator, "device_to_device", [8] * MAX_DESCRIPTORS * 16)
        tasks = [begin(executor, large, taken(device, compute), sim_log, launches=MAX_LAUNCHES)]
        small = between(device, cuda_simulator, "device_to_device", [8] * 300)
        tasks.append(begin(executor, small, taken(device, compute), sim_log, launches=3))
        compute.release()
        for task, case in zip(tasks, (large, small), strict=True):
            assert task.wait(FOREVER).status == KVN_OK
            case.assert_moved()

    def test_when_one_is_through_the_next_is_put_on_a_stream(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """So that the last layer of a model is on one before its event comes."""
        executor = Executor(device.backend("device_to_device"))
        count = 3 * ORDERED
        cases, tasks = [], []
        sim_log.restart()
        for _ in range(count):
            cases.append(between(device, cuda_simulator, "device_to_device", [64] * 3))
            compute.hold()
            tasks.append(executor.submit(cases[-1].descriptors, after=taken(device, compute)))
        for number, (task, case) in enumerate(zip(tasks, cases, strict=True)):
            on_streams = min(number + ORDERED, count)
            wait_until(lambda: len(sim_log.calls(LAUNCH)) >= on_streams)  # noqa: B023
            assert len(sim_log.calls(LAUNCH)) == on_streams
            assert waits(task, case)
            compute.release()
            assert task.wait(FOREVER).status == KVN_OK
            case.assert_moved()

    def test_a_full_direction_does_not_keep_the_others_from_streams(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """Those of another that wait behind it at the gate are put on a stream when one is free."""
        other = compute_on(cuda_simulator)
        tasks = []

        def submit(stream: Compute, direction: str, count: int) -> None:
            stream.hold()
            point = taken(device, stream)
            executor, case = ways[direction]
            tasks.extend(executor.submit(case.descriptors, after=point) for _ in range(count))

        ways = {
            name: (Executor(device.backend(name)), between(device, cuda_simulator, name, [64] * 3))
            for name in ("host_to_device", "device_to_device")
        }
        sim_log.restart()
        submit(compute, "host_to_device", ORDERED + 1)
        submit(other, "device_to_device", ORDERED)
        submit(other, "device_to_device", 1)
        wait_until(lambda: len(sim_log.calls(LAUNCH)) == 2 * ORDERED)
        assert tasks[-1].held
        other.release()
        wait_until(lambda: len(sim_log.calls(LAUNCH)) == 2 * ORDERED + 1)
        assert not tasks[-1].held
        other.close()
        compute.release()
        assert all(task.wait(FOREVER).status == KVN_OK for task in tasks)

    def test_many_at_once(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute
    ) -> None:
        """More than there are streams for: each comes after its own event, some are given up."""
        executor = Executor(device.backend("device_to_device"))
        cases, tasks = [], []
        for _ in range(100):
            cases.append(between(device, cuda_simulator, "device_to_device", [64] * 3))
            compute.hold()
            tasks.append(executor.submit(cases[-1].descriptors, after=taken(device, compute)))
        for task in tasks[1::3]:
            assert task.cancel().status == KVN_CANCELLED
        assert all(
            task.wait(0, give_up=False).status == KVN_PENDING
            for number, task in enumerate(tasks)
            if number % 3 != 1
        )
        for _ in cases:
            compute.release()
        for number, (task, case) in enumerate(zip(tasks, cases, strict=True)):
            if number % 3 != 1:
                assert task.wait(FOREVER).status == KVN_OK
                case.assert_moved()
        compute.settle()
        assert all((case.target == UNTOUCHED).all() for case in cases[1::3])


class TestFailures:
    """Nothing is waited for that may never come, once it is known that the transfer has failed."""

    def test_a_launch_that_is_refused(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute
    ) -> None:
        executor = Executor(device.backend("device_to_device"))
        case = between(device, cuda_simulator, "device_to_device", [1] * (MAX_DESCRIPTORS + 1))
        compute.hold()
        cuda_simulator.add_fault(f"{LAUNCH}:2=701")
        report = executor.submit(case.descriptors, after=taken(device, compute)).wait(FOREVER)
        assert report.message.startswith(f"{LAUNCH}: 701 (")
        assert report.bytes_done == 0
        compute.release()
        compute.settle()
        assert (case.target == UNTOUCHED).all()

    def test_an_event_that_cannot_be_ordered_or_queried(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute
    ) -> None:
        executor = Executor(device.backend("device_to_device"))
        case = between(device, cuda_simulator, "device_to_device", [100])
        compute.hold()
        for call in ("cuStreamWaitEvent", "cuEventQuery"):
            point = taken(device, compute)
            cuda_simulator.add_fault(f"{call}:1=2")
            report = executor.submit(case.descriptors, after=point).wait(FOREVER)
            assert report.status not in (KVN_OK, KVN_PENDING)
            assert f"{call}: 2 (" in report.message
        compute.release()
        compute.settle()
        assert (case.target == UNTOUCHED).all()

    @pytest.mark.parametrize("is_announced", [False, True])
    def test_a_layer_that_fails_ends_those_that_wait(
        self,
        device: Device,
        cuda_simulator: CudaControls,
        compute: Compute,
        sim_log: Log,
        is_announced: bool,
    ) -> None:
        case = between(device, cuda_simulator, "device_to_device", [64] * 4)
        targets = case.dst_offsets + np.uint64(case.sides[1].address)
        targets[3] += np.uint64(1 << 40)
        descriptors = Descriptors.from_columns(
            targets, case.src_offsets + np.uint64(case.sides[0].address), case.nbytes
        )
        backend, here = device.backend("device_to_device"), Here()
        if is_announced:
            backend = here.writer().around(backend, here.registered)
        compute.hold()
        sim_log.restart()
        task = Executor(backend).layered(descriptors, 1)
        for layer in (0, 2):
            task.open(layer, taken(device, compute))
        wait_until(lambda: len(sim_log.calls(LAUNCH)) == 2)
        task.open(3)
        report = task.wait(FOREVER, give_up=False)
        assert (report.status, report.failed) == (KVN_UNMAPPED, 3)
        compute.release()
        compute.settle()
        assert (case.target == UNTOUCHED).all()
