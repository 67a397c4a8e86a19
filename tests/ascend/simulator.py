"""The simulated libraries as tests see them: memory, faults, calls and leaks."""

from __future__ import annotations

import ctypes
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.ascend_sim.build import build

CORE = "libkvsim_core.so"
HOME = "ASCEND_HOME_PATH"
HOST_TO_DEVICE = 1  # ACL's constant
MAX_LINE_NBYTES = 4096  # of the log, see core_log.c; a run of all tests writes 60 MB of lines
VARIANT = os.environ.get("KVSIM_VARIANT", "8.5")  # of this process; test_acl_variants.py sets it
# Empty in tests/conftest.py, so that most tests run without a device.
ELSEWHERE = "KVPLAN_ASCEND_LIBRARY"


class Call(NamedTuple):
    """A line of the log: a call of a simulated library, or a note of the simulator."""

    name: str
    code: int
    pid: int
    fields: dict[str, Any]


def is_staging(line: dict[str, Any]) -> bool:
    """Return True for a copy from the host to the device within a transfer."""
    call = line.get("call")
    return call in ("aclrtMemcpyBatch", "aclrtMemcpyBatchAsync") or (
        call == "aclrtMemcpyAsync" and line["kind"] == HOST_TO_DEVICE
    )


def _whole(text: bytes) -> bytes:
    """Return the complete lines, without one that a process may still be writing."""
    return text[: text.rfind(b"\n") + 1]


class Log:
    """Calls from now on, in all processes with the same environment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.restart()

    def restart(self) -> None:
        """Forget the calls so far."""
        self._from = 0
        if self._path.exists():
            with self._path.open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - 2 * MAX_LINE_NBYTES)
                file.seek(start)
                self._from = start + len(_whole(file.read()))

    def rewind(self) -> None:
        """Return to the beginning of the log."""
        self._from = 0

    def calls(self, *names: str, pid: int | None = None) -> list[Call]:
        """Return the calls of these names, or all calls; of one process, or of all."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._from)
            text = file.read()
        # Threads that wait poll often, so only lines of wanted calls are parsed.
        wanted = tuple(f'"call":"{name}"'.encode() for name in names)
        lines = [
            json.loads(line)
            for line in _whole(text).splitlines()
            if not names or any(item in line for item in wanted)
        ]
        return [
            Call(line["call"], line.get("code", 0), line.get("pid", 0), line)
            for line in lines
            if (not names or line.get("call") in names) and pid in (None, line.get("pid"))
        ]

    def counts(self, *names: str, pid: int | None = None) -> dict[str, int]:
        """Return the number of calls by name, for these names or for all."""
        counted = Counter(call.name for call in self.calls(*names, pid=pid))
        return {name: counted[name] for name in (names or counted)}


class Controls:
    """Controls of the simulator of this process, whose core serves all libraries.

    Args:
        library: the core, or a library that needs it.
    """

    accelerator = "ascend"

    def __init__(self, library: Path | str) -> None:
        core = ctypes.CDLL(str(library))
        core.kvsim_host_view.argtypes, core.kvsim_host_view.restype = (
            [ctypes.c_uint64],
            ctypes.c_void_p,
        )
        core.kvsim_leaks.restype = ctypes.c_char_p
        core.kvsim_fault_add.argtypes = [ctypes.c_char_p]
        core.kvsim_set.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self._core = core

    def host_view(self, address: int) -> int:
        """Return the host address of a device address's bytes."""
        view: int | None = self._core.kvsim_host_view(address)
        assert view, f"{address:#x} is not device memory"
        return view

    def left(self) -> dict[str, int]:
        """Return the number of leaks by kind, without the contexts of devices."""
        left: dict[str, int] = json.loads(self._core.kvsim_leaks())
        return {kind: count for kind, count in left.items() if count and kind != "contexts"}

    def contexts(self) -> int:
        """Return the number of contexts besides the primary ones."""
        return int(json.loads(self._core.kvsim_leaks())["contexts"])

    def add_fault(self, *specifications: str) -> None:
        """Inject faults into calls of this process; see `kvsim_fault_add`."""
        for specification in specifications:
            assert self._core.kvsim_fault_add(specification.encode()) == 0, specification

    def clear_faults(self) -> None:
        self._core.kvsim_faults_clear()

    def lingers(self) -> int:
        """Return the number of ranges that aborted operations still use."""
        return int(self._core.kvsim_lingering())

    def faults_left(self) -> int:
        """Return the number of faults that have not happened yet."""
        return int(self._core.kvsim_faults_left())

    def set(self, name: str, value: object) -> None:
        """Change a setting of this process, by its name without KVSIM_."""
        assert self._core.kvsim_set(name.encode(), str(value).encode()) == 0, name


@cache
def controls(variant: str = VARIANT) -> Controls:
    """Return the controls of this process, with the core of the simulator that it has loaded."""
    home = build(variant)
    try:
        ctypes.CDLL(CORE, os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return Controls(home / "lib64" / CORE)
    return Controls(CORE)


@contextmanager
def found(variant: str = VARIANT) -> Iterator[Path]:
    """Make this process, and those that it starts, find the simulated libraries."""
    before = {name: os.environ.get(name) for name in (HOME, ELSEWHERE)}
    home = build(variant)
    os.environ[HOME] = str(home)
    os.environ.pop(ELSEWHERE, None)
    try:
        yield home
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
