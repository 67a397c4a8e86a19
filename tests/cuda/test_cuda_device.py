"""Contexts, memory and streams of a CUDA device."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from kvnative._backend import (
    KVN_DENIED,
    KVN_DEVICE_MEMORY,
    KVN_FAILED,
    KVN_INVALID,
    KVN_NO_DEVICE_MEMORY,
    KVN_OK,
    KVN_TIMEOUT,
    KVN_UNSUPPORTED,
)
from kvnative._cuda import CudaError, CudaLibrary
from kvnative._cuda_share import export, import_handle, import_here, import_pieces
from kvnative._device import Device, DeviceBuffer
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._pinned import allocate_host, pin
from kvnative._report import Report
from kvplan.device.cuda import CudaDevice
from tests.ascend.simulator import Log
from tests.cuda_sim.cuda_library import Cuda
from tests.cuda_sim.simulator import CudaControls
from tests.support.ends import assert_no_outcome_before_its_end
from tests.support.refusals import refused

PAGE = mmap.PAGESIZE
GRANULE = 2 << 20
NEW_FAILURE = "cuMemcpyAsync:1=sync:719"  # breaks the context of the stream


@pytest.fixture
def program(cuda_simulator: CudaControls) -> Iterator[Cuda]:
    """CUDA calls of the program in the same process."""
    cuda = Cuda()
    cuda.ok("cuInit", 0)
    yield cuda
    cuda.ok("cuCtxSetCurrent", None)


def one(source: int, target: int, nbytes: int) -> Descriptors:
    columns = [np.array([item], np.uint64) for item in (target, source, nbytes)]
    return Descriptors.from_columns(*columns)


def moved(device: Device, source: int, target: int, nbytes: int, direction: str) -> Report:
    with Executor(device.backend(direction)) as executor:
        return executor.run(one(source, target, nbytes))


# ---- contexts ----


def test_a_thread_keeps_its_current_context(device: Device, program: Cuda) -> None:
    def use() -> None:
        buffer = device.allocate(100)
        device.write(buffer.address, bytes(100))
        with pytest.raises(CudaError):
            device.allocate(1 << 50)

    def current() -> int | None:
        out = ctypes.c_void_p()
        program.ok("cuCtxGetCurrent", ctypes.byref(out))
        return out.value

    seen: list[int | None] = []

    def without() -> None:
        use()
        seen.append(current())

    thread = threading.Thread(target=without)
    thread.start()
    thread.join()
    assert seen == [None]

    theirs = program.primary(1)
    use()
    other = CudaLibrary.load(context="own").device(2)
    other.allocate(100)
    assert current() == theirs
    program.ok("cuCtxSetCurrent", None)
    assert current() is None  # the stack of contexts is empty below the program's
    del other
    program.ok("cuDevicePrimaryCtxRelease_v2", 1)


REFUSED: dict[str, Callable[[Device, DeviceBuffer, int], object]] = {
    "cuMemHostAlloc": lambda device, *_: allocate_host(device, 100),
    "cuMemHostRegister_v2": lambda device, _, at: pin(device, at, PAGE),
    "cuMemGetInfo_v2": lambda device, *_: device.memory(),
    "cuMemsetD8Async": lambda device, buffer, _: device.clear(buffer.address, 4),
    "cuMemExportToShareableHandle": lambda device, buffer, _: export(device, buffer.address, 4),
    "cuMemAddressReserve": lambda device, *_: import_pieces(device, GRANULE, [], is_far=False),
    "cuIpcOpenMemHandle_v2": lambda device, *_: import_handle(device, bytes(64), 8, is_far=False),
    "cuCtxEnablePeerAccess": lambda device, *_: import_here(device, device.library.device(4), 8, 8),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_refused_call_leaves_a_thread_its_own_context(
    device: Device, program: Cuda, cuda_simulator: CudaControls, call: str
) -> None:
    buffer, pages = device.allocate(GRANULE), np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    theirs, now = program.primary(1), ctypes.c_void_p()
    cuda_simulator.add_fault(f"{call}:1=2")
    try:
        with pytest.raises(CudaError, match=call):
            REFUSED[call](device, buffer, pages.ctypes.data)
        program.ok("cuCtxGetCurrent", ctypes.byref(now))
        assert now.value == theirs
    finally:
        program.ok("cuCtxSetCurrent", None)
        program.ok("cuDevicePrimaryCtxRelease_v2", 1)


def test_the_primary_context_is_the_programs(device: Device, program: Cuda) -> None:
    program.primary(3)
    theirs = program.made("cuMemAlloc_v2", GRANULE)
    assert device.locate(theirs) == ("device", 3)
    device.write(theirs, b"kv")
    program.ok("cuMemFree_v2", theirs)
    program.ok("cuDevicePrimaryCtxRelease_v2", 3)


def test_memory_of_the_program_is_refused_in_an_own_context(
    cuda_simulator: CudaControls, program: Cuda
) -> None:
    before = cuda_simulator.contexts()  # of all simulated devices of this process
    program.primary(3)
    theirs = program.made("cuMemAlloc_v2", GRANULE)
    own = CudaLibrary.load(context="own").device(3)
    assert own.locate(theirs) == ("foreign", 3)
    with pytest.raises(CudaError, match=f"address {theirs:#x} is not memory of a device"):
        own.read(theirs, bytearray(8))
    mine = own.allocate(100)
    assert own.locate(mine.address) == ("device", 3)
    own.write(mine.address, b"kv")
    del mine, own
    with (
        closing(CudaDevice(3, CudaLibrary.load(context="own"))) as device,
        refused("LLM_PARAM_INVALID", "tensor 0 at .* is device memory of another context in this"),
    ):
        device.check_host("tensor 0", theirs)
    del device
    program.ok("cuMemFree_v2", theirs)
    program.ok("cuDevicePrimaryCtxRelease_v2", 3)
    gc.collect()
    assert cuda_simulator.left() == {}
    assert cuda_simulator.contexts() <= before


def test_an_own_context_survives_a_broken_context_of_the_program(
    cuda_simulator: CudaControls, program: Cuda
) -> None:
    """Only this test uses the device, whose primary context is unusable until it is released."""
    before = cuda_simulator.contexts()
    own, primary = (CudaLibrary.load(context=name).device(6) for name in ("own", "primary"))
    ours, theirs = own.allocate(100), primary.allocate(100)
    cuda_simulator.add_fault(NEW_FAILURE)
    with pytest.raises(CudaError, match=r"^cuStreamQuery: 719 \(CUDA_ERROR_LAUNCH_FAILED\)"):
        primary.write(theirs.address, bytes(100))
    with pytest.raises(CudaError, match="719"):
        primary.backend("host_to_device")
    own.write(ours.address, bytes(100))
    del ours, theirs, own, primary
    gc.collect()
    assert cuda_simulator.left() == {}
    assert cuda_simulator.contexts() <= before


# ---- memory ----


def test_allocated_memory_is_exportable(device: Device, program: Cuda, sim_log: Log) -> None:
    sim_log.restart()
    buffer = device.allocate(GRANULE + 1)
    program.primary(3)
    assert program.attribute(buffer.address, 14) == 1  # exportable as a file descriptor
    program.ok("cuDevicePrimaryCtxRelease_v2", 3)
    assert buffer.nbytes == GRANULE + 1
    assert sim_log.calls("cuMemCreate")[0].fields["bytes"] == 2 * GRANULE
    free, total = device.memory()
    assert total - free >= 2 * GRANULE
    del buffer
    assert device.memory()[0] == free + 2 * GRANULE


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]])
def test_memory_without_gaps_is_freed_one_by_one(
    device: Device, cuda_simulator: CudaControls, order: list[int]
) -> None:
    """Each allocation begins where another ends, and is still a separate one."""
    cuda_simulator.set("cuda_adjacent", 1)
    try:
        buffers = {i: device.allocate(GRANULE) for i in range(3)}
        addresses = [buffers[i].address for i in range(3)]
        assert addresses == [addresses[0] + i * GRANULE for i in range(3)]
        free = device.memory()[0]
        for number, i in enumerate(order, 1):
            device.write(addresses[i], bytes(GRANULE))
            del buffers[i]
            assert device.memory()[0] == free + number * GRANULE
            for left in buffers:  # tested up to the last byte
                device.write(addresses[left], bytes(GRANULE))
    finally:
        cuda_simulator.set("cuda_adjacent", 0)


@pytest.mark.parametrize(("virtual", "exported"), [("0", 0), ("2", 0)])
def test_a_failure_to_create_an_own_context_is_reported(
    cuda_simulator: CudaControls, program: Cuda, virtual: str, exported: int
) -> None:
    cuda_simulator.set("cuda_virtual", virtual)
    try:
        device = CudaLibrary.load().device(5)
        buffer = device.allocate(100)
        device.write(buffer.address, b"kv")
        program.primary(5)
        assert program.attribute(buffer.address, 14) == exported
        program.ok("cuDevicePrimaryCtxRelease_v2", 5)
        del buffer, device
        gc.collect()
    finally:
        cuda_simulator.set("cuda_virtual", "1")
    assert cuda_simulator.left() == {}


def test_memory_is_allocated_without_access_of_network_cards_if_refused(
    device: Device, cuda_simulator: CudaControls, sim_log: Log
) -> None:
    """The GPU supports access of network cards, but the machine does not."""
    cuda_simulator.add_fault("cuMemGetAllocationGranularity:1=801")
    assert CudaLibrary.load().device(5).allocate(100).nbytes == 100
    sim_log.restart()
    cuda_simulator.add_fault("cuMemCreate:1=1")
    assert device.allocate(100).nbytes == 100
    assert len(sim_log.calls("cuMemCreate")) == 2
    cuda_simulator.add_fault("cuMemCreate:1=1", "cuMemCreate:2=1")
    with pytest.raises(CudaError, match=r"^cuMemCreate: 1 "):
        device.allocate(100)


def test_errors_of_memory_calls_are_reported(device: Device, cuda_simulator: CudaControls) -> None:
    with pytest.raises(
        CudaError, match=r"^cuMemCreate: 2 \(CUDA_ERROR_OUT_OF_MEMORY\): out of memory$"
    ) as caught:
        device.allocate(1 << 50)
    assert caught.value.status == KVN_NO_DEVICE_MEMORY
    for call in ("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"):
        cuda_simulator.add_fault(f"{call}:1=2")
        with pytest.raises(CudaError, match=f"^{call}: 2 "):
            device.allocate(100)
    assert cuda_simulator.left() == {}
    with pytest.raises(CudaError, match="are more than any device has"):
        device.allocate((1 << 64) - 1)
    buffer = device.allocate(10)
    with pytest.raises(CudaError, match=r"address 0x\w+ is not memory of a device"):
        device.write(buffer.address, bytes(GRANULE + 1))
    device.write(buffer.address, bytes(10))


@pytest.mark.parametrize(
    ("status", "codes"),
    [
        (KVN_INVALID, [1, 3, 4, 101, 201, 400, 709, 712, 713]),
        (KVN_NO_DEVICE_MEMORY, [2, 701]),
        (KVN_UNSUPPORTED, [34, 100, 209, 217, 218, 221, 222, 223, 801, 802, 803, 804]),
        (KVN_DENIED, [46, 800]),
        (KVN_DEVICE_MEMORY, [214]),
        (KVN_TIMEOUT, [702]),
        (KVN_FAILED, [700, 719, 999]),
    ],
)
def test_each_code_of_the_driver_has_its_status(
    device: Device, cuda_simulator: CudaControls, status: int, codes: list[int]
) -> None:
    for code in codes:
        cuda_simulator.add_fault(f"cuMemAddressReserve:1={code}")
        with pytest.raises(CudaError, match=f"^cuMemAddressReserve: {code} ") as caught:
            device.allocate(100)
        assert caught.value.status == status, code


def test_the_location_of_memory_is_known(device: Device) -> None:
    other = device.library.device(5)
    mine, theirs, host = device.allocate(100), other.allocate(100), allocate_host(device, 100)
    assert device.locate(mine.address + 99) == ("device", 3)
    assert device.locate(theirs.address) == ("device", 5)
    assert device.locate(host.address)[0] == "host"
    pages = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    assert device.locate(pages.ctypes.data) == ("pageable", 0)
    pinned = pin(device, pages.ctypes.data, PAGE)
    assert device.locate(pages.ctypes.data)[0] == "host"
    pinned.close()
    assert device.locate(pages.ctypes.data)[0] == "pageable"


def test_memory_of_another_gpu_in_its_context_is_not_foreign(device: Device, program: Cuda) -> None:
    program.primary(5)
    address = program.made("cuMemAlloc_v2", PAGE)
    assert device.locate(address) == ("device", 5)
    program.ok("cuMemFree_v2", address)
    program.ok("cuDevicePrimaryCtxRelease_v2", 5)


def test_the_program_may_unpin_first(device: Device, program: Cuda) -> None:
    pages = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    pinned = pin(device, pages.ctypes.data, PAGE)
    program.primary(3)
    program.ok("cuMemHostUnregister", pages.ctypes.data)
    program.ok("cuDevicePrimaryCtxRelease_v2", 3)
    assert device.locate(pages.ctypes.data)[0] == "pageable"
    pinned.close()
    assert device.locate(pages.ctypes.data)[0] == "pageable"
    pin(device, pages.ctypes.data, PAGE).close()  # no registration is left


def test_freeing_waits_for_work_of_the_program(
    device: Device, program: Cuda, cuda_simulator: CudaControls
) -> None:
    """A kernel that still reads a freed cache would break the program's context."""
    buffer, target = device.allocate(100), device.allocate(100)
    program.primary(3)
    stream = program.made("cuStreamCreate", 1)
    cuda_simulator.add_fault("cuMemcpyAsync:1=hang")
    program.ok("cuMemcpyAsync", target.address, buffer.address, 100, stream)
    held = [buffer]
    del buffer
    address = held[0].address
    thread = threading.Thread(target=held.clear)
    thread.start()
    assert thread.is_alive()  # no work ends the kernel before the next line
    cuda_simulator.end_hangs()
    thread.join()
    assert device.locate(address) == ("pageable", 0)
    program.ok("cuStreamSynchronize", stream)
    program.ok("cuStreamDestroy_v2", stream)
    program.ok("cuDevicePrimaryCtxRelease_v2", 3)


