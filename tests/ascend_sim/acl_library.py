"""The simulated ACL library as tests call it: by ctypes, with the names and codes of C."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from tests.ascend_sim.build import build

ROOT = Path(__file__).resolve().parents[2]
SIZE_MAX = 2**64 - 1
HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
HOST, DEVICE, UNREGISTERED = range(3)

_int32, _uint32, _size, _pointer = (
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_size_t,
    ctypes.c_void_p,
)
_out = _pointer
ARGUMENTS: dict[str, Sequence[Any]] = {
    "aclInit": [ctypes.c_char_p],
    "aclrtSetDevice": [_int32],
    "aclrtGetDeviceInfo": [_uint32, _int32, _out],
    "aclrtMalloc": [_out, _size, _int32],
    "aclrtMallocAlign32": [_out, _size, _int32],
    "aclrtMallocHost": [_out, _size],
    "aclrtFree": [_pointer],
    "aclrtFreeHost": [_pointer],
    "aclrtHostRegister": [_pointer, ctypes.c_uint64, _int32, _out],
    "aclrtHostRegisterV2": [_pointer, ctypes.c_uint64, _uint32],
    "aclrtHostUnregister": [_pointer],
    "aclrtPointerGetAttributes": [_pointer, _out],
    "aclrtGetMemInfo": [_int32, _out, _out],
    "aclrtMemcpy": [_pointer, _size, _pointer, _size, _int32],
    "aclrtMemcpyAsync": [_pointer, _size, _pointer, _size, _int32, _pointer],
    "aclrtMemset": [_pointer, _size, _int32, _size],
    "aclrtMemsetAsync": [_pointer, _size, _int32, _size, _pointer],
    "aclrtMemcpyBatch": [_out, _out, _out, _out, _size, _out, _out, _size, _out],
    "aclrtMemcpyBatchAsync": [_out, _out, _out, _out, _size, _out, _out, _size, _out, _pointer],
    "aclrtCreateContext": [_out, _int32],
    "aclrtDestroyContext": [_pointer],
    "aclrtSetCurrentContext": [_pointer],
    "aclrtCreateStreamWithConfig": [_out, _uint32, _uint32],
    "aclrtDestroyStream": [_pointer],
    "aclrtDestroyStreamForce": [_pointer],
    "aclrtSynchronizeStream": [_pointer],
    "aclrtSynchronizeStreamWithTimeout": [_pointer, _int32],
    "aclrtSetStreamFailureMode": [_pointer, ctypes.c_uint64],
    "aclrtStreamQuery": [_pointer, _out],
    "aclrtStreamAbort": [_pointer],
    "aclrtLaunchHostFunc": [_pointer, _pointer, _pointer],
    "aclrtCreateEventWithFlag": [_out, _uint32],
    "aclrtCreateEventExWithFlag": [_out, _uint32],
    "aclrtDestroyEvent": [_pointer],
    "aclrtRecordEvent": [_pointer, _pointer],
    "aclrtResetEvent": [_pointer, _pointer],
    "aclrtStreamWaitEvent": [_pointer, _pointer],
    "aclrtQueryEventStatus": [_pointer, _out],
    "aclrtQueryEventWaitStatus": [_pointer, _out],
    "aclrtSynchronizeEvent": [_pointer],
    "aclrtSynchronizeEventWithTimeout": [_pointer, _int32],
    "aclrtEventElapsedTime": [_out, _pointer, _pointer],
}


class Location(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int32)]


class Attributes(ctypes.Structure):
    _fields_ = [("location", Location), ("page", ctypes.c_uint32), ("rest", ctypes.c_uint32 * 4)]


class BatchAttribute(ctypes.Structure):
    _fields_ = [("target", Location), ("source", Location), ("reserved", ctypes.c_uint8 * 16)]


class Acl:
    """The library of a variant: calls by attribute return their code.

    ``made("aclrtMalloc", 64, 0)`` returns the pointer that the call stores.
    """

    def __init__(self, variant: str = "8.5") -> None:
        self.library = ctypes.CDLL(str(build(variant) / "lib64/libascendcl.so"))
        self.core = self.library  # the core that this library uses, if the process has several
        for name, arguments in ARGUMENTS.items():
            if hasattr(self.library, name):
                getattr(self.library, name).argtypes = arguments
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.library.aclrtGetSocName.restype = ctypes.c_char_p
        self.core.kvsim_leaks.restype = ctypes.c_char_p
        self.core.kvsim_host_view.argtypes = [ctypes.c_uint64]
        self.core.kvsim_host_view.restype = ctypes.c_void_p

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.library, name)
        return function

    def ok(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code} {self.library.aclGetRecentErrMsg()!r}"

    def made(self, name: str, *arguments: Any) -> int:
        """Make a call that must succeed; return the pointer that it stores first."""
        out = ctypes.c_void_p()
        self.ok(name, ctypes.byref(out), *arguments)
        assert out.value
        return out.value

    def stored(self, name: str, *arguments: Any) -> int:
        """Make a call that must succeed; return the integer that it stores last."""
        out = ctypes.c_int64(0)
        self.ok(name, *arguments, ctypes.byref(out))
        return out.value

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make another device current in this thread inside the block."""
        before = self.made("aclrtGetCurrentContext")
        self.ok("aclrtSetDevice", device)
        yield
        self.ok("aclrtResetDevice", device)
        self.ok("aclrtSetCurrentContext", before)

    def location(self, address: int) -> tuple[int, int]:
        """Return the kind and the number of the device that has an address."""
        out = Attributes()
        self.ok("aclrtPointerGetAttributes", address, ctypes.byref(out))
        return out.location.type, out.location.id

    def view(self, address: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Return a view of device memory."""
        return (ctypes.c_ubyte * nbytes).from_address(self.core.kvsim_host_view(address))

    def fault(self, specification: str) -> None:
        assert self.core.kvsim_fault_add(specification.encode()) == 0, specification

    def set(self, name: str, value: object) -> None:
        assert self.core.kvsim_set(name.encode(), str(value).encode()) == 0, (name, value)

    def message(self) -> str:
        text = self.library.aclGetRecentErrMsg()
        return text.decode() if text else ""

    def leaks(self) -> dict[str, int]:
        left: dict[str, int] = json.loads(self.core.kvsim_leaks())
        return {name: count for name, count in left.items() if count}

    def batch(
        self,
        pairs: Sequence[tuple[int, int, int]],
        attributes: Sequence[tuple[int, Location, Location]],
        *,
        stream: int | None = None,
        capacities: Sequence[int] | None = None,
        reserved: int = 0,
    ) -> tuple[int, int]:
        """Copy the (target, source, nbytes) of ``pairs``; return the code and failIndex.

        ``attributes`` are tuples of first item, target and source. The call is synchronous without
        a stream.
        """
        count, wide = len(pairs), len(pairs) or 1
        targets = (ctypes.c_void_p * wide)(*[pair[0] for pair in pairs])
        sources = (ctypes.c_void_p * wide)(*[pair[1] for pair in pairs])
        sizes = (ctypes.c_size_t * wide)(*[pair[2] for pair in pairs])
        allowed = (ctypes.c_size_t * wide)(*(capacities or [pair[2] for pair in pairs]))
        table = (BatchAttribute * max(1, len(attributes)))()
        for row, (_, target, source) in zip(table, attributes, strict=False):
            row.target, row.source, row.reserved[3] = target, source, reserved
        first = (ctypes.c_size_t * len(table))(*[attribute[0] for attribute in attributes])
        failed = ctypes.c_size_t(77)
        arguments = (targets, allowed, sources, sizes, count, table, first, len(attributes))
        if stream is None:
            code = self.library.aclrtMemcpyBatch(*arguments, ctypes.byref(failed))
        else:
            code = self.library.aclrtMemcpyBatchAsync(*arguments, ctypes.byref(failed), stream)
        return code, failed.value


class Memories(NamedTuple):
    """Device, pinned and pageable memory of one size, and a stream."""

    device: int
    pinned: int
    pageable: int
    stream: int


@contextmanager
def memories(acl: Acl, nbytes: int) -> Iterator[Memories]:
    """Yield memories of `nbytes` and a stream, and free them at the end."""
    owner = ctypes.create_string_buffer(nbytes)
    device, pinned = acl.made("aclrtMalloc", nbytes, 0), acl.made("aclrtMallocHost", nbytes)
    stream = acl.made("aclrtCreateStream")
    yield Memories(device, pinned, ctypes.addressof(owner), stream)
    acl.ok("aclrtDestroyStreamForce", stream)
    acl.ok("aclrtFree", device)
    acl.ok("aclrtFreeHost", pinned)


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread, which has no context yet."""
    results: list[Any] = []
    thread = Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def answer_of(beginning: str, program: str, settings: Mapping[str, object]) -> Any:
    """Return the value that a program passes to ``answer``; see `in_process`."""
    environment = {f"KVSIM_{name.upper()}": str(value) for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(beginning) + textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        return done.returncode, done.stderr
    return json.loads(done.stdout)


def in_process(program: str, variant: str = "8.5", **settings: object) -> Any:
    """Run a program in a process of its own; return the value that it passes to ``answer``.

    The program finds the library as ``acl``. `settings` are environment variables without the
    prefix KVSIM_. If the process fails, return its exit code and what it wrote to stderr.
    """
    beginning = f"""
        import ctypes, json, os
        from tests.ascend_sim.acl_library import *
        acl = Acl({variant!r})
        answer = lambda value: print(json.dumps(value), flush=True)
    """
    return answer_of(beginning, program, settings)
