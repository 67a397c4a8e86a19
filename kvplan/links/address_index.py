"""An index of caches by address, which also splits ranges at the boundaries of caches.

A range may continue in a cache that follows without a gap, because programs register memory piece
by piece. If caches overlap, the index uses the one that ends last.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from kvnative._ranges import Pieces, locate
from kvplan.status import LLMException, not_exist

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.uint64]

_Cache = TypeVar("_Cache")


class Extent(NamedTuple, Generic[_Cache]):
    """Memory [address, address + nbytes) of one tensor of a cache."""

    address: int
    nbytes: int
    cache: _Cache
    tensor: int


class Cut(NamedTuple):
    """Ranges that each lie in one extent.

    Attributes:
        extents: Index of the extent of each range.
        starts: First address of each range.
        others: First address of each range on the other side of the transfer.
        nbytes: Size of each range.
    """

    extents: Column
    starts: Column
    others: Column
    nbytes: Column


class AddressIndex(Generic[_Cache]):
    """The memory of several caches, sorted by address.

    Attributes:
        extents: The extents that are not empty.
        pieces: The same memory as disjoint pieces, for native code.
    """

    def __init__(self, who: str, extents: Iterable[Extent[_Cache]], how: str = "") -> None:
        self._whose = f"{who} has registered{how}"
        self.extents = sorted(
            (extent for extent in extents if extent.nbytes), key=lambda extent: extent[:2]
        )
        firsts, lasts, owners = _apart(self.extents)
        self._firsts = np.array(firsts, dtype=np.uint64)
        # Last bytes, not ends: memory may end at 2**64.
        self._lasts = np.array(lasts, dtype=np.uint64)
        # None: piece `i` belongs to extent `i`.
        self._owners = (
            None if owners == list(range(len(self.extents))) else np.array(owners, dtype=np.uint64)
        )
        self.pieces = Pieces(self._firsts, self._lasts, self._owners, len(self.extents))

    def cut(self, side: str, starts: Column, others: Column, nbytes: Column) -> Cut:
        """Find the extent of each range, and split ranges that continue in the next extent."""
        given = starts, nbytes
        pieces: list[Cut] = []
        numbers = None  # positions of the remaining ranges in the input; None: all
        while True:
            found, missing, passes = locate(self._firsts, self._lasts, starts, nbytes)
            if missing >= 0:
                number = missing if numbers is None else int(numbers[missing])
                start, size = (int(column[number]) for column in given)
                which = f"{side} range {number}, [{start:#x}, {start + size:#x})"
                raise self._missing(which, int(starts[missing]))
            extents = found if self._owners is None else self._owners[found]
            if not passes:
                pieces.append(Cut(extents, starts, others, nbytes))
                break
            taken = np.minimum(nbytes, self._lasts[found] - starts + np.uint64(1))
            pieces.append(Cut(extents, starts, others, taken))
            left = np.flatnonzero(taken < nbytes)
            numbers = left if numbers is None else numbers[left]
            starts, others = starts[left] + taken[left], others[left] + taken[left]
            nbytes = nbytes[left] - taken[left]
        if len(pieces) == 1:
            return pieces[0]
        return Cut(*(np.concatenate(column) for column in zip(*pieces, strict=True)))

    def _missing(self, which: str, missing: int) -> LLMException:
        text = f"{which}: the byte at {missing:#x} is in no memory that {self._whose}"
        if not self.extents:
            return not_exist(f"{text}: it has no such memory")
        nearest = min(self.extents, key=lambda extent: _distance(extent, missing))
        start, end = nearest.address, nearest.address + nearest.nbytes
        away = _distance(nearest, missing)
        where = "above the end" if missing >= end else "below the beginning"
        return not_exist(
            f"{text}; the nearest is [{start:#x}, {end:#x}), and the byte is {away} "
            f"{'byte' if away == 1 else 'bytes'} {where} of it"
        )


def _distance(extent: Extent[_Cache], address: int) -> int:
    """Return the distance in bytes from an extent to an address outside of it."""
    return max(extent.address - address, address - (extent.address + extent.nbytes - 1), 0)


def _apart(extents: list[Extent[_Cache]]) -> tuple[list[int], list[int], list[int]]:
    """Split extents into disjoint, ascending pieces: first bytes, last bytes, extent indices."""
    firsts: list[int] = []
    lasts: list[int] = []
    owners: list[int] = []
    open_extents: list[tuple[int, int]] = []  # a heap of (-last byte, index)

    def until(end: int | None) -> None:
        """Add the pieces of open extents up to `end`, or all remaining ones if None."""
        while open_extents and (end is None or position < end):
            last, number = -open_extents[0][0], open_extents[0][1]
            if last < position:
                heappop(open_extents)
                continue
            stop = last if end is None else min(last, end - 1)
            if owners and owners[-1] == number and lasts[-1] == position - 1:
                lasts[-1] = stop
            else:
                firsts.append(position)
                lasts.append(stop)
                owners.append(number)
            advance(stop + 1)

    position = 0

    def advance(to: int) -> None:
        nonlocal position
        position = to

    for number, extent in enumerate(extents):
        until(extent.address)
        advance(extent.address)
        heappush(open_extents, (-(extent.address + extent.nbytes - 1), number))
    until(None)
    return firsts, lasts, owners
