"""Streams, events and copies: order, completion and waits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.cuda_sim.cuda_library import Cuda, in_thread

INVALID_VALUE, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 1, 400, 600, 700
N = 8192


class Objects(NamedTuple):
    """Device, pinned and pageable memory of one size, and two streams."""

    device: int
    pinned: int
    pageable: int
    stream: int
    other: int


@pytest.fixture
def objects(cuda: Cuda) -> Iterator[Objects]:
    owner = ctypes.create_string_buffer(N)
    places = Objects(
        cuda.made("cuMemAlloc_v2", N),
        cuda.made("cuMemHostAlloc", N, 1),
        ctypes.addressof(owner),
        cuda.made("cuStreamCreate", 1),
        cuda.made("cuStreamCreate", 1),
    )
    yield places
    cuda.ok("cuStreamDestroy_v2", places.stream)
    cuda.ok("cuStreamDestroy_v2", places.other)
    cuda.ok("cuMemFree_v2", places.device)
    cuda.ok("cuMemFreeHost", places.pinned)


def test_bytes_go_there_and_back(cuda: Cuda, objects: Objects) -> None:
    ctypes.memset(objects.pinned, 7, N)
    cuda.ok("cuMemcpyAsync", objects.device, objects.pinned, N, objects.stream)
    cuda.ok("cuMemcpyAsync", objects.device + 10, objects.device + 5000, 100, objects.stream)
    cuda.ok("cuMemsetD8Async", objects.device, 3, 10, objects.stream)
    cuda.ok("cuStreamSynchronize", objects.stream)
    assert bytes(cuda.view(objects.device, N)) == b"\3" * 10 + b"\7" * (N - 10)
    cuda.ok("cuMemcpyDtoH_v2", objects.pageable, objects.device, N)
    assert ctypes.string_at(objects.pageable, N) == b"\3" * 10 + b"\7" * (N - 10)
    ctypes.memset(objects.pageable, 9, N)
    cuda.ok("cuMemcpyHtoD_v2", objects.device + 1, objects.pageable, 5)
    assert bytes(cuda.view(objects.device, 7)) == b"\3" + b"\t" * 5 + b"\3"


def test_pageable_memory_is_read_by_the_call_and_written_before_it_returns(
    cuda: Cuda, objects: Objects
) -> None:
    ctypes.memset(objects.pageable, 5, N)
    cuda.fault("cuMemcpyAsync:1=hang")
    cuda.ok("cuMemcpyAsync", objects.device, objects.pageable, N, objects.stream)
    ctypes.memset(objects.pageable, 6, N)
    cuda.kvsim_hangs_end()
    cuda.ok("cuStreamSynchronize", objects.stream)
    assert set(cuda.view(objects.device, N)) == {5}
    cuda.ok("cuMemcpyAsync", objects.pageable, objects.device, N, objects.stream)
    assert ctypes.string_at(objects.pageable, N) == b"\5" * N


def test_staged_bytes_arrive_later(cuda: Cuda, objects: Objects) -> None:
    """The call returns before the bytes arrive; only the default stream orders them."""
    cuda.set("cuda_staged_us", 50_000)
    cuda.ok("cuMemcpyHtoD_v2", objects.device, ctypes.create_string_buffer(b"new"), 3)
    assert bytes(cuda.view(objects.device, 3)) == b"\xa5" * 3
    cuda.ok("cuStreamSynchronize", None)
    assert bytes(cuda.view(objects.device, 3)) == b"new"


@pytest.mark.parametrize(("offset", "nbytes"), [(N, 1), (N - 1, 2), (0, N + 1)])
def test_a_copy_beyond_its_memory_loses_the_context(
    cuda: Cuda, objects: Objects, offset: int, nbytes: int
) -> None:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    memory, stream = cuda.made("cuMemAlloc_v2", N), cuda.made("cuStreamCreate", 1)
    target = cuda.made("cuMemHostAlloc", 2 * N, 1)
    with cuda.violating("not mapped"):
        cuda.ok("cuMemcpyAsync", target, memory + offset, nbytes, stream)
    assert cuda.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS
    assert cuda.cuMemFreeHost(target) == ILLEGAL_ADDRESS
    cuda.ok("cuCtxDestroy_v2", own)


def test_a_copy_of_partly_pinned_memory_is_refused(cuda: Cuda, objects: Objects) -> None:
    with cuda.violating("a part is pinned"):
        assert (
            cuda.cuMemcpyAsync(objects.device, objects.pinned + 1, N, objects.stream)
            == INVALID_VALUE
        )


def test_work_of_a_destroyed_stream_still_runs(cuda: Cuda, objects: Objects) -> None:
    stream, event = cuda.made("cuStreamCreate", 1), cuda.made("cuEventCreate", 2)
    cuda.fault("cuMemsetD8Async:1=hang")
    cuda.ok("cuMemsetD8Async", objects.device, 4, N, stream)
    cuda.ok("cuEventRecord", event, stream)
    cuda.ok("cuStreamDestroy_v2", stream)
    assert cuda.cuEventQuery(event) == NOT_READY
    with cuda.violating("used as a stream"):
        assert cuda.cuStreamQuery(stream) == INVALID_HANDLE
    cuda.kvsim_hangs_end()
    cuda.ok("cuEventSynchronize", event)
    assert set(cuda.view(objects.device, N)) == {4}
    cuda.ok("cuEventDestroy_v2", event)


def test_freeing_memory_waits_for_its_work(cuda: Cuda, objects: Objects) -> None:
    memory, event = cuda.made("cuMemAlloc_v2", 64), cuda.made("cuEventCreate", 2)
    cuda.set("latency_us", 20_000)
    cuda.ok("cuMemsetD8Async", memory, 4, 64, objects.stream)
    cuda.ok("cuEventRecord", event, objects.stream)
    assert cuda.cuEventQuery(event) == NOT_READY
    cuda.ok("cuMemFree_v2", memory)
    cuda.ok("cuEventQuery", event)
    cuda.ok("cuEventDestroy_v2", event)


def test_queries_do_not_wait(cuda: Cuda, objects: Objects) -> None:
    cuda.ok("cuStreamQuery", objects.stream)
    cuda.fault("cuMemsetD8Async:1=hang")
    cuda.ok("cuMemsetD8Async", objects.device, 4, N, objects.stream)
    assert cuda.cuStreamQuery(objects.stream) == NOT_READY
    cuda.ok("cuStreamQuery", objects.other)
    cuda.kvsim_hangs_end()
    cuda.ok("cuStreamSynchronize", objects.stream)
    cuda.ok("cuStreamQuery", objects.stream)


def test_streams_wait_for_events_of_others(cuda: Cuda, objects: Objects) -> None:
    event = cuda.made("cuEventCreate", 2)
    cuda.ok("cuEventQuery", event)  # the event has no work yet
    cuda.ok("cuStreamWaitEvent", objects.other, event, 0)
    cuda.ok("cuStreamSynchronize", objects.other)
    cuda.fault("cuMemsetD8Async:1=hang")
    cuda.ok("cuMemsetD8Async", objects.device, 1, N, objects.stream)
    cuda.ok("cuEventRecord", event, objects.stream)
    cuda.ok("cuStreamWaitEvent", objects.other, event, 0)
    cuda.ok("cuMemsetD8Async", objects.device, 2, 10, objects.other)
    assert cuda.cuEventQuery(event) == cuda.cuStreamQuery(objects.other) == NOT_READY
    cuda.ok("cuEventDestroy_v2", event)  # streams that wait for the event still wait
    assert cuda.cuStreamQuery(objects.other) == NOT_READY
    cuda.kvsim_hangs_end()
    cuda.ok("cuStreamSynchronize", objects.other)
    assert bytes(cuda.view(objects.device, 11)) == b"\2" * 10 + b"\1"


def test_events_of_another_device_can_be_awaited_but_not_recorded(
    cuda: Cuda, objects: Objects
) -> None:
    before = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(before))
    event = cuda.made("cuEventCreate", 2)
    cuda.primary(1)
    stream = cuda.made("cuStreamCreate", 1)
    cuda.ok("cuStreamWaitEvent", stream, event, 0)
    assert cuda.cuEventRecord(event, stream) == INVALID_HANDLE
    with cuda.violating("of the context that is current"):
        assert cuda.cuStreamSynchronize(objects.stream) == INVALID_HANDLE
    cuda.ok("cuStreamDestroy_v2", stream)
    cuda.ok("cuCtxSetCurrent", before)
    cuda.ok("cuDevicePrimaryCtxRelease_v2", 1)
    cuda.ok("cuEventDestroy_v2", event)
    with cuda.violating("is none"):
        assert cuda.cuEventQuery(event) == INVALID_HANDLE


def test_devices_copy_to_each_other(cuda: Cuda, objects: Objects) -> None:
    before = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(before))
    cuda.primary(1)
    memory = cuda.made("cuMemAlloc_v2", N)
    cuda.ok("cuMemsetD8Async", memory, 8, N, None)
    cuda.ok("cuStreamSynchronize", None)
    cuda.ok("cuCtxSetCurrent", before)
    cuda.ok("cuMemcpyAsync", objects.device, memory, N, objects.stream)
    cuda.ok("cuStreamSynchronize", objects.stream)
    assert set(cuda.view(objects.device, N)) == {8}
    cuda.primary(1)
    cuda.ok("cuMemFree_v2", memory)
    cuda.ok("cuCtxSetCurrent", before)
    for _ in range(2):
        cuda.ok("cuDevicePrimaryCtxRelease_v2", 1)


def test_memory_that_another_context_registered_counts_as_pageable(
    cuda: Cuda, objects: Objects
) -> None:
    size = 4096
    owner = ctypes.create_string_buffer(2 * size)
    address = (ctypes.addressof(owner) + size - 1) // size * size
    cuda.ok("cuMemHostRegister_v2", address, size, 0)
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    memory, stream = cuda.made("cuMemAlloc_v2", size), cuda.made("cuStreamCreate", 1)
    cuda.ok("cuMemsetD8Async", memory, 8, size, stream)
    cuda.set("latency_us", 10_000)
    cuda.ok("cuMemcpyAsync", address, memory, size, stream)
    assert ctypes.string_at(address, size) == b"\b" * size  # the call has waited for the copy
    cuda.ok("cuStreamDestroy_v2", stream)
    cuda.ok("cuMemFree_v2", memory)
    cuda.ok("cuCtxDestroy_v2", own)
    cuda.ok("cuMemHostUnregister", address)


def test_threads_with_the_same_context_share_its_streams(cuda: Cuda, objects: Objects) -> None:
    context = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(context))

    def work() -> list[int]:
        return [
            cuda.cuCtxSetCurrent(context),
            cuda.cuMemsetD8Async(objects.device, 2, N, objects.stream),
            cuda.cuStreamSynchronize(objects.stream),
        ]

    assert in_thread(work) == [0, 0, 0]


@pytest.mark.parametrize("kind", ["sync", "partial"])
def test_a_fault_of_work_fails_its_stream(cuda: Cuda, objects: Objects, kind: str) -> None:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    memory = cuda.made("cuMemAlloc_v2", N)
    cuda.ok("cuMemsetD8Async", memory, 1, N, None)
    cuda.fault(f"cuMemsetD8Async:1={kind}:719")
    cuda.ok("cuMemsetD8Async", memory, 2, N, None)
    assert cuda.cuStreamSynchronize(None) == 719
    assert bytes(cuda.view(memory, N)).count(2) == (N // 2 if kind == "partial" else 0)
    cuda.ok("cuCtxDestroy_v2", own)


def test_a_fault_of_a_call_fails_only_that_call(cuda: Cuda, objects: Objects) -> None:
    cuda.fault("cuMemcpyAsync:2=2")
    codes = [
        cuda.cuMemcpyAsync(objects.device, objects.pinned, N, objects.stream) for _ in range(3)
    ]
    assert codes == [0, 2, 0]
    cuda.ok("cuStreamSynchronize", objects.stream)
