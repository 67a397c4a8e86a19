"""Memory of devices and of the host: limits, frees, and allowed accesses."""

from __future__ import annotations

import ctypes
import mmap
import signal
from pathlib import Path

import pytest

from tests.ascend_sim.acl_library import (
    DEFAULT,
    DEVICE,
    HOST,
    UNREGISTERED,
    Acl,
    Attributes,
    in_process,
)

INVALID, PARAM, UNALIGNED, UNSUPPORTED = 100000, 107000, 107008, 207000
NO_MEMORY, REGISTERED, NOT_REGISTERED = 207001, 507910, 507911
MAPPED, PINNED = 0x2, 0x10000000
PAGE = 4096


def pages(count: int) -> tuple[int, mmap.mmap]:
    """Return the address of page-aligned memory, and its owner."""
    owner = mmap.mmap(-1, count * PAGE)
    return ctypes.addressof(ctypes.c_char.from_buffer(owner)), owner


def test_invalid_sizes_and_policies_are_refused(acl: Acl) -> None:
    out = ctypes.byref(ctypes.c_void_p())
    assert acl.aclrtMalloc(out, 0, 0) == INVALID
    assert acl.aclrtMalloc(None, 1, 0) == INVALID
    assert acl.aclrtMalloc(out, 1, 8) == INVALID
    assert acl.aclrtMallocHost(out, 0) == INVALID
    large = acl.made("aclrtMalloc", 1 << 21, 0)
    assert large % (2 << 20) == 0
    acl.ok("aclrtFree", large)


def test_freed_memory_is_gone_and_its_address_is_not_reused(acl: Acl) -> None:
    seen = set()
    for _ in range(20):
        memory = acl.made("aclrtMalloc", PAGE, 0)
        assert memory not in seen
        seen.add(memory)
        assert acl.aclrtFree(memory + 64) == PARAM
        acl.ok("aclrtFree", memory)
        assert acl.aclrtFree(memory) == PARAM
        assert acl.aclrtPointerGetAttributes(memory, ctypes.byref(Attributes())) == PARAM


def test_host_and_device_are_freed_by_their_own_calls(acl: Acl) -> None:
    device, host = acl.made("aclrtMalloc", 64, 0), acl.made("aclrtMallocHost", 64)
    assert acl.aclrtFreeHost(device) == PARAM
    assert acl.aclrtFree(host) == PARAM
    acl.ok("aclrtFree", device)
    acl.ok("aclrtFreeHost", host)


def test_new_memory_is_not_zero(acl: Acl) -> None:
    memory = acl.made("aclrtMalloc", 64, 0)
    assert bytes(acl.view(memory, 64)) == b"\xa5" * 64
    acl.ok("aclrtFree", memory)


@pytest.mark.parametrize("freed", [False, True])
def test_the_host_cannot_read_device_memory(freed: bool) -> None:
    code, _ = in_process(f"""
        acl.aclInit(None)
        acl.ok("aclrtSetDevice", 0)
        memory = acl.made("aclrtMalloc", 4096, 0)
        {freed} and acl.aclrtFree(memory)
        ctypes.string_at(memory, 1)
    """)
    assert code == -signal.SIGSEGV


def test_views_outlive_the_memory(acl: Acl) -> None:
    memory = acl.made("aclrtMalloc", 64, 0)
    view = acl.view(memory + 32, 32)
    acl.ok("aclrtMemset", memory, 64, 3, 64)
    acl.ok("aclrtFree", memory)
    assert bytes(view) == b"\3" * 32
    assert acl.core.kvsim_host_view(memory) is None


def test_device_memory_is_limited(tmp_path: Path) -> None:
    answer = in_process(
        """
        acl.aclInit(None)
        acl.ok("aclrtSetDevice", 0)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        out = ctypes.byref(ctypes.c_void_p())
        first = acl.made("aclrtMallocAlign32", 2 << 20, 0)  # aclrtMalloc takes another page
        acl.ok("aclrtGetMemInfo", 1, ctypes.byref(free), ctypes.byref(total))
        refused = acl.aclrtMalloc(out, 3 << 20, 0)
        message = acl.message()
        acl.ok("aclrtSetDevice", 1)
        elsewhere = acl.aclrtMalloc(out, 3 << 20, 0)
        acl.ok("aclrtSetDevice", 0)
        acl.ok("aclrtFree", first)
        again = acl.aclrtMalloc(out, 3 << 20, 0)
        answer([free.value, total.value, refused, message, elsewhere, again])
        """,
        dir=tmp_path,  # other processes of a run share the memory of devices
        hbm_bytes=4 << 20,
    )
    assert answer[:3] == [2 << 20, 4 << 20, NO_MEMORY]
    assert "3145728 bytes of memory of device 0" in answer[3]
    assert answer[4:] == [0, 0]


