"""HCCL's regions of this process's memory: disjoint, and covering all registrations.

HCCL refuses overlaps, while caches may share memory or lie inside each other. So each byte is in
one region: a registration uses existing regions, and makes new ones for the gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import numpy as np

from kvnative._signals import Mutex
from kvplan.status import invalid, unsupported
from kvplan.transport.hccl.metadata import RegionRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvnative._hccl_memory import Region
    from kvnative._pinned import Pinned

    Column = NDArray[np.uint64]


class MakeRegion(Protocol):
    """A function that registers memory with HCCL."""

    def __call__(
        self, address: int, nbytes: int, *, on_device: bool, owner: object
    ) -> tuple[Region, tuple[Pinned, ...]]:
        """Register memory, and pin it if HCCL does not.

        `owner` keeps the memory in place while it is registered with HCCL; None: the caller does.
        """


class HeldRegion:
    """A region, and the number of registrations that use it.

    Attributes:
        native: The region in HCCL.
        pinned: The pins of its memory.
        ref: The region in published metadata.
        on_device: True if the memory is on the device.
        is_kept: True if an owner was given, which keeps the memory in place.
        is_closed: True once `close` has returned or failed.
    """

    __slots__ = (
        "__weakref__",
        "is_closed",
        "is_kept",
        "native",
        "on_device",
        "pinned",
        "ref",
        "users",
    )

    def __init__(
        self,
        native: Region,
        pinned: tuple[Pinned, ...],
        ref: RegionRef,
        *,
        on_device: bool,
        is_kept: bool,
    ) -> None:
        self.native = native
        self.pinned = pinned
        self.ref = ref
        self.on_device = on_device
        self.is_kept = is_kept
        self.users = 0
        self.is_closed = False

    @property
    def end(self) -> int:
        """The first address after the region."""
        return self.ref.address + self.ref.nbytes

    def close(self) -> None:
        """Deregister the region. No connection may bind it any more."""
        try:
            self.native.close()
        finally:
            self.is_closed = True
        self.pinned = ()


class Regions:
    """The regions of one transport. Thread-safe.

    Args:
        make: Registers memory with HCCL; if it raises, nothing has changed.
        forget: Closes an unused region. Several threads may call it for one region.
    """

    def __init__(self, make: MakeRegion, forget: Callable[[HeldRegion], None]) -> None:
        self._make = make
        self._forget = forget
        # Re-entrant: releasing memory may run finalizers, which may deregister more.
        self.mutex = Mutex()
        self._regions: list[HeldRegion] = []  # disjoint, by address
        self._leaving: WeakSet[HeldRegion] = WeakSet()  # unused, and perhaps not closed yet
        self._newest = 0
        self.changes = 0  # number of changes of the list
        self._columns: tuple[Column, Column, Column] | None = None

    @property
    def newest(self) -> int:
        """The highest number of a region so far."""
        return self._newest

    def all(self) -> list[HeldRegion]:
        """Return the regions in use, by address."""
        with self.mutex:
            return list(self._regions)

    def cover(
        self,
        address: int,
        nbytes: int,
        *,
        on_device: bool,
        owner: object = None,
        whole: tuple[int, int] | None = None,
    ) -> tuple[HeldRegion, ...]:
        """Return the regions that hold [address, address + nbytes), in order, to be released later.

        `owner` keeps the memory in place; None: the caller does. `whole` is the (address, nbytes)
        of the allocation, if known: it becomes one region, unless a part of it is in one already.
        """
        start, end = address, address + nbytes
        if whole is not None:
            start, end = min(start, whole[0]), max(end, whole[0] + whole[1])
        while True:
            with self.mutex:
                leaving = [
                    region
                    for region in self._leaving
                    if not region.is_closed and region.ref.address < end and start < region.end
                ]
                if not leaving:
                    return self._cover(address, nbytes, whole, on_device=on_device, owner=owner)
            for region in leaving:  # HCCL refuses new regions that overlap these
                self._forget(region)
                if not region.is_closed:
                    raise unsupported(
                        f"[{start:#x}, {end:#x}) was deregistered, and HIXL keeps it until no "
                        "connection from before that is left: unlink the peers first"
                    )

    def _cover(
        self,
        address: int,
        nbytes: int,
        whole: tuple[int, int] | None,
        *,
        on_device: bool,
        owner: object,
    ) -> tuple[HeldRegion, ...]:
        start, end = address, address + nbytes
        if whole is not None and not self._between(whole[0], whole[0] + whole[1]):
            start, end = whole[0], whole[0] + whole[1]
        if any(region.on_device is not on_device for region in self._between(start, end)):
            raise invalid(
                f"memory at {address:#x} overlaps registered memory of the other kind (host or "
                "device)"
            )
        made: list[HeldRegion] = []
        try:
            for gap_start, gap_end in self._gaps(start, end):
                size = gap_end - gap_start
                native, pinned = self._make(gap_start, size, on_device=on_device, owner=owner)
                named = RegionRef(gap_start, size, self._newest + 1)
                self._newest += 1
                is_kept = owner is not None
                made.append(HeldRegion(native, pinned, named, on_device=on_device, is_kept=is_kept))
        except BaseException:
            for region in made:
                region.close()
            raise
        if made:
            self._regions = sorted((*self._regions, *made), key=lambda region: region.ref.address)
            self._columns = None
            self.changes += 1
        found = tuple(self._between(address, address + nbytes))
        for region in found:
            region.users += 1
        return found

    def release(self, held: Sequence[HeldRegion], forget: Callable[[HeldRegion], None]) -> None:
        """Release regions, and call `forget` for each that is unused now."""
        unused = []
        with self.mutex:
            for region in held:
                region.users -= 1
                if not region.users:
                    # A new list: `newest_of` may be using the old one.
                    self._regions = [other for other in self._regions if other is not region]
                    self._columns = None
                    self.changes += 1
                    self._leaving.add(region)
                    unused.append(region)
        for region in unused:
            forget(region)

    def newest_of(self, addresses: Column, nbytes: Column, *, on_device: bool) -> int | None:
        """Return the highest number of the tensors' regions; None: a tensor is not inside one."""
        with self.mutex:
            firsts, lasts, numbers = self._columns = self._columns or self._sorted()
            regions = self._regions
        if not len(firsts):
            return None
        at = np.searchsorted(firsts, addresses, side="right") - 1
        if (at < 0).any() or (addresses + nbytes - np.uint64(1) > lasts[at]).any():
            return None
        if any(regions[i].on_device is not on_device for i in set(at.tolist())):
            return None
        return int(numbers[at].max())

    def _sorted(self) -> tuple[Column, Column, Column]:
        refs = [region.ref for region in self._regions]
        return (
            np.array([ref.address for ref in refs], dtype=np.uint64),
            np.array([ref.address + ref.nbytes - 1 for ref in refs], dtype=np.uint64),
            np.array([ref.number for ref in refs], dtype=np.uint64),
        )

    def _between(self, start: int, end: int) -> list[HeldRegion]:
        """Return the regions that have bytes of [start, end), in order."""
        at = bisect_right(self._regions, start, key=lambda region: region.end)
        found = []
        while at < len(self._regions) and self._regions[at].ref.address < end:
            found.append(self._regions[at])
            at += 1
        return found

    def _gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [start, end) that are not in a region."""
        gaps = []
        for region in self._between(start, end):
            if start < region.ref.address:
                gaps.append((start, region.ref.address))
            start = region.end
        if start < end:
            gaps.append((start, end))
        return gaps
