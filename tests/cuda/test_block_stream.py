"""Streams of a model that wait for transfers on the GPU, without a waiting host thread.

Faults make copies hang until `end_hangs`, so the tests can observe that a stream waits.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from typing import Any

import numpy as np
import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_FAILED,
    KVN_INVALID,
    KVN_NO_DEVICE_MEMORY,
    KVN_OK,
    KVN_PENDING,
    KVN_TIMEOUT,
    KVN_UNSUPPORTED,
    NativeError,
)
from kvnative._cuda import CudaError, CudaLibrary
from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._task import Task
from tests.ascend.acl_cases import FOREVER, UNTOUCHED, between
from tests.ascend.simulator import Log
from tests.cuda.streams import (
    BATCH,
    KERNEL,
    SINGLE,
    SIZES,
    assert_moves,
    assert_stream_waits,
    block,
    compute,
    held,
    refusal,
)
from tests.cuda_sim.cuda_library import Cuda, in_thread
from tests.cuda_sim.simulator import CudaControls
from tests.device.compute import CudaCompute, handle_of

__all__ = ["compute"]

WAYS = [
    ("device_to_device", True, KERNEL, SIZES),
    ("device_to_device", True, SINGLE, [9 << 20]),
    ("host_to_device", True, KERNEL, SIZES),
    ("host_to_device", True, BATCH, [200_000, 300_000]),
    ("host_to_device", False, SINGLE, [4096]),  # the driver waits with a second one
    ("device_to_host", True, KERNEL, SIZES),
]


@pytest.mark.parametrize(("direction", "pinned", "call", "sizes"), WAYS)
def test_bytes_that_the_stream_reads_next_have_arrived(
    device: Device,
    cuda_simulator: CudaControls,
    compute: CudaCompute,
    direction: str,
    pinned: bool,
    call: str,
    sizes: list[int],
) -> None:
    task, case = held(device, cuda_simulator, direction, pinned=pinned, call=call, sizes=sizes)
    block(task, compute.handle)
    target = case.sides[1].address
    seen = compute.read(target, case.target.nbytes)
    assert_stream_waits(compute, task)
    cuda_simulator.end_hangs()
    expected = case.expected(set(range(len(sizes))))
    assert compute.seen(seen, case.target.nbytes) == expected.tobytes()
    assert task.wait(FOREVER).status == KVN_OK


def test_memory_that_the_stream_writes_next_was_read_before(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    task, case = held(device, cuda_simulator)
    given = case.source.copy()
    block(task, compute.handle)
    compute.fill(case.sides[0].address, case.source.nbytes, 0)
    cuda_simulator.end_hangs()
    compute.wait()
    assert not case.source.any()
    case.source[:] = given
    case.assert_moved()
    assert task.wait(FOREVER).status == KVN_OK


def test_pageable_memory_is_copied_before_it_returns(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    case = between(device, cuda_simulator, "device_to_host", SIZES, pinned=False)
    task = Executor(device.backend("device_to_host")).submit(case.descriptors)
    block(task, compute.handle)
    compute.wait()
    case.assert_moved()
    assert task.wait(FOREVER).status == KVN_OK


def test_blocking_a_stream_waits_until_the_batch_is_issued(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    first = [held(device, cuda_simulator, "host_to_device") for _ in range(2)]  # on each channel
    case = between(device, cuda_simulator, "host_to_device", SIZES)
    task = Executor(device.backend("host_to_device")).submit(case.descriptors)
    waiting = threading.Thread(target=block, args=(task, compute.handle))
    waiting.start()
    assert task.wait(20, give_up=False).status == KVN_PENDING
    assert waiting.is_alive()
    cuda_simulator.end_hangs()
    waiting.join()
    seen = compute.read(case.sides[1].address, case.target.nbytes)
    expected = case.expected(set(range(len(SIZES))))
    assert compute.seen(seen, case.target.nbytes) == expected.tobytes()
    for item in (task, *(item for item, _ in first)):
        assert item.wait(FOREVER).status == KVN_OK


def test_a_cancelled_batch_that_waits_for_its_turn_releases_the_stream(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    first = [held(device, cuda_simulator, "host_to_device") for _ in range(2)]
    case = between(device, cuda_simulator, "host_to_device", SIZES)
    task = Executor(device.backend("host_to_device")).submit(case.descriptors)
    waiting = threading.Thread(target=block, args=(task, compute.handle))
    waiting.start()
    assert task.cancel().status == KVN_CANCELLED
    waiting.join()
    compute.wait()
    assert (case.target == UNTOUCHED).all()
    cuda_simulator.end_hangs()
    assert {item.wait(FOREVER).status for item, _ in first} == {KVN_OK}


@pytest.mark.parametrize("ends", ["cancelled", "timed out"])
def test_a_cancelled_batch_releases_the_stream(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute, ends: str
) -> None:
    task, case = held(device, cuda_simulator)
    block(task, compute.handle)
    report = task.cancel() if ends == "cancelled" else task.wait(1)
    assert report.status == (KVN_CANCELLED if ends == "cancelled" else KVN_TIMEOUT)
    block(task, compute.handle)  # no work is left to wait for
    cuda_simulator.end_hangs()  # the launch begins, and touches no memory
    compute.wait()
    assert (case.target == UNTOUCHED).all()
    assert_moves(device, case)


def test_a_failed_batch_does_not_hold_the_stream(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    case = between(device, cuda_simulator, "device_to_device", SIZES)
    cuda_simulator.add_fault(f"{KERNEL}:1=400")
    task = Executor(device.backend("device_to_device")).submit(case.descriptors)
    block(task, compute.handle)
    compute.wait()
    assert task.wait(FOREVER).status == KVN_INVALID
    block(task, compute.handle)


def test_the_end_of_the_executor_releases_the_stream(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    case = between(device, cuda_simulator, "device_to_device", SIZES)
    executor = Executor(device.backend("device_to_device"))
    cuda_simulator.add_fault(f"{KERNEL}:1=hang")
    task = executor.submit(case.descriptors)
    block(task, compute.handle)
    executor.close(cancel=True)
    cuda_simulator.end_hangs()
    compute.wait()
    assert (case.target == UNTOUCHED).all()
    assert_moves(device, case)


def test_several_streams_wait_for_several_transfers(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    other = CudaCompute(cuda_simulator)
    tasks = [held(device, cuda_simulator) for _ in range(3)]
    for task, _ in tasks:
        for stream in (compute, other, compute):
            block(task, stream.handle)
    assert not compute.is_done
    assert not other.is_done
    cuda_simulator.end_hangs()
    compute.wait()
    other.wait()
    for task, case in tasks:
        case.assert_moved()
        assert task.wait(FOREVER).status == KVN_OK
    other.close()


def test_the_default_stream_waits_for_a_transfer(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    task, case = held(device, cuda_simulator)
    block(task, 0)
    program = Cuda()
    seen = program.made("cuMemAlloc_v2", 100)
    program.ok("cuMemcpyAsync", seen, case.sides[1].address, 100, None)
    assert program.cuStreamQuery(None) != 0
    cuda_simulator.end_hangs()
    program.ok("cuStreamSynchronize", None)
    assert bytes(program.view(seen, 100)) == case.expected({0, 1, 2, 3})[:100].tobytes()
    program.ok("cuMemFree_v2", seen)
    assert task.wait(FOREVER).status == KVN_OK


def test_threads_keep_their_current_context(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    def current() -> int | None:
        out = ctypes.c_void_p()
        program.ok("cuCtxGetCurrent", ctypes.byref(out))
        return out.value

    def ask() -> list[int | None]:
        before = current()
        block(task, compute.handle)
        return [before, current()]

    program = Cuda()
    task, _ = held(device, cuda_simulator)
    assert in_thread(ask) == [None, None]
    cuda_simulator.end_hangs()
    compute.wait()
    assert task.wait(FOREVER).status == KVN_OK


@pytest.mark.parametrize(
    ("call", "code", "status"),
    [
        ("cuEventCreate", 2, KVN_NO_DEVICE_MEMORY),
        ("cuEventRecord", 400, KVN_INVALID),
        ("cuStreamWaitEvent", 999, KVN_FAILED),
        ("cuStreamIsCapturing", 1, KVN_INVALID),
        ("cuStreamGetCtx", 400, KVN_INVALID),
    ],
)
def test_failed_calls_are_reported(
    device: Device,
    cuda_simulator: CudaControls,
    compute: CudaCompute,
    call: str,
    code: int,
    status: int,
) -> None:
    """A failed call changes neither the transfer nor the stream."""
    task, case = held(device, cuda_simulator)
    cuda_simulator.add_fault(f"{call}:1={code}")
    report = refusal(task, compute.handle)
    assert (report.status, report.code) == (status, code)
    assert report.message.startswith(f"{call}: {code} (")
    compute.wait()
    block(task, compute.handle)
    assert not compute.is_done
    cuda_simulator.end_hangs()
    compute.wait()
    case.assert_moved()
    assert task.wait(FOREVER).status == KVN_OK


def test_a_batch_that_waits_for_its_event_in_a_thread_is_refused(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    case = between(device, cuda_simulator, "device_to_device", SIZES)
    executor = Executor(device.backend("device_to_device"))
    compute.hold()
    point = device.take_event(handle_of(compute.event()))
    tasks, cases = [executor.submit(case.descriptors, after=point)], [case]
    while not tasks[-1].held:  # more than the streams of the device
        cases.append(between(device, cuda_simulator, "device_to_device", SIZES))
        tasks.append(executor.submit(cases[-1].descriptors, after=point))
    report = refusal(tasks[-1], compute.handle)
    assert report.status == KVN_UNSUPPORTED
    assert "the event that it comes after has not come" in report.message
    compute.release()
    compute.wait()
    for task in tasks:
        assert task.wait(FOREVER).status == KVN_OK
    block(tasks[-1], compute.handle)


@pytest.mark.parametrize("ends", ["moved", "cancelled"])
def test_a_transfer_runs_between_two_parts_of_a_streams_work(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute, ends: str
) -> None:
    """The copy runs between the model's earlier and later work, and no host thread waits."""
    case = between(device, cuda_simulator, "device_to_device", SIZES)
    compute.hold()
    compute.fill(case.sides[0].address, case.source.nbytes, 7)
    executor = Executor(device.backend("device_to_device"))
    task = executor.submit(case.descriptors, after=device.take_stream(compute.handle))
    block(task, compute.handle)
    compute.fill(case.sides[0].address, case.source.nbytes, 9)
    assert_stream_waits(compute, task)
    if ends == "cancelled":
        assert task.cancel().status == KVN_CANCELLED
        assert not compute.is_done  # its own event has not come
    compute.release()
    compute.wait()
    assert (case.source == 9).all()
    if ends == "moved":
        assert task.wait(FOREVER).status == KVN_OK
        assert (case.target[case.target != UNTOUCHED] == 7).all()
        assert np.count_nonzero(case.target != UNTOUCHED) == case.total
    else:
        assert (case.target == UNTOUCHED).all()
        assert_moves(device, case)


