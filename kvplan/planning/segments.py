"""Segments: slices, merged if they are adjacent on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvplan.validation import UINT64_MAX, check_width, shown

Column = NDArray[np.uint64]

_ROW = Struct("=3Q")
_assign = object.__setattr__  # bypasses the guard of a frozen table


class Coalesce(StrEnum):
    """The way in which slices become segments. The copied bytes are the same."""

    NONE = "none"
    CALLER_ORDER = "caller"
    """Merge neighbours in the caller's block order."""
    SORTED = "sorted"
    """Sort by source, then destination offset: finds runs in descending or shuffled tables too."""


DEFAULT_COALESCE = Coalesce.SORTED
"""Chosen by measurement: docs/internals/adr/0001-coalescing-order.md."""


class Repeat(NamedTuple):
    """The repetition of segments: segment i occurs `counts[i]` times, at a fixed stride.

    Attributes:
        counts: the number of occurrences of each segment.
        src_stride: bytes from one occurrence to the next at the source.
        dst_stride: bytes from one occurrence to the next at the destination.
    """

    counts: Column
    src_stride: int
    dst_stride: int


MAX_REPEATS = 2
"""Maximum levels of repeats: the tokens and the heads of a block."""


class Segments:
    """A frozen table of (src offset, dst offset, nbytes), shared by every tensor pair of a part.

    Each column is a read-only, contiguous uint64 array of shape (n,), in bytes relative to the
    address of the tensor.

    A segment is one run of bytes, or, if there are `repeats` (outermost first), as many runs as the
    product of their counts.

    Raises:
        TypeError: a column or a stride that is not of integers.
        ValueError: an entry outside uint64, columns that are not flat and equally long, more than
            two levels of repeats, or a level that is not (counts, src_stride, dst_stride).
    """

    __slots__ = ("_num_runs", "dst_offsets", "nbytes", "repeats", "src_offsets")

    src_offsets: Column
    dst_offsets: Column
    nbytes: Column
    repeats: tuple[Repeat, ...]
    _num_runs: int

    def __init__(
        self,
        src_offsets: ArrayLike,
        dst_offsets: ArrayLike,
        nbytes: ArrayLike,
        repeats: Sequence[tuple[ArrayLike, int, int]] = (),
    ) -> None:
        columns = [
            _column(name, values)
            for name, values in zip(self.columns(), (src_offsets, dst_offsets, nbytes), strict=True)
        ]
        if len(repeats) > MAX_REPEATS:
            raise ValueError(
                f"repeats has {len(repeats)} levels; at most {MAX_REPEATS} are allowed"
            )
        levels = []
        for level, (counts, *strides) in enumerate(repeats):
            src, dst = (
                check_width(f"repeats[{level}]", stride, 0, UINT64_MAX) for stride in strides
            )
            levels.append(Repeat(_column(f"repeats[{level}]", counts), src, dst))
        if (
            len(
                lengths := {
                    len(column) for column in (*columns, *(repeat.counts for repeat in levels))
                }
            )
            > 1
        ):
            raise ValueError(f"columns of {sorted(lengths)} entries must be of one length")
        for name, column in zip(self.columns(), columns, strict=True):
            _assign(self, name, column)
        _assign(self, "repeats", tuple(levels))
        _assign(self, "_num_runs", -1 if levels else len(columns[0]))

    @classmethod
    def adopt(
        cls,
        src: Column,
        dst: Column,
        nbytes: Column,
        repeats: tuple[Repeat, ...] = (),
        *,
        merged: bool = False,
    ) -> Segments:
        """Take ownership of columns without copying them.

        Args:
            src, dst, nbytes: the columns.
            repeats: levels of repeats, outermost first.
            merged: True if neighbours that are adjacent on both sides become one. The copied bytes
                stay the same. Segments with repeats are not merged.
        """
        if merged and not repeats and len(src) > 1:
            # A segment continues if both sides do: the distance between the sides stays the same,
            # and one side continues.
            apart = dst - src
            adjacent = apart[1:] == apart[:-1]
            if np.count_nonzero(adjacent):
                adjacent &= src[1:] - src[:-1] == nbytes[:-1]
            if np.count_nonzero(adjacent):
                breaks = np.flatnonzero(~adjacent)
                first = np.concatenate(([0], breaks + 1))
                last = np.concatenate((breaks, [len(src) - 1]))
                ends = src[last] + nbytes[last]
                src, dst = src[first], dst[first]
                nbytes = ends - src
        segments = cls.__new__(cls)
        for column in (src, dst, nbytes):
            column.setflags(write=False)
        for repeat in repeats:
            repeat.counts.setflags(write=False)
        _assign(segments, "src_offsets", src)
        _assign(segments, "dst_offsets", dst)
        _assign(segments, "nbytes", nbytes)
        _assign(segments, "repeats", repeats)
        _assign(segments, "_num_runs", -1 if repeats else len(nbytes))
        return segments

    @classmethod
    def single(cls, src_offset: int, dst_offset: int, nbytes: int) -> Segments:
        """Return a table of one segment, whose columns share one read-only piece of memory."""
        row = np.frombuffer(_ROW.pack(src_offset, dst_offset, nbytes), np.uint64)
        return cls.adopt(row[0:1], row[1:2], row[2:3])

    @staticmethod
    def columns() -> tuple[str, str, str]:
        """Return the names of the columns, in order."""
        return ("src_offsets", "dst_offsets", "nbytes")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Segments are frozen: cannot set {name}")

    def __len__(self) -> int:
        return len(self.nbytes)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(
            self.src_offsets.tolist(), self.dst_offsets.tolist(), self.nbytes.tolist(), strict=True
        )

    @property
    def num_runs(self) -> int:
        """Number of runs, repeats counted: descriptors of a tensor pair."""
        if self._num_runs < 0:
            _assign(self, "_num_runs", int(self.runs().sum()))
        return self._num_runs

    def runs(self) -> Column:
        """Return the number of runs of each segment: uint64 (n,)."""
        runs = np.ones(len(self), np.uint64)
        for repeat in self.repeats:
            runs = runs * repeat.counts
        return runs

    @property
    def total_nbytes(self) -> int:
        """Bytes of all runs."""
        return int((self.nbytes * self.runs()).sum() if self.repeats else self.nbytes.sum())

    def ends(self) -> tuple[Column, Column]:
        """Return the offset after the last byte of each segment, at src and at dst."""
        src, dst = self.src_offsets + self.nbytes, self.dst_offsets + self.nbytes
        one = np.uint64(1)
        for counts, src_stride, dst_stride in self.repeats:
            src = src + (counts - one) * np.uint64(src_stride)
            dst = dst + (counts - one) * np.uint64(dst_stride)
        return src, dst

    def expanded(self) -> Segments:
        """Return the same runs as a table without repeats, in the order of their descriptors."""
        if not self.repeats:
            return self
        src, dst, nbytes = self.src_offsets, self.dst_offsets, self.nbytes
        counts = [repeat.counts for repeat in self.repeats]
        for level, repeat in enumerate(self.repeats):
            times = counts[level].astype(np.int64)
            step = np.arange(int(times.sum())) - np.repeat(np.cumsum(times) - times, times)
            step = step.astype(np.uint64)
            src = np.repeat(src, times) + step * np.uint64(repeat.src_stride)
            dst = np.repeat(dst, times) + step * np.uint64(repeat.dst_stride)
            nbytes = np.repeat(nbytes, times)
            counts = [np.repeat(column, times) for column in counts]
        return Segments.adopt(src, dst, nbytes)

    def runs_at(self, indices: NDArray[np.int64]) -> tuple[Column, Column, Column]:
        """Return the runs at these positions: src offsets, dst offsets, nbytes."""
        if not self.repeats:
            return self.src_offsets[indices], self.dst_offsets[indices], self.nbytes[indices]
        before = np.cumsum(self.runs()).astype(np.int64)
        segment = np.searchsorted(before, indices, side="right")
        inside = (indices - (before - self.runs().astype(np.int64))[segment]).astype(np.uint64)
        src, dst = self.src_offsets[segment], self.dst_offsets[segment]
        for counts, src_stride, dst_stride in reversed(self.repeats):
            step = inside % counts[segment]
            inside = inside // counts[segment]
            src = src + step * np.uint64(src_stride)
            dst = dst + step * np.uint64(dst_stride)
        return src, dst, self.nbytes[segment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segments):
            return NotImplemented
        return (
            all(
                np.array_equal(getattr(self, column), getattr(other, column))
                for column in self.columns()
            )
            and len(self.repeats) == len(other.repeats)
            and all(
                a[1:] == b[1:] and np.array_equal(a.counts, b.counts)
                for a, b in zip(self.repeats, other.repeats, strict=True)
            )
        )

    def __hash__(self) -> int:
        return hash(tuple(part.tobytes() for part in self.parts()))

    def parts(self) -> Iterator[Column]:
        """Yield all columns, counts and strides, for digests."""
        for name in self.columns():
            yield getattr(self, name)
        for counts, *strides in self.repeats:
            yield counts
            yield np.array(strides, np.uint64)

    def __repr__(self) -> str:
        runs = f" of {self.num_runs} runs" if self.repeats else ""
        return f"<Segments {len(self)}{runs}: {self.total_nbytes} bytes>"

    def __reduce__(self) -> tuple[type[Segments], tuple[object, ...]]:
        return Segments, (self.src_offsets, self.dst_offsets, self.nbytes, self.repeats)


def _column(name: str, values: ArrayLike) -> Column:
    """Return a copy of `values` as a column. A cast would wrap -1 and truncate 1.5."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {given.shape}")
    if given.size and given.dtype.kind not in "iu":
        given = np.array(values, dtype=object)  # keeps ints exact that NumPy made floats
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


def first_overlapped(
    starts: Column, ends: Column, written_starts: Column, written_ends: Column
) -> int | None:
    """Return the index of the first range that overlaps a written range, or None.

    Written ranges are sorted and disjoint.
    """
    after = np.searchsorted(written_ends, starts, side="right")
    inside: NDArray[np.bool_] = after < len(written_starts)
    inside[inside] = written_starts[after[inside]] < ends[inside]
    found = np.flatnonzero(inside)
    return int(found[0]) if len(found) else None
