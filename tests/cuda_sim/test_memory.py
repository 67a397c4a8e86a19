"""Memory of devices and of the host: limits, frees, registration, and attributes of pointers."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal

import pytest

from tests.cuda_sim.cuda_library import Cuda, in_process

INVALID_VALUE, OUT_OF_MEMORY, REGISTERED, NOT_REGISTERED = 1, 2, 712, 713
PORTABLE, MAPPED = 1, 2
TYPE, MANAGED, DEVICE, IPC, START, SIZE, HANDLES = 2, 8, 9, 10, 11, 12, 14
HOST_MEMORY, DEVICE_MEMORY = 1, 2
PAGE = 4096


def pages(count: int) -> tuple[int, mmap.mmap]:
    """Return the address of page-aligned memory, and its owner."""
    owner = mmap.mmap(-1, count * PAGE)
    return ctypes.addressof(ctypes.c_char.from_buffer(owner)), owner


def test_freed_memory_is_gone_and_its_address_does_not_return(cuda: Cuda) -> None:
    seen = set()
    for _ in range(5):
        memory = cuda.made("cuMemAlloc_v2", PAGE)
        assert memory not in seen
        seen.add(memory)
        with cuda.violating("not the beginning"):
            assert cuda.cuMemFree_v2(memory + 64) == INVALID_VALUE
        cuda.ok("cuMemFree_v2", memory)
        with cuda.violating("given back before"):
            assert cuda.cuMemFree_v2(memory) == INVALID_VALUE
    assert cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_void_p()), 0) == INVALID_VALUE
    cuda.ok("cuMemFree_v2", 0)
    cuda.ok("cuMemFreeHost", None)


def test_host_and_device_are_freed_by_their_own_calls(cuda: Cuda) -> None:
    device, host = cuda.made("cuMemAlloc_v2", 64), cuda.made("cuMemHostAlloc", 64, PORTABLE)
    with cuda.violating("given back"):
        assert cuda.cuMemFreeHost(device) == INVALID_VALUE
    with cuda.violating("given back"):
        assert cuda.cuMemFree_v2(host) == INVALID_VALUE
    cuda.ok("cuMemFree_v2", device)
    cuda.ok("cuMemFreeHost", host)


@pytest.mark.parametrize("freed", [False, True])
def test_the_host_cannot_read_device_memory(freed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise a sanitizer would exit with a code of its own.
    for name in ("ASAN_OPTIONS", "TSAN_OPTIONS"):
        monkeypatch.setenv(name, f"{os.environ.get(name, '')}:handle_segv=0")
    code, _ = in_process(f"""
        cuda.ok("cuInit", 0)
        cuda.primary()
        memory = cuda.made("cuMemAlloc_v2", 4096)
        {freed} and cuda.cuMemFree_v2(memory)
        ctypes.string_at(memory, 1)
    """)
    assert code == -signal.SIGSEGV


def test_device_memory_is_limited() -> None:
    answer = in_process(
        """
        cuda.ok("cuInit", 0)
        cuda.primary()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        out = ctypes.byref(ctypes.c_void_p())
        first = cuda.made("cuMemAlloc_v2", 2 << 20)
        cuda.ok("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        refused = cuda.cuMemAlloc_v2(out, 3 << 20)
        cuda.ok("cuMemFree_v2", first)
        answer([free.value, total.value, refused, cuda.cuMemAlloc_v2(out, 3 << 20)])
        """,
        hbm_bytes=4 << 20,
    )
    assert answer == [2 << 20, 4 << 20, OUT_OF_MEMORY, 0]


def test_memory_of_the_host_is_registered_once(cuda: Cuda) -> None:
    address, _owner = pages(3)
    cuda.ok("cuMemHostRegister_v2", address + 100, 100, PORTABLE)
    assert cuda.cuMemHostRegister_v2(address, PAGE, PORTABLE) == REGISTERED
    assert cuda.cuMemHostRegister_v2(address + 1000, 10, PORTABLE) == REGISTERED  # on the same page
    cuda.ok("cuMemHostRegister_v2", address + PAGE, PAGE, PORTABLE | MAPPED)
    assert cuda.cuMemHostUnregister(address) == NOT_REGISTERED
    cuda.ok("cuMemHostUnregister", address + 100)
    assert cuda.cuMemHostUnregister(address + 100) == NOT_REGISTERED
    cuda.ok("cuMemHostUnregister", address + PAGE)


def test_ranges_that_cannot_be_registered(cuda: Cuda) -> None:
    device, host = cuda.made("cuMemAlloc_v2", PAGE), cuda.made("cuMemHostAlloc", PAGE, 0)
    address, owner = pages(1)
    assert cuda.cuMemHostRegister_v2(device, PAGE, PORTABLE) == INVALID_VALUE
    assert cuda.cuMemHostRegister_v2(host, PAGE, PORTABLE) == REGISTERED
    assert cuda.cuMemHostRegister_v2(address, 0, PORTABLE) == INVALID_VALUE
    assert cuda.cuMemHostRegister_v2(address, PAGE, 16) == INVALID_VALUE
    assert cuda.cuMemHostUnregister(host) == NOT_REGISTERED
    del owner  # drops the pages, too
    assert cuda.cuMemHostRegister_v2(address, PAGE, PORTABLE) == INVALID_VALUE
    cuda.ok("cuMemFree_v2", device)
    cuda.ok("cuMemFreeHost", host)


def test_attributes_of_pointers(cuda: Cuda) -> None:
    device, host = cuda.made("cuMemAlloc_v2", 100), cuda.made("cuMemHostAlloc", 64, PORTABLE)
    which = (TYPE, MANAGED, DEVICE, IPC, HANDLES)
    assert [cuda.attribute(device + 99, item) for item in which] == [DEVICE_MEMORY, 0, 0, 1, 0]
    assert cuda.attribute(device + 99, START) == device
    assert cuda.attribute(device + 99, SIZE) == 100
    assert cuda.attribute(host, TYPE) == HOST_MEMORY
    address, _owner = pages(2)
    assert [cuda.attribute(address, item) for item in (*which, START, SIZE)] == [
        0
    ] * 7  # the last one is success
    cuda.ok("cuMemHostRegister_v2", address, PAGE, PORTABLE)
    assert cuda.attribute(address, TYPE) == HOST_MEMORY
    assert cuda.attribute(address + PAGE, TYPE) == 0
    cuda.ok("cuMemHostUnregister", address)
    cuda.ok("cuMemFree_v2", device)
    assert cuda.attribute(device, TYPE) == 0
    cuda.ok("cuMemFreeHost", host)


def test_managed_memory_is_recognized(cuda: Cuda) -> None:
    memory = cuda.made("cuMemAllocManaged", 64, 1)
    assert [cuda.attribute(memory, item) for item in (TYPE, MANAGED, IPC)] == [DEVICE_MEMORY, 1, 0]
    ctypes.memset(memory, 1, 64)
    cuda.ok("cuMemFree_v2", memory)


def test_devices_have_their_own_memory(cuda: Cuda) -> None:
    before = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(before))
    cuda.primary(3)
    memory = cuda.made("cuMemAlloc_v2", 64)
    assert cuda.attribute(memory, DEVICE) == 3
    cuda.ok("cuMemFree_v2", memory)
    cuda.ok("cuCtxSetCurrent", before)
    cuda.ok("cuDevicePrimaryCtxRelease_v2", 3)


def test_new_memory_is_not_zero(cuda: Cuda) -> None:
    memory = cuda.made("cuMemAlloc_v2", 64)
    assert bytes(cuda.view(memory, 64)) == b"\xa5" * 64
    cuda.ok("cuMemFree_v2", memory)


def test_pinned_memory_is_freed_while_work_uses_it(cuda: Cuda) -> None:
    device, host = cuda.made("cuMemAlloc_v2", 64), cuda.made("cuMemHostAlloc", 64, PORTABLE)
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    target, stream = cuda.made("cuMemAlloc_v2", 64), cuda.made("cuStreamCreate", 1)
    cuda.fault("cuMemcpyAsync:1=hang")
    cuda.ok("cuMemcpyAsync", target, host, 64, stream)
    with cuda.violating("given back while queued work uses it"):
        cuda.ok("cuMemFreeHost", host)
    with cuda.violating("while queued work uses it"):
        cuda.kvsim_hangs_end()
        assert cuda.cuStreamSynchronize(stream) == 700
    cuda.ok("cuCtxDestroy_v2", own)
    cuda.ok("cuMemFree_v2", device)
