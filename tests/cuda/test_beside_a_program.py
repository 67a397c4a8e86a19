"""Tests that kvplan does not interfere with a program that uses the same driver.

The program captures streams into graphs, has memory that a kernel must not use, and fills the GPU's
memory.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from kvnative._backend import KVN_OK, KVN_UNMAPPED
from kvnative._cuda import CudaError, CudaLibrary
from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._pinned import pin
from kvnative._report import Report
from tests.ascend.acl_cases import DIRECTIONS, Case, between
from tests.ascend.simulator import Log
from tests.cuda_sim.cuda_library import Access, Cuda, Location, allocation
from tests.cuda_sim.simulator import CudaControls

GRANULE = 2 << 20
LAUNCH, SINGLE, MODULE = "cuLaunchKernel", "cuMemcpyAsync", "cuModuleLoadDataEx"
PLAIN = "cuMemAlloc_v2"
GLOBAL, RELAXED = 0, 2  # CUstreamCaptureMode
WRITE_COMBINED = 4


@pytest.fixture
def program(cuda_simulator: CudaControls) -> Iterator[Cuda]:
    """A program with the primary context of device 3, on this thread."""
    cuda = Cuda()
    cuda.ok("cuInit", 0)
    cuda.primary(3)
    yield cuda
    cuda.ok("cuDevicePrimaryCtxRelease_v2", 3)
    cuda.ok("cuCtxSetCurrent", None)


@pytest.fixture
def capture(cuda_simulator: CudaControls) -> Iterator[Callable[[], None]]:
    """A capture in another thread of the program, until the fixture's function is called."""
    cuda_simulator.set("cuda_capture", 1)
    yield lambda: cuda_simulator.set("cuda_capture", 0)
    cuda_simulator.set("cuda_capture", 0)


def run(executor: Executor, case: Case) -> None:
    report = executor.run(case.descriptors)
    assert (report.status, report.message, report.bytes_done) == (KVN_OK, "", case.total)
    case.assert_moved()


def moved(device: Device, direction: str, dst: list[int], src: list[int], nbytes: int) -> Report:
    columns = (dst, src, [nbytes] * len(dst))
    with Executor(device.backend(direction)) as executor:
        return executor.run(
            Descriptors.from_columns(*(np.array(column, np.uint64) for column in columns))
        )


# ---- graphs ----


def mode_of(program: Cuda) -> int:
    """Return the capture mode of this thread, and reset it to the default."""
    mode = ctypes.c_int(GLOBAL)
    program.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    return mode.value


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_calls_of_kvplan_keep_captures_valid(
    device: Device,
    cuda_simulator: CudaControls,
    program: Cuda,
    capture: Callable[[], None],
    direction: str,
) -> None:
    """The stand-in would report a violation, which fails the test."""
    case = between(device, cuda_simulator, direction, [100] * 300)
    run(Executor(device.backend(direction)), case)
    pages = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    pin(device, pages.ctypes.data, mmap.PAGESIZE).close()
    stream = program.made("cuStreamCreate", 1)
    device.take_stream(stream)
    program.ok("cuStreamDestroy_v2", stream)
    assert mode_of(program) == GLOBAL
    del case
    capture()
    device.allocate(1)  # frees the memory that was released meanwhile


@pytest.mark.parametrize("stream", [0, 1, 2], ids=["default", "legacy", "of the thread"])
def test_the_context_of_a_default_stream_is_not_queried(
    device: Device, sim_log: Log, stream: int
) -> None:
    """This thread has no context, so the driver could not answer.

    The stream belongs to the primary context.
    """
    sim_log.restart()
    with suppress(CudaError):  # the stand-in lacks per-thread default streams
        device.take_stream(stream)
    assert sim_log.calls("cuStreamIsCapturing")
    assert not sim_log.calls("cuStreamGetCtx")


def test_a_thread_keeps_its_capture_mode(device: Device, program: Cuda) -> None:
    mode = ctypes.c_int(RELAXED)
    program.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    device.memory()
    with pytest.raises(CudaError):
        device.allocate(1 << 50)
    assert mode_of(program) == RELAXED
    device.memory()
    assert mode_of(program) == GLOBAL


def test_a_thread_keeps_its_capture_mode_after_a_failed_context_switch(
    device: Device, program: Cuda, cuda_simulator: CudaControls
) -> None:
    program.ok("cuCtxSetCurrent", None)
    cuda_simulator.add_fault("cuCtxSetCurrent:1=201")
    with pytest.raises(CudaError, match="cuCtxSetCurrent: 201"):
        device.memory()
    assert mode_of(program) == GLOBAL


def test_memory_that_is_freed_during_a_capture_is_released_later(
    device: Device, program: Cuda, capture: Callable[[], None]
) -> None:
    """The device cannot wait for the memory's users, which may still read it."""
    buffers = [device.allocate(GRANULE) for _ in range(3)]
    free, _ = device.memory()
    buffers.pop()
    buffers.pop()
    assert device.memory()[0] == free
    capture()
    buffers.append(device.allocate(GRANULE))
    assert device.memory()[0] == free + GRANULE
    buffers.clear()
    assert device.memory()[0] == free + 3 * GRANULE


