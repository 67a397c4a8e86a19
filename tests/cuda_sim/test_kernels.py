"""Modules and launches: accepted texts and shapes, and the memory that a kernel may use."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.cuda_sim.cuda_library import Cuda, in_process

INVALID_VALUE, INVALID_IMAGE, INVALID_PTX, UNSUPPORTED_PTX = 1, 200, 218, 222
INVALID_HANDLE, NOT_FOUND, ILLEGAL_ADDRESS, OUT_OF_RESOURCES = 400, 500, 700, 701
N, EACH = 6400, 64

PTX = """// made by hand
.version {version}
.target {target}
.address_size 64
.visible .entry kvsim_example(
    .param .u64 kvsim_example_param_0, .param .u32 kvsim_example_param_1,
    .param .u8 kvsim_example_param_2, .param .u64 kvsim_example_param_3
)
.maxntid 64, 1, 1
{{ ret; }}
"""
TEXT = PTX.format(version="7.2", target="sm_70").encode()


class Loaded(NamedTuple):
    """A context with a kernel and the memory that the kernel changes."""

    cuda: Cuda
    module: int
    function: int
    memory: int
    stream: int

    def launch(self, address: int, blocks: int, *, threads: int = 64, done: int = 0) -> int:
        """Launch the kernel, whose blocks add 3 to EACH bytes; return the code."""
        values = (
            ctypes.c_uint64(address),
            ctypes.c_uint32(EACH),
            ctypes.c_uint8(3),
            ctypes.c_uint64(done),
        )
        parameters = (ctypes.c_void_p * 4)(*[ctypes.addressof(value) for value in values])
        shape = (blocks, 1, 1, threads, 1, 1)
        code: int = self.cuda.cuLaunchKernel(
            self.function, *shape, 0, self.stream, parameters, None
        )
        return code

    def end(self) -> int:
        """Wait for the stream; return the code."""
        code: int = self.cuda.cuStreamSynchronize(self.stream)
        return code


@pytest.fixture
def loaded(cuda: Cuda) -> Iterator[Loaded]:
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    module = cuda.made("cuModuleLoadDataEx", TEXT, 0, None, None)
    function = cuda.made("cuModuleGetFunction", module, b"kvsim_example")
    stream = cuda.made("cuStreamCreate", 1)
    memory = cuda.made("cuMemAlloc_v2", N)
    cuda.ok("cuMemsetD8Async", memory, 5, N, stream)
    cuda.ok("cuStreamSynchronize", stream)
    yield Loaded(cuda, module, function, memory, stream)
    if cuda.cuStreamSynchronize(stream) == 0:
        cuda.ok("cuMemFree_v2", memory)
        cuda.ok("cuStreamDestroy_v2", stream)
        cuda.ok("cuModuleUnload", module)
    cuda.ok("cuCtxDestroy_v2", own)


def load(cuda: Cuda, text: bytes) -> int:
    code: int = cuda.cuModuleLoadDataEx(ctypes.byref(ctypes.c_void_p()), text, 0, None, None)
    return code


def test_invalid_texts_are_refused(cuda: Cuda) -> None:
    assert load(cuda, b"\x7fELF") == INVALID_IMAGE
    assert load(cuda, b"") == INVALID_PTX
    assert load(cuda, b'extern "C" __global__ void f() {}') == INVALID_PTX
    assert load(cuda, PTX.format(version="9.9", target="sm_70").encode()) == UNSUPPORTED_PTX
    log = ctypes.create_string_buffer(100)
    options, values = (ctypes.c_int * 2)(5, 6), (ctypes.c_void_p * 2)(ctypes.addressof(log), 100)
    newer = PTX.format(version="7.2", target="sm_100").encode()
    out = ctypes.byref(ctypes.c_void_p())
    assert cuda.cuModuleLoadDataEx(out, newer, 2, options, values) == INVALID_PTX
    assert b"ptxas fatal" in log.value


def test_an_old_driver_refuses_newer_text() -> None:
    texts = [PTX.format(version=name, target="sm_70").encode() for name in ("8.4", "8.5")]
    program = f"""
        cuda.ok("cuInit", 0)
        cuda.primary()
        out = ctypes.byref(ctypes.c_void_p())
        answer([cuda.cuModuleLoadDataEx(out, text, 0, None, None) for text in {texts!r}])
    """
    assert in_process(program, "12.4") == [0, UNSUPPORTED_PTX]


def test_a_module_has_the_functions_of_its_text(loaded: Loaded) -> None:
    out = ctypes.byref(ctypes.c_void_p())
    cuda = loaded.cuda
    assert cuda.cuModuleGetFunction(out, loaded.module, b"kvsim") == NOT_FOUND
    assert cuda.cuModuleGetFunction(out, loaded.function, b"kvsim_example") == INVALID_HANDLE


def test_every_block_runs_once(loaded: Loaded) -> None:
    done = loaded.cuda.made("cuMemHostAlloc", 4096, 1)
    ctypes.memset(done, 0, 4096)
    assert [loaded.launch(loaded.memory, N // EACH, done=done), loaded.end()] == [0, 0]
    assert set(loaded.cuda.view(loaded.memory, N)) == {8}
    assert set((ctypes.c_uint * (N // EACH)).from_address(done)) == {64}
    loaded.cuda.ok("cuMemFreeHost", done)


def test_invalid_shapes_are_refused(loaded: Loaded) -> None:
    assert loaded.launch(loaded.memory, 0) == INVALID_VALUE
    assert loaded.launch(loaded.memory, 1, threads=0) == INVALID_VALUE
    assert loaded.launch(loaded.memory, 1, threads=1025) == INVALID_VALUE
    assert loaded.launch(loaded.memory, 1, threads=65) == OUT_OF_RESOURCES
    with loaded.cuda.violating("another shape"):
        assert loaded.launch(loaded.memory, 1, threads=32) == 0
    no_parameters = (loaded.function, 1, 1, 1, 64, 1, 1, 0, loaded.stream, None, None)
    assert loaded.cuda.cuLaunchKernel(*no_parameters) == INVALID_VALUE


def test_a_first_launch_during_work_is_a_violation(loaded: Loaded) -> None:
    cuda = loaded.cuda
    cuda.core.kvsim_fault_add(b"cuMemsetD8Async:1=hang")
    cuda.ok("cuMemsetD8Async", loaded.memory, 1, N, loaded.stream)
    with cuda.violating("first launched while the context has work"):
        assert loaded.launch(loaded.memory, 1) == 0
    assert loaded.launch(loaded.memory, 1) == 0, "it is loaded now"
    function = cuda.made("cuModuleGetFunction", loaded.module, b"kvsim_example")
    cuda.ok("cuFuncLoad", function)
    assert loaded._replace(function=function).launch(loaded.memory, 1) == 0
    assert cuda.cuFuncLoad(loaded.module) == INVALID_HANDLE
    cuda.core.kvsim_hangs_end()


def test_a_missing_address_loses_the_context(loaded: Loaded) -> None:
    with loaded.cuda.violating("a kernel touches memory that is not mapped"):
        assert loaded.launch(loaded.memory + N - EACH + 1, 1) == 0
        assert loaded.end() == ILLEGAL_ADDRESS
    assert loaded.launch(loaded.memory, 1) == ILLEGAL_ADDRESS


def test_memory_of_the_host_must_be_pinned(loaded: Loaded) -> None:
    owner = ctypes.create_string_buffer(2 * N)
    with loaded.cuda.violating("not mapped"):
        assert loaded.launch(ctypes.addressof(owner), 1) == 0
        assert loaded.end() == ILLEGAL_ADDRESS


@pytest.mark.parametrize(("flags", "code"), [(1, ILLEGAL_ADDRESS), (3, 0)])
def test_registered_memory_must_be_mapped_for_the_device(
    loaded: Loaded, flags: int, code: int
) -> None:
    page = 4096
    owner = ctypes.create_string_buffer(2 * page)
    address = (ctypes.addressof(owner) + page - 1) // page * page
    loaded.cuda.ok("cuMemHostRegister_v2", address, page, flags)
    before = loaded.cuda.violations()
    assert [loaded.launch(address, 2), loaded.end()] == [0, code]
    assert loaded.cuda.violations() == before + (code != 0)
    if not code:
        assert ctypes.string_at(address, 3 * EACH) == b"\3" * 2 * EACH + b"\0" * EACH
        loaded.cuda.ok("cuMemHostUnregister", address)


@pytest.mark.parametrize("enabled", [False, True])
def test_memory_of_another_device_needs_peer_access(loaded: Loaded, enabled: bool) -> None:
    cuda, before = loaded.cuda, ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(before))
    peer = cuda.primary(1)
    memory = cuda.made("cuMemAlloc_v2", EACH)
    cuda.ok("cuCtxSetCurrent", before)
    if enabled:
        cuda.ok("cuCtxEnablePeerAccess", peer, 0)
        assert cuda.cuCtxEnablePeerAccess(peer, 0) == 704
        assert [loaded.launch(memory, 1), loaded.end()] == [0, 0]
    else:
        with cuda.violating("no access"):
            assert [loaded.launch(memory, 1), loaded.end()] == [0, ILLEGAL_ADDRESS]
    cuda.ok("cuCtxSetCurrent", peer)
    cuda.ok("cuMemFree_v2", memory)
    cuda.ok("cuCtxSetCurrent", before)
    cuda.ok("cuDevicePrimaryCtxRelease_v2", 1)


def test_a_function_belongs_to_its_context(loaded: Loaded) -> None:
    other = loaded.cuda.made("cuCtxCreate_v2", 0, 0)
    with loaded.cuda.violating("not a function of the context"):
        assert loaded.launch(loaded.memory, 1) == INVALID_HANDLE
    loaded.cuda.ok("cuCtxDestroy_v2", other)