# ---- a context of kvplan's own ----


def test_streams_wait_for_transfers_in_another_context(
    cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    """The program's streams are in another context; the default one is in that of its thread."""
    own = CudaLibrary.load(context="own").device(3)
    case = between(own, cuda_simulator, "device_to_device", SIZES)
    executor = Executor(own.backend("device_to_device"))
    for stream in (compute.handle, 0):
        case.target[:] = UNTOUCHED
        cuda_simulator.add_fault(f"{KERNEL}:1=hang")
        task = executor.submit(case.descriptors)
        block(task, stream)
        assert Cuda().cuStreamQuery(stream) != 0
        cuda_simulator.end_hangs()
        Cuda().ok("cuStreamSynchronize", stream)
        case.assert_moved()
        assert task.wait(FOREVER).status == KVN_OK
    compute.hold()
    task = executor.submit(case.descriptors, after=own.take_stream(compute.handle))
    assert task.wait(20, give_up=False).status == KVN_PENDING
    compute.release()
    assert task.wait(FOREVER).status == KVN_OK

    def without_context() -> Any:
        with pytest.raises(CudaError, match="this thread has none"):
            own.take_stream(0)

    in_thread(without_context)


# ---- many at once ----


def test_a_forked_child_cannot_block_a_stream(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute
) -> None:
    task, _ = held(device, cuda_simulator)
    child = os.fork()
    if child == 0:
        try:
            task.block_stream(compute.handle)
        except NativeError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    cuda_simulator.end_hangs()
    assert task.wait(FOREVER).status == KVN_OK


def test_many_threads_block_streams_while_transfers_end(
    device: Device, cuda_simulator: CudaControls, compute: CudaCompute, sim_log: Log
) -> None:
    """In all combinations the stream continues, and transfers that were not cancelled arrive."""
    executor = Executor(device.backend("device_to_device"))
    cases = [
        between(device, cuda_simulator, "device_to_device", [9000] * 20, seed=number)
        for number in range(8)
    ]
    for seed in range(20):
        choose = random.Random(seed)
        tasks = [executor.submit(case.descriptors) for case in cases]
        calls: list[Any] = [
            *[(Task.block_stream, task, compute.handle) for task in tasks for _ in range(2)],
            *[(Task.cancel, item) for item in choose.sample(tasks, 2)],
            *[(Task.wait, task, FOREVER) for task in tasks],
        ]
        choose.shuffle(calls)
        threads = [
            threading.Thread(
                target=lambda part: [call(*item) for call, *item in part], args=(calls[i::3],)
            )
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        compute.wait()
        for task, case in zip(tasks, cases, strict=True):
            if task.report.status == KVN_OK:
                case.assert_moved()
            case.target[:] = UNTOUCHED
    assert_moves(device, cases[0])
