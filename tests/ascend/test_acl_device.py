"""The library, devices, their memory, and pinned host memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvnative._acl import AclError, AclLibrary
from kvnative._backend import (
    KVN_DENIED,
    KVN_DEVICE_MEMORY,
    KVN_FAILED,
    KVN_INVALID,
    KVN_NO_DEVICE_MEMORY,
    KVN_NO_MEMORY,
    KVN_PEER_GONE,
    KVN_SUSPECT_REMOTE,
    KVN_TIMEOUT,
    KVN_UNSUPPORTED,
    Backend,
    NativeError,
)
from kvnative._device import Device, DeviceBuffer, DeviceError
from kvnative._hccl import Communicator
from kvnative._hccl_memory import HcclError, HcclLibrary, Region
from kvnative._pinned import Pinned, allocate_host, pin, pinned_by
from tests.ascend.acl_cases import VARIANT
from tests.ascend.hccl_ends import rank_table
from tests.ascend.simulator import Controls, Log, found
from tests.support.held import Held

OLD = VARIANT == "8.1"
PAGE = mmap.PAGESIZE
PIN = "aclrtHostRegister" if OLD else "aclrtHostRegisterV2"
PHYSICAL = "rtGetDevicePhyIdByIndex" if OLD else "aclrtGetPhyDevIdByLogicDevId"


# ---- the library ----


def test_the_library_is_found_once(simulator: Controls) -> None:
    library = AclLibrary.load()
    with found() as home:
        folder = home / "lib64"
        file = folder / ("libascendcl.so" if OLD else "libacl_rt.so")
        assert Path(library.path) == file
        for path in (None, str(home), str(folder), str(file), file.name):
            assert AclLibrary.load(path) is library


def test_properties_of_the_library_are_reported(simulator: Controls) -> None:
    library = AclLibrary.load()
    assert library.version == {"8.1": "8.1.RC1", "batch-v2": "9.1.0"}.get(VARIANT, "8.5.0")
    newer = ("aclrtHostRegisterV2", "aclrtGetPhyDevIdByLogicDevId", "aclrtGetDeviceInfo")
    batches = ("aclrtMemcpyBatch", "aclrtMemcpyBatchAsync")
    assert library.missing == ((*newer, *batches) if OLD else ())
    assert library.has_batch is not OLD
    assert library.device_count() == 8
    assert library.soc_name() == "Ascend910B1"


def test_a_missing_or_invalid_library_is_refused(simulator: Controls, tmp_path: Path) -> None:
    with pytest.raises(NativeError, match=r"no ACL library: .*/nothing/libacl_rt\.so: cannot open"):
        AclLibrary.load(str(tmp_path / "nothing" / "libacl_rt.so"))
    with pytest.raises(NativeError, match=r"no ACL library: .* has neither libacl_rt\.so nor lib"):
        AclLibrary.load(str(tmp_path))
    with pytest.raises(NativeError, match=r"libm\.so\.6 has no aclrtMemcpyAsync; kvplan needs"):
        AclLibrary.load("libm.so.6")
    with pytest.raises(TypeError, match=r"comes from AclLibrary\.load"):
        AclLibrary()


def test_an_unknown_device_is_refused(simulator: Controls) -> None:
    with pytest.raises(
        AclError, match=r"^aclrtSetDevice: 107001 \(no such device\): .*99"
    ) as caught:
        AclLibrary.load().device(99)
    assert (caught.value.code, caught.value.status) == (107001, KVN_INVALID)


def test_an_unknown_property_leaves_no_error_text(
    simulator: Controls, device: Device, tmp_path: Path
) -> None:
    """ACL keeps an error's text until it is read, so the next error would contain it, too."""
    library = device.library
    copy = tmp_path / Path(library.path).name
    shutil.copyfile(library.path, copy)  # without a file that has the version
    for call, ask in (
        ("aclrtGetVersion", lambda: AclLibrary.load(str(copy))),
        ("aclrtGetSocName", library.soc_name),
        (PHYSICAL, lambda: device.physical_id),
    ):
        simulator.add_fault(f"{call}:1=507899")
        ask()
        assert not simulator.faults_left(), call
        with pytest.raises(AclError) as caught:
            library.device(99)
        assert call not in str(caught.value)


# ---- devices ----


def test_a_device_is_one_object_while_it_is_used(device: Device) -> None:
    library = device.library
    assert library.device(3) is device
    assert library.device(4) is not device
    device.close()
    device.close()
    assert device.is_closed
    again = library.device(3)
    assert again is not device
    device.close()
    assert library.device(3) is again, "the one that was opened since"
    with pytest.raises(NativeError, match="device 3 is closed"):
        device.allocate(1)


