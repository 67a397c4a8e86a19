"""An end of a communicator, in a process of `hccl_ends.py`.

Calls of the simulated library return their code and raise nothing, because tests compare codes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import threading
from ctypes import byref, c_char_p, c_int, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

DEVICE, PINNED, REGISTERED = 0, 1, 2


class HcclMem(ctypes.Structure):
    _fields_ = [("type", c_int32), ("addr", c_void_p), ("size", c_uint64)]


class HcclMemDescs(ctypes.Structure):
    _fields_ = [("array", c_void_p), ("length", c_uint32)]


class HcclDesc(ctypes.Structure):
    _fields_ = [("local", c_void_p), ("remote", c_void_p), ("count", c_uint64), ("type", c_int32)]


class PrepareConfig(ctypes.Structure):
    _fields_ = [("topology", c_int32), ("reserved", c_uint64 * 3)]


def config(
    name: str,
    *,
    size: int = 300,
    magic: int = 0xF0F0F0F0,
    version: int = 5,
    buffer_mb: int = 200,
    traffic_class: int = 0xFFFFFFFF,
    service_level: int = 0xFFFFFFFF,
) -> bytes:
    """Return the configuration record of version 5."""
    head = struct.pack("<QIIQ", size, magic, version, 0)
    middle = struct.pack("<II128s128sI", buffer_mb, 0, name.encode(), b"", 0)
    return head + middle + struct.pack("<II", traffic_class, service_level)


class End:
    """The simulated libraries, and the objects that this process has made with them."""

    def __init__(self, lib64: str, device: int) -> None:
        acl, hccl = (
            next(path for name in names if Path(path := f"{lib64}/{name}").exists())
            for names in (("libacl_rt.so", "libascendcl.so"), ("libhcomm.so", "libhccl.so"))
        )
        self.core = ctypes.CDLL(f"{lib64}/libkvsim_core.so")
        self.core.kvsim_host_view.restype = c_void_p
        self.core.kvsim_leaks.restype = c_char_p
        self.acl = ctypes.CDLL(acl)
        self.hccl = ctypes.CDLL(hccl)
        self.hccl.HcclGetErrorString.restype = c_char_p
        self.device = device
        self.buffers: list[Any] = []
        self.streams: dict[int, int] = {}
        self.threads: list[threading.Thread] = []
        self.acl.aclInit(None)
        self.use(device)

    def use(self, device: int) -> int:
        """Make a device current in this thread."""
        self.device = device
        return self.acl.aclrtSetDevice(c_int32(device))

    def fault(self, specification: str) -> int:
        return self.core.kvsim_fault_add(specification.encode())

    def setting(self, name: str, value: str) -> int:
        library = self.core.kvsim_set(name.encode(), value.encode())
        return self.hccl.kvsim_hccl_set(name.encode(), value.encode()) if library else 0

    def leaks(self) -> str:
        return self.core.kvsim_leaks().decode()

    def error_text(self, code: int) -> str:
        return self.hccl.HcclGetErrorString(code).decode()

    # Memory.

    def allocate(
        self, nbytes: int, kind: int = DEVICE, device: int | None = None, mapped: bool = False
    ) -> int:
        address = c_uint64()
        owner = self.device if device is None else device
        if kind == REGISTERED:
            self.buffers.append(ctypes.create_string_buffer(nbytes + 4096))
            address.value = -(-ctypes.addressof(self.buffers[-1]) // 4096) * 4096
            code = self.core.sim_memory_register(owner, address, c_uint64(nbytes), mapped)
        else:
            code = self.core.sim_memory_allocate(kind, owner, c_uint64(nbytes), byref(address))
        if code:
            raise RuntimeError(f"no memory: {code}")
        return address.value

    def free(self, address: int, kind: int = DEVICE) -> int:
        return self.core.sim_memory_free(kind, c_uint64(address))

    def _view(self, address: int, kind: int) -> int:
        return address if kind == REGISTERED else self.core.kvsim_host_view(c_uint64(address))

    def write(self, address: int, content: bytes, kind: int = DEVICE) -> None:
        ctypes.memmove(self._view(address, kind), content, len(content))

    def read(self, address: int, nbytes: int, kind: int = DEVICE) -> bytes:
        return ctypes.string_at(self._view(address, kind), nbytes)

    # Communicators and the memory bound to them.

    def init(self, table: str | None, rank: int, record: bytes | None) -> tuple[int, int]:
        comm = c_void_p()
        text = table.encode() if table is not None else None
        code = self.hccl.HcclCommInitClusterInfoMemConfig(text, rank, record, byref(comm))
        return code, comm.value or 0

    def init_together(self, table: str, rank: int, names: list[str]) -> list[int]:
        """Initialize a communicator of each name, in as many threads at once."""
        codes: list[int] = []
        all_there = threading.Barrier(len(names))

        def one(name: str) -> None:
            self.acl.aclrtSetDevice(c_int32(self.device))
            all_there.wait()
            codes.append(self.init(table, rank, config(name))[0])

        threads = [threading.Thread(target=one, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(codes)

    def register(self, address: int, nbytes: int, kind: int = DEVICE) -> tuple[int, int]:
        handle = c_void_p()
        memory = HcclMem(min(kind, 1), address, nbytes)
        return self.hccl.HcclRegisterGlobalMem(byref(memory), byref(handle)), handle.value or 0

    def deregister(self, handle: int) -> int:
        return self.hccl.HcclDeregisterGlobalMem(c_void_p(handle))

    def bind(self, comm: int, handle: int) -> int:
        return self.hccl.HcclCommBindMem(c_void_p(comm), c_void_p(handle))

    def unbind(self, comm: int, handle: int) -> int:
        return self.hccl.HcclCommUnbindMem(c_void_p(comm), c_void_p(handle))

    def prepare(self, comm: int, timeout: int = 5, topology: int = 0) -> int:
        self.acl.aclrtSetDevice(c_int32(self.device))
        asked = PrepareConfig(topology)
        return self.hccl.HcclCommPrepare(c_void_p(comm), byref(asked), c_int(timeout))

    def prepare_in_threads(self, ends: list[tuple[int, int]]) -> list[int]:
        """Prepare communicators (device, communicator) of this process, each in its own thread."""
        codes = [-1] * len(ends)

        def one(i: int, device: int, comm: int) -> None:
            self.acl.aclrtSetDevice(c_int32(device))
            codes[i] = self.hccl.HcclCommPrepare(c_void_p(comm), byref(PrepareConfig()), c_int(5))

        threads = [threading.Thread(target=one, args=(i, *end)) for i, end in enumerate(ends)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return codes

    def destroy(self, comm: int) -> int:
        return self.hccl.HcclCommDestroy(c_void_p(comm))

    def async_error(self, comm: int) -> tuple[int, int]:
        found = c_int(-1)
        return self.hccl.HcclGetCommAsyncError(c_void_p(comm), byref(found)), found.value

    def remap(self, comms: list[int], ranges: list[tuple[int, int]]) -> int:
        memories = (HcclMem * len(ranges))(*(HcclMem(0, *item) for item in ranges))
        handles = (c_void_p * len(comms))(*comms)
        return self.hccl.HcclRemapRegistedMemory(
            handles, memories, c_uint64(len(comms)), c_uint64(len(ranges))
        )

    # Transfers.

    def stream(self) -> int:
        made = c_void_p()
        self.acl.aclrtCreateStream(byref(made))
        return made.value or 0

    def transfer(
        self,
        direction: str,
        comm: int,
        remote_rank: int,
        pieces: list[tuple[int, int, int]],
        stream: int,
        data_type: int = 7,
    ) -> int:
        """Put or get pieces of (local, remote, count)."""
        descs = (HcclDesc * max(1, len(pieces)))(*(HcclDesc(*piece, data_type) for piece in pieces))
        function = self.hccl.HcclBatchPut if direction == "put" else self.hccl.HcclBatchGet
        return function(
            c_void_p(comm), c_uint32(remote_rank), descs, c_uint32(len(pieces)), c_void_p(stream)
        )

    def transfer_and_kill(self, pid: int, *arguments: Any) -> list[int]:
        """Submit two transfers and kill a process, sooner than a test in another process could."""
        codes = [self.transfer("put", *arguments) for _ in range(2)]
        os.kill(pid, signal.SIGKILL)
        return codes

    def synchronize(self, stream: int, timeout_ms: int = 5000) -> int:
        return self.acl.aclrtSynchronizeStreamWithTimeout(c_void_p(stream), c_int32(timeout_ms))

    def abort(self, stream: int) -> int:
        return self.acl.aclrtStreamAbort(c_void_p(stream))

    def destroy_stream(self, stream: int) -> int:
        return self.acl.aclrtDestroyStreamForce(c_void_p(stream))

    # Memory that is registered for a single communicator.

    def register_for(
        self, comm: int, remote_rank: int, address: int, nbytes: int, kind: int = DEVICE
    ) -> tuple[int, bytes]:
        desc = ctypes.create_string_buffer(512)
        code = self.hccl.HcclRegisterMem(
            *(c_void_p(comm), c_uint32(remote_rank), c_int(min(kind, 1))),
            *(c_void_p(address), c_uint64(nbytes), desc),
        )
        return code, desc.raw

    def deregister_for(self, comm: int, desc: bytes) -> int:
        return self.hccl.HcclDeregisterMem(c_void_p(comm), desc)

    def exchange(
        self, comm: int, remote_rank: int, descs: list[bytes], room: int = 8, timeout: int = 5
    ) -> tuple[int, list[bytes]]:
        mine = ctypes.create_string_buffer(b"".join(descs), 512 * max(1, len(descs)))
        theirs = ctypes.create_string_buffer(512 * room)
        local = HcclMemDescs(ctypes.addressof(mine), len(descs))
        remote = HcclMemDescs(ctypes.addressof(theirs), room)
        actual = c_uint32()
        code = self.hccl.HcclExchangeMemDesc(
            *(c_void_p(comm), c_uint32(remote_rank), byref(local), c_int(timeout)),
            *(byref(remote), byref(actual)),
        )
        return code, [theirs.raw[i * 512 : i * 512 + 512] for i in range(actual.value)]

    def enable(self, comm: int, desc: bytes) -> tuple[int, int, int]:
        memory = HcclMem()
        code = self.hccl.HcclEnableMemAccess(c_void_p(comm), desc, byref(memory))
        return code, memory.addr or 0, memory.size

    def disable(self, comm: int, desc: bytes) -> int:
        return self.hccl.HcclDisableMemAccess(c_void_p(comm), desc)


def names(lib64: str, device: str) -> dict[str, Any]:
    return {"end": End(lib64, int(device))}
