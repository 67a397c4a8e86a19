"""Segments: slices merged where they are adjacent on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvplan.validation import UINT64_MAX, shown

Column = NDArray[np.uint64]

_ROW = Struct("=3Q")
_assign = object.__setattr__  # past the guard of a frozen table


class Coalesce(StrEnum):
    """How slices become segments; what is copied is the same with each."""

    NONE = "none"
    CALLER_ORDER = "caller"
    """Merge neighbours in the caller's block order."""
    SORTED = "sorted"
    """Sort by source, then destination offset: finds runs in descending or shuffled tables too."""


DEFAULT_COALESCE = Coalesce.SORTED
"""Chosen by measurement: docs/adr/0001-coalescing-order.md."""


class Segments:
    """A frozen table of (src offset, dst offset, nbytes), shared by every tensor pair of a plan.

    Each column is a read-only, contiguous uint64 array of shape (n,), in bytes relative to the
    address of the tensor. Columns, not rows: that is what lowering adds a base address to.

    Raises:
        TypeError: a column that does not hold integers.
        ValueError: an entry outside uint64, or columns that are not flat and of one length.
    """

    __slots__ = ("dst_offsets", "nbytes", "src_offsets")

    src_offsets: Column
    dst_offsets: Column
    nbytes: Column

    def __init__(self, src_offsets: ArrayLike, dst_offsets: ArrayLike, nbytes: ArrayLike) -> None:
        columns = [
            _column(name, values)
            for name, values in zip(self.columns(), (src_offsets, dst_offsets, nbytes), strict=True)
        ]
        if len(lengths := {len(column) for column in columns}) > 1:
            raise ValueError(f"columns of {sorted(lengths)} entries must be of one length")
        for name, column in zip(self.columns(), columns, strict=True):
            _assign(self, name, column)

    @classmethod
    def adopt(cls, src: Column, dst: Column, nbytes: Column, *, merged: bool = False) -> Segments:
        """Take over columns that have no other holder, without copying them.

        Args:
            merged: whether neighbours that are adjacent on both sides become one; the bytes copied
                stay the same.
        """
        if merged and len(src) > 1:
            src_ends = src + nbytes
            # The law of merging: a segment continues where both sides continue.
            adjacent = (src_ends[:-1] == src[1:]) & (dst[:-1] + nbytes[:-1] == dst[1:])
            if adjacent.any():
                breaks = np.flatnonzero(~adjacent)
                first = np.concatenate(([0], breaks + 1))
                last = np.concatenate((breaks, [len(src) - 1]))
                src, dst = src[first], dst[first]
                nbytes = src_ends[last] - src
        segments = cls.__new__(cls)
        for name, column in (("src_offsets", src), ("dst_offsets", dst), ("nbytes", nbytes)):
            column.setflags(write=False)
            _assign(segments, name, column)
        return segments

    @classmethod
    def single(cls, src_offset: int, dst_offset: int, nbytes: int) -> Segments:
        """One segment; its columns lie in one piece of memory, which is read-only."""
        row = np.frombuffer(_ROW.pack(src_offset, dst_offset, nbytes), np.uint64)
        return cls.adopt(row[0:1], row[1:2], row[2:3])

    @staticmethod
    def columns() -> tuple[str, str, str]:
        """Names of the columns, in order."""
        return ("src_offsets", "dst_offsets", "nbytes")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Segments are frozen: cannot set {name}")

    def __len__(self) -> int:
        return len(self.nbytes)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(
            self.src_offsets.tolist(), self.dst_offsets.tolist(), self.nbytes.tolist(), strict=True
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segments):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.columns()
        )

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name).tobytes() for name in self.columns()))

    def __repr__(self) -> str:
        return f"<Segments {len(self)}: {int(self.nbytes.sum())} bytes>"

    def __reduce__(self) -> tuple[type[Segments], tuple[Column, Column, Column]]:
        return Segments, (self.src_offsets, self.dst_offsets, self.nbytes)


def _column(name: str, values: ArrayLike) -> Column:
    """A copy of `values` as a column: a cast alone would wrap -1 and cut 1.5."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {given.shape}")
    if given.size and given.dtype.kind not in "iu":
        given = np.array(values, dtype=object)  # ints that NumPy took for floats are exact again
        if not all(type(value) is int for value in given):
            raise TypeError(f"{name}={shown(values)} must hold int only")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) <= UINT64_MAX:
        raise ValueError(f"{name}={shown(values)} is out of range [0, {UINT64_MAX}]")
    column = np.array(given, dtype=np.uint64, order="C")
    column.setflags(write=False)
    return column


def first_overlap(starts: Column, nbytes: Column) -> tuple[int, int] | None:
    """Return the indices of two ranges [start, start + nbytes) that share a byte, or None."""
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = starts + nbytes[order]
    clashes = np.flatnonzero(ends[:-1] > starts[1:])
    if not len(clashes):
        return None
    return int(order[clashes[0]]), int(order[clashes[0] + 1])
