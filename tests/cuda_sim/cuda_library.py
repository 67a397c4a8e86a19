"""The stand-in for libcuda.so.1 as tests call it: by ctypes, with the names and codes of C."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ascend_sim.acl_library import answer_of, in_thread
from tests.cuda_sim.build import DEFAULT, build

__all__ = [
    "Access",
    "Allocation",
    "CopyAttributes",
    "Cuda",
    "IpcHandle",
    "Location",
    "allocation",
    "in_process",
    "in_thread",
]

ROOT = Path(__file__).resolve().parents[2]

_int, _uint, _size, _pointer, _long = (
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_uint64,
)
_out = _pointer

# Calls of programs, which kvplan does not make.
PROGRAMS = {
    "cuMemAllocManaged",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphDestroy",
}


class Location(ctypes.Structure):
    _fields_ = [("type", _int), ("id", _int)]


class Allocation(ctypes.Structure):
    """The struct CUmemAllocationProp."""

    _fields_ = [
        ("type", _int),
        ("handle_types", _int),
        ("location", Location),
        ("windows", _pointer),
        ("flags", ctypes.c_uint8 * 8),
    ]


class Access(ctypes.Structure):
    """The struct CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", _int)]


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class CopyAttributes(ctypes.Structure):
    """The struct CUmemcpyAttributes."""

    _fields_ = [("order", _int), ("src", Location), ("dst", Location), ("flags", _uint)]


def allocation(device: int = 0, types: int = 1) -> Allocation:
    """Return the properties of memory of a device that may be exported as `types`."""
    return Allocation(1, types, Location(1, device))


ARGUMENTS: dict[str, Sequence[Any]] = {
    "cuInit": [_uint],
    "cuDevicePrimaryCtxRetain": [_out, _int],
    "cuDevicePrimaryCtxRelease_v2": [_int],
    "cuCtxCreate_v2": [_out, _uint, _int],
    "cuCtxDestroy_v2": [_pointer],
    "cuCtxSetCurrent": [_pointer],
    "cuCtxEnablePeerAccess": [_pointer, _uint],
    "cuMemGetInfo_v2": [_out, _out],
    "cuMemAlloc_v2": [_out, _size],
    "cuMemAllocManaged": [_out, _size, _uint],
    "cuMemFree_v2": [_long],
    "cuMemHostAlloc": [_out, _size, _uint],
    "cuMemFreeHost": [_pointer],
    "cuMemHostRegister_v2": [_pointer, _size, _uint],
    "cuMemHostUnregister": [_pointer],
    "cuPointerGetAttributes": [_uint, _out, _out, _long],
    "cuMemcpyHtoD_v2": [_long, _pointer, _size],
    "cuMemcpyDtoH_v2": [_pointer, _long, _size],
    "cuMemcpyAsync": [_long, _long, _size, _pointer],
    "cuMemsetD8Async": [_long, ctypes.c_uint8, _size, _pointer],
    "cuStreamCreate": [_out, _uint],
    "cuStreamDestroy_v2": [_pointer],
    "cuStreamQuery": [_pointer],
    "cuStreamSynchronize": [_pointer],
    "cuStreamWaitEvent": [_pointer, _pointer, _uint],
    "cuStreamIsCapturing": [_pointer, _out],
    "cuStreamGetCtx": [_pointer, _out],
    "cuStreamBeginCapture_v2": [_pointer, _int],
    "cuStreamEndCapture": [_pointer, _out],
    "cuGraphDestroy": [_pointer],
    "cuEventCreate": [_out, _uint],
    "cuEventDestroy_v2": [_pointer],
    "cuEventRecord": [_pointer, _pointer],
    "cuEventQuery": [_pointer],
    "cuEventSynchronize": [_pointer],
    "cuModuleLoadDataEx": [_out, ctypes.c_char_p, _uint, _out, _out],
    "cuModuleUnload": [_pointer],
    "cuModuleGetFunction": [_out, _pointer, ctypes.c_char_p],
    "cuFuncLoad": [_pointer],
    "cuLaunchKernel": [_pointer, *[_uint] * 7, _pointer, _out, _out],
    "cuMemGetAllocationGranularity": [_out, _out, _int],
    "cuMemCreate": [_out, _size, _out, _long],
    "cuMemRelease": [_long],
    "cuMemAddressReserve": [_out, _size, _size, _long, _long],
    "cuMemAddressFree": [_long, _size],
    "cuMemMap": [_long, _size, _size, _long, _long],
    "cuMemUnmap": [_long, _size],
    "cuMemSetAccess": [_long, _size, _out, _size],
    "cuMemGetAccess": [_out, _out, _long],
    "cuMemRetainAllocationHandle": [_out, _pointer],
    "cuMemExportToShareableHandle": [_out, _long, _int, _long],
    "cuMemImportFromShareableHandle": [_out, _pointer, _int],
    "cuIpcGetMemHandle": [_out, _long],
    "cuIpcOpenMemHandle_v2": [_out, IpcHandle, _uint],
    "cuIpcCloseMemHandle": [_long],
    "cuMemcpyBatchAsync": [_out, _out, _out, _size, _out, _out, _size, _out, _pointer],
    "cuMemcpyBatchAsync_v2": [_out, _out, _out, _size, _out, _out, _size, _pointer],
}


