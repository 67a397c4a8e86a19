"""Host memory that is registered in parts, because the driver may refuse a large registration."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from kvnative._backend import KVN_OK, NativeError
from kvnative._cuda import CopyTuning, limit_copies, limit_registered, tune_copies
from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._pinned import Pinned, pin, pinned_by
from tests.ascend.simulator import Log
from tests.cuda_sim.cuda_library import Cuda
from tests.cuda_sim.simulator import VARIANT, CudaControls

PAGE = mmap.PAGESIZE
PART, NUM_PARTS = 4 * PAGE, 3
NBYTES = NUM_PARTS * PART - PAGE  # the last part is short
REGISTER, UNREGISTER = "cuMemHostRegister_v2", "cuMemHostUnregister"
# Inside of a part, up to a boundary, one byte across on each side, all parts, and from one byte on.
PLACES = [(10, 100), (PART - 100, 100), (PART - 1, 2), (7, NBYTES - 7), (2 * PART, 5)]
WAYS = {
    "kernel": CopyTuning(1 << 30, 0, 4),
    "batch": CopyTuning(0, 1 << 30, 0),
    "single": CopyTuning(0, 0, 0),
}


@pytest.fixture
def pages(device: Device) -> np.ndarray:
    limit_registered(device, PART)
    return np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8)


@pytest.fixture
def pinned(device: Device, pages: np.ndarray) -> Iterator[Pinned]:
    pinned = pin(device, pages.ctypes.data, NBYTES)
    yield pinned
    pinned.close()


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)


def sizes(log: Log, name: str) -> list[int]:
    return [call.fields["bytes"] for call in log.calls(name)]


def test_each_part_is_registered_and_none_is_left(
    device: Device, pages: np.ndarray, sim_log: Log
) -> None:
    first = pages.ctypes.data
    pinned = pin(device, first, NBYTES)
    assert sizes(sim_log, REGISTER) == [PART, PART, PART - PAGE]
    assert pinned_by(device, first, NBYTES) == "pin"
    assert device.locate(first + NBYTES - 1)[0] == "host"
    pinned.close()
    starts = [call.fields["address"] for call in sim_log.calls(UNREGISTER)]
    assert starts == [first, first + PART, first + 2 * PART]
    assert device.locate(first)[0] == "pageable"


@pytest.mark.parametrize("nbytes", [PART - PAGE, PART])
def test_small_memory_is_registered_at_once(
    device: Device, pages: np.ndarray, sim_log: Log, nbytes: int
) -> None:
    pin(device, pages.ctypes.data, nbytes).close()
    assert sizes(sim_log, REGISTER) == [nbytes]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_refused_part_leaves_no_registrations(
    device: Device, pages: np.ndarray, cuda_simulator: CudaControls, failing: int
) -> None:
    cuda_simulator.add_fault(f"{REGISTER}:{failing}=2")
    with pytest.raises(NativeError, match=REGISTER):
        pin(device, pages.ctypes.data, NBYTES)
    for place in range(0, NBYTES, PAGE):
        assert device.locate(pages.ctypes.data + place)[0] == "pageable"
    pin(device, pages.ctypes.data, NBYTES).close()


def test_a_part_that_the_program_has_unregistered_does_not_affect_others(
    device: Device, pages: np.ndarray, sim_log: Log
) -> None:
    """The other parts are still unregistered."""
    pinned = pin(device, pages.ctypes.data, NBYTES)
    program = Cuda(VARIANT)
    program.primary(3)
    program.ok(UNREGISTER, pages.ctypes.data)
    program.ok("cuCtxSetCurrent", None)
    program.ok("cuDevicePrimaryCtxRelease_v2", 3)
    sim_log.restart()
    pinned.close()
    assert [call.code for call in sim_log.calls(UNREGISTER)] == [713, 0, 0]
    pin(device, pages.ctypes.data, NBYTES).close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
def test_transfers_across_boundaries_are_cut(
    device: Device,
    pages: np.ndarray,
    pinned: Pinned,
    sim_log: Log,
    direction: str,
    way: str,
) -> None:
    """The host side of a copy must not lie in two registrations."""
    tune_copies(device, direction, WAYS[way])
    buffer = device.allocate(NBYTES)
    host, there, expected = pages.ctypes.data, buffer.address, content(1)
    if direction == "host_to_device":
        pages[:] = expected
    else:
        device.write(there, expected)
        pages[:] = 0
    executor = Executor(device.backend(direction))
    for offset, nbytes in PLACES:
        sides = [np.array([start + offset, start], np.uint64) for start in (host, there)]
        src, dst = sides if direction == "host_to_device" else sides[::-1]
        sim_log.restart()
        columns = Descriptors.from_columns(dst, src, np.array([nbytes, 1], np.uint64))
        assert executor.run(columns).status == KVN_OK
        if way != "kernel":
            assert_whole(sim_log, host)
    if direction == "host_to_device":
        found = np.empty(NBYTES, np.uint8)
        device.read(there, found)
    else:
        found = pages
    for offset, nbytes in PLACES:
        assert np.array_equal(found[offset : offset + nbytes], expected[offset : offset + nbytes])


def assert_whole(log: Log, host: int) -> None:
    """Fail if a copy of one descriptor crosses a boundary; the stand-in checks batches itself."""
    copies = [call.fields for call in log.calls("cuMemcpyAsync")]
    assert all(copy["bytes"] <= PART for copy in copies), copies


def test_caches_are_written_and_read_across_boundaries(
    device: Device, pages: np.ndarray, pinned: Pinned
) -> None:
    """Writes and reads use synchronous copies with the user's pinned memory."""
    buffer, expected = device.allocate(NBYTES), content(2)
    pages[:] = expected
    device.write(buffer.address, pages)
    pages[:] = 0
    device.read(buffer.address, pages)
    assert np.array_equal(pages, expected)


def test_copies_across_boundaries_work_without_batch_calls(
    device: Device, pages: np.ndarray, pinned: Pinned
) -> None:
    limit_copies(device, batch_calls=False)
    tune_copies(device, "host_to_device", WAYS["batch"])
    buffer = device.allocate(NBYTES)
    pages[:] = content(3)
    side = np.array([0, PART - 8], np.uint64)
    columns = Descriptors.from_columns(
        side + np.uint64(buffer.address),
        side + np.uint64(pages.ctypes.data),
        np.array([8, 16], np.uint64),
    )
    assert Executor(device.backend("host_to_device")).run(columns).status == KVN_OK
    found = np.empty(NBYTES, np.uint8)
    device.read(buffer.address, found)
    assert np.array_equal(found[PART - 8 : PART + 8], content(3)[PART - 8 : PART + 8])
