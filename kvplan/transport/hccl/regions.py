"""What of this process's memory HCCL knows: disjoint regions that cover all registrations.

HCCL refuses overlaps, while caches may share memory, or lie one inside another. So each byte is in
one region: a registration uses the regions that are there, and gets new ones for what is between.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvnative._signals import Mutex
from kvplan.transport.hccl.metadata import RegionRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvnative._hccl import Region
    from kvplan.device.device import PinnedMemory

    Column = NDArray[np.uint64]


class MakeRegion(Protocol):
    """Makes HCCL know memory."""

    def __call__(
        self, address: int, nbytes: int, *, on_device: bool, owner: object
    ) -> tuple[Region, tuple[PinnedMemory, ...]]:
        """Register it, and pin what must be pinned for that.

        `owner` keeps it where it is as long as HCCL knows it; None: the caller does.
        """


class HeldRegion:
    """A region, and how many registrations use it.

    Attributes:
        native: as HCCL knows it.
        pinned: what pins it.
        ref: as it is published to peers.
        on_device: whether it is memory of the device.
        is_kept: whether something keeps its memory where it is, as long as HCCL knows it.
    """

    __slots__ = ("is_kept", "native", "on_device", "pinned", "ref", "users")

    def __init__(
        self,
        native: Region,
        pinned: tuple[PinnedMemory, ...],
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

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.ref.address + self.ref.nbytes

    def close(self) -> None:
        """Let HCCL forget it; it is bound nowhere."""
        self.native.close()
        self.pinned = ()


class Regions:
    """The regions of one transport; may be used from several threads.

    Args:
        make: makes HCCL know memory; what it raises leaves all as it was.
    """

    def __init__(self, make: MakeRegion) -> None:
        self._make = make
        # Re-entrant: letting go of memory may run finalizers, which may deregister more.
        self.mutex = Mutex()
        self._regions: list[HeldRegion] = []  # disjoint, by address
        self._newest = 0
        self.changes = 0  # rises whenever regions come or go
        self._columns: tuple[Column, Column, Column] | None = None

    @property
    def newest(self) -> int:
        """The highest number of a region so far."""
        return self._newest

    def all(self) -> list[HeldRegion]:
        """Those that are in use, by address."""
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
        """The regions that hold [address, address + nbytes), in order; `release` must follow.

        Args:
            address, nbytes: what is registered.
            on_device: whether it is memory of the device.
            owner: keeps the memory where it is; None: the caller does.
            whole: (address, nbytes) of the allocation that it is a part of, where that is known:
                all of that is one region, unless a part of it is in another already.
        """
        with self.mutex:
            start, end = address, address + nbytes
            if whole is not None and not self._between(whole[0], whole[0] + whole[1]):
                start, end = whole[0], whole[0] + whole[1]
            made: list[HeldRegion] = []
            try:
                for gap_start, gap_end in self._gaps(start, end):
                    size = gap_end - gap_start
                    native, pinned = self._make(gap_start, size, on_device=on_device, owner=owner)
                    named = RegionRef(gap_start, size, self._newest + 1)
                    self._newest += 1
                    is_kept = owner is not None
                    made.append(
                        HeldRegion(native, pinned, named, on_device=on_device, is_kept=is_kept)
                    )
            except BaseException:
                for it in made:
                    it.close()
                raise
            if made:
                self._regions = sorted((*self._regions, *made), key=lambda it: it.ref.address)
                self._columns = None
                self.changes += 1
            found = tuple(self._between(address, address + nbytes))
            for it in found:
                it.users += 1
            return found

    def release(self, held: Sequence[HeldRegion], forget: Callable[[HeldRegion], None]) -> None:
        """Let go of regions; `forget` is called for each that nobody uses any more."""
        unused = []
        with self.mutex:
            for it in held:
                it.users -= 1
                if not it.users:
                    # Another list: `newest_of` goes on with the one that it has.
                    self._regions = [other for other in self._regions if other is not it]
                    self._columns = None
                    self.changes += 1
                    unused.append(it)
        for it in unused:
            forget(it)

    def newest_of(self, addresses: Column, nbytes: Column, *, on_device: bool) -> int | None:
        """The highest number of the regions that tensors lie in; None: one is in no one region."""
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
        refs = [it.ref for it in self._regions]
        return (
            np.array([it.address for it in refs], dtype=np.uint64),
            np.array([it.address + it.nbytes - 1 for it in refs], dtype=np.uint64),
            np.array([it.number for it in refs], dtype=np.uint64),
        )

    def _between(self, start: int, end: int) -> list[HeldRegion]:
        """Those that have bytes of [start, end), in order."""
        at = bisect_right(self._regions, start, key=lambda it: it.end)
        found = []
        while at < len(self._regions) and self._regions[at].ref.address < end:
            found.append(self._regions[at])
            at += 1
        return found

    def _gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of [start, end) is in no region."""
        gaps = []
        for it in self._between(start, end):
            if start < it.ref.address:
                gaps.append((start, it.ref.address))
            start = it.end
        if start < end:
            gaps.append((start, end))
        return gaps
