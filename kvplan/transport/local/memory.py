"""Mappings of a peer's arenas and device allocations, each mapped once."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from weakref import WeakValueDictionary

from kvnative._backend import NativeError
from kvnative._host import Arena, Pin
from kvnative._signals import Mutex
from kvplan.device.sharing import AllocationRef, exported
from kvplan.status import LLMException, link_failed, not_exist, unsupported
from kvplan.system.limits import is_lack, reason_of, system_error
from kvplan.transport.local.descriptors import MAX_BATCH, ask, close_all, refusal
from kvplan.transport.local.identity import advice
from kvplan.transport.local.metadata import ArenaRef, Metadata, Range
from kvplan.transport.pages import background_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kvnative._process import Peer
    from kvplan.device.device import Device
    from kvplan.device.sharing import Mapped, Piece, Sharing

Kind = Literal["registered", "device", "pieces"]
"""Host memory outside of arenas, memory of the peer's device, device memory in pieces."""

POPULATE: Final = ("background", "now", "off")
"""The time to map pages of a peer's arena: by a thread before use, all at once, or at first use."""

# A link to this process finds the arena here instead of mapping it again.
_OFFERED: WeakValueDictionary[ArenaRef, Arena] = WeakValueDictionary()


def offer(arena: Arena) -> ArenaRef:
    """Return the reference by which peers, and links to this process, find `arena`."""
    ref = ArenaRef(arena.address, arena.nbytes, arena.fd, arena.inode)
    _OFFERED[ref] = arena
    return ref


class Held(NamedTuple):
    """Memory of a peer that stays mapped here.

    Attributes:
        holder: Keeps the memory mapped.
        shift: Address here minus address in the peer.
    """

    holder: object
    shift: int


