"""An observed transfer: the bytes at both ends, and its plan, which is made on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvplan.lease import BlockLease
from kvplan.observe.plans import Numbers, Regions
from kvplan.planning.plan import Plan


class Peer(NamedTuple):
    """A peer, as recordings need it."""

    cluster_id: int


class Spans(NamedTuple):
    """Ranges of bytes, sorted."""

    starts: Numbers
    ends: Numbers

    @classmethod
    def of(cls, starts: Numbers, nbytes: Numbers) -> Spans:
        """Return ranges in their order in memory."""
        order = np.argsort(starts, kind="stable")
        return cls(starts[order], (starts + nbytes)[order])

    def twice(self) -> int | None:
        """Return an address that two of the ranges contain, or None."""
        reach = np.maximum.accumulate(self.ends)
        hit = np.flatnonzero(self.starts[1:] < reach[:-1])
        return int(self.starts[hit[0] + 1]) if len(hit) else None

    def common(self, other: Spans) -> int | None:
        """Return an address that a range of each side contains, or None."""
        reach = np.maximum.accumulate(other.ends)
        place = np.searchsorted(other.starts, self.ends, side="left") - 1
        hit = np.flatnonzero((place >= 0) & (reach[np.maximum(place, 0)] > self.starts))
        if not len(hit):
            return None
        first = int(hit[0])
        start = int(self.starts[first])
        index = int(np.searchsorted(reach, start, side="right"))
        return max(start, int(other.starts[index]))


def outside(ranges: Numbers, spans: Spans) -> int | None:
    """Return an address of `spans` that no range (address, nbytes) contains, or None."""
    if not len(ranges):
        return int(spans.starts[0]) if len(spans.starts) else None
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    starts, ends = ranges[:, 0], np.maximum.accumulate(ranges.sum(axis=1))
    place = np.searchsorted(starts, spans.starts, side="right") - 1
    bad = np.flatnonzero((place < 0) | (ends[np.maximum(place, 0)] < spans.ends))
    return int(spans.starts[bad[0]]) if len(bad) else None


class Table(NamedTuple):
    """Rows that a transfer moves in each of several tensors."""

    regions: Regions
    tensors: range
    rows: Numbers

    @classmethod
    def of(cls, regions: Regions, indices: Numbers, num_tensors: int) -> Table | None:
        """Return the table of indices that name the same rows of consecutive tensors, or None."""
        if len(indices) % num_tensors:
            return None
        (side,) = regions.sides
        tensors = indices.reshape(num_tensors, -1)
        first = int(indices[0]) // side.count
        if first < 0 or first + num_tensors > side.num_tensors:
            return None
        rows = tensors[0] - first * side.count
        if int(rows.view(np.uint64).max()) >= side.count:  # a negative number is large
            return None
        if num_tensors > 1 and (tensors[1:] - tensors[:-1] != side.count).any():
            return None
        return cls(regions, range(first, first + num_tensors), rows)


def tables_of(
    ours: Regions, here: Numbers, theirs: Regions, there: Numbers
) -> tuple[Table, Table] | tuple[None, None]:
    """Return a transfer as two tables of equal length, if all of its rows are whole."""
    if ours.whole and theirs.whole and ours.sides[0].stride == theirs.sides[0].stride and len(here):
        again = np.flatnonzero(here == here[0] + ours.sides[0].count)
        count = len(here) // int(again[0]) if len(again) else 1
        found = Table.of(ours, here, count), Table.of(theirs, there, count)
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
    return None, None


class End:
    """The bytes of a transfer in one process.

    Args:
        ranges: returns the addresses and the sizes of the descriptors.
        table: the descriptors as a table, if they are one.
    """

    def __init__(
        self, ranges: Callable[[], tuple[Numbers, Numbers]], table: Table | None = None
    ) -> None:
        self.ranges = ranges
        self.table = table

    @cached_property
    def spans(self) -> Spans:
        """The ranges."""
        return Spans.of(*self.ranges())

    @cached_property
    def _rows(self) -> frozenset[int]:
        assert self.table is not None
        return frozenset(self.table.rows.tolist())

    def twice(self) -> int | None:
        """Return an address that two descriptors contain, or None."""
        table = self.table
        if table is not None and table.regions.apart and len(self._rows) == len(table.rows):
            return None
        return self.spans.twice()

    def common(self, other: End) -> int | None:
        """Return an address that a descriptor of each side contains, or None."""
        ours, theirs = self.table, other.table
        if ours is not None and theirs is not None and ours.regions is theirs.regions and (
            ours.regions.apart and self._rows.isdisjoint(other._rows)
        ):  # fmt: skip
            return None
        return self.spans.common(other.spans)


@dataclass
class Observed:
    """A transfer, which `Recorder` records when it ends.

    Attributes:
        name, tag, started, cache_id, link, leases: see `kvplan.recording.writer.Ended`.
        pulls: True for a read.
        here, there: the bytes of this process and of the peer.
        nbytes: bytes that move.
        make_plan: makes the plan; None if two descriptors write the same bytes.
        in_flight: True from its posting until its end is seen.
        deregistered: True if its memory was deregistered in flight.
        uneven: text about layers with unequal numbers of blocks; empty: there are none.
    """

    name: str
    tag: str
    started: float
    cache_id: int
    link: Peer | None
    pulls: bool
    here: End
    there: End
    nbytes: int
    make_plan: Callable[[], Plan] | None
    leases: tuple[BlockLease, ...] = ()
    in_flight: bool = False
    deregistered: bool = False
    uneven: str = ""

    @property
    def written(self) -> End:
        """The bytes that the transfer writes."""
        return self.here if self.pulls else self.there

    @cached_property
    def plan(self) -> Plan | None:
        """The plan; None: the transfer writes a byte twice, which no plan can."""
        return None if self.make_plan is None else self.make_plan()

    def __str__(self) -> str:
        return f"{self.name} of {self.tag}" if self.tag else self.name