def test_memory_that_is_freed_during_a_capture_is_released_with_the_device(
    cuda_simulator: CudaControls, capture: Callable[[], None]
) -> None:
    device = CudaLibrary.load().device(5)
    device.allocate(GRANULE)
    assert cuda_simulator.left() != {}
    capture()
    del device
    gc.collect()
    assert cuda_simulator.left() == {}


def test_a_device_that_is_closed_during_a_capture_keeps_it_valid(
    cuda_simulator: CudaControls,
) -> None:
    """The stand-in would report a violation, which fails the test."""
    device = CudaLibrary.load().device(5)
    case = between(device, cuda_simulator, "host_to_device", [100] * 20)
    run(Executor(device.backend("host_to_device")), case)
    del case
    gc.collect()
    cuda_simulator.set("cuda_capture", 1)
    try:
        del device
        gc.collect()
    finally:
        cuda_simulator.set("cuda_capture", 0)
    assert cuda_simulator.left() == {}


# ---- memory of other kinds ----


@pytest.fixture
def segment(program: Cuda) -> Iterator[int]:
    """Address space of four pages.

    Device 3 may use two of them and may not use the third; the fourth is unmapped.
    """
    address = program.made("cuMemAddressReserve", 4 * GRANULE, 0, 0, 0)
    for i in range(3):
        handle = program.made("cuMemCreate", GRANULE, ctypes.byref(allocation(3)), 0)
        program.ok("cuMemMap", address + i * GRANULE, GRANULE, 0, handle, 0)
        program.ok("cuMemRelease", handle)
    access = Access(location=Location(1, 3), flags=3)
    program.ok("cuMemSetAccess", address, 2 * GRANULE, ctypes.byref(access), 1)
    yield address
    program.ok("cuMemUnmap", address, 3 * GRANULE)
    program.ok("cuMemAddressFree", address, 4 * GRANULE)


@pytest.mark.parametrize("page", [2, 3], ids=["no access", "a hole"])
def test_descriptors_outside_of_a_segment_are_never_launched(
    device: Device, program: Cuda, segment: int, sim_log: Log, page: int
) -> None:
    """In torch's expandable segments, too, the range of a pointer is the whole reservation."""
    buffer = device.allocate(GRANULE)
    ours = buffer.address
    device.write(ours, bytes(range(100)))
    good = [segment, segment + GRANULE - 50]  # crosses the end of the first page
    assert moved(device, "device_to_device", good, [ours] * 2, 100).status == KVN_OK
    found = bytearray(100)
    device.read(good[1], found)
    assert found == bytes(range(100))
    bad = [*good, segment + page * GRANULE + 8]
    report = moved(device, "device_to_device", bad, [ours] * 3, 100)
    assert (report.status, report.failed) == (KVN_UNMAPPED, 2)
    report = moved(device, "device_to_device", [segment + 2 * GRANULE - 50], [ours], 100)
    assert (report.status, report.failed) == (KVN_UNMAPPED, 0)
    assert sim_log.counts(LAUNCH)[LAUNCH] == 2, "of what was good"
    device.write(ours, bytes(100))


def test_memory_with_unknown_access_is_copied_by_the_driver(
    device: Device, segment: int, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    buffer = device.allocate(GRANULE)
    ours = buffer.address
    device.write(ours, bytes(range(100)))
    cuda_simulator.add_fault("cuMemGetAccess:1=801")
    sim_log.restart()
    assert moved(device, "device_to_device", [segment], [ours], 100).status == KVN_OK
    assert sim_log.counts(LAUNCH, SINGLE) == {LAUNCH: 0, SINGLE: 1}


def test_write_combined_memory_is_copied_by_the_driver(
    device: Device, program: Cuda, sim_log: Log
) -> None:
    """Kernels find this memory at another address than the host."""
    host = program.made("cuMemHostAlloc", 4096, WRITE_COMBINED)
    ctypes.memset(host, 7, 4096)
    buffer = device.allocate(4096)
    target = buffer.address
    sim_log.restart()
    report = moved(device, "host_to_device", [target, target + 100], [host, host + 8], 50)
    assert report.status == KVN_OK
    assert sim_log.counts(LAUNCH, SINGLE) == {LAUNCH: 0, SINGLE: 2}
    found = bytearray(50)
    device.read(target + 100, found)
    assert found == b"\7" * 50
    program.ok("cuMemFreeHost", host)


# ---- no memory ----


def test_copies_on_a_full_gpu_need_no_memory_for_descriptors(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    executor = Executor(device.backend("device_to_device"))
    case = between(device, cuda_simulator, "device_to_device", [100] * 300)
    cuda_simulator.add_fault(f"{PLAIN}:1=2")
    for _ in range(2):
        sim_log.restart()
        run(executor, case)
        counted = sim_log.counts(LAUNCH, PLAIN)
        assert counted[LAUNCH] == 3, "128 descriptors each, in the launches themselves"
    assert counted[PLAIN] == 0, "what the model has filled is asked for once"
    assert device.fallback_reason == ""


def test_a_kernel_that_could_not_be_loaded_is_loaded_later(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    executor = Executor(device.backend("device_to_device"))
    cuda_simulator.add_fault(f"{MODULE}:1=2")
    for launches in (0, 1):
        sim_log.restart()
        run(executor, between(device, cuda_simulator, "device_to_device", [100] * 20))
        assert sim_log.counts(LAUNCH)[LAUNCH] == launches
        assert device.fallback_reason == ""