class Cuda:
    """The library of a variant: calls by attribute return their code.

    ``made("cuMemAlloc_v2", 64)`` returns the pointer that the call stores.
    """

    def __init__(self, variant: str = DEFAULT) -> None:
        self.library = ctypes.CDLL(str(build(variant)))
        self.core = self.library  # the loader also finds the core's functions through the library
        for name, arguments in ARGUMENTS.items():
            if hasattr(self.library, name):
                getattr(self.library, name).argtypes = arguments
        self.core.kvsim_leaks.restype = ctypes.c_char_p
        self.core.kvsim_last_violation.restype = ctypes.c_char_p
        self.core.kvsim_host_view.argtypes = [ctypes.c_uint64]
        self.core.kvsim_host_view.restype = ctypes.c_void_p

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.library, name)
        return function

    def ok(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def made(self, name: str, *arguments: Any) -> int:
        """Make a call that must succeed; return the pointer that it stores first."""
        out = ctypes.c_void_p()
        self.ok(name, ctypes.byref(out), *arguments)
        assert out.value
        return out.value

    def attribute(self, address: int, attribute: int) -> int:
        """Return an attribute of a pointer as a number."""
        out = ctypes.c_uint64(0)
        which = (ctypes.c_int * 1)(attribute)
        where = (ctypes.c_void_p * 1)(ctypes.addressof(out))
        self.ok("cuPointerGetAttributes", 1, which, where, address)
        return out.value

    def view(self, address: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Return a view of device memory."""
        return (ctypes.c_ubyte * nbytes).from_address(self.core.kvsim_host_view(address))

    def fault(self, specification: str) -> None:
        assert self.core.kvsim_fault_add(specification.encode()) == 0, specification

    def set(self, name: str, value: object) -> None:
        assert self.core.kvsim_set(name.encode(), str(value).encode()) == 0, (name, value)

    def leaks(self) -> dict[str, int]:
        left: dict[str, int] = json.loads(self.core.kvsim_leaks())
        return {name: count for name, count in left.items() if count}

    def violation(self) -> str:
        text: bytes = self.core.kvsim_last_violation()
        return text.decode()

    def violations(self) -> int:
        return int(self.core.kvsim_violations())

    @contextmanager
    def violating(self, text: str) -> Iterator[None]:
        """Expect exactly one violation, whose text contains `text`."""
        before = self.violations()
        yield
        assert self.violations() == before + 1
        assert text in self.violation()

    @contextmanager
    def capturing(self, stream: int, mode: int = 0) -> Iterator[None]:
        """Capture a stream, by default in global mode; the capture must stay valid."""
        self.ok("cuStreamBeginCapture_v2", stream, mode)
        yield
        graph = ctypes.c_void_p()
        self.ok("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.ok("cuGraphDestroy", graph)

    def primary(self, device: int = 0) -> int:
        """Retain the primary context of a device, and make it current."""
        context = self.made("cuDevicePrimaryCtxRetain", device)
        self.ok("cuCtxSetCurrent", context)
        return context


def in_process(program: str, variant: str = DEFAULT, **settings: object) -> Any:
    """Run a program in a process of its own; return the value that it passes to ``answer``.

    The program finds the library as ``cuda``. `settings` are environment variables without the
    prefix KVSIM_. If the process fails, return its exit code and what it wrote to stderr.
    """
    beginning = f"""
        import ctypes, json, os
        from tests.cuda_sim.cuda_library import *
        cuda = Cuda({variant!r})
        answer = lambda value: print(json.dumps(value), flush=True)
    """
    return answer_of(beginning, program, settings)
