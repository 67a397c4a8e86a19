"""Streams: order, waits, aborts and handles."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from threading import Thread

import pytest

from tests.ascend_sim.acl_library import HOST_TO_DEVICE, Acl, in_thread

PARAM, OTHER_CONTEXT, HANDLE, ABORTED, TIMEOUT = 107000, 107003, 107017, 107023, 507046
N = 64
COMPLETE, NOT_READY = 0, 1


@pytest.fixture
def stream(acl: Acl) -> Iterator[int]:
    made = acl.made("aclrtCreateStream")
    yield made
    acl.ok("aclrtDestroyStreamForce", made)


@pytest.fixture
def memory(acl: Acl) -> Iterator[int]:
    made = acl.made("aclrtMalloc", N, 0)
    yield made
    acl.ok("aclrtFree", made)


@pytest.fixture
def gate(acl: Acl) -> Iterator[int]:
    """An event that blocks a stream until the event is recorded in another."""
    made = acl.made("aclrtCreateEvent")
    yield made
    acl.ok("aclrtDestroyEvent", made)


def open_gate(acl: Acl, gate: int) -> None:
    acl.ok("aclrtRecordEvent", gate, None)
    acl.ok("aclrtSynchronizeStream", None)


def test_work_runs_in_order_after_its_gate(acl: Acl, stream: int, memory: int, gate: int) -> None:
    acl.ok("aclrtMemset", memory, N, 0, N)
    acl.ok("aclrtStreamWaitEvent", stream, gate)
    for value in range(1, 100):
        acl.ok("aclrtMemsetAsync", memory, N, value, N, stream)
    assert acl.aclrtSynchronizeStreamWithTimeout(stream, 1) == TIMEOUT
    assert acl.stored("aclrtStreamQuery", stream) == NOT_READY
    assert bytes(acl.view(memory, N)) == bytes(N)
    open_gate(acl, gate)
    acl.ok("aclrtSynchronizeStreamWithTimeout", stream, 10000)
    assert acl.stored("aclrtStreamQuery", stream) == COMPLETE
    assert bytes(acl.view(memory, N)) == b"\x63" * N


@pytest.mark.parametrize("timeout", [0, -2])
def test_waits_for_a_stream_time_out(acl: Acl, stream: int, timeout: int) -> None:
    assert acl.aclrtSynchronizeStreamWithTimeout(stream, timeout) == PARAM
    acl.ok("aclrtSynchronizeStreamWithTimeout", stream, -1)


def test_an_abort_drops_queued_work_and_ends_all_waits(acl: Acl, stream: int, memory: int) -> None:
    acl.ok("aclrtMemset", memory, N, 1, N)
    acl.fault("aclrtMemsetAsync:1=hang")
    for value in (2, 3):
        acl.ok("aclrtMemsetAsync", memory, N, value, N, stream)
    codes = []

    def wait() -> None:
        acl.ok("aclrtSetDevice", 0)
        codes.append(acl.aclrtSynchronizeStreamWithTimeout(stream, 60000))
        acl.ok("aclrtResetDevice", 0)

    waiter = Thread(target=wait)
    waiter.start()
    # An abort has no effect on a thread that does not wait yet.
    while not codes and waiter.is_alive():
        acl.fault("aclrtMemsetAsync:1=hang")
        acl.ok("aclrtMemsetAsync", memory, N, 4, N, stream)
        waiter.join(0.01)
        acl.ok("aclrtStreamAbort", stream)
    waiter.join()
    assert codes == [ABORTED]
    assert bytes(acl.view(memory, N)) == b"\1" * N
    acl.core.kvsim_faults_clear()
    acl.ok("aclrtMemsetAsync", memory, N, 5, N, stream)
    acl.ok("aclrtSynchronizeStream", stream)
    assert bytes(acl.view(memory, N)) == b"\5" * N


def test_destroyed_streams_are_refused(acl: Acl) -> None:
    stream = acl.made("aclrtCreateStream")
    acl.ok("aclrtDestroyStream", stream)
    for name, arguments in (
        ("aclrtDestroyStream", ()),
        ("aclrtDestroyStreamForce", ()),
        ("aclrtSynchronizeStream", ()),
        ("aclrtStreamAbort", ()),
        ("aclrtStreamQuery", (ctypes.byref(ctypes.c_int32()),)),
    ):
        assert getattr(acl, name)(stream, *arguments) == HANDLE
        assert getattr(acl, name)(0x1000, *arguments) == HANDLE
    another = acl.made("aclrtCreateStream")
    assert another != stream
    acl.ok("aclrtDestroyStream", another)
    assert acl.aclrtDestroyStream(None) == 100000


def test_a_stream_is_used_in_its_context(acl: Acl, stream: int, memory: int) -> None:
    def elsewhere() -> list[int]:
        acl.ok("aclrtSetDevice", 1)
        codes = [
            acl.aclrtMemsetAsync(memory, N, 1, N, stream),
            acl.aclrtSynchronizeStream(stream),
            acl.aclrtDestroyStream(stream),
        ]
        acl.ok("aclrtResetDevice", 1)
        return codes

    assert in_thread(elsewhere) == [OTHER_CONTEXT] * 3


def test_the_default_stream_belongs_to_the_context(acl: Acl, memory: int) -> None:
    before = acl.leaks().get("streams")
    acl.ok("aclrtMemsetAsync", memory, N, 7, N, None)
    acl.ok("aclrtSynchronizeStream", None)
    assert bytes(acl.view(memory, N)) == b"\7" * N
    assert acl.leaks().get("streams") == before


def test_destroying_waits_unless_forced(acl: Acl, memory: int) -> None:
    acl.ok("aclrtMemset", memory, N, 1, N)
    stream = acl.made("aclrtCreateStreamWithConfig", 0, 0x3)
    acl.set("latency_us", 2000)
    acl.ok("aclrtMemsetAsync", memory, N, 2, N, stream)
    acl.ok("aclrtDestroyStream", stream)
    assert bytes(acl.view(memory, N)) == b"\2" * N
    stream = acl.made("aclrtCreateStream")
    acl.set("latency_us", 3_600_000_000)
    acl.ok("aclrtMemsetAsync", memory, N, 3, N, stream)
    acl.ok("aclrtDestroyStreamForce", stream)
    assert bytes(acl.view(memory, N)) == b"\2" * N


@pytest.fixture
def own_context(acl: Acl) -> Iterator[int]:
    """A context that is current in this thread; after a failure, it stays in its failed state."""
    made = acl.made("aclrtCreateContext", 0)
    yield made
    acl.ok("aclrtDestroyContext", made)
    acl.ok("aclrtSetDevice", 0)
    acl.ok("aclrtResetDevice", 0)


@pytest.mark.parametrize("stops", [0, 1])
def test_a_failed_stream_depends_on_its_mode(
    acl: Acl, own_context: int, stream: int, memory: int, stops: int
) -> None:
    acl.ok("aclrtSetStreamFailureMode", stream, stops)
    assert acl.aclrtSetStreamFailureMode(stream, stops) == PARAM
    acl.ok("aclrtMemset", memory, N, 1, N)
    acl.fault("aclrtMemsetAsync:1=sync:507899")
    acl.ok("aclrtMemsetAsync", memory, N, 2, N, stream)
    acl.aclrtMemsetAsync(memory, 8, 3, 8, stream)
    assert acl.aclrtSynchronizeStream(stream) == 507899
    expected = b"\1" * N if stops else b"\3" * 8 + b"\1" * (N - 8)
    assert bytes(acl.view(memory, N)) == expected
    assert acl.aclrtSynchronizeStream(stream) == (507899 if stops else 0)
    assert acl.aclrtMemsetAsync(memory, N, 4, N, stream) == (507899 if stops else 0)
    acl.aclrtSynchronizeStream(stream)


def test_synchronizing_a_device_waits_for_its_streams(
    acl: Acl, stream: int, memory: int, gate: int
) -> None:
    acl.ok("aclrtStreamWaitEvent", stream, gate)
    acl.ok("aclrtMemsetAsync", memory, N, 6, N, stream)
    assert acl.aclrtSynchronizeDeviceWithTimeout(1) == TIMEOUT
    open_gate(acl, gate)
    acl.ok("aclrtSynchronizeDevice")
    assert bytes(acl.view(memory, N)) == b"\6" * N


def test_functions_of_the_host_run_in_order(acl: Acl, stream: int) -> None:
    called = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
    for value in (1, 2):
        acl.ok("aclrtLaunchHostFunc", stream, function, value)
    acl.ok("aclrtSynchronizeStream", stream)
    assert called == [1, 2]


def test_large_copies_can_be_aborted(acl: Acl, stream: int) -> None:
    n = 64 << 20
    device, host = acl.made("aclrtMalloc", n, 0), acl.made("aclrtMallocHost", n)
    for _ in range(20):
        acl.ok("aclrtMemcpyAsync", device, n, host, n, HOST_TO_DEVICE, stream)
    acl.ok("aclrtStreamAbort", stream)
    acl.ok("aclrtSynchronizeStream", stream)
    acl.ok("aclrtMemset", device, n, ord("\t"), n)
    assert bytes(acl.view(device, n)) == b"\t" * n  # no copy still runs
    acl.ok("aclrtFree", device)
    acl.ok("aclrtFreeHost", host)
