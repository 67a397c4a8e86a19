"""An end of communicators, in a process of `hccl_ends.py`."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvnative._acl import AclLibrary
from kvnative._executor import Executor
from kvnative._hccl import Communicator, Tickets
from kvnative._hccl_memory import Guards, HcclLibrary, Region, Staging
from kvnative._lower import Descriptors
from kvnative._pinned import pin
from kvnative._report import Report
from kvnative._task import Task
from tests.ascend.simulator import HOME, Controls
from tests.support.peer import described

UNTOUCHED = 0xA5
NORESERVE = 0x4000  # Linux's constant, which Python has from 3.13 on


REPORTED = ("status", "code", "failed", "message", "bytes_done", "unconfirmed")


def reported(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in REPORTED}


def columns(direction: str, rows: Sequence[tuple[int, int, int]]) -> Descriptors:
    """Return the columns of descriptors (local, remote, nbytes)."""
    local, remote, nbytes = np.array(rows, np.uint64).reshape(-1, 3).T.copy()
    dst, src = (local, remote) if direction == "get" else (remote, local)
    return Descriptors.from_columns(dst, src, nbytes)


class Memory:
    """Memory of kind "device", "pinned" or "pageable", filled with UNTOUCHED."""

    def __init__(self, end: End, kind: str, nbytes: int) -> None:
        self.kind, self.nbytes, self._device = kind, nbytes, end.device
        self.owner: Any
        self.array: NDArray[np.uint8]
        if kind == "device":
            self.owner = end.device.allocate(nbytes)
            self.address = self.owner.address
            self.write(0, bytes([UNTOUCHED]) * nbytes)
        else:
            self.array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
            self.array[...] = UNTOUCHED
            self.address = self.array.ctypes.data
            self.owner = pin(end.device, self.address, nbytes) if kind == "pinned" else None

    def write(self, offset: int, content: bytes) -> None:
        if self.kind == "device":
            self._device.write(self.address + offset, content)
        else:
            self.array[offset : offset + len(content)] = np.frombuffer(content, np.uint8)

    def read(self) -> bytes:
        if self.kind != "device":
            return self.array.tobytes()
        content = bytearray(self.nbytes)
        self._device.read(self.address, content)
        return bytes(content)


class Reserved(Memory):
    """Memory of any size that is never written."""

    def __init__(self, end: End, kind: str, nbytes: int) -> None:
        self.kind, self.nbytes, self._device = kind, nbytes, end.device
        if kind == "device":
            self.owner = end.device.allocate(nbytes)
            self.address = self.owner.address
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
            self.array = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
            self.address = self.array.ctypes.data
            self.owner = pin(end.device, self.address, nbytes)


class End:
    """A device of this process and its objects, which tests refer to by names."""

    def __init__(self, device: int) -> None:
        acl = AclLibrary.load()
        self.library = HcclLibrary.load(acl)
        self.device = acl.device(device)
        self.controls = Controls(Path(os.environ[HOME]) / "lib64" / "libkvsim_core.so")
        self.memories: dict[int, Memory] = {}
        self.regions: dict[int, Region] = {}
        self.stagings: dict[str, Staging] = {}
        self.communicators: dict[str, Communicator] = {}
        self.tasks: dict[str, tuple[Task, Executor]] = {}
        self.threads: dict[str, tuple[threading.Thread, list[Any]]] = {}

    def facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "path": self.library.path,
            "generation": self.library.generation,
            "missing": self.library.missing,
        }

    # ---- memory ----

    def memory(self, kind: str, nbytes: int) -> int:
        made = Memory(self, kind, nbytes)
        self.memories[made.address] = made
        return made.address

    def reserve(self, kind: str, nbytes: int) -> int:
        """Reserve address space of a kind; it is never touched, so it costs no memory."""
        made = Reserved(self, kind, nbytes)
        self.memories[made.address] = made
        return made.address

    def write(self, address: int, offset: int, content: bytes) -> None:
        self.memories[address].write(offset, content)

    def read(self, address: int) -> bytes:
        return self.memories[address].read()

    def free(self, address: int) -> None:
        del self.memories[address]

    def region(self, address: int, **changes: Any) -> None:
        memory = self.memories[address]
        asked = {"nbytes": memory.nbytes, "on_device": memory.kind == "device"} | changes
        nbytes = asked.pop("nbytes")
        self.regions[address] = Region(
            self.library, self.device, address, nbytes, owner=memory.owner, **asked
        )

    def deregister(self, address: int) -> None:
        self.regions[address].close()
        del self.regions[address]

    def staging(self, name: str, **options: int) -> None:
        self.stagings[name] = Staging(self.library, self.device, **options)

    def close_staging(self, name: str) -> None:
        self.stagings[name].close()
        del self.stagings[name]

    def unbind_staging(self, name: str, staging: str) -> None:
        self.communicators[name].unbind(self.stagings[staging].region)

    # ---- communicators ----

    def open(
        self, name: str, table: str, rank: int, *, max_batch: int = 64, **options: Any
    ) -> None:
        options["max_batch"] = max_batch  # every product accepts 64
        self.communicators[name] = Communicator(
            self.library, self.device, table, rank, 1 - rank, name, **options
        )

    def open_with(self, table: str, options: dict[str, Any]) -> None:
        ranks = {"rank_table": table, "rank": 0, "remote_rank": 1}
        given = ranks | {"name": "name", "max_batch": 64} | options
        made = Communicator(self.library, self.device, **given)
        self.communicators[made.name] = made

    def bind(self, name: str, *regions: int | str) -> None:
        """Bind regions by address, and stagings by name."""
        for key in regions:
            region = self.stagings[key].region if isinstance(key, str) else self.regions[key]
            self.communicators[name].bind(region)

    def unbind(self, name: str, address: int) -> None:
        self.communicators[name].unbind(self.regions[address])

    def prepare(self, name: str, timeout_ms: float = 5000) -> None:
        self.communicators[name].prepare(timeout_ms)

    def ask(self, name: str, what: str) -> Any:
        return getattr(self.communicators[name], what)

    def cancel(self, name: str, message: str) -> None:
        self.communicators[name].cancel(message)

    def close(self, name: str) -> None:
        self.communicators.pop(name).close()

    def close_only(self, name: str) -> None:
        self.communicators[name].close()

    # ---- concurrent calls ----

    def call_in_thread(self, key: str, method: str, *arguments: Any) -> None:
        answers: list[Any] = []

        def call() -> None:
            try:
                answers.append((True, getattr(self, method)(*arguments)))
            except Exception as error:
                answers.append((False, described(error)))

        thread = threading.Thread(target=call)
        self.threads[key] = thread, answers
        thread.start()

    def join(self, key: str, timeout_s: float | None = None) -> tuple[bool, Any]:
        thread, answers = self.threads.pop(key)
        thread.join(timeout_s)
        answered: tuple[bool, Any] = answers[0]
        return answered

    # ---- transfers ----

    def start(
        self,
        key: str,
        name: str,
        direction: Any,
        rows: Sequence[tuple[int, int, int]],
        *,
        guards: Sequence[tuple[int, int]] = (),
        staging: str | None = None,
        local: Any = "device",
        tickets: int | None = None,
        leases: Sequence[str] = (),
    ) -> None:
        """Start a transfer. With `tickets`, memory full of zeros, a put is announced."""
        backend = self.communicators[name].backend(
            direction,
            Guards(*np.array(guards, np.uint64).T.copy()) if guards else None,
            self.stagings[staging] if staging else None,
            local,
            leases,
            tickets=None if tickets is None else Tickets(tickets, self.memories[tickets]),
            tag=1,
        )
        executor = Executor(backend)
        self.tasks[key] = executor.submit(columns(direction, rows)), executor

    def wait(self, key: str, timeout_ms: float | None = 20000) -> dict[str, Any]:
        task, executor = self.tasks.pop(key)
        report = task.wait(timeout_ms)
        executor.close()
        return reported(report)

    def cancel_task(self, key: str) -> dict[str, Any]:
        task, executor = self.tasks.pop(key)
        report = task.cancel()
        executor.close()
        return reported(report)

    def transfer(
        self, *arguments: Any, timeout_ms: float | None = 20000, **options: Any
    ) -> dict[str, Any]:
        self.start("", *arguments, **options)
        return self.wait("", timeout_ms)

    # ---- actions of a framework in the same process ----

    def set_own_context(self) -> None:
        """Make the context of another device current."""
        self.acl = ctypes.CDLL(self.library.acl.path)
        self.own = ctypes.c_void_p()
        assert self.acl.aclrtCreateContext(ctypes.byref(self.own), ctypes.c_int32(5)) == 0

    def has_own_context(self) -> bool:
        current = ctypes.c_void_p()
        assert self.acl.aclrtGetCurrentContext(ctypes.byref(current)) == 0
        return current.value == self.own.value

    def drop_own_context(self) -> None:
        assert self.acl.aclrtDestroyContext(self.own) == 0

    # ---- the simulator ----

    def fault(self, *specifications: str) -> None:
        self.controls.add_fault(*specifications)

    def faults_left(self) -> int:
        left = self.controls.faults_left()
        self.controls.clear_faults()
        return left

    def faults_left_now(self) -> int:
        return self.controls.faults_left()

    def set(self, name: str, value: object) -> None:
        self.controls.set(name, value)

    def left(self) -> dict[str, int]:
        return self.controls.left()


def names(device: str) -> dict[str, Any]:
    return {"end": End(int(device))}
