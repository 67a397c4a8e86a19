"""Copies and fills, with and without a stream: what is refused, and when errors show."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.ascend_sim.acl_library import (
    DEFAULT,
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    HOST_TO_HOST,
    Acl,
    Memories,
    memories,
)

INVALID, PARAM, UNSUPPORTED, DMA, TIMEOUT = 100000, 107000, 207000, 507013, 507046
N = 4096


@pytest.fixture
def at(acl: Acl) -> Iterator[Memories]:
    with memories(acl, N) as at:
        yield at


def test_there_and_back(acl: Acl, at: Memories) -> None:
    ctypes.memmove(at.pageable, bytes(range(256)) * 16, N)
    acl.ok("aclrtMemcpy", at.device, N, at.pageable, N, HOST_TO_DEVICE)
    assert bytes(acl.view(at.device, N)) == bytes(range(256)) * 16
    acl.ok("aclrtMemcpyAsync", at.pinned, N, at.device, N, DEVICE_TO_HOST, at.stream)
    acl.ok("aclrtSynchronizeStream", at.stream)
    assert ctypes.string_at(at.pinned, N) == bytes(range(256)) * 16
    acl.ok("aclrtMemcpyAsync", at.device, 8, at.device + 256 - 8, 8, DEFAULT, at.stream)
    acl.ok("aclrtSynchronizeStream", at.stream)
    assert bytes(acl.view(at.device, 8)) == bytes(range(248, 256))


@pytest.mark.parametrize(
    ("capacity", "nbytes", "kind", "code"),
    [
        (N, 0, HOST_TO_DEVICE, PARAM),
        (N - 1, N, HOST_TO_DEVICE, PARAM),
        (N, N, 8, INVALID),
        (N, N, -1, INVALID),
        (N, N, DEVICE_TO_HOST, PARAM),
        (N, N, HOST_TO_HOST, PARAM),
        (N, N, DEVICE_TO_DEVICE, PARAM),
        (N, N, DEFAULT, 0),
    ],
)
def test_arguments(
    acl: Acl, at: Memories, capacity: int, nbytes: int, kind: int, code: int
) -> None:
    assert acl.aclrtMemcpy(at.device, capacity, at.pinned, nbytes, kind) == code
    arguments = (at.device, capacity, at.pinned, nbytes, kind, at.stream)
    assert acl.aclrtMemcpyAsync(*arguments) == code
    acl.ok("aclrtSynchronizeStream", at.stream)


def test_ranges_end_with_their_memory(acl: Acl, at: Memories) -> None:
    for target, source in ((at.device + 1, at.pinned), (at.device, at.pinned + 1)):
        assert acl.aclrtMemcpy(target, N, source, N, HOST_TO_DEVICE) == PARAM
        assert "is partly outside of its memory" in acl.message()
    assert acl.aclrtMemcpy(at.device + N, N, at.pinned, 8, HOST_TO_DEVICE) == PARAM
    assert "nobody's device memory" in acl.message()
    assert acl.aclrtMemcpy(None, N, at.pinned, N, HOST_TO_DEVICE) == INVALID


def test_from_host_to_host_there_is_no_stream(acl: Acl, at: Memories) -> None:
    acl.ok("aclrtMemcpy", at.pageable, N, at.pinned, N, HOST_TO_HOST)
    arguments = (at.pageable, N, at.pinned, N, HOST_TO_HOST, at.stream)
    assert acl.aclrtMemcpyAsync(*arguments) == UNSUPPORTED


def test_only_pinned_memory_is_copied_later(acl: Acl, at: Memories) -> None:
    acl.set("latency_us", 3_600_000_000)
    acl.ok("aclrtMemcpyAsync", at.device, N, at.pinned, N, HOST_TO_DEVICE, at.stream)
    assert acl.aclrtSynchronizeStreamWithTimeout(at.stream, 1) == TIMEOUT
    acl.ok("aclrtStreamAbort", at.stream)
    acl.set("latency_us", 0)
    ctypes.memset(at.pageable, 9, N)
    acl.ok("aclrtMemcpyAsync", at.device, N, at.pageable, N, HOST_TO_DEVICE, at.stream)
    assert bytes(acl.view(at.device, N)) == b"\x09" * N  # before any synchronization


def test_memory_that_is_freed_too_early_shows_at_the_end(acl: Acl, at: Memories) -> None:
    gate = acl.made("aclrtCreateEvent")
    other, memory = acl.made("aclrtCreateStream"), acl.made("aclrtMalloc", N, 0)
    acl.ok("aclrtStreamWaitEvent", at.stream, gate)
    acl.ok("aclrtMemcpyAsync", memory, N, at.pinned, N, HOST_TO_DEVICE, at.stream)
    acl.ok("aclrtFree", memory)
    acl.ok("aclrtRecordEvent", gate, other)
    assert acl.aclrtSynchronizeStream(at.stream) == DMA
    acl.ok("aclrtSynchronizeStream", at.stream)
    acl.ok("aclrtDestroyStream", other)
    acl.ok("aclrtDestroyEvent", gate)


def test_fills(acl: Acl, at: Memories) -> None:
    acl.ok("aclrtMemset", at.device, N, 1, N)
    acl.ok("aclrtMemsetAsync", at.device + 8, N - 8, 2, 8, at.stream)
    acl.ok("aclrtSynchronizeStream", at.stream)
    assert bytes(acl.view(at.device, 24)) == b"\1" * 8 + b"\2" * 8 + b"\1" * 8
    assert acl.aclrtMemset(at.device, N, 1, N + 1) == PARAM
    assert acl.aclrtMemset(at.device, 2 * N, 1, N + 1) == PARAM
    assert acl.aclrtMemsetAsync(at.device, N, 1, 0, at.stream) == PARAM


def test_two_devices_need_peer_access(acl: Acl, at: Memories) -> None:
    with acl.on_device(1):
        far = acl.made("aclrtMalloc", N, 0)
        arguments = (far, N, at.device, N, DEVICE_TO_DEVICE)
        assert acl.aclrtMemcpy(*arguments) == PARAM
        assert "from device 0 to 1 without peer access" in acl.message()
        acl.ok("aclrtDeviceEnablePeerAccess", 0, 0)
        acl.ok("aclrtMemcpy", *arguments)
        acl.ok("aclrtDeviceDisablePeerAccess", 0)
        assert acl.aclrtMemcpy(*arguments) == PARAM
        acl.ok("aclrtFree", far)


def test_a_stream_copies_for_its_device(acl: Acl, at: Memories) -> None:
    with acl.on_device(1):
        stream = acl.made("aclrtCreateStream")
        arguments = (at.device, N, at.pinned, N, HOST_TO_DEVICE)
        assert acl.aclrtMemcpyAsync(*arguments, stream) == PARAM
        acl.ok("aclrtDestroyStream", stream)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_bandwidth(acl: Acl, at: Memories, asynchronous: bool) -> None:
    start, end = (acl.made("aclrtCreateEventExWithFlag", 0x8) for _ in range(2))
    acl.set("bandwidth", N * 100)  # 10 ms
    acl.ok("aclrtRecordEvent", start, at.stream)
    acl.ok("aclrtSynchronizeStream", at.stream)
    if asynchronous:
        acl.ok("aclrtMemcpyAsync", at.device, N, at.pinned, N, HOST_TO_DEVICE, at.stream)
    else:
        acl.ok("aclrtMemcpy", at.device, N, at.pinned, N, HOST_TO_DEVICE)
    acl.ok("aclrtRecordEvent", end, at.stream)
    acl.ok("aclrtSynchronizeStream", at.stream)
    elapsed = ctypes.c_float()
    acl.ok("aclrtEventElapsedTime", ctypes.byref(elapsed), start, end)
    assert elapsed.value >= 10
    acl.ok("aclrtDestroyEvent", start)
    acl.ok("aclrtDestroyEvent", end)
