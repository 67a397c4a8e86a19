"""Arenas: the one that memory of this process lies in, and a peer's that are mapped here."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from kvnative._host import Arena
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.metadata import ArenaRef

if TYPE_CHECKING:
    from kvplan.transport.metadata import Range

# What this process offers, so that a link to itself finds the arena instead of mapping it anew.
_OFFERED: WeakValueDictionary[ArenaRef, Arena] = WeakValueDictionary()


class MemoryLimit(NamedTuple):
    """The most memory that this process can ever have.

    Attributes:
        nbytes: of memory and swap.
        whose: limit it is, for messages.
    """

    nbytes: float
    whose: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """What there is of memory and swap, in the smallest cgroup that this process is in.

    Args:
        root: of the file system that has /proc and /sys.

    Returns:
        None where the system does not say.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
        cgroups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(kib) << 10 for name, kib in _MEMINFO.findall(meminfo)}
    swap = sizes["SwapTotal"]
    limits = [MemoryLimit(sizes["MemTotal"] + swap, "this machine")]
    for line in cgroups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        limit_of = _limit_of_version_1 if controllers else _limit_of_version_2
        names = [it for it in path.split("/") if it not in ("", "..")]
        # Its parents' limits count too; and in a container only the root may be what is there.
        for depth in range(len(names) + 1):
            nbytes = limit_of(mounted.joinpath(*names[:depth]), swap)
            limits.append(MemoryLimit(nbytes, f"cgroup /{'/'.join(names[:depth])}"))
    return min(limits)


_MEMINFO = re.compile(r"^(MemTotal|SwapTotal): +([0-9]+) kB$", re.MULTILINE)


def _limit_of_version_1(cgroup: Path, swap: int) -> float:
    memory = _number_in(cgroup / "memory.limit_in_bytes")
    return min(memory + swap, _number_in(cgroup / "memory.memsw.limit_in_bytes"))


def _limit_of_version_2(cgroup: Path, swap: int) -> float:
    memory = _number_in(cgroup / "memory.max")
    return memory + min(swap, _number_in(cgroup / "memory.swap.max"))


def _number_in(path: Path) -> float:
    """What a file of a cgroup limits: infinite if it is not there, or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return math.inf


def new_arena(nbytes: int, *, prefault: bool = False, allow_overcommit: bool = False) -> Arena:
    """New zeroed memory.

    Args:
        nbytes: its size.
        prefault: have all pages now; otherwise each comes at its first use.
        allow_overcommit: let it be larger than all memory and swap there is.

    Raises:
        LLMException: LLM_PARAM_INVALID: a size that cannot be; LLM_OUT_OF_MEMORY: there is not as
            much; LLM_FAILED: no file descriptor is left, say.
    """
    limit = None if allow_overcommit else memory_limit()
    if limit is not None and nbytes > limit.nbytes:
        raise LLMException(
            f"{nbytes} bytes were asked for, and {limit.whose} has {limit.nbytes} of memory and "
            "swap; kvplan.allow_overcommit=1 permits more than can be written to",
            status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
        )
    try:
        return Arena(nbytes, prefault=prefault)
    except ValueError as error:
        raise invalid(str(error)) from error
    except MemoryError as error:
        raise LLMException(str(error), status_code=LLMStatusCode.LLM_OUT_OF_MEMORY) from error
    except OSError as error:
        raise LLMException(str(error)) from error


def arena_of(memory: object) -> Arena | None:
    """The arena of this process that `memory` views: itself, a memoryview, or arrays over one."""
    while isinstance(memory, np.ndarray | memoryview):
        memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
    return memory if isinstance(memory, Arena) and memory.fd >= 0 else None


def offer(arena: Arena) -> ArenaRef:
    """How peers find `arena`, and a link to this process too."""
    ref = ArenaRef(arena.fd, arena.inode, arena.address, arena.nbytes)
    _OFFERED[ref] = arena
    return ref


def offered(ref: ArenaRef) -> Arena | None:
    """The arena of this process that was offered as `ref`, if it is still there."""
    return _OFFERED.get(ref)


class PeerArenas:
    """The arenas of process `pid` that are mapped here, each once however many use it."""

    def __init__(self, pid: int, *, prefault: bool) -> None:
        self._pid = pid
        self._prefault = prefault
        self._mutex = threading.RLock()  # a signal handler may close the link
        self._mapped: WeakValueDictionary[ArenaRef, Arena] = WeakValueDictionary()
        self._kept: dict[ArenaRef, Arena] = {}
        self._closed = False

    def map(self, it: Range) -> Arena:
        """The arena that `it` is a part of. OSError, ValueError, MemoryError as `Arena.of_peer`."""
        ref = it.arena
        assert ref is not None
        with self._mutex:
            arena = self._mapped.get(ref)
            if arena is None or (it.writable and not arena.writable):
                # A good moment to let go of what its owner has closed meanwhile.
                self._kept = {key: kept for key, kept in self._kept.items() if self._is_open(key)}
                arena = Arena.of_peer(
                    self._pid, ref.fd, ref.inode, ref.nbytes, writable=it.writable
                )
                if self._prefault:
                    arena.populate()
                self._mapped[ref] = arena
            # One that is offered whole goes with its last user here. One that is offered in parts
            # stays: it is a pool, whose parts come and go while its pages are mapped once.
            if it.nbytes < ref.nbytes and not self._closed:
                self._kept[ref] = arena
            return arena

    def close(self) -> None:
        """Keep nothing that is not in use; idempotent."""
        with self._mutex:
            self._closed = True
            self._kept = {}

    def _is_open(self, ref: ArenaRef) -> bool:
        try:
            return Path(f"/proc/{self._pid}/fd/{ref.fd}").stat().st_ino == ref.inode
        except OSError:
            return False
