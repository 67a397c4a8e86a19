"""Memory of a peer on this host: arenas and allocations, mapped here once, and tensors in them."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self
from weakref import WeakValueDictionary

from kvnative._host import Arena
from kvnative._signals import Mutex
from kvplan.device.memory import check_device_of_link
from kvplan.device.sharing import AllocationRef, Exported, exported
from kvplan.status import LLMException, LLMStatusCode, invalid
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
    from kvplan.device.device import Device
    from kvplan.device.sharing import Mapped, Sharing
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.inspection.copy_ways import CopyDirection
    from kvplan.lease import BlockLease
    from kvplan.transport.local.link import LocalLink

    Column = NDArray[np.uint64]

POPULATE: Final = ("background", "now", "off")
"""When to map pages of a peer's arena: existing pages in the background, all pages with the arena,
or each page at its first use."""

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


class LocalPeerMemory(BasePeerMemory["LocalLink", Range]):
    """Tensors in a peer, either mapped here or at the peer's own addresses."""

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
        self._words = words  # of the ranges, then of the leases
        self._leases: Sequence[BlockLease] = ()
        # Keeps what the addresses point into mapped; empty for the peer's own addresses.
        self._held = held
        self._writer = writer  # announces writes; None: nothing is announced
        self._write_guard: WriteGuard | None = None
        self._backends: dict[Direction, tuple[ThreadPool, Backend | None, Backend]] = {}

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory
    ) -> Backend | None:
        """Return the backend for the peer's own addresses; None: they are mapped here.

        Every write is announced to the owner, whatever copies. LLM_FEATURE_NOT_ENABLED: the system
        copies from the peer's own addresses only to host memory, and `other` is on a device.
        """
        device = None  # of `other`, which copies
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
        assert self._writer is not None, "memory that is not writable was refused before"
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
        """See `PeerMemory.leased`: each check finds a lease that ended before it."""
        words = self._words
        for lease in leases:
            word = lease.packed_word("local")
            if word is None:
                raise no_leases("local")
            words += word
        copy = self._copy()
        copy._words = words
        copy._leases = leases
        copy._held = self._held
        copy._writer = self._writer
        copy._write_guard = None
        copy._backends = {}
        return copy

    def check(self) -> None:
        """Check the peer, its ranges and the leases, before and after a transfer.

        Only if both checks pass has the transfer moved the right bytes.
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
        """Check all ranges, whatever the part: it takes no system call."""
        self.check()


def words_of(ranges: Sequence[Range]) -> bytes:
    """Return slot and generation of each range, by which a check finds it registered."""
    return array("Q", [number for it in ranges for number in (it.slot, it.generation)]).tobytes()


class PeerAllocations:
    """The allocations of a peer's devices that are mapped for a device here, each once.

    Args:
        process: The peer.
        device: The device that the memory is mapped for.
        sharing: The sharing of that device.
    """

    def __init__(self, process: Peer, device: Device, sharing: Sharing) -> None:
        self.device = device
        self._process = process
        self._sharing = sharing
        self._mutex = Mutex()  # a signal handler may close the link
        self._mapped: WeakValueDictionary[AllocationRef, Mapped] = WeakValueDictionary()
        self._kept: dict[AllocationRef, Mapped] = {}  # of pools
        self._closed = False

    def map(self, link: LocalLink, memory: Range) -> Mapped:
        """Return the allocation that holds `memory`, which was registered while it was mapped."""
        ref = memory.allocation
        assert ref is not None
        with self._mutex:
            mapped = self._mapped.get(ref)
            if mapped is None:
                mapped = self._map(ref)
                # While it is registered, its owner keeps the descriptor, whose number is not used
                # again. So this is the right one.
                link.check_ranges([memory], words_of([memory]))
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
        fd = self._process.take_descriptor(ref.fd)
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


class LocalDeviceMemory(LocalPeerMemory):
    """Tensors in the memory of a peer's device, mapped here."""

    def backend(self, pool: ThreadPool, direction: Direction, other: TensorMemory) -> Backend:
        """Return the copies of this side's device between the peer's device and `other`.

        Writes are announced to the owner. So are reads, if only the announcement keeps the owner
        from freeing the memory.
        """
        device = self._link.device
        assert device is not None, "without one nothing is mapped"
        if not other.in_process or isinstance(other, LocalPeerMemory):
            raise invalid(
                "src and dst are both memory of other processes; one of them must be this one's"
            )
        check_device_of_link(other, device, self._link.peer)
        way: CopyDirection = (
            "device_to_device"
            if other.on_device
            else "device_to_host"
            if direction == "get"
            else "host_to_device"
        )
        inner = device.backend(way)
        if direction == "get" and not any(memory.announces_reads for memory in self._ranges):
            return inner
        known = self._backends.get(direction)
        if known is None or known[1] is not inner:
            assert self._writer is not None, "memory that is not writable is refused before"
            made = self._writer.around(inner, self._words)
            known = self._backends[direction] = pool, inner, made
        return known[2]

    @property
    def guard(self) -> None:
        """None: a plain copy does not reach the memory."""

    @property
    def write_guard(self) -> None:
        """None: a plain copy does not reach the memory."""