def test_a_device_reports_its_properties(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (device.id, device.name) == (3, "Ascend910B1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0, 2,4, 6")  # the system handles this variable
    assert device.physical_id == 3
    if OLD:
        assert device.attribute(402) is None
    else:
        assert device.attribute(402) == 3  # PHY_CHIP_ID
        assert device.attribute(9999) is None
    with pytest.raises(TypeError, match=r"comes from the device\(\) of its library"):
        Device()


def test_the_smallest_allocation_has_a_huge_page(device: Device) -> None:
    first, second = device.allocate(1), device.allocate(1)
    assert {device.page_nbytes(item.address) for item in (first, second)} == {2 << 20}
    assert first.address % (2 << 20) == second.address % (2 << 20) == 0


def test_memory_that_the_driver_does_not_know_is_pageable(
    device: Device, simulator: Controls
) -> None:
    for code in (107000, 507899):
        simulator.add_fault(f"aclrtPointerGetAttributes:1={code}")
        assert device.locate(4096)[0] == "pageable"
    simulator.add_fault("aclrtPointerGetAttributes:1=507010")
    with pytest.raises(AclError, match="heartbeat"):
        device.locate(4096)


@pytest.mark.skipif(OLD, reason="8.1 has no code of its own for that")
def test_hccl_may_unpin_first(device: Device) -> None:
    pages = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    pinned = pin(device, pages.ctypes.data, PAGE)
    acl = ctypes.CDLL(device.library.path)
    assert acl.aclrtSetDevice(3) == 0
    assert acl.aclrtHostUnregister(ctypes.c_void_p(pages.ctypes.data)) == 0
    pinned.close()
    assert acl.aclrtResetDevice(3) == 0


def test_device_memory_is_written_and_read(device: Device, simulator: Controls) -> None:
    free, total = device.memory()
    data = np.arange(100_000, dtype=np.uint32)
    buffer = device.allocate(data.nbytes)
    assert isinstance(buffer, DeviceBuffer)
    assert (buffer.nbytes, buffer.device) == (data.nbytes, device)
    assert device.memory()[1] == total
    device.write(buffer.address, data)
    back = np.zeros_like(data)
    device.read(buffer.address + 400, back[100:])
    assert np.array_equal(back[100:], data[100:])
    assert simulator.left()["device_bytes"] >= data.nbytes
    del buffer
    assert "device_bytes" not in simulator.left()
    assert device.memory()[0] == free


def test_whole_huge_pages_take_no_more_than_their_size(device: Device) -> None:
    """With aclrtMalloc, each would take 32 bytes more, and so another page."""
    free, _ = device.memory()
    buffers = [device.allocate(2 << 20), device.allocate(8 << 20)]
    assert free - device.memory()[0] == sum(buffer.nbytes for buffer in buffers)


def test_errors_of_memory_calls_are_reported(device: Device) -> None:
    with pytest.raises(AclError, match=r"^aclrtMallocAlign32: 207001") as caught:
        device.allocate(1 << 50)
    assert caught.value.status == KVN_NO_DEVICE_MEMORY
    with pytest.raises(ValueError, match="nbytes is 0; it must be at least 1"):
        device.allocate(0)
    with pytest.raises(ValueError, match=r"nbytes is -1; it must be in \[0, 2\*\*64\)"):
        device.allocate(-1)
    buffer = device.allocate(10)
    with pytest.raises(AclError, match=r"^aclrtMemcpy: "):
        device.write(buffer.address, bytes(11))
    with pytest.raises(BufferError):
        device.read(buffer.address, bytes(10))
    with pytest.raises(TypeError, match=r"comes from Device\.allocate"):
        DeviceBuffer()


@pytest.mark.parametrize(
    ("status", "codes"),
    [
        (
            KVN_INVALID,
            [100000, 100001, *range(107000, 107004), 107008, 107016, 107017, 507910, 507911],
        ),
        (KVN_TIMEOUT, [107019, 107020, 207020, 507046, 507047]),
        (KVN_NO_MEMORY, [200000]),
        (KVN_NO_DEVICE_MEMORY, [207001, 207005, 207007, 207008, 207012, 207018]),
        (KVN_UNSUPPORTED, [200001, 207000, 207004]),
        (KVN_DENIED, [207006]),
        (KVN_DEVICE_MEMORY, [507053, 507054, 507055]),
        (KVN_SUSPECT_REMOTE, [507057]),
        (KVN_PEER_GONE, [507901]),
        (KVN_FAILED, [107022, 107023, 500000, 507010, 507056, 507899, 507904, 123456]),
    ],
)
def test_each_code_of_the_runtime_has_its_status(
    device: Device, simulator: Controls, status: int, codes: list[int]
) -> None:
    for code in codes:
        simulator.add_fault(f"aclrtMallocAlign32:1={code}")
        with pytest.raises(AclError, match=f"^aclrtMallocAlign32: {code}") as caught:
            device.allocate(100)
        assert caught.value.status == status, code


def test_a_buffer_outlives_the_closing_of_its_device(device: Device, simulator: Controls) -> None:
    buffer = device.allocate(10)
    device.close()
    del buffer
    assert "device_bytes" not in simulator.left()


def test_the_location_of_memory_is_known(device: Device) -> None:
    other = device.library.device(5)
    mine, theirs = device.allocate(100), other.allocate(100)
    assert device.locate(mine.address + 99) == ("device", 3)
    assert device.locate(theirs.address) == ("device", 5)
    pages = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    # Before 8.5, unpinned memory has no kind of its own.
    assert device.locate(pages.ctypes.data)[0] == ("host" if OLD else "pageable")
    pinned = pin(device, pages.ctypes.data, PAGE)
    assert device.locate(pages.ctypes.data)[0] == "host"
    pinned.close()


# ---- pinned memory ----


def test_memory_is_pinned_and_unpinned(device: Device, simulator: Controls, sim_log: Log) -> None:
    pages = np.frombuffer(mmap.mmap(-1, 8 * PAGE), np.uint8)
    start = pages.ctypes.data
    sim_log.restart()
    pinned = pin(device, start, 4 * PAGE)
    assert isinstance(pinned, Pinned)
    assert (pinned.address, pinned.nbytes, pinned.device) == (start, 4 * PAGE, device)
    assert len(sim_log.calls("aclrtHostRegister" if OLD else "aclrtHostRegisterV2")) == 1
    beside = pin(device, start + 4 * PAGE, PAGE)
    for first, pages_long in ((0, 1), (3, 2), (4, 4)):
        with pytest.raises(
            ValueError, match=r"overlaps \[0x\w+, 0x\w+\), which is pinned for device 3"
        ):
            pin(device, start + first * PAGE, pages_long * PAGE)
    pinned.close()
    pinned.close()
    again = pin(device, start, 4 * PAGE)
    device.close()
    again.close()
    del beside
    assert simulator.left() == {}


def test_whole_pages_are_pinned(device: Device, sim_log: Log) -> None:
    """The driver maps only whole pages; the caller has pinned the requested range."""
    pages = np.frombuffer(mmap.mmap(-1, 3 * PAGE), np.uint8)
    start = pages.ctypes.data
    sim_log.restart()
    pinned = pin(device, start, PAGE + 1)
    (call,) = sim_log.calls("aclrtHostRegister" if OLD else "aclrtHostRegisterV2")
    assert (call.fields["address"], call.fields["bytes"]) == (start, 2 * PAGE)
    assert pinned_by(device, start, PAGE + 1) == "pin"
    for beyond in ((start, PAGE + 2), (start + PAGE, 2), (start + 2 * PAGE, 1)):
        assert pinned_by(device, *beyond) == ""
    pinned.close()


def test_objects_that_cannot_be_pinned_are_refused(device: Device, simulator: Controls) -> None:
    pages = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    start = pages.ctypes.data
    with pytest.raises(ValueError, match=r"address is 0x\w+; it must be that of a page"):
        pin(device, start + 1, 10)
    with pytest.raises(ValueError, match="nbytes is 0; it must be at least 1"):
        pin(device, start, 0)
    call = "aclrtHostRegister" if OLD else "aclrtHostRegisterV2"
    simulator.add_fault(f"{call}:1=207001")
    with pytest.raises(AclError, match=f"^{call}: 207001 "):
        pin(device, start, PAGE)
    pin(device, start, PAGE).close()  # the refused pin has left nothing behind


# ---- contexts and threads ----


def test_a_threads_own_context_stays_current(device: Device, simulator: Controls) -> None:
    acl = ctypes.CDLL(device.library.path)
    before, own, now = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    acl.aclrtGetCurrentContext(ctypes.byref(before))
    assert acl.aclrtCreateContext(ctypes.byref(own), 1) == 0
    try:
        buffer = device.allocate(100)
        device.write(buffer.address, bytes(100))
        device.library.device(6)
        with pytest.raises(AclError):
            device.allocate(1 << 50)
        del buffer
        assert acl.aclrtGetCurrentContext(ctypes.byref(now)) == 0
        assert now.value == own.value
    finally:
        acl.aclrtSetCurrentContext(before)
        assert acl.aclrtDestroyContext(own) == 0


def communicate(device: Device, buffer: DeviceBuffer, _: int) -> None:
    """Bind and prepare a communicator; one of these calls is refused."""
    hccl = HcclLibrary.load(device.library)
    table = rank_table("1.0").replace('"device_id": "0"', f'"device_id": "{device.id}"')
    with ExitStack() as held:
        region = Region(hccl, device, buffer.address, 4096, on_device=True)
        held.callback(region.close)
        communicator = Communicator(hccl, device, table, 0, 1, "refused", max_batch=64)
        held.callback(communicator.close)
        communicator.bind(region)
        communicator.prepare(1000)


@pytest.mark.parametrize("place", [0, 1])
def test_memory_of_another_device_is_not_bound(device: Device, place: int) -> None:
    """The region of the other device is the first or the second one of the communicator."""
    library = device.library
    hccl = HcclLibrary.load(library)
    table = rank_table("1.0").replace('"device_id": "0"', '"device_id": "3"')
    with ExitStack() as held:
        own, other = library.device(3), library.device(4)
        communicator = Communicator(hccl, own, table, 0, 1, "of-device-3", max_batch=64)
        held.callback(communicator.close)
        for its in [own] * place + [other]:
            buffer = its.allocate(4096)
            region = Region(hccl, its, buffer.address, 4096, on_device=True, owner=buffer)
            held.callback(region.close)
            if its is own:
                communicator.bind(region)
                held.callback(communicator.unbind, region)
            else:
                with pytest.raises(HcclError, match="is of device 4, the communicator of device 3"):
                    communicator.bind(region)


REFUSED: list[tuple[str, Callable[[Device, DeviceBuffer, int], object]]] = [
    ("aclrtMallocAlign32", lambda device, *_: device.allocate(100)),
    ("aclrtMallocHost", lambda device, *_: allocate_host(device, 100)),
    ("aclrtMemcpy", lambda device, buffer, _: device.write(buffer.address, bytes(4))),
    ("aclrtMemset", lambda device, buffer, _: device.clear(buffer.address, 4)),
    ("aclrtGetMemInfo", lambda device, *_: device.memory()),
    (PIN, lambda device, _, at: pin(device, at, PAGE)),
    # These calls are HCCL's; on old runtimes, a pin uses this call, too.
    (
        "aclrtHostRegister",
        lambda device, _, at: HcclLibrary.load(device.library).check_host(device, at, PAGE),
    ),
    (
        "HcclRegisterGlobalMem",
        lambda device, buffer, _: Region(
            HcclLibrary.load(device.library), device, buffer.address, 4096, on_device=True
        ),
    ),
    ("HcclCommBindMem", communicate),
    ("HcclCommPrepare", communicate),
]


@pytest.mark.parametrize(("call", "make"), REFUSED)
def test_a_refused_call_leaves_a_thread_its_own_context(
    device: Device,
    simulator: Controls,
    call: str,
    make: Callable[[Device, DeviceBuffer, int], object],
) -> None:
    acl = ctypes.CDLL(device.library.path)
    before, own, now = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    acl.aclrtGetCurrentContext(ctypes.byref(before))
    buffer, pages = device.allocate(4096), np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    assert acl.aclrtCreateContext(ctypes.byref(own), 1) == 0
    try:
        simulator.add_fault(f"{call}:1={4 if call.startswith('Hccl') else 507899}")
        with pytest.raises(DeviceError, match=call):
            make(device, buffer, pages.ctypes.data)
        assert acl.aclrtGetCurrentContext(ctypes.byref(now)) == 0
        assert now.value == own.value
    finally:
        acl.aclrtSetCurrentContext(before)
        assert acl.aclrtDestroyContext(own) == 0


def test_any_thread_may_call(device: Device) -> None:
    """The thread has no context before its first call of ACL."""
    seen: list[int] = []

    def use() -> None:
        buffer = device.allocate(4)
        device.write(buffer.address, b"kv__")
        seen.extend(device.memory())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(seen) == 2


def test_backends_share_channels_and_end_with_the_last(device: Device, simulator: Controls) -> None:
    first, second = (device.backend("host_to_device") for _ in range(2))
    assert simulator.left()["streams"] == 2
    third = device.backend("device_to_device")
    assert simulator.left()["streams"] == 6
    del first, third
    gc.collect()
    assert simulator.left()["streams"] == 2
    assert second.name == "acl"


def test_a_backend_without_streams_is_refused(device: Device, simulator: Controls) -> None:
    before = Held.now()
    simulator.add_fault("aclrtCreateStream:2=207008")
    with pytest.raises(
        AclError, match=r"^no stream on device 3: aclrtCreateStream: 207008"
    ) as caught:
        device.backend("device_to_host")
    assert caught.value.status == KVN_NO_DEVICE_MEMORY
    assert "streams" not in simulator.left()
    before.check_nothing_new()
    assert device.backend("device_to_host").name == "acl"


def test_threads_that_make_backends_at_once_share_channels(
    device: Device, simulator: Controls
) -> None:
    start = threading.Barrier(4)

    def make(_: int) -> Backend:
        start.wait()
        return device.backend("host_to_device")

    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            backends = [*threads.map(make, range(4))]
            assert simulator.left()["streams"] == 2
            backends.clear()
