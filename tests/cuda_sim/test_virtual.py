"""Virtual memory: handles, address ranges, access, and handles of other processes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_sim.cuda_library import Access, Allocation, Cuda, Location, allocation, in_process

INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, ILLEGAL_ADDRESS, NOT_SUPPORTED = 1, 2, 101, 700, 801
TYPE, IPC, START, SIZE, HANDLES = 2, 10, 11, 12, 14
READ, READ_WRITE = 1, 3
PAGE = 2 << 20


def give_access(cuda: Cuda, address: int, nbytes: int, flags: int, device: int = 0) -> int:
    wanted = Access(Location(1, device), flags)
    code: int = cuda.cuMemSetAccess(address, nbytes, ctypes.byref(wanted), 1)
    return code


@pytest.fixture
def mapped(cuda: Cuda) -> Iterator[tuple[int, int]]:
    """The address of a range of four pages, with memory mapped to the first two, and a stream."""
    address = cuda.made("cuMemAddressReserve", 4 * PAGE, 0, 0, 0)
    handles = [cuda.made("cuMemCreate", PAGE, ctypes.byref(allocation()), 0) for _ in range(2)]
    for i, handle in enumerate(handles):
        cuda.ok("cuMemMap", address + i * PAGE, PAGE, 0, handle, 0)
        cuda.ok("cuMemRelease", handle)  # the mapping keeps the memory
    yield address, cuda.made("cuStreamCreate", 1)
    cuda.ok("cuMemUnmap", address, 2 * PAGE)
    cuda.ok("cuMemAddressFree", address, 4 * PAGE)


def test_sizes_and_properties_are_checked(cuda: Cuda) -> None:
    nbytes, out = ctypes.c_size_t(), ctypes.byref(ctypes.c_uint64())
    cuda.ok("cuMemGetAllocationGranularity", ctypes.byref(nbytes), ctypes.byref(allocation()), 0)
    assert nbytes.value == PAGE
    assert cuda.cuMemCreate(out, PAGE - 1, ctypes.byref(allocation()), 0) == INVALID_VALUE
    assert cuda.cuMemCreate(out, PAGE, ctypes.byref(allocation(8)), 0) == INVALID_DEVICE
    assert cuda.cuMemCreate(out, PAGE, ctypes.byref(Allocation()), 0) == INVALID_VALUE
    assert cuda.cuMemCreate(out, PAGE, ctypes.byref(allocation(types=2)), 0) == NOT_SUPPORTED
    assert cuda.cuMemCreate(out, 1 << 44, ctypes.byref(allocation()), 0) == OUT_OF_MEMORY
    assert cuda.cuMemAddressReserve(out, 4096, 0, 0, 0) == INVALID_VALUE


def test_a_handle_is_retained_by_an_address(cuda: Cuda, mapped: tuple[int, int]) -> None:
    """The retained handle outlives the mapping, and needs a release of its own."""
    address, stream = mapped
    handle = cuda.made("cuMemRetainAllocationHandle", address + PAGE + 5)
    cuda.ok("cuMemUnmap", address + PAGE, PAGE)
    out = ctypes.byref(ctypes.c_uint64())
    assert cuda.cuMemRetainAllocationHandle(out, address + PAGE) == INVALID_VALUE
    assert cuda.cuMemRetainAllocationHandle(out, address + 3 * PAGE) == INVALID_VALUE
    cuda.ok("cuMemMap", address + PAGE, PAGE, 0, handle, 0)
    cuda.ok("cuMemRelease", handle)
    with cuda.violating("is not a handle of memory"):
        assert cuda.cuMemRelease(handle) == INVALID_VALUE
    cuda.ok("cuStreamDestroy_v2", stream)


def test_work_crosses_adjacent_mappings(cuda: Cuda, mapped: tuple[int, int]) -> None:
    address, stream = mapped
    assert give_access(cuda, address, 2 * PAGE, READ_WRITE) == 0
    cuda.ok("cuMemsetD8Async", address, 1, 2 * PAGE, stream)
    cuda.ok("cuMemsetD8Async", address + PAGE - 5, 2, 10, stream)
    cuda.ok("cuStreamSynchronize", stream)
    assert bytes(cuda.view(address + PAGE, 6)) == b"\2" * 5 + b"\1"
    assert bytes(cuda.view(address + PAGE - 6, 6)) == b"\1" + b"\2" * 5
    got = ctypes.create_string_buffer(12)
    cuda.ok("cuMemcpyDtoH_v2", got, address + PAGE - 6, 12)
    assert got.raw == b"\1" + b"\2" * 10 + b"\1"
    cuda.ok("cuStreamDestroy_v2", stream)


def test_attributes_of_pointers_show_the_reserved_range(
    cuda: Cuda, mapped: tuple[int, int]
) -> None:
    address, stream = mapped
    which = (TYPE, IPC, START, SIZE, HANDLES)
    inside = address + PAGE + 7
    assert [cuda.attribute(inside, item) for item in which] == [2, 0, address, 4 * PAGE, 1]
    unmapped = address + 3 * PAGE
    assert [cuda.attribute(unmapped, item) for item in which] == [0, 0, address, 4 * PAGE, 0]
    assert cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), address) == INVALID_VALUE
    cuda.ok("cuStreamDestroy_v2", stream)


@pytest.mark.parametrize("flags", [None, READ])
def test_work_without_access_fails(cuda: Cuda, flags: int | None) -> None:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    address = cuda.made("cuMemAddressReserve", PAGE, 0, 0, 0)
    handle = cuda.made("cuMemCreate", PAGE, ctypes.byref(allocation()), 0)
    cuda.ok("cuMemMap", address, PAGE, 0, handle, 0)
    if flags is not None:
        assert give_access(cuda, address, PAGE, flags) == 0
        cuda.ok("cuMemcpyDtoH_v2", ctypes.create_string_buffer(4), address, 4)
    with cuda.violating("without access"):
        cuda.ok("cuMemsetD8Async", address, 1, 4, None)
    assert cuda.cuStreamSynchronize(None) == ILLEGAL_ADDRESS
    cuda.ok("cuCtxDestroy_v2", own)
    cuda.ok("cuMemUnmap", address, PAGE)  # it belongs to no context
    cuda.ok("cuMemAddressFree", address, PAGE)
    cuda.ok("cuMemRelease", handle)


def test_ranges_that_cannot_be_mapped_or_unmapped(cuda: Cuda, mapped: tuple[int, int]) -> None:
    address, stream = mapped
    handle = cuda.made("cuMemCreate", PAGE, ctypes.byref(allocation()), 0)
    assert cuda.cuMemMap(address + PAGE, PAGE, 0, handle, 0) == INVALID_VALUE  # already mapped
    assert cuda.cuMemMap(address + 4 * PAGE, PAGE, 0, handle, 0) == INVALID_VALUE  # not reserved
    # Larger than the memory.
    assert cuda.cuMemMap(address + 2 * PAGE, 2 * PAGE, 0, handle, 0) == INVALID_VALUE
    assert cuda.cuMemUnmap(address, PAGE + 4096) == INVALID_VALUE
    assert cuda.cuMemUnmap(address + 4096, PAGE) == INVALID_VALUE
    assert give_access(cuda, address, 3 * PAGE, READ_WRITE) == INVALID_VALUE
    assert give_access(cuda, address, PAGE, READ_WRITE, 9) == INVALID_DEVICE
    with cuda.violating("are mapped"):
        assert cuda.cuMemAddressFree(address, 4 * PAGE) == INVALID_VALUE
    cuda.ok("cuMemRelease", handle)
    with cuda.violating("released"):
        assert cuda.cuMemRelease(handle) == INVALID_VALUE
    with cuda.violating("is not a handle"):
        assert cuda.cuMemMap(address + 2 * PAGE, PAGE, 0, handle, 0) == INVALID_VALUE
    cuda.ok("cuStreamDestroy_v2", stream)


def test_memory_is_unmapped_while_work_uses_it(cuda: Cuda) -> None:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    address = cuda.made("cuMemAddressReserve", PAGE, 0, 0, 0)
    handle = cuda.made("cuMemCreate", PAGE, ctypes.byref(allocation()), 0)
    cuda.ok("cuMemMap", address, PAGE, 0, handle, 0)
    assert give_access(cuda, address, PAGE, READ_WRITE) == 0
    cuda.fault("cuMemsetD8Async:1=hang")
    cuda.ok("cuMemsetD8Async", address, 1, 4, None)
    with cuda.violating("unmapped while work uses it"):
        cuda.ok("cuMemUnmap", address, PAGE)
    with cuda.violating("while queued work uses it"):
        cuda.kvsim_hangs_end()
        assert cuda.cuStreamSynchronize(None) == ILLEGAL_ADDRESS
    cuda.ok("cuCtxDestroy_v2", own)
    cuda.ok("cuMemRelease", handle)
    cuda.ok("cuMemAddressFree", address, PAGE)


def test_memory_is_freed_with_its_last_handle_and_mapping() -> None:
    answer = in_process(
        """
        from tests.cuda_sim.cuda_library import allocation
        PAGE, wanted, out = 2 << 20, ctypes.byref(allocation()), ctypes.byref(ctypes.c_uint64())
        cuda.ok("cuInit", 0)
        address = cuda.made("cuMemAddressReserve", PAGE, 0, 0, 0)
        first = cuda.made("cuMemCreate", PAGE, wanted, 0)
        cuda.ok("cuMemMap", address, PAGE, 0, first, 0)
        cuda.ok("cuMemRelease", first)
        mapped = cuda.cuMemCreate(out, PAGE, wanted, 0)
        left = cuda.leaks()
        cuda.ok("cuMemUnmap", address, PAGE)
        answer([mapped, left, cuda.cuMemCreate(out, PAGE, wanted, 0), cuda.leaks()])
        """,
        hbm_bytes=PAGE,
    )
    assert answer == [
        OUT_OF_MEMORY,
        {"device_bytes": PAGE, "ranges": 1},
        0,
        {"handles": 1, "ranges": 1},
    ]


def test_another_process_imports_an_exported_handle(cuda: Cuda) -> None:
    """The importing process releases its handle, which does not free the exporter's memory."""
    handle = cuda.made("cuMemCreate", PAGE, ctypes.byref(allocation(1)), 0)
    fd = ctypes.c_int(-1)
    cuda.ok("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, 0)
    address = cuda.made("cuMemAddressReserve", PAGE, 0, 0, 0)
    cuda.ok("cuMemMap", address, PAGE, 0, handle, 0)
    cuda.view(address, 4)[:] = b"ours"
    program = f"""
        from tests.cuda_sim.cuda_library import Access, Location
        fd = os.open("/proc/{os.getpid()}/fd/{fd.value}", os.O_RDWR)
        PAGE = 2 << 20
        cuda.ok("cuInit", 0)
        cuda.primary(1)
        address = cuda.made("cuMemAddressReserve", PAGE, 0, 0, 0)
        handle = cuda.made("cuMemImportFromShareableHandle", fd, 1)
        os.close(fd)
        cuda.ok("cuMemMap", address, PAGE, 0, handle, 0)
        cuda.ok("cuMemRelease", handle)
        wanted = Access(Location(1, 1), 3)
        cuda.ok("cuMemSetAccess", address, PAGE, ctypes.byref(wanted), 1)
        got = ctypes.create_string_buffer(4)
        cuda.ok("cuMemcpyDtoH_v2", got, address, 4)
        cuda.ok("cuMemcpyHtoD_v2", address + 1, b"hei", 3)
        answer([got.raw.decode(), cuda.attribute(address, 9), cuda.violations()])
    """
    assert in_process(program) == ["ours", 1, 0]
    assert bytes(cuda.view(address, 4)) == b"ohei"
    os.close(fd.value)
    cuda.ok("cuMemUnmap", address, PAGE)
    cuda.ok("cuMemAddressFree", address, PAGE)
    cuda.ok("cuMemRelease", handle)


def test_handles_that_cannot_be_exported_or_imported(cuda: Cuda) -> None:
    private = cuda.made("cuMemCreate", PAGE, ctypes.byref(allocation(types=0)), 0)
    fd = ctypes.c_int(-1)
    assert cuda.cuMemExportToShareableHandle(ctypes.byref(fd), private, 1, 0) == INVALID_VALUE
    cuda.ok("cuMemRelease", private)
    out = ctypes.byref(ctypes.c_uint64())
    with Path(os.devnull).open("rb") as file:
        assert cuda.cuMemImportFromShareableHandle(out, file.fileno(), 1) == INVALID_VALUE
    assert cuda.cuMemImportFromShareableHandle(out, 12345, 1) == INVALID_VALUE