def test_processes_share_the_memory_of_a_device(tmp_path: Path) -> None:
    program = """
        from tests.ascend_sim.acl_library import in_process
        acl.aclInit(None)
        acl.ok("aclrtSetDevice", 0)
        acl.made("aclrtMallocAlign32", 2 << 20, 0)
        other = '''
        acl.aclInit(None)
        acl.ok("aclrtSetDevice", 0)
        out = ctypes.byref(ctypes.c_void_p())
        answer([acl.aclrtMalloc(out, 2 << 20, 0), acl.aclrtMallocAlign32(out, 2 << 20, 0)])
        '''
        first = in_process(other)
        answer([first, acl.aclrtMallocAlign32(ctypes.byref(ctypes.c_void_p()), 2 << 20, 0)])
    """
    settings = {"dir": tmp_path, "hbm_bytes": 4 << 20}
    assert in_process(program, **settings) == [[NO_MEMORY, 0], 0]


def test_the_location_of_a_pointer_is_known(acl: Acl) -> None:
    address, owner = pages(2)
    with acl.on_device(3):
        device, host = acl.made("aclrtMalloc", 64, 0), acl.made("aclrtMallocHost", 64)
        assert acl.location(device + 63) == (DEVICE, 3)
        assert acl.location(host + 63) == (HOST, 0)
        acl.ok("aclrtFree", device)
        acl.ok("aclrtFreeHost", host)
    assert acl.location(address) == (UNREGISTERED, 0)
    acl.ok("aclrtHostRegisterV2", address, PAGE, MAPPED)
    assert acl.location(address) == (HOST, 0)
    assert acl.location(address + PAGE) == (UNREGISTERED, 0)
    acl.ok("aclrtHostUnregister", address)
    assert acl.location(address) == (UNREGISTERED, 0)
    del owner


def test_before_85_pageable_memory_is_host_memory() -> None:
    answer = in_process(
        """
        acl.aclInit(None)
        acl.ok("aclrtSetDevice", 0)
        answer(acl.location(ctypes.addressof(ctypes.create_string_buffer(8))))
        """,
        "8.1",
    )
    assert answer == [HOST, 0]


def test_host_memory_is_registered_in_whole_pages_once(acl: Acl) -> None:
    address, owner = pages(4)
    pinned, device = acl.made("aclrtMallocHost", PAGE), acl.made("aclrtMalloc", PAGE, 0)
    register = acl.aclrtHostRegisterV2
    assert register(address + 64, PAGE, PINNED) == UNALIGNED
    assert register(address, 0, PINNED) == PARAM
    assert [register(address, PAGE, flags) for flags in (0, 1, 0x4, 0x8)] == [PARAM] * 4
    assert register(pinned, PAGE, PINNED) == REGISTERED
    assert register(device, PAGE, PINNED) == PARAM
    acl.ok("aclrtHostRegisterV2", address + PAGE, 2 * PAGE, MAPPED | PINNED)
    assert register(address + 2 * PAGE, PAGE, PINNED) == REGISTERED
    assert register(address, 2 * PAGE, PINNED) == REGISTERED
    assert acl.aclrtHostUnregister(address + 2 * PAGE) == NOT_REGISTERED
    acl.ok("aclrtHostUnregister", address + PAGE)
    assert acl.aclrtHostUnregister(address + PAGE) == NOT_REGISTERED
    out = ctypes.c_void_p()
    assert acl.aclrtHostRegister(address, PAGE, 4, ctypes.byref(out)) == UNSUPPORTED
    acl.ok("aclrtHostRegister", address, PAGE, 0, ctypes.byref(out))
    assert acl.aclrtMemcpy(out, PAGE, pinned, PAGE, DEFAULT) == PARAM
    acl.ok("aclrtHostUnregister", address)
    acl.ok("aclrtFreeHost", pinned)
    acl.ok("aclrtFree", device)
    del owner