class PeerArenas:
    """The arenas of process `pid` that are mapped here, each once."""

    def __init__(self, pid: int, *, populate: str, is_self: bool = False) -> None:
        self._pid = pid
        self._is_self = is_self
        self._populate = populate
        self._owner = object()  # stands for this object in background work, which must not hold it
        self._mutex = Mutex()  # a signal handler may close the link
        self._mapped: WeakValueDictionary[ArenaRef, Arena] = WeakValueDictionary()
        self._kept: dict[ArenaRef, Arena] = {}
        self._closed = False

    def hold(self, memory: Range) -> Held | None:
        """Return the arena of `memory`, mapped here; None: this process had it, and has freed it.

        An arena of this process is not mapped again. A second mapping would give one byte two
        addresses, which hides overlaps.
        """
        ref = memory.arena
        assert ref is not None
        if not self._is_self:
            return Held(arena := self._map(memory, ref), arena.address - ref.address)
        own = _OFFERED.get(ref)
        return None if own is None else Held(Pin(own, writable=memory.writable), 0)

    def _map(self, memory: Range, ref: ArenaRef) -> Arena:
        with self._mutex:
            arena = self._mapped.get(ref)
            if arena is None or (memory.writable and not arena.writable):
                # Drop arenas that their owner has closed.
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
            # An arena that is registered whole is unmapped with its last user. One that is
            # registered in parts is a pool: its pages stay mapped while its parts come and go.
            if memory.nbytes < ref.nbytes and not self._closed:
                self._kept[ref] = arena
            return arena

    def prepare(self, job: Callable[[], object]) -> None:
        """Let the background thread call `job`, which maps arenas, if it populates arenas."""
        if self._populate == "background" and not self._closed:
            background_pages().submit(job, self._owner)

    def mapped(self) -> list[Arena]:
        """Return the arenas that are mapped now."""
        known = self._mapped.valuerefs()  # a snapshot: other threads may map meanwhile
        return [arena for reference in known if (arena := reference()) is not None]

    def close(self) -> None:
        """Drop arenas that are not in use, and stop populating. Idempotent."""
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
    """The device allocations of a peer that are mapped for a device here, each once.

    Args:
        peer: The metadata of the peer.
        process: The process of the peer.
        token: The token of the link, for requests of descriptors.
        device: The device for which the memory is mapped.
        sharing: The sharing of that device.
        check_link: Raises if the peer has died or the link was closed.
    """

    def __init__(
        self,
        peer: Metadata,
        process: Peer,
        token: bytes,
        device: Device,
        sharing: Sharing,
        check_link: Callable[[], None],
    ) -> None:
        self._peer = peer
        self._process = process
        self._token = token
        self._is_self = peer.identity.pid == os.getpid()
        self._device = device
        self._sharing = sharing
        self._check_link = check_link
        self._mutex = Mutex()  # a signal handler may close the link
        self._mapped: WeakValueDictionary[AllocationRef, Mapped] = WeakValueDictionary()
        self._kept: dict[AllocationRef, Mapped] = {}  # of pools
        self._closed = False

    def lacks(self) -> dict[Kind, str]:
        """Return the reason for each kind of device memory that cannot be mapped."""
        peer = self._peer
        if why := self._sharing.shortfall(peer.device):
            return {"device": f"memory of the GPU of {peer} is not reached: {why}"}
        unsent = None if self._is_self else refusal(peer.identity.pid, peer.descriptors)
        lacks: dict[Kind, str] = {"pieces": f"{self._of_pieces}: {unsent}"} if unsent else {}
        try:
            os.close(self._process.take_descriptor(peer.generations.fd))
        except OSError as error:
            if unsent:
                what = "has memory of a GPU, which cannot be mapped"
                lacks["device"] = str(refused(peer, what, error).args[0])
        return lacks

    def hold(self, memory: Range, check: Callable[[], None]) -> Held:
        """Return the allocation of `memory`, mapped here; `check` raises if `memory` has ended.

        An allocation of this process is mapped again only for another device or context.
        """
        ref = memory.allocation
        assert ref is not None
        if self._is_self:
            if (own := exported(ref)) is None:
                raise not_exist(f"{memory} of this process is not registered any more")
            if own.device is self._device.native:
                return Held(own, 0)
        return Held(mapped := self._map(ref, check), mapped.address - ref.address)

    def _map(self, ref: AllocationRef, check: Callable[[], None]) -> Mapped:
        with self._mutex:
            mapped = self._mapped.get(ref)
            if mapped is None:
                mapped = self._map_new(ref)
                # While the memory is registered, its owner keeps the descriptor open (or makes
                # new ones of the same pieces). So its number was not reused: the mapping is right.
                check()
                self._mapped[ref] = mapped
            # A pool stays mapped while its parts come and go. Other mappings end with their last
            # user here: a mapping keeps memory allocated even after its owner has freed it.
            if ref.is_pool and ref.is_kept_by_peers and not self._closed:
                self._kept[ref] = mapped
            return mapped

    def close(self) -> None:
        """Drop allocations that are not in use. Idempotent."""
        with self._mutex:
            self._closed = True
            self._kept = {}

    def _map_new(self, ref: AllocationRef) -> Mapped:
        with closing(self._descriptors(ref)) as batches:
            return self._sharing.map(ref, batches)

    def _descriptors(self, ref: AllocationRef) -> Generator[list[Piece]]:
        """Yield the peer's pieces of an allocation in batches; close each before the next one."""
        index = nbytes = 0
        while not ref.handle and nbytes < ref.nbytes:
            batch = self._take(ref, index)
            try:
                yield batch
            finally:
                close_all(batch)
            index += len(batch)
            nbytes += sum(size for _, size in batch)

    def _take(self, ref: AllocationRef, first: int) -> list[Piece]:
        """Return descriptors of an allocation of the peer, from piece `first`."""
        refused_with = None
        if not ref.is_in_pieces:
            try:
                return [(self._process.take_descriptor(ref.fd), ref.nbytes)]
            except OSError as error:
                if isinstance(error, ProcessLookupError) or is_lack(error):
                    raise
                refused_with = error
        peer = self._peer
        try:
            if self._is_self and (own := exported(ref)) is not None:
                return own.descriptors(first, MAX_BATCH)
            return ask(peer.identity.pid, peer.descriptors, self._token, ref.number, first)
        except (OSError, ValueError, NativeError) as error:
            if is_lack(error):
                raise
            if refused_with is not None:
                raise refused_with from None  # `refused` adds advice to it
            self._check_link()
            raise unsupported(f"{self._of_pieces}: {reason_of(error)}") from error
        finally:
            refused_with = None  # its frames have this one

    @property
    def _of_pieces(self) -> str:
        return (
            f"{self._peer} has device memory in pieces (as torch's expandable segments are), whose "
            "descriptors it sends over an abstract Unix socket, which needs one user and one "
            "network namespace (kvplan.transport=tcp does not)"
        )


def refused(peer: Metadata, what: str, error: Exception) -> LLMException:
    """Return the error of memory that this process may not reach, or lacks resources for."""
    if is_lack(error):
        return system_error(f"{peer} {what}", error)
    reason = reason_of(error)
    if isinstance(error, PermissionError):
        reason += f"; {advice(peer.identity)}"
    return link_failed(f"{peer} {what}: {reason}")
