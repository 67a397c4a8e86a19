"""Arenas of a peer on this host, and allocations of its devices, each mapped here once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from kvnative._host import Arena
from kvnative._signals import Mutex
from kvplan.device.sharing import AllocationRef, Exported, exported
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.local.metadata import ArenaRef, Range
from kvplan.transport.pages import background_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.device.device import Device
    from kvplan.device.sharing import Mapped, Sharing

POPULATE: Final = ("background", "now", "off")
"""Times to map pages of a peer's arena.

Existing pages in the background, all pages with the arena, or each page at its first use.
"""

# So that a link to this process finds the arena instead of mapping it again.
_OFFERED: WeakValueDictionary[ArenaRef, Arena] = WeakValueDictionary()


def offer(arena: Arena) -> ArenaRef:
    """Return how peers, and a link to this process, find `arena`."""
    ref = ArenaRef(arena.address, arena.nbytes, arena.fd, arena.inode)
    _OFFERED[ref] = arena
    return ref


def offered(ref: ArenaRef) -> Arena | None:
    """Return the arena of this process that was offered as `ref`, if it still exists."""
    return _OFFERED.get(ref)


class PeerArenas:
    """The arenas of process `pid` that are mapped here, each once however many use it."""

    def __init__(self, pid: int, *, populate: str) -> None:
        self._pid = pid
        self._populate = populate
        self._owner = object()  # of background work, which must not hold this object
        self._mutex = Mutex()  # a signal handler may close the link
        self._mapped: WeakValueDictionary[ArenaRef, Arena] = WeakValueDictionary()
        self._kept: dict[ArenaRef, Arena] = {}
        self._closed = False

    def map(self, memory: Range) -> Arena:
        """Return the arena that holds `memory`. It raises the errors of `Arena.of_peer`."""
        ref = memory.arena
        assert ref is not None
        with self._mutex:
            arena = self._mapped.get(ref)
            if arena is None or (memory.writable and not arena.writable):
                # Let go of arenas that their owner has closed meanwhile.
                self._kept = {key: kept for key, kept in self._kept.items() if self._is_open(key)}
                arena = Arena.of_peer(
                    self._pid, ref.fd, ref.inode, ref.nbytes, writable=memory.writable
                )
                if self._populate == "now":
                    arena.populate()
                self._mapped[ref] = arena
                # Pages of hugetlbfs are mapped with the arena.
                if self._populate == "background" and arena.pages != "hugetlb" and not self._closed:
                    background_pages().add(arena, self._owner)
            # An arena that is offered whole is unmapped with its last user. One that is offered in
            # parts is a pool: its pages stay mapped while its parts come and go.
            if memory.nbytes < ref.nbytes and not self._closed:
                self._kept[ref] = arena
            return arena

    def prepare(self, job: Callable[[], object]) -> None:
        """Call `job`, which maps arenas, soon if arenas are populated in the background."""
        if self._populate == "background" and not self._closed:
            background_pages().submit(job, self._owner)

    def mapped(self) -> list[Arena]:
        """Return the arenas that are mapped now."""
        known = self._mapped.valuerefs()  # a snapshot: other threads may map meanwhile
        return [arena for reference in known if (arena := reference()) is not None]

    def close(self) -> None:
        """Keep only arenas that are in use, and populate nothing more. Idempotent."""
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


class PeerAllocations:
    """The allocations of a peer's devices that are mapped for a device here, each once.

    Args:
        descriptor: Duplicates the peer's descriptor of an allocation into this process.
        device: The device that the memory is mapped for.
        sharing: The sharing of that device.
    """

    def __init__(
        self, descriptor: Callable[[AllocationRef], int], device: Device, sharing: Sharing
    ) -> None:
        self.device = device
        self._descriptor = descriptor
        self._sharing = sharing
        self._mutex = Mutex()  # a signal handler may close the link
        self._mapped: WeakValueDictionary[AllocationRef, Mapped] = WeakValueDictionary()
        self._kept: dict[AllocationRef, Mapped] = {}  # of pools
        self._closed = False

    def map(self, memory: Range, check: Callable[[], None]) -> Mapped:
        """Return the allocation that holds `memory`; `check` refuses it if it is not registered."""
        ref = memory.allocation
        assert ref is not None
        with self._mutex:
            mapped = self._mapped.get(ref)
            if mapped is None:
                mapped = self._map(ref)
                # While it is registered, its owner keeps the descriptor, whose number is not used
                # again. So this is the right one.
                check()
                self._mapped[ref] = mapped
            # A pool is mapped once while its parts come and go. Other mappings end with their last
            # user here: until then the memory is not free, even after its owner has freed it.
            if ref.is_pool and ref.is_kept_by_peers and not self._closed:
                self._kept[ref] = mapped
            return mapped

    def close(self) -> None:
        """Keep only allocations that are in use. Idempotent."""
        with self._mutex:
            self._closed = True
            self._kept = {}

    def _map(self, ref: AllocationRef) -> Mapped:
        if ref.fd < 0:
            return self._sharing.map(ref, -1)
        fd = self._descriptor(ref)
        try:
            return self._sharing.map(ref, fd)
        finally:
            os.close(fd)


def allocation_here(memory: Range, device: Device) -> Exported | None:
    """Return the allocation of this process that holds `memory`.

    None: in another device or context.

    A second mapping would give one byte two addresses, which hides overlaps.
    """
    assert memory.allocation is not None
    if (found := exported(memory.allocation)) is None:
        raise LLMException(
            f"{memory} of this process is not registered any more",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )
    return found if found.device is device.native else None
