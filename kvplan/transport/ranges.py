"""A table of the registered ranges of a peer, which finds the range that holds a tensor."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from kvplan.status import invalid, not_exist
from kvplan.transport.metadata import Range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Column = NDArray[np.uint64]

_SHOWN_RANGES = 8


_Range = TypeVar("_Range", bound=Range)


class RangeTable(Generic[_Range]):
    """The registered memory of `peer`, sorted so that bisection finds the range of a tensor.

    `peer` is for messages, such as "process 12 of node3".
    """

    def __init__(self, peer: str, ranges: Sequence[_Range]) -> None:
        self._peer = peer
        # Among ranges with the same start the last is tried first: preferred, writable, shortest.
        self._ranges = sorted(
            ranges,
            key=lambda found: (found.address, found.is_preferred, found.writable, -found.nbytes),
        )
        self._firsts = np.array([found.address for found in self._ranges], dtype=np.uint64)
        # Last bytes, not ends: a range may end at 2**64.
        self._lasts = np.array(
            [found.address + found.nbytes - 1 for found in self._ranges], dtype=np.uint64
        )
        self._writable = np.array([found.writable for found in self._ranges], dtype=np.bool_)
        self._preferred = np.array([found.is_preferred for found in self._ranges], dtype=np.bool_)

    def locate(
        self, starts: Column, sizes: Column, *, writable: bool
    ) -> tuple[list[_Range], NDArray[np.intp]]:
        """Return the used ranges, each once, and for each tensor the index of its range.

        If several ranges hold a tensor, a preferred one is chosen.
        """
        lasts = starts + (sizes - np.uint64(1))
        bad = np.flatnonzero((sizes < 1) | (lasts < starts))
        if bad.size:
            i = int(bad[0])
            raise invalid(
                f"tensor {i} has address {int(starts[i]):#x} and nbytes {sizes[i]}; nbytes must be "
                "at least 1, and end by 2**64"
            )
        found = np.searchsorted(self._firsts, starts, side="right") - 1
        sure = found >= 0
        near = found[sure]
        sure[sure] = (
            (lasts[sure] <= self._lasts[near])
            & (self._writable[near] if writable else True)
            & (self._preferred[near] | (not self._preferred.any()))
        )
        for i in np.flatnonzero(~sure).tolist():  # another range may hold it
            found[i] = self._search(i, int(starts[i]), int(sizes[i]), writable=writable)
        used = sorted(set(found.tolist()))
        return [self._ranges[k] for k in used], np.searchsorted(used, found)

    def _search(self, i: int, start: int, size: int, *, writable: bool) -> int:
        """Return the index of the range of tensor `i`, by a search of all ranges."""
        inside = np.flatnonzero((self._firsts <= start) & (start + size - 1 <= self._lasts))
        if not inside.size:
            raise not_exist(
                f"tensor {i} at address {start:#x}, nbytes {size}, is not inside one range that "
                f"{self._peer} has registered: {self._listed()}"
            )
        fitting = inside[self._writable[inside]] if writable else inside
        if not fitting.size:
            raise invalid(
                f"tensor {i} at address {start:#x} cannot be written: {self._peer} has registered "
                f"{self._ranges[inside[0]]} with writable=False"
            )
        return int(fitting[self._preferred[fitting].argmax()])

    def _listed(self) -> str:
        shown = ", ".join(str(found) for found in self._ranges[:_SHOWN_RANGES])
        more = len(self._ranges) - _SHOWN_RANGES
        return f"{shown} and {more} more" if more > 0 else shown or "none"


def sized_tensors(
    addresses: Sequence[int] | Column, nbytes: int | Sequence[int] | Column
) -> tuple[Column, Column]:
    """Return the address and the size of each tensor, in new columns."""
    starts = _uint64("addresses", addresses)
    sizes = _uint64("nbytes", [nbytes] if isinstance(nbytes, int) else nbytes)
    if not starts.size or sizes.size not in (1, starts.size):
        raise invalid(
            f"addresses has {starts.size} values and nbytes has {sizes.size}; give at least one "
            "address, and one nbytes for each or one for all"
        )
    return starts, np.broadcast_to(sizes, starts.shape).copy()


def _uint64(name: str, values: Sequence[int] | Column) -> Column:
    """Return a new column; refuse values that are not integers in [0, 2**64)."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {values.dtype}; it must be an integer type")
    numbers = values.ravel().tolist() if isinstance(values, np.ndarray) else list(values)
    for number in numbers:
        if not 0 <= index(number) < 2**64:
            raise invalid(f"{name} holds {number}; it must be in [0, 2**64)")
    return np.array(numbers, dtype=np.uint64)
