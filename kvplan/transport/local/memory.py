"""Memory of a peer on this host: its arenas, mapped here once, and tensors as a transfer's side."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self
from weakref import WeakValueDictionary

from kvnative._host import Arena
from kvnative._signals import Mutex
from kvplan.transport.base import BasePeerMemory, no_leases
from kvplan.transport.local.metadata import ArenaRef, Range
from kvplan.transport.pages import background_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvnative._process import Peer
    from kvnative._writers import WriteGuard, Writer
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.lease import BlockLease
    from kvplan.transport.local.link import LocalLink

    Column = NDArray[np.uint64]

POPULATE: Final = ("background", "now", "off")
"""When pages of a peer's arena are mapped: those that are there, in the background; all, holes too,
with the arena; or each at its first use."""

# What this process offers, so that a link to itself finds the arena instead of mapping it again.
_OFFERED: WeakValueDictionary[ArenaRef, Arena] = WeakValueDictionary()


def offer(arena: Arena) -> ArenaRef:
    """How peers find `arena`, and a link to this process too."""
    ref = ArenaRef(arena.address, arena.nbytes, arena.fd, arena.inode)
    _OFFERED[ref] = arena
    return ref


def offered(ref: ArenaRef) -> Arena | None:
    """The arena of this process that was offered as `ref`, if it is still there."""
    return _OFFERED.get(ref)


class PeerArenas:
    """The arenas of process `pid` that are mapped here, each once however many use it."""

    def __init__(self, pid: int, *, populate: str) -> None:
        self._pid = pid
        self._populate = populate
        self._owner = object()  # of what is populated in the background, which must not hold this
        self._mutex = Mutex()  # a signal handler may close the link
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
                if self._populate == "now":
                    arena.populate()
                self._mapped[ref] = arena
                # Pages of hugetlbfs are all mapped with it.
                if self._populate == "background" and arena.pages != "hugetlb" and not self._closed:
                    background_pages().add(arena, self._owner)
            # One that is offered whole goes with its last user here. One that is offered in parts
            # stays: it is a pool, whose parts come and go while its pages are mapped once.
            if it.nbytes < ref.nbytes and not self._closed:
                self._kept[ref] = arena
            return arena

    def prepare(self, job: Callable[[], object]) -> None:
        """Have `job`, which maps arenas, called soon where they are populated in the background."""
        if self._populate == "background" and not self._closed:
            background_pages().submit(job, self._owner)

    def mapped(self) -> list[Arena]:
        """Those that are mapped now."""
        known = self._mapped.valuerefs()  # at once: others map meanwhile
        return [arena for it in known if (arena := it()) is not None]

    def close(self) -> None:
        """Keep nothing that is not in use, populate nothing more; idempotent."""
        with self._mutex:
            self._closed = True
            self._kept = {}
        if self._populate == "background":
            background_pages().cancel(self._owner)

    def _is_open(self, ref: ArenaRef) -> bool:
        try:
            return Path(f"/proc/{self._pid}/fd/{ref.fd}").stat().st_ino == ref.inode
        except OSError:
            return False


class LocalPeerMemory(BasePeerMemory["LocalLink", Range]):
    """Tensors in a peer, as `LocalLink.memory` found them: mapped here, or at its own addresses."""

    def __init__(
        self,
        link: LocalLink,
        addresses: Column,
        nbytes: Column,
        ranges: Sequence[Range],
        words: bytes,
        held: Sequence[object],
        writer: Writer | None,
        *,
        writable: bool,
        on_device: bool = False,
    ) -> None:
        super().__init__(
            link,
            addresses,
            nbytes,
            ranges,
            writable=writable,
            in_process=bool(held) or link.is_to_self,
            on_device=on_device,
        )
        self._words = words  # of the ranges; those of leases follow
        self._leases: Sequence[BlockLease] = ()
        # What the addresses point into, held open; empty where they are the peer's own.
        self._held = held
        self._writer = writer  # that announces what is written; None: there is nothing to
        self._write_guard: WriteGuard | None = None
        self._backends: dict[Direction, tuple[ThreadPool, Backend | None, Backend]] = {}

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory
    ) -> Backend | None:
        """What reaches the addresses; None: they are mapped here, so whatever copies here does.

        What writes to them announces that to their owner, whatever copies.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: addresses of the peer's own, which the system
                copies from and to host memory alone, and `other` is on a device.
        """
        device = None  # what copies, where `other` is on one
        if other.on_device:
            if not self.in_process:
                raise self._link.unreached_from_device()
            if direction == "get":
                return None
            device = other.backend(pool, "get", self)
        elif direction == "get" and self._held:
            return None
        known = self._backends.get(direction)
        if known is None or known[0] is not pool or known[1] is not device:
            made = self._writing(pool, device) if direction == "put" else self._link.reading(pool)
            known = self._backends[direction] = pool, device, made
        return known[2]

    def _writing(self, pool: ThreadPool, device: Backend | None) -> Backend:
        assert self._writer is not None, "memory that is not writable is refused before"
        if device is not None:
            return self._writer.around(device, self._words)
        if self._held:
            return self._writer.mapped(pool, self._words)
        return self._writer.by_address(pool, self._words)

    @property
    def guard(self) -> tuple[Peer, bytes] | None:
        """See `PeerMemory.guard`."""
        return (self._link.process, self._words) if self._held else None

    @property
    def write_guard(self) -> WriteGuard | None:
        """See `PeerMemory.write_guard`."""
        if self._write_guard is None and self._writer is not None and self._held:
            self._write_guard = self._writer.guarded(self._words)
        return self._write_guard

    def leased(self, leases: Sequence[BlockLease]) -> Self:
        """See `PeerMemory.leased`: each check finds one of them ended, that was so before it."""
        words = self._words
        for lease in leases:
            word = lease.packed_word("local")
            if word is None:
                raise no_leases("local")
            words += word
        it = self._copy()
        it._words = words
        it._leases = leases
        it._held = self._held
        it._writer = self._writer
        it._write_guard = None
        it._backends = {}
        return it

    def check(self) -> None:
        """Call before a transfer and after it; only if both pass, it moved what it should.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer has exited, executes another program, or has
                closed its transport; LLM_KV_CACHE_NOT_EXIST: it has deregistered a range, or ended
                a lease; LLM_NOT_YET_LINK: the link was closed.
        """
        link = self._link
        try:
            if os.getpid() == link.pid and link.process.check(self._words) < 0:
                return
        except (ValueError, OSError):
            pass
        held: list[Range | BlockLease] = [*self._ranges, *self._leases]
        link.check_ranges(held, self._words)  # says what is wrong

    def check_tensors(self, tensors: range) -> None:
        """As `check`: all ranges are looked at, whatever the part, and no system call is made."""
        self.check()


def words_of(ranges: Sequence[Range]) -> bytes:
    """By which it is checked that they are registered: of each its slot and its generation."""
    return array("Q", [number for it in ranges for number in (it.slot, it.generation)]).tobytes()
