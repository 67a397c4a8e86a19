"""Streams, events and copies: order, ends, what is waited for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.cuda_sim.cuda_library import Cuda, in_thread

INVALID_VALUE, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 1, 400, 600, 700
N = 8192


class At(NamedTuple):
    """Memory of one size, on the device and of the host, and two streams."""

    device: int
    pinned: int
    pageable: int
    stream: int
    other: int


@pytest.fixture
def at(cuda: Cuda) -> Iterator[At]:
    owner = ctypes.create_string_buffer(N)
    places = At(
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


def test_bytes_go_there_and_back(cuda: Cuda, at: At) -> None:
    ctypes.memset(at.pinned, 7, N)
    cuda.ok("cuMemcpyAsync", at.device, at.pinned, N, at.stream)
    cuda.ok("cuMemcpyAsync", at.device + 10, at.device + 5000, 100, at.stream)
    cuda.ok("cuMemsetD8Async", at.device, 3, 10, at.stream)
    cuda.ok("cuStreamSynchronize", at.stream)
    assert bytes(cuda.view(at.device, N)) == b"\3" * 10 + b"\7" * (N - 10)
    cuda.ok("cuMemcpyDtoH_v2", at.pageable, at.device, N)
    assert ctypes.string_at(at.pageable, N) == b"\3" * 10 + b"\7" * (N - 10)
    ctypes.memset(at.pageable, 9, N)
    cuda.ok("cuMemcpyHtoD_v2", at.device + 1, at.pageable, 5)
    assert bytes(cuda.view(at.device, 7)) == b"\3" + b"\t" * 5 + b"\3"


def test_pageable_memory_is_read_by_the_call_and_written_before_it_returns(
    cuda: Cuda, at: At
) -> None:
    ctypes.memset(at.pageable, 5, N)
    cuda.fault("cuMemcpyAsync:1=hang")
    cuda.ok("cuMemcpyAsync", at.device, at.pageable, N, at.stream)
    ctypes.memset(at.pageable, 6, N)
    cuda.kvsim_hangs_end()
    cuda.ok("cuStreamSynchronize", at.stream)
    assert set(cuda.view(at.device, N)) == {5}
    cuda.ok("cuMemcpyAsync", at.pageable, at.device, N, at.stream)
    assert ctypes.string_at(at.pageable, N) == b"\5" * N


def test_staged_bytes_arrive_later(cuda: Cuda, at: At) -> None:
    """Only the default stream, in which it is, says when."""
    cuda.set("cuda_staged_us", 50_000)
    cuda.ok("cuMemcpyHtoD_v2", at.device, ctypes.create_string_buffer(b"new"), 3)
    assert bytes(cuda.view(at.device, 3)) == b"\xa5" * 3
    cuda.ok("cuStreamSynchronize", None)
    assert bytes(cuda.view(at.device, 3)) == b"new"


@pytest.mark.parametrize(("offset", "nbytes"), [(N, 1), (N - 1, 2), (0, N + 1)])
def test_a_copy_that_leaves_its_memory(cuda: Cuda, at: At, offset: int, nbytes: int) -> None:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    memory, stream = cuda.made("cuMemAlloc_v2", N), cuda.made("cuStreamCreate", 1)
    target = cuda.made("cuMemHostAlloc", 2 * N, 1)
    with cuda.violating("not mapped"):
        cuda.ok("cuMemcpyAsync", target, memory + offset, nbytes, stream)
    assert cuda.cuStreamSynchronize(stream) == ILLEGAL_ADDRESS
    assert cuda.cuMemFreeHost(target) == ILLEGAL_ADDRESS
    cuda.ok("cuCtxDestroy_v2", own)


def test_a_copy_of_memory_that_is_pinned_in_part(cuda: Cuda, at: At) -> None:
    with cuda.violating("a part is pinned"):
        assert cuda.cuMemcpyAsync(at.device, at.pinned + 1, N, at.stream) == INVALID_VALUE


def test_a_stream_is_destroyed_at_once_and_its_work_goes_on(cuda: Cuda, at: At) -> None:
    stream, event = cuda.made("cuStreamCreate", 1), cuda.made("cuEventCreate", 2)
    cuda.fault("cuMemsetD8Async:1=hang")
    cuda.ok("cuMemsetD8Async", at.device, 4, N, stream)
    cuda.ok("cuEventRecord", event, stream)
    cuda.ok("cuStreamDestroy_v2", stream)
    assert cuda.cuEventQuery(event) == NOT_READY
    with cuda.violating("used as a stream"):
        assert cuda.cuStreamQuery(stream) == INVALID_HANDLE
    cuda.kvsim_hangs_end()
    cuda.ok("cuEventSynchronize", event)
    assert set(cuda.view(at.device, N)) == {4}
    cuda.ok("cuEventDestroy_v2", event)


def test_memory_is_freed_when_the_work_is_done(cuda: Cuda, at: At) -> None:
    memory, event = cuda.made("cuMemAlloc_v2", 64), cuda.made("cuEventCreate", 2)
    cuda.set("latency_us", 20_000)
    cuda.ok("cuMemsetD8Async", memory, 4, 64, at.stream)
    cuda.ok("cuEventRecord", event, at.stream)
    assert cuda.cuEventQuery(event) == NOT_READY
    cuda.ok("cuMemFree_v2", memory)
    cuda.ok("cuEventQuery", event)
    cuda.ok("cuEventDestroy_v2", event)


def test_queries_do_not_wait(cuda: Cuda, at: At) -> None:
    cuda.ok("cuStreamQuery", at.stream)
    cuda.fault("cuMemsetD8Async:1=hang")
    cuda.ok("cuMemsetD8Async", at.device, 4, N, at.stream)
    assert cuda.cuStreamQuery(at.stream) == NOT_READY
    cuda.ok("cuStreamQuery", at.other)
    cuda.kvsim_hangs_end()
    cuda.ok("cuStreamSynchronize", at.stream)
    cuda.ok("cuStreamQuery", at.stream)


def test_streams_wait_for_events_of_others(cuda: Cuda, at: At) -> None:
    event = cuda.made("cuEventCreate", 2)
    cuda.ok("cuEventQuery", event)  # of no work
    cuda.ok("cuStreamWaitEvent", at.other, event, 0)
    cuda.ok("cuStreamSynchronize", at.other)
    cuda.fault("cuMemsetD8Async:1=hang")
    cuda.ok("cuMemsetD8Async", at.device, 1, N, at.stream)
    cuda.ok("cuEventRecord", event, at.stream)
    cuda.ok("cuStreamWaitEvent", at.other, event, 0)
    cuda.ok("cuMemsetD8Async", at.device, 2, 10, at.other)
    assert cuda.cuEventQuery(event) == cuda.cuStreamQuery(at.other) == NOT_READY
    cuda.ok("cuEventDestroy_v2", event)  # who waits goes on waiting
    assert cuda.cuStreamQuery(at.other) == NOT_READY
    cuda.kvsim_hangs_end()
    cuda.ok("cuStreamSynchronize", at.other)
    assert bytes(cuda.view(at.device, 11)) == b"\2" * 10 + b"\1"


def test_events_of_another_device_are_waited_for_and_not_recorded(cuda: Cuda, at: At) -> None:
    before = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(before))
    event = cuda.made("cuEventCreate", 2)
    cuda.primary(1)
    stream = cuda.made("cuStreamCreate", 1)
    cuda.ok("cuStreamWaitEvent", stream, event, 0)
    assert cuda.cuEventRecord(event, stream) == INVALID_HANDLE
    with cuda.violating("of the context that is current"):
        assert cuda.cuStreamSynchronize(at.stream) == INVALID_HANDLE
    cuda.ok("cuStreamDestroy_v2", stream)
    cuda.ok("cuCtxSetCurrent", before)
    cuda.ok("cuDevicePrimaryCtxRelease_v2", 1)
    cuda.ok("cuEventDestroy_v2", event)
    with cuda.violating("is none"):
        assert cuda.cuEventQuery(event) == INVALID_HANDLE


def test_devices_copy_to_each_other(cuda: Cuda, at: At) -> None:
    before = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(before))
    cuda.primary(1)
    memory = cuda.made("cuMemAlloc_v2", N)
    cuda.ok("cuMemsetD8Async", memory, 8, N, None)
    cuda.ok("cuStreamSynchronize", None)
    cuda.ok("cuCtxSetCurrent", before)
    cuda.ok("cuMemcpyAsync", at.device, memory, N, at.stream)
    cuda.ok("cuStreamSynchronize", at.stream)
    assert set(cuda.view(at.device, N)) == {8}
    cuda.primary(1)
    cuda.ok("cuMemFree_v2", memory)
    cuda.ok("cuCtxSetCurrent", before)
    for _ in range(2):
        cuda.ok("cuDevicePrimaryCtxRelease_v2", 1)


def test_memory_that_others_registered_counts_as_pageable(cuda: Cuda, at: At) -> None:
    size = 4096
    owner = ctypes.create_string_buffer(2 * size)
    address = (ctypes.addressof(owner) + size - 1) // size * size
    cuda.ok("cuMemHostRegister_v2", address, size, 0)
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    memory, stream = cuda.made("cuMemAlloc_v2", size), cuda.made("cuStreamCreate", 1)
    cuda.ok("cuMemsetD8Async", memory, 8, size, stream)
    cuda.set("latency_us", 10_000)
    cuda.ok("cuMemcpyAsync", address, memory, size, stream)
    assert ctypes.string_at(address, size) == b"\b" * size  # it was waited for
    cuda.ok("cuStreamDestroy_v2", stream)
    cuda.ok("cuMemFree_v2", memory)
    cuda.ok("cuCtxDestroy_v2", own)
    cuda.ok("cuMemHostUnregister", address)


def test_threads_that_have_the_context_share_its_streams(cuda: Cuda, at: At) -> None:
    context = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(context))

    def work() -> list[int]:
        return [
            cuda.cuCtxSetCurrent(context),
            cuda.cuMemsetD8Async(at.device, 2, N, at.stream),
            cuda.cuStreamSynchronize(at.stream),
        ]

    assert in_thread(work) == [0, 0, 0]


@pytest.mark.parametrize("kind", ["sync", "partial"])
def test_faults_of_work(cuda: Cuda, at: At, kind: str) -> None:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    memory = cuda.made("cuMemAlloc_v2", N)
    cuda.ok("cuMemsetD8Async", memory, 1, N, None)
    cuda.fault(f"cuMemsetD8Async:1={kind}:719")
    cuda.ok("cuMemsetD8Async", memory, 2, N, None)
    assert cuda.cuStreamSynchronize(None) == 719
    assert bytes(cuda.view(memory, N)).count(2) == (N // 2 if kind == "partial" else 0)
    cuda.ok("cuCtxDestroy_v2", own)


def test_faults_of_calls(cuda: Cuda, at: At) -> None:
    cuda.fault("cuMemcpyAsync:2=2")
    codes = [cuda.cuMemcpyAsync(at.device, at.pinned, N, at.stream) for _ in range(3)]
    assert codes == [0, 2, 0]
    cuda.ok("cuStreamSynchronize", at.stream)
