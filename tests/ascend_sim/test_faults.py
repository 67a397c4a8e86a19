"""Injected faults: their syntax, and each kind of fault in each kind of call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.ascend_sim.acl_library import (
    DEVICE,
    HOST,
    HOST_TO_DEVICE,
    SIZE_MAX,
    Acl,
    Location,
    in_process,
)

TIMEOUT, CODE = 507046, 507054
N, ITEM = 512, 64
IN = (0, Location(0, DEVICE), Location(0, HOST))


@pytest.fixture
def memory_set(acl: Acl) -> Iterator[tuple[int, int, int]]:
    """Device memory, pinned memory full of ones, and a stream."""
    device, host = acl.made("aclrtMalloc", N, 0), acl.made("aclrtMallocHost", N)
    stream = acl.made("aclrtCreateStream")
    acl.ok("aclrtMemset", device, N, 0, N)
    ctypes.memset(host, 1, N)
    yield device, host, stream
    acl.ok("aclrtDestroyStreamForce", stream)
    acl.ok("aclrtFree", device)
    acl.ok("aclrtFreeHost", host)


@pytest.mark.parametrize(
    "text",
    [
        *("name", ":1=2", "name:0=2", "name:1", "name:1=", "name:1=x", "name:1=0", "name:1=2x"),
        *("name:1=sync", "name:1=sync:", "name:1=partial:0", "name:1=hang:3", "a:1=2;b"),
    ],
)
def test_invalid_specifications_are_refused(acl: Acl, text: str) -> None:
    assert acl.core.kvsim_fault_add(text.encode()) == -1
    assert acl.core.kvsim_faults_left() == 0


def test_a_fault_hits_the_nth_call_from_now(acl: Acl) -> None:
    acl.fault("aclrtGetDevice:2=5; aclrtGetDevice:3=6;aclrtSetDevice:9=hang")
    out = ctypes.byref(ctypes.c_int32())
    assert [acl.aclrtGetDevice(out) for _ in range(5)] == [0, 5, 6, 0, 0]
    assert "a fault of the test: 6" in acl.message()
    assert acl.core.kvsim_faults_left() == 1
    acl.core.kvsim_faults_clear()
    assert acl.core.kvsim_faults_left() == 0


def test_faults_are_read_from_the_environment() -> None:
    program = "answer([acl.aclInit(None), acl.aclInit(None)])"
    assert in_process(program, faults="aclInit:1=100001") == [100001, 0]


def test_a_failed_call_has_no_effect(acl: Acl) -> None:
    acl.fault("aclrtMalloc:1=207001")
    assert acl.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0) == 207001
    assert "device_bytes" not in acl.leaks()


def filled(acl: Acl, device: int) -> int:
    return sum(acl.view(device, N))


@pytest.mark.parametrize(("kind", "moved"), [("sync", 0), ("partial", N // 2)])
def test_faults_of_a_copy_on_a_stream(
    acl: Acl, memory_set: tuple[int, int, int], kind: str, moved: int
) -> None:
    device, host, stream = memory_set
    acl.fault(f"aclrtMemcpyAsync:1={kind}:{CODE}")
    acl.ok("aclrtMemcpyAsync", device, N, host, N, HOST_TO_DEVICE, stream)
    assert acl.aclrtSynchronizeStream(stream) == CODE
    assert filled(acl, device) == moved
    acl.ok("aclrtSynchronizeStream", stream)


@pytest.mark.parametrize(("kind", "moved"), [("sync", 0), ("partial", N // 2)])
def test_faults_of_a_synchronous_copy(
    acl: Acl, memory_set: tuple[int, int, int], kind: str, moved: int
) -> None:
    device, host, _ = memory_set
    acl.fault(f"aclrtMemcpy:1={kind}:{CODE}")
    assert acl.aclrtMemcpy(device, N, host, N, HOST_TO_DEVICE) == CODE
    assert filled(acl, device) == moved


def test_faults_of_batches(acl: Acl, memory_set: tuple[int, int, int]) -> None:
    device, host, stream = memory_set
    pairs = [(device + i * ITEM, host + i * ITEM, ITEM) for i in range(N // ITEM)]
    acl.fault(f"aclrtMemcpyBatchAsync:1=sync:{CODE};aclrtMemcpyBatchAsync:2=partial:{CODE}")
    assert acl.batch(pairs, [IN], stream=stream) == (0, SIZE_MAX)
    assert acl.aclrtSynchronizeStream(stream) == CODE
    assert filled(acl, device) == 0
    assert acl.batch(pairs, [IN], stream=stream) == (CODE, SIZE_MAX)
    acl.ok("aclrtSynchronizeStream", stream)
    assert filled(acl, device) == N // 2  # items that were issued run although the call has failed
    acl.ok("aclrtMemset", device, N, 0, N)
    acl.fault(f"aclrtMemcpyBatch:1=partial:{CODE};aclrtMemcpyBatch:2=sync:{CODE}")
    assert acl.batch(pairs, [IN]) == (CODE, SIZE_MAX)
    assert filled(acl, device) == N // 2
    assert acl.batch(pairs, [IN]) == (CODE, SIZE_MAX)
    assert filled(acl, device) == N // 2


@pytest.mark.parametrize("name", ["aclrtMemcpyAsync", "aclrtMemcpyBatchAsync", "aclrtMemsetAsync"])
def test_an_abort_ends_work_that_hangs(
    acl: Acl, memory_set: tuple[int, int, int], name: str
) -> None:
    device, host, stream = memory_set
    acl.fault(f"{name}:1=hang")
    if name == "aclrtMemcpyBatchAsync":
        assert acl.batch([(device, host, N)], [IN], stream=stream)[0] == 0
    elif name == "aclrtMemcpyAsync":
        acl.ok(name, device, N, host, N, HOST_TO_DEVICE, stream)
    else:
        acl.ok(name, device, N, 1, N, stream)
    assert acl.aclrtSynchronizeStreamWithTimeout(stream, 5) == TIMEOUT
    acl.ok("aclrtStreamAbort", stream)
    acl.ok("aclrtSynchronizeStream", stream)
    assert filled(acl, device) == 0


def test_a_synchronization_may_fail(acl: Acl, memory_set: tuple[int, int, int]) -> None:
    *_, stream = memory_set
    acl.fault(f"aclrtSynchronizeStreamWithTimeout:1={CODE}")
    assert acl.aclrtSynchronizeStreamWithTimeout(stream, 100) == CODE
    acl.ok("aclrtSynchronizeStreamWithTimeout", stream, 100)
