"""Copies and fills, with and without a stream: refusals, and the time at which errors appear."""

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
def memory_set(acl: Acl) -> Iterator[Memories]:
    with memories(acl, N) as memory_set:
        yield memory_set


def test_bytes_are_copied_in_both_directions(acl: Acl, memory_set: Memories) -> None:
    ctypes.memmove(memory_set.pageable, bytes(range(256)) * 16, N)
    acl.ok("aclrtMemcpy", memory_set.device, N, memory_set.pageable, N, HOST_TO_DEVICE)
    assert bytes(acl.view(memory_set.device, N)) == bytes(range(256)) * 16
    acl.ok(
        "aclrtMemcpyAsync",
        memory_set.pinned,
        N,
        memory_set.device,
        N,
        DEVICE_TO_HOST,
        memory_set.stream,
    )
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    assert ctypes.string_at(memory_set.pinned, N) == bytes(range(256)) * 16
    acl.ok(
        "aclrtMemcpyAsync",
        memory_set.device,
        8,
        memory_set.device + 256 - 8,
        8,
        DEFAULT,
        memory_set.stream,
    )
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    assert bytes(acl.view(memory_set.device, 8)) == bytes(range(248, 256))


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
def test_invalid_arguments_are_refused(
    acl: Acl, memory_set: Memories, capacity: int, nbytes: int, kind: int, code: int
) -> None:
    assert acl.aclrtMemcpy(memory_set.device, capacity, memory_set.pinned, nbytes, kind) == code
    arguments = (memory_set.device, capacity, memory_set.pinned, nbytes, kind, memory_set.stream)
    assert acl.aclrtMemcpyAsync(*arguments) == code
    acl.ok("aclrtSynchronizeStream", memory_set.stream)


def test_ranges_beyond_their_memory_are_refused(acl: Acl, memory_set: Memories) -> None:
    for target, source in (
        (memory_set.device + 1, memory_set.pinned),
        (memory_set.device, memory_set.pinned + 1),
    ):
        assert acl.aclrtMemcpy(target, N, source, N, HOST_TO_DEVICE) == PARAM
        assert "is partly outside of its memory" in acl.message()
    assert acl.aclrtMemcpy(memory_set.device + N, N, memory_set.pinned, 8, HOST_TO_DEVICE) == PARAM
    assert "is not device memory" in acl.message()
    assert acl.aclrtMemcpy(None, N, memory_set.pinned, N, HOST_TO_DEVICE) == INVALID


def test_copies_from_host_to_host_refuse_a_stream(acl: Acl, memory_set: Memories) -> None:
    acl.ok("aclrtMemcpy", memory_set.pageable, N, memory_set.pinned, N, HOST_TO_HOST)
    arguments = (memory_set.pageable, N, memory_set.pinned, N, HOST_TO_HOST, memory_set.stream)
    assert acl.aclrtMemcpyAsync(*arguments) == UNSUPPORTED


def test_only_pinned_memory_is_copied_asynchronously(acl: Acl, memory_set: Memories) -> None:
    acl.set("latency_us", 3_600_000_000)
    acl.ok(
        "aclrtMemcpyAsync",
        memory_set.device,
        N,
        memory_set.pinned,
        N,
        HOST_TO_DEVICE,
        memory_set.stream,
    )
    assert acl.aclrtSynchronizeStreamWithTimeout(memory_set.stream, 1) == TIMEOUT
    acl.ok("aclrtStreamAbort", memory_set.stream)
    acl.set("latency_us", 0)
    ctypes.memset(memory_set.pageable, 9, N)
    acl.ok(
        "aclrtMemcpyAsync",
        memory_set.device,
        N,
        memory_set.pageable,
        N,
        HOST_TO_DEVICE,
        memory_set.stream,
    )
    assert bytes(acl.view(memory_set.device, N)) == b"\x09" * N  # before any synchronization


def test_synchronization_reports_memory_that_was_freed_too_early(
    acl: Acl, memory_set: Memories
) -> None:
    gate = acl.made("aclrtCreateEvent")
    other, memory = acl.made("aclrtCreateStream"), acl.made("aclrtMalloc", N, 0)
    acl.ok("aclrtStreamWaitEvent", memory_set.stream, gate)
    acl.ok("aclrtMemcpyAsync", memory, N, memory_set.pinned, N, HOST_TO_DEVICE, memory_set.stream)
    acl.ok("aclrtFree", memory)
    acl.ok("aclrtRecordEvent", gate, other)
    assert acl.aclrtSynchronizeStream(memory_set.stream) == DMA
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    acl.ok("aclrtDestroyStream", other)
    acl.ok("aclrtDestroyEvent", gate)


def test_memory_is_filled_inside_its_bounds(acl: Acl, memory_set: Memories) -> None:
    acl.ok("aclrtMemset", memory_set.device, N, 1, N)
    acl.ok("aclrtMemsetAsync", memory_set.device + 8, N - 8, 2, 8, memory_set.stream)
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    assert bytes(acl.view(memory_set.device, 24)) == b"\1" * 8 + b"\2" * 8 + b"\1" * 8
    assert acl.aclrtMemset(memory_set.device, N, 1, N + 1) == PARAM
    assert acl.aclrtMemset(memory_set.device, 2 * N, 1, N + 1) == PARAM
    assert acl.aclrtMemsetAsync(memory_set.device, N, 1, 0, memory_set.stream) == PARAM


def test_two_devices_need_peer_access(acl: Acl, memory_set: Memories) -> None:
    with acl.on_device(1):
        far = acl.made("aclrtMalloc", N, 0)
        arguments = (far, N, memory_set.device, N, DEVICE_TO_DEVICE)
        assert acl.aclrtMemcpy(*arguments) == PARAM
        assert "from device 0 to 1 without peer access" in acl.message()
        acl.ok("aclrtDeviceEnablePeerAccess", 0, 0)
        acl.ok("aclrtMemcpy", *arguments)
        acl.ok("aclrtDeviceDisablePeerAccess", 0)
        assert acl.aclrtMemcpy(*arguments) == PARAM
        acl.ok("aclrtFree", far)


def test_a_stream_copies_for_its_device(acl: Acl, memory_set: Memories) -> None:
    with acl.on_device(1):
        stream = acl.made("aclrtCreateStream")
        arguments = (memory_set.device, N, memory_set.pinned, N, HOST_TO_DEVICE)
        assert acl.aclrtMemcpyAsync(*arguments, stream) == PARAM
        acl.ok("aclrtDestroyStream", stream)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_bandwidth_limits_copies(acl: Acl, memory_set: Memories, asynchronous: bool) -> None:
    start, end = (acl.made("aclrtCreateEventExWithFlag", 0x8) for _ in range(2))
    acl.set("bandwidth", N * 100)  # 10 ms
    acl.ok("aclrtRecordEvent", start, memory_set.stream)
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    if asynchronous:
        acl.ok(
            "aclrtMemcpyAsync",
            memory_set.device,
            N,
            memory_set.pinned,
            N,
            HOST_TO_DEVICE,
            memory_set.stream,
        )
    else:
        acl.ok("aclrtMemcpy", memory_set.device, N, memory_set.pinned, N, HOST_TO_DEVICE)
    acl.ok("aclrtRecordEvent", end, memory_set.stream)
    acl.ok("aclrtSynchronizeStream", memory_set.stream)
    elapsed = ctypes.c_float()
    acl.ok("aclrtEventElapsedTime", ctypes.byref(elapsed), start, end)
    assert elapsed.value >= 10
    acl.ok("aclrtDestroyEvent", start)
    acl.ok("aclrtDestroyEvent", end)