# ---- streams ----


def test_nothing_uses_the_default_stream(device: Device, sim_log: Log) -> None:
    """The default stream is ordered with all work of a program."""
    sim_log.restart()
    buffer, host = device.allocate(1000), allocate_host(device, 1000)
    device.write(buffer.address, bytes(range(250)) * 4)
    device.clear(buffer.address, 10)
    device.read(buffer.address, bytearray(1000))
    assert moved(device, buffer.address, host.address, 1000, "device_to_host").status == KVN_OK
    assert memoryview(host)[9:12].tolist() == [0, 10, 11]
    created = {call.fields["stream"] for call in sim_log.calls("cuStreamCreate")}
    assert {call.fields["flags"] for call in sim_log.calls("cuStreamCreate")} == {1}
    issued = [
        call
        for call in sim_log.calls()
        if "stream" in call.fields and call.name != "cuStreamCreate"
    ]
    assert issued
    assert {item.fields["stream"] for item in issued} <= created


def test_no_outcome_is_known_before_the_end_of_a_batch(device: Device) -> None:
    buffer, host = device.allocate(GRANULE), allocate_host(device, GRANULE)
    copied = one(buffer.address, host.address, GRANULE)
    assert_no_outcome_before_its_end(device.backend("device_to_host"), copied)


