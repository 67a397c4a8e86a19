"""Initialization, devices and contexts: the current context, its loss, and forks."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_sim.build import VARIANTS, build
from tests.cuda_sim.cuda_library import ARGUMENTS, PROGRAMS, Cuda, in_process, in_thread

INVALID_VALUE, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE = 1, 3, 100, 101
INVALID_CONTEXT, ILLEGAL_ADDRESS, DESTROYED = 201, 700, 709
OWN = Path(__file__).resolve().parents[2] / "include" / "kvnative" / "cuda.h"


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_has_the_declared_calls(variant: str) -> None:
    required, _, optional = OWN.read_text().partition("define KVN_CUDA_OPTIONAL")
    names = set(re.findall(r"X\((cu\w+),", required))
    called = set(ARGUMENTS) - PROGRAMS - set(re.findall(r"X\((cu\w+),", optional))
    assert names >= called
    exported = build(variant).read_bytes()
    assert {name for name in names if name.encode() + b"\0" not in exported} == set()
    later = [
        match
        for match in re.findall(r"X\((cu\w+),", optional)
        if match.encode() + b"\0" in exported
    ]
    batches = ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"]
    assert later == [
        "cuDeviceGetUuid_v2",
        "cuFuncLoad",
        *batches[: {"12.4": 0, "12.8": 1, "13.0": 2}[variant]],
    ]


def test_calls_before_initialization_are_refused() -> None:
    answer = in_process("""
        out = ctypes.byref(ctypes.c_int())
        before = [cuda.cuDeviceGetCount(out), cuda.cuMemAlloc_v2(out, 1), cuda.cuInit(1)]
        version = ctypes.c_int()
        cuda.ok("cuDriverGetVersion", ctypes.byref(version))
        answer([before, version.value, cuda.cuInit(0), cuda.cuInit(0)])
    """)
    assert answer == [[NOT_INITIALIZED, NOT_INITIALIZED, INVALID_VALUE], 13000, 0, 0]


def test_visible_devices_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        code, count, bus = cuda.cuInit(0), ctypes.c_int(), ctypes.create_string_buffer(13)
        cuda.cuDeviceGetCount(ctypes.byref(count))
        cuda.cuDeviceGetPCIBusId(bus, 13, 1)
        answer([code, count.value, bus.value.decode()])
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0,9,1")
    assert in_process(program) == [0, 2, "0000:10:00.0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert in_process(program)[0] == NO_DEVICE


def test_errors_have_names_and_texts(cuda: Cuda) -> None:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    cuda.ok("cuGetErrorName", 700, ctypes.byref(name))
    cuda.ok("cuGetErrorString", 700, ctypes.byref(text))
    assert (name.value, text.value) == (
        b"CUDA_ERROR_ILLEGAL_ADDRESS",
        b"an illegal memory access was encountered",
    )
    assert cuda.cuGetErrorName(12345, ctypes.byref(name)) == INVALID_VALUE
    assert name.value is None


def test_devices_have_attributes_and_uuids(cuda: Cuda) -> None:
    value = ctypes.c_int()
    cuda.ok("cuDeviceGetAttribute", ctypes.byref(value), 75, 0)
    assert value.value == 9
    assert cuda.cuDeviceGetAttribute(ctypes.byref(value), 75, 8) == INVALID_DEVICE
    cuda.ok("cuDeviceCanAccessPeer", ctypes.byref(value), 0, 1)
    assert value.value == 1
    uuids = [ctypes.create_string_buffer(16) for _ in range(2)]
    for device, uuid in enumerate(uuids):
        cuda.ok("cuDeviceGetUuid", uuid, device)
    assert uuids[0].raw != uuids[1].raw


def test_calls_without_a_context_are_refused(cuda: Cuda) -> None:
    memory, out = cuda.made("cuMemAlloc_v2", 8), ctypes.byref(ctypes.c_void_p())
    calls: list[tuple[Any, ...]] = [
        ("cuMemAlloc_v2", out, 1),
        ("cuMemHostAlloc", out, 1, 0),
        ("cuMemFree_v2", memory),
        ("cuStreamCreate", out, 1),
        ("cuEventCreate", out, 2),
        ("cuStreamSynchronize", None),
        ("cuMemcpyAsync", memory, memory, 8, None),
        ("cuPointerGetAttributes", 1, out, out, memory),
        ("cuMemGetInfo_v2", out, out),
    ]
    codes = in_thread(lambda: [getattr(cuda, name)(*arguments) for name, *arguments in calls])
    assert codes == [INVALID_CONTEXT] * len(calls)
    cuda.ok("cuMemFree_v2", memory)


def test_the_primary_context_ends_with_its_last_release() -> None:
    answer = in_process("""
        cuda.ok("cuInit", 0)
        first, again = (cuda.made("cuDevicePrimaryCtxRetain", 1) for _ in range(2))
        cuda.ok("cuCtxSetCurrent", first)
        memory = cuda.made("cuMemAlloc_v2", 64)
        cuda.ok("cuDevicePrimaryCtxRelease_v2", 1)
        still = cuda.cuMemFree_v2(memory)
        left = cuda.leaks()
        cuda.ok("cuDevicePrimaryCtxRelease_v2", 1)
        gone = [cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_void_p()), 1), cuda.cuCtxSetCurrent(first)]
        too_often = cuda.cuDevicePrimaryCtxRelease_v2(1)
        answer([first == again, still, left, gone, too_often, cuda.leaks()])
    """)
    assert answer == [True, 0, {"contexts": 1}, [DESTROYED, INVALID_CONTEXT], INVALID_CONTEXT, {}]


def test_created_contexts_are_a_stack(cuda: Cuda) -> None:
    def current() -> int | None:
        out = ctypes.c_void_p()
        cuda.ok("cuCtxGetCurrent", ctypes.byref(out))
        return out.value

    primary = current()
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    assert current() == own != primary
    cuda.ok("cuCtxDestroy_v2", own)
    assert current() == primary
    with cuda.violating("destroyed"):
        assert cuda.cuCtxSetCurrent(own) == INVALID_CONTEXT
    with cuda.violating("invalid context"):
        assert cuda.cuCtxDestroy_v2(own) == INVALID_CONTEXT
    assert primary is not None
    with cuda.violating("primary"):
        assert cuda.cuCtxDestroy_v2(primary) == INVALID_CONTEXT
    cuda.ok("cuCtxSetCurrent", None)
    assert current() is None
    cuda.ok("cuCtxSetCurrent", primary)


def test_destroying_a_context_frees_its_objects(cuda: Cuda) -> None:
    before = cuda.leaks()
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    memory = cuda.made("cuMemAlloc_v2", 64)
    with cuda.violating("1 allocations"):
        cuda.ok("cuCtxDestroy_v2", own)
    assert cuda.kvsim_host_view(memory) is None
    assert cuda.leaks() == before


def test_contexts_of_one_device_do_not_share_memory(cuda: Cuda) -> None:
    theirs = cuda.made("cuMemAlloc_v2", 64)
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    ours, stream = cuda.made("cuMemAlloc_v2", 64), cuda.made("cuStreamCreate", 1)
    with cuda.violating("another context of device 0"):
        assert cuda.cuMemcpyAsync(ours, theirs, 64, stream) == INVALID_VALUE
    with cuda.violating("freed in another"):
        assert cuda.cuMemFree_v2(theirs) == INVALID_VALUE
    cuda.ok("cuStreamDestroy_v2", stream)
    cuda.ok("cuMemFree_v2", ours)
    cuda.ok("cuCtxDestroy_v2", own)
    cuda.ok("cuMemFree_v2", theirs)


def test_a_context_is_lost_after_its_first_error(cuda: Cuda) -> None:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    memory, stream = cuda.made("cuMemAlloc_v2", 64), cuda.made("cuStreamCreate", 1)
    cuda.fault("cuMemsetD8Async:1=sync:719")
    cuda.ok("cuMemsetD8Async", memory, 1, 64, stream)
    assert cuda.cuStreamSynchronize(stream) == 719
    assert [cuda.cuStreamQuery(stream), cuda.cuMemFree_v2(memory), cuda.cuEventQuery(None)] == [
        719
    ] * 3
    before = cuda.violations()
    cuda.ok("cuCtxDestroy_v2", own)  # resources of a lost context cannot be freed
    assert cuda.violations() == before
    cuda.ok("cuStreamSynchronize", None)  # the primary context still works


def test_a_wrong_address_fails_all_streams(cuda: Cuda) -> None:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    streams = [cuda.made("cuStreamCreate", 1) for _ in range(2)]
    memory = cuda.made("cuMemAlloc_v2", 64)
    cuda.fault("cuMemsetD8Async:1=hang")
    cuda.ok("cuMemsetD8Async", memory, 1, 64, streams[1])
    with cuda.violating("not mapped"):
        cuda.ok("cuMemsetD8Async", memory, 1, 65, streams[0])
    assert [cuda.cuStreamSynchronize(stream) for stream in streams] == [ILLEGAL_ADDRESS] * 2
    cuda.ok("cuCtxDestroy_v2", own)


def test_calls_in_a_forked_child_fail_without_hanging() -> None:
    answer = in_process("""
        cuda.ok("cuInit", 0)
        cuda.primary()
        memory, stream = cuda.made("cuMemAlloc_v2", 4096), cuda.made("cuStreamCreate", 1)
        cuda.fault("cuMemsetD8Async:1=hang")
        cuda.ok("cuMemsetD8Async", memory, 1, 4096, stream)
        read, write = os.pipe()
        if not os.fork():
            codes = [cuda.cuInit(0), cuda.cuStreamSynchronize(stream), cuda.cuMemFree_v2(memory)]
            os.write(write, json.dumps(codes).encode())
            os._exit(0)
        os.wait()
        theirs = json.loads(os.read(read, 10000))
        cuda.kvsim_hangs_end()
        answer([theirs, cuda.cuStreamSynchronize(stream), cuda.cuMemFree_v2(memory)])
    """)
    assert answer == [[NOT_INITIALIZED] * 3, 0, 0]
