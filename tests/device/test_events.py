"""Transfers that wait for work on a device: order, deadlines and independence."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import pytest

from kvnative._acl import AclLibrary
from kvnative._backend import (
    KVN_CANCELLED,
    KVN_FAILED,
    KVN_OK,
    KVN_PENDING,
    KVN_TIMEOUT,
    Backend,
    NativeError,
    ThreadPool,
    host_backend,
)
from kvnative._cuda import CudaLibrary
from kvnative._device import Device, DeviceError
from kvnative._executor import Executor
from kvnative._task import Gate, Task
from tests.ascend.acl_cases import FOREVER, UNTOUCHED, Case, between
from tests.ascend.simulator import Controls, Log
from tests.cuda.conftest import besides_launches
from tests.datadist.layers import wait_until
from tests.device.compute import Compute, compute_on, handle_of
from tests.native.scatter import scatter
from tests.support.wrappers import fail_at

WAYS = [
    ("device_to_device", True),
    ("device_to_host", True),
    ("device_to_host", False),
    ("host_to_device", True),
    ("host_to_device", False),
    ("host", True),
]
SIZES = [100, 4096, 1, 300_000]
CALLS = {
    "ascend": {
        "event": "aclrtCreateEventExWithFlag",
        "stream": "aclrtCreateStream",
        "wait": "aclrtStreamWaitEvent",
        "record": "aclrtRecordEvent",
        "query": "aclrtQueryEventStatus",
    },
    "cuda": {
        "event": "cuEventCreate",
        "stream": "cuStreamCreate",
        "wait": "cuStreamWaitEvent",
        "record": "cuEventRecord",
        "query": "cuEventQuery",
    },
}
A_WHILE = 20  # milliseconds, in which a transfer that waits for no event would end
KEPT = 64  # number of ready events that a device keeps, of each kind


@pytest.fixture
def device(simulator: Controls) -> Iterator[Device]:
    """Device 3 of eight; its users must leave nothing behind."""
    library = AclLibrary if simulator.accelerator == "ascend" else CudaLibrary
    device = library.load().device(3)
    yield device
    device.close()
    gc.collect()
    kept = {"streams"} if simulator.accelerator == "cuda" else set()
    assert {*besides_launches(simulator.left())} <= kept
    assert "events" not in simulator.left()


@pytest.fixture
def compute(simulator: Controls, device: Device) -> Iterator[Compute]:
    made = compute_on(simulator)
    yield made
    made.close()


only_ascend = pytest.mark.parametrize("simulator", ["ascend"], indirect=True)


def case_of(device: Device, simulator: Controls, way: str, pinned: bool) -> tuple[Backend, Case]:
    if way != "host":
        return device.backend(way), between(device, simulator, way, SIZES, pinned=pinned)
    plan = scatter(SIZES, 0, writes_source=True)
    return host_backend(ThreadPool(2)), Case(**vars(plan), sides=())


def take_point(device: Device, compute: Compute) -> Gate:
    return device.take_event(handle_of(compute.event()))


def assert_waits(task: Task, case: Case) -> None:
    assert task.wait(A_WHILE, give_up=False).status == KVN_PENDING
    assert (case.target == UNTOUCHED).all()


def assert_moves(executor: Executor, case: Case, after: Gate | None = None) -> None:
    case.target[:] = UNTOUCHED
    assert executor.submit(case.descriptors, after=after).wait(FOREVER).status == KVN_OK
    case.assert_moved()


@pytest.mark.parametrize(("way", "pinned"), WAYS)
class TestEachWay:
    def test_bytes_that_arrive_were_written_before_the_event(
        self, device: Device, simulator: Controls, compute: Compute, way: str, pinned: bool
    ) -> None:
        backend, case = case_of(device, simulator, way, pinned)
        compute.hold()
        if way.startswith("device"):
            compute.fill(case.sides[0].address, case.source.nbytes, 7)
        event = compute.event()
        executor = Executor(backend)
        task = executor.submit(case.descriptors, after=device.take_event(handle_of(event)))
        compute.destroy(handle_of(event))  # the executor has taken the event
        assert_waits(task, case)
        if way.startswith("host"):
            # Written by the program, which knows that the work has not got so far.
            case.source[:] = 7
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()
        assert (case.target[case.target != UNTOUCHED] == 7).all()

    def test_an_event_that_never_comes_ends_at_the_deadline(
        self, device: Device, simulator: Controls, compute: Compute, way: str, pinned: bool
    ) -> None:
        backend, case = case_of(device, simulator, way, pinned)
        executor = Executor(backend)
        compute.hold()
        task = executor.submit(case.descriptors, after=take_point(device, compute))
        report = task.wait(A_WHILE)
        assert (report.status, report.unconfirmed) == (KVN_TIMEOUT, ((0, len(SIZES)),))
        assert report.message.startswith("the deadline passed: 0 of ")
        compute.release()
        compute.wait()
        assert (case.target == UNTOUCHED).all()
        for after in (None, take_point(device, compute)):
            assert_moves(executor, case, after)

    def test_a_transfer_behind_an_event_that_never_comes_is_cancelled(
        self, device: Device, simulator: Controls, compute: Compute, way: str, pinned: bool
    ) -> None:
        backend, case = case_of(device, simulator, way, pinned)
        executor = Executor(backend)
        compute.hold()
        tasks = [executor.submit(case.descriptors, after=take_point(device, compute)) for _ in "ab"]
        assert [task.cancel().status for task in tasks[::-1]] == [KVN_CANCELLED] * 2
        compute.release()
        compute.wait()
        assert (case.target == UNTOUCHED).all()
        assert_moves(executor, case, take_point(device, compute))

    def test_transfers_without_an_event_do_not_wait_for_others(
        self, device: Device, simulator: Controls, compute: Compute, way: str, pinned: bool
    ) -> None:
        backend, case = case_of(device, simulator, way, pinned)
        executor = Executor(backend)
        compute.hold()
        held = executor.submit(case.descriptors, after=take_point(device, compute))
        _, other = case_of(device, simulator, way, pinned)
        for _ in range(5):  # more than the channels of one direction
            assert_moves(executor, other)
        assert_waits(held, case)
        executor.close(cancel=True)
        assert held.report.status == KVN_CANCELLED
        compute.release()  # before memory is freed: CUDA waits for all work of the context

    def test_transfers_with_another_event_do_not_wait_for_others(
        self, device: Device, simulator: Controls, compute: Compute, way: str, pinned: bool
    ) -> None:
        backend, held = case_of(device, simulator, way, pinned)
        _, moved = case_of(device, simulator, way, pinned)
        executor = Executor(backend)
        other = compute_on(simulator)
        compute.hold()
        point = take_point(device, compute)
        for _ in range(6):  # more than the streams that wait for events
            executor.submit(held.descriptors, after=point)
            assert_moves(executor, moved, take_point(device, other))
        executor.close(cancel=True)
        other.close()
        compute.release()  # before memory is freed: CUDA waits for all work of the context


ISSUES = {
    "ascend": ("aclrtMemcpyAsync", "aclrtMemcpyBatchAsync"),
    "cuda": ("cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"),
}


@pytest.mark.parametrize("way", ["device_to_device", "device_to_host", "host_to_device"])
def test_the_device_keeps_the_order(
    device: Device, simulator: Controls, compute: Compute, sim_log: Log, way: str
) -> None:
    """The copies are on a stream before the event, so the executor issues nothing after it."""
    backend, case = case_of(device, simulator, way, pinned=True)
    issues = ISSUES[simulator.accelerator]
    compute.hold()
    point = take_point(device, compute)
    sim_log.restart()
    task = Executor(backend).submit(case.descriptors, after=point)
    wait_until(lambda: bool(sim_log.calls(*issues)))
    assert_waits(task, case)
    before = sim_log.counts(*issues)
    compute.release()
    assert task.wait(FOREVER).status == KVN_OK
    case.assert_moved()
    assert sim_log.counts(*issues) == before


class TestPoints:
    def test_a_point_of_a_stream_covers_all_work_issued_before(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        backend, case = case_of(device, simulator, "device_to_device", pinned=True)
        compute.hold()
        compute.fill(case.sides[0].address, case.source.nbytes, 9)
        point = device.take_stream(compute.handle)
        compute.hold()
        task = Executor(backend).submit(case.descriptors, after=point)
        assert_waits(task, case)
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK  # although the stream is held again
        assert (case.target[case.target != UNTOUCHED] == 9).all()
        compute.release()

    def test_an_event_that_is_recorded_again_keeps_its_first_point(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        backend, case = case_of(device, simulator, "host", pinned=True)
        compute.hold()
        event = handle_of(compute.event())
        point = device.take_event(event)
        compute.hold()
        compute.record(event)
        task = Executor(backend).submit(case.descriptors, after=point)
        assert_waits(task, case)
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK

    def test_several_transfers_wait_for_one_event(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        ways = [case_of(device, simulator, *way) for way in WAYS]
        compute.hold()
        point = take_point(device, compute)
        tasks = [Executor(backend).submit(case.descriptors, after=point) for backend, case in ways]
        for task, (_, case) in zip(tasks, ways, strict=True):
            assert_waits(task, case)
        compute.release()
        assert {task.wait(FOREVER).status for task in tasks} == {KVN_OK}

    def test_a_point_of_finished_work_delays_nothing(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        point = take_point(device, compute)
        compute.wait()
        for way, pinned in WAYS:
            backend, case = case_of(device, simulator, way, pinned)
            assert_moves(Executor(backend), case, point)

    def test_independent_transfers_end_in_any_order(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        backend, case = case_of(device, simulator, "host", pinned=True)
        executor = Executor(backend)
        compute.hold()
        held = executor.submit(case.descriptors, after=take_point(device, compute))
        assert held.held
        other = compute_on(simulator)
        _, second = case_of(device, simulator, "host", pinned=True)
        assert_moves(executor, second, take_point(device, other))
        other.close()
        assert held.held
        compute.release()
        assert held.wait(FOREVER).status == KVN_OK
        assert not held.held

    def test_an_abandoned_point_does_not_delay_later_ones(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        """The event and stream of an abandoned point still wait on the device.

        So they must not be reused yet.
        """
        backend, case = case_of(device, simulator, "host", pinned=True)
        executor = Executor(backend)
        compute.hold()
        for way in (take_point, lambda *of: device.take_stream(of[1].handle)):
            given_up = way(device, compute)
            del given_up
            other = compute_on(simulator)
            assert_moves(executor, case, way(device, other))
            other.close()
        compute.release()

    def test_points_are_reused(
        self, device: Device, simulator: Controls, compute: Compute, sim_log: Log
    ) -> None:
        backend, case = case_of(device, simulator, "device_to_device", pinned=True)
        executor = Executor(backend)
        point = take_point(device, compute)
        assert_moves(executor, case, point)
        del point
        sim_log.restart()
        for _ in range(10):
            task = executor.submit(case.descriptors, after=device.take_stream(compute.handle))
            assert task.wait(FOREVER).status == KVN_OK
        assert not sim_log.calls("aclrtCreateStream", "cuStreamCreate")
        assert len(sim_log.calls("aclrtCreateEventExWithFlag", "cuEventCreate")) <= 2

    def test_only_a_bounded_number_of_abandoned_points_is_kept(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        """Each point is an event on the device, and a stream, which would stay until the end."""
        event = handle_of(compute.event())
        compute.hold()
        compute.record(event)
        before = simulator.left()
        points = [device.take_event(event) for _ in range(200)]
        points += [device.take_stream(compute.handle) for _ in range(200)]
        points.clear()
        compute.release()
        compute.wait()
        compute.settle()
        kept = simulator.left()
        assert kept["events"] - before["events"] <= 2 * KEPT
        assert kept["streams"] - before["streams"] <= KEPT

    def test_many_events_are_independent_of_each_other(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        """Each event is independent of the order of the others."""
        backend, _ = case_of(device, simulator, "host", pinned=True)
        executor = Executor(backend)
        cases = [case_of(device, simulator, "host", pinned=True)[1] for _ in range(40)]
        tasks = []
        for case in cases:
            compute.hold()
            tasks.append(executor.submit(case.descriptors, after=take_point(device, compute)))
        for task in tasks[1::2]:
            assert task.cancel().status == KVN_CANCELLED
        for _ in cases:
            compute.release()
        for number, (task, case) in enumerate(zip(tasks, cases, strict=True)):
            assert task.wait(FOREVER).status == (KVN_CANCELLED if number % 2 else KVN_OK)
            assert (case.target == UNTOUCHED).all() == bool(number % 2)


class TestLayers:
    def test_layers_behind_finished_work_reuse_one_event(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        backend, case = case_of(device, simulator, "host", pinned=True)
        task = Executor(backend).layered(case.descriptors, 1)
        assert task.open(0, take_point(device, compute))
        counts = set()
        for _ in range(10):
            assert not task.open(0, device.take_stream(compute.handle))
            compute.wait()
            counts.add(simulator.left()["events"])
        assert len(counts) == 1  # a single event is reused
        task.cancel()

    def test_a_failure_ends_layers_whose_event_is_pending(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        host, case = case_of(device, simulator, "host", pinned=True)
        compute.hold()
        for failing in (1, 3):
            task = Executor(fail_at(host, failing)).layered(case.descriptors, 1)
            for layer in (0, 2):
                task.open(layer, take_point(device, compute))
            task.open(failing)
            report = task.wait(FOREVER, give_up=False)
            assert (report.status, report.failed) == (KVN_FAILED, failing)
            assert report.unconfirmed == ((0, len(SIZES)),)
        compute.release()
        compute.wait()
        assert (case.target == UNTOUCHED).all()


class TestFailures:
    @only_ascend  # CUDA may crash
    def test_a_destroyed_event_is_refused(self, device: Device, compute: Compute) -> None:
        event = handle_of(compute.event())
        compute.destroy(event)
        with pytest.raises(DeviceError, match="aclrtStreamWaitEvent: 107017"):
            device.take_event(event)

    def test_impossible_handles_are_refused(self, device: Device) -> None:
        for handle in (0, -1, 1 << 64):
            with pytest.raises((ValueError, OverflowError), match="handle"):
                device.take_event(handle)

    @only_ascend  # CUDA may crash
    def test_a_stream_of_another_device_is_refused(
        self, simulator: Controls, device: Device
    ) -> None:
        other = compute_on(simulator, device.id + 1)
        with pytest.raises(DeviceError, match="aclrtRecordEvent: 107003"):
            device.take_stream(other.npu_stream)
        other.close()

    @pytest.mark.parametrize("step", ["event", "stream", "wait", "record"])
    def test_a_failed_call_for_a_point_is_reported_and_repeatable(
        self, device: Device, simulator: Controls, compute: Compute, step: str
    ) -> None:
        failing = CALLS[simulator.accelerator][step]
        event = handle_of(compute.event())
        simulator.add_fault(f"{failing}:1=2")
        with pytest.raises(DeviceError, match=rf"{failing}: 2\b"):
            device.take_event(event)
        device.take_event(event)

    def test_a_failed_query_of_an_event_ends_the_transfer(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        backend, case = case_of(device, simulator, "host", pinned=True)
        point = take_point(device, compute)
        call = CALLS[simulator.accelerator]["query"]
        simulator.add_fault(f"{call}:1=2")
        report = Executor(backend).submit(case.descriptors, after=point).wait(FOREVER)
        assert report.status not in (KVN_OK, KVN_PENDING)
        assert report.message.startswith(f"the event that it comes after: {call}: 2")
        assert (case.target == UNTOUCHED).all()

    @only_ascend  # CUDA waits for the event instead
    def test_a_failed_wait_for_an_event_ends_the_transfer(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        backend, case = case_of(device, simulator, "device_to_device", pinned=True)
        executor = Executor(backend)
        point = take_point(device, compute)
        simulator.add_fault("aclrtStreamWaitEvent:1=507899")
        report = executor.submit(case.descriptors, after=point).wait(FOREVER)
        assert "aclrtStreamWaitEvent: 507899" in report.message
        assert (case.target == UNTOUCHED).all()
        assert_moves(executor, case, point)

    def test_tasks_and_devices_are_refused_in_a_forked_child(
        self, device: Device, simulator: Controls, compute: Compute
    ) -> None:
        backend, case = case_of(device, simulator, "host", pinned=True)
        executor = Executor(backend)
        compute.hold()
        task = executor.submit(case.descriptors, after=take_point(device, compute))
        child = os.fork()
        if child == 0:
            try:
                refused = 0
                for call in (task.cancel, lambda: task.held, lambda: device.take_stream(0)):
                    try:
                        call()
                    except NativeError:
                        refused += 1
                os._exit(0 if refused == 3 else 1)
            finally:
                os._exit(2)
        deadline = time.monotonic() + FOREVER / 1000
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert ended[1] == 0
        compute.release()
        assert task.wait(FOREVER).status == KVN_OK
        case.assert_moved()