def test_copies_of_threads_do_not_wait_for_each_other(
    device: Device, cuda_simulator: CudaControls
) -> None:
    buffer = device.allocate(2 * GRANULE)
    cuda_simulator.add_fault("cuMemsetD8Async:1=hang")
    cleared = threading.Thread(target=device.clear, args=(buffer.address, 100))
    cleared.start()
    wait_until_true(lambda: cuda_simulator.faults_left() == 0)
    device.write(buffer.address + GRANULE, bytes(100))
    assert cleared.is_alive()
    cuda_simulator.end_hangs()
    cleared.join()


def wait_until_true(happened: Callable[[], bool]) -> None:
    """Wait for an event in another thread."""
    while not happened():
        threading.Event().wait(0.001)


# ---- other processes ----


def test_calls_in_a_forked_child_are_refused_and_harmless(cuda_simulator: CudaControls) -> None:
    script = """
import gc, os
from kvnative._backend import NativeError
from kvnative._pinned import allocate_host
from kvplan.device.cuda import load_library
library = load_library()
device = library.device(2)
buffer, host = device.allocate(10), allocate_host(device, 10)
backend = device.backend("host_to_device")
child = os.fork()
if child == 0:
    try:
        for use in (
            lambda: device.allocate(1),
            lambda: device.locate(buffer.address),
            lambda: device.write(buffer.address, bytes(10)),
            lambda: device.backend("device_to_host"),
            lambda: library.device_count(),
            lambda: library.device(2),
        ):
            try:
                use()
            except NativeError as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError("no error")
        del buffer, host, backend
        device.close()
        del device
        gc.collect()
        os._exit(0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
device.write(buffer.address, bytes(10))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
