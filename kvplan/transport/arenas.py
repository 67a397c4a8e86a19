"""Arenas: the one that memory of this process lies in, and a peer's that are mapped here."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from kvnative._host import Arena
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.metadata import ArenaRef

if TYPE_CHECKING:
    from kvplan.transport.metadata import Range

# What this process offers, so that a link to itself finds the arena instead of mapping it anew.
_OFFERED: WeakValueDictionary[ArenaRef, Arena] = WeakValueDictionary()


def new_arena(nbytes: int) -> Arena:
    """New zeroed memory, whose pages come at first use.

    Raises:
        LLMException: LLM_PARAM_INVALID: a size that cannot be; LLM_OUT_OF_MEMORY; LLM_FAILED: no
            file descriptor is left, say.
    """
    try:
        return Arena(nbytes)
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
