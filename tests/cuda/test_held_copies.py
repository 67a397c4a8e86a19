"""Copies that wait for an event on a CUDA device: the GPU keeps the order, and cancels held work.

When they are submitted, launches of the kernel are put on a stream behind the event. Copies that
need the driver wait on the host. The stand-in for the driver runs both.
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
from tests.cuda.held import LAUNCH, MODULE, SINGLE, begin, take_point
from tests.cuda_sim.simulator import CudaControls
from tests.datadist.layers import wait_until
from tests.device.compute import Compute, compute_on, handle_of
from tests.native.writers import Here

ISSUES = (LAUNCH, SINGLE, "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")
ORDERED = 4  # transfers per direction that wait on streams
MAX_LAUNCHES, MAX_DESCRIPTORS = 16, 8192  # on a stream at one time; per launch
A_WHILE = 20  # milliseconds, in which a transfer that waits for no event would end
MIB = 1 << 20


def assert_waits(task: Task, case: Case) -> bool:
    report = task.wait(A_WHILE, give_up=False)
    return report.status == KVN_PENDING and bool((case.target == UNTOUCHED).all())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [20, 300], ids=["few", "many"])
class TestOnTheStream:
    def test_held_launches_begin_without_the_host(
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
        task = begin(executor, case, take_point(device, compute), sim_log)
        assert assert_waits(task, case)
        issued = len(sim_log.calls(*ISSUES))
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()
        assert len(sim_log.calls(*ISSUES)) == issued == (1 if count == 20 else 2)

    def test_a_transfer_is_cancelled_before_its_event(
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
            task = begin(executor, case, take_point(device, compute), sim_log)
            report = task.wait(0) if len(cases) % 2 else task.cancel()
            assert report.status == (KVN_TIMEOUT if len(cases) % 2 else KVN_CANCELLED)
            assert report.bytes_done == 0
            assert report.message.endswith("; the event that it comes after has not come")
            cases.append(case)
        compute.release()
        compute.wait()
        compute.settle()  # the launches have begun, and ended
        assert all((case.target == UNTOUCHED).all() for case in cases)
        task = executor.submit(case.descriptors, after=take_point(device, compute))
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()


def test_nothing_is_loaded_behind_a_wait(
    device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
) -> None:
    """Loading a module may wait for all work of the context, and so for the event."""
    compute.hold()
    case = between(device, cuda_simulator, "device_to_device", [100] * 300)
    gate = take_point(device, compute)
    assert sim_log.counts(MODULE, "cuFuncLoad") == {MODULE: 1, "cuFuncLoad": 2}
    task = begin(Executor(device.backend("device_to_device")), case, gate, sim_log)
    assert sim_log.counts(MODULE, "cuFuncLoad") == {MODULE: 0, "cuFuncLoad": 0}
    compute.release()
    assert task.wait(FOREVER).status == KVN_OK
    case.assert_moved()


class TestHeldOnTheHost:
    def test_descriptors_for_the_kernel_are_issued_first(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """Memory is pinned, pageable and pinned.

        The pageable part does not begin before the event.
        """
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
        given_up = executor.submit(descriptors, after=take_point(device, compute))
        task = executor.submit(descriptors, after=take_point(device, compute))
        wait_until(lambda: len(sim_log.calls(LAUNCH)) == 2)
        assert given_up.cancel().status == KVN_CANCELLED
        assert all(assert_waits(task, part) for part in parts)
        assert sim_log.calls(SINGLE) == []
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        for part in parts:
            part.assert_moved()
        # There are more copies because kvplan checks per 2 MiB whether memory is pinned.
        assert len(sim_log.calls(SINGLE)) >= 3

    def test_more_launches_than_a_stream_holds_are_issued_in_turn(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """The rest begins when earlier launches have ended, or is cancelled with them."""
        count = MAX_LAUNCHES * MAX_DESCRIPTORS + 5
        case = between(device, cuda_simulator, "device_to_device", [1] * count)
        executor = Executor(device.backend("device_to_device"))
        compute.hold()
        task = begin(executor, case, take_point(device, compute), sim_log, MAX_LAUNCHES)
        assert assert_waits(task, case)
        assert len(sim_log.calls(LAUNCH)) == MAX_LAUNCHES
        assert task.cancel().status == KVN_CANCELLED
        task = begin(executor, case, take_point(device, compute), sim_log, MAX_LAUNCHES)
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()
        # Cancelled launches keep their columns until their event has come.
        assert len(sim_log.calls(LAUNCH)) > MAX_LAUNCHES

    @pytest.mark.parametrize("is_given_up", [True, False])
    def test_copies_wait_on_the_host_if_the_driver_refuses_the_kernel(
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
        task = executor.submit(case.descriptors, after=take_point(device, compute))
        assert assert_waits(task, case)
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
        task = begin(executor, case, take_point(device, compute), sim_log)
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()
        assert sim_log.calls(*ISSUES[1:]) == []

    def test_the_kernel_is_loaded_before_the_first_held_copy(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """Loading the kernel may wait for all work of the context."""
        case = between(device, cuda_simulator, "device_to_device", [100] * 20)
        event = handle_of(compute.event())
        sim_log.restart()
        point = device.take_event(event)
        executor = Executor(device.backend("device_to_device"))
        assert executor.submit(case.descriptors, after=point).wait(FOREVER).status == KVN_OK
        calls = [call.name for call in sim_log.calls(MODULE, "cuStreamWaitEvent")]
        assert calls[0] == MODULE
        assert calls.count(MODULE) == 1

    def test_no_memory_is_allocated_while_a_copy_is_held(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """Allocating may wait for all work of the context, and so for the event."""
        executor = Executor(device.backend("device_to_device"))
        compute.hold()
        cases = [
            between(device, cuda_simulator, "device_to_device", [100] * count)
            for count in (20, 300, 300, 3 * MAX_DESCRIPTORS)
        ]
        tasks = [begin(executor, cases[0], take_point(device, compute), sim_log)]
        sim_log.restart()
        for case, launches in zip(cases[1:], (1, 2, 5), strict=True):
            tasks.append(executor.submit(case.descriptors, after=take_point(device, compute)))
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
        """While 16 large launches wait, others have their descriptors in their parameters."""
        executor = Executor(device.backend("device_to_device"))
        compute.hold()
        large = between(device, cuda_simulator, "device_to_device", [8] * MAX_DESCRIPTORS * 16)
        tasks = [
            begin(executor, large, take_point(device, compute), sim_log, launches=MAX_LAUNCHES)
        ]
        small = between(device, cuda_simulator, "device_to_device", [8] * 300)
        tasks.append(begin(executor, small, take_point(device, compute), sim_log, launches=3))
        compute.release()
        for task, case in zip(tasks, (large, small), strict=True):
            assert task.wait(FOREVER).status == KVN_OK
            case.assert_moved()

    def test_the_end_of_a_transfer_frees_its_stream_for_the_next(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """The last layer of a model must be on a stream before its event comes."""
        executor = Executor(device.backend("device_to_device"))
        count = 3 * ORDERED
        cases, tasks = [], []
        sim_log.restart()
        for _ in range(count):
            cases.append(between(device, cuda_simulator, "device_to_device", [64] * 3))
            compute.hold()
            tasks.append(executor.submit(cases[-1].descriptors, after=take_point(device, compute)))
        for number, (task, case) in enumerate(zip(tasks, cases, strict=True)):
            on_streams = min(number + ORDERED, count)
            wait_until(lambda: len(sim_log.calls(LAUNCH)) >= on_streams)  # noqa: B023
            assert len(sim_log.calls(LAUNCH)) == on_streams
            assert assert_waits(task, case)
            compute.release()
            assert task.wait(FOREVER).status == KVN_OK
            case.assert_moved()

    def test_a_full_direction_does_not_delay_other_directions(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute, sim_log: Log
    ) -> None:
        """Transfers of another direction that wait at the gate get the next free stream."""
        other = compute_on(cuda_simulator)
        tasks = []

        def submit(stream: Compute, direction: str, count: int) -> None:
            stream.hold()
            point = take_point(device, stream)
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

    def test_many_held_transfers_are_independent(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute
    ) -> None:
        """Each of more transfers than streams waits for its own event; some are cancelled."""
        executor = Executor(device.backend("device_to_device"))
        cases, tasks = [], []
        for _ in range(100):
            cases.append(between(device, cuda_simulator, "device_to_device", [64] * 3))
            compute.hold()
            tasks.append(executor.submit(cases[-1].descriptors, after=take_point(device, compute)))
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
    """Once a transfer is known to have failed, no call waits for an event that may never come."""

    def test_a_refused_launch_fails_its_transfer(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute
    ) -> None:
        executor = Executor(device.backend("device_to_device"))
        case = between(device, cuda_simulator, "device_to_device", [1] * (MAX_DESCRIPTORS + 1))
        compute.hold()
        cuda_simulator.add_fault(f"{LAUNCH}:2=701")
        report = executor.submit(case.descriptors, after=take_point(device, compute)).wait(FOREVER)
        assert report.message.startswith(f"{LAUNCH}: 701 (")
        assert report.bytes_done == 0
        compute.release()
        compute.settle()
        assert (case.target == UNTOUCHED).all()

    def test_failed_calls_for_an_event_fail_the_transfer(
        self, device: Device, cuda_simulator: CudaControls, compute: Compute
    ) -> None:
        executor = Executor(device.backend("device_to_device"))
        case = between(device, cuda_simulator, "device_to_device", [100])
        compute.hold()
        for call in ("cuStreamWaitEvent", "cuEventQuery"):
            point = take_point(device, compute)
            cuda_simulator.add_fault(f"{call}:1=2")
            report = executor.submit(case.descriptors, after=point).wait(FOREVER)
            assert report.status not in (KVN_OK, KVN_PENDING)
            assert f"{call}: 2 (" in report.message
        compute.release()
        compute.settle()
        assert (case.target == UNTOUCHED).all()

    @pytest.mark.parametrize("is_announced", [False, True])
    def test_a_failed_layer_ends_waiting_ones(
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
            task.open(layer, take_point(device, compute))
        wait_until(lambda: len(sim_log.calls(LAUNCH)) == 2)
        task.open(3)
        report = task.wait(FOREVER, give_up=False)
        assert (report.status, report.failed) == (KVN_UNMAPPED, 3)
        compute.release()
        compute.settle()
        assert (case.target == UNTOUCHED).all()
