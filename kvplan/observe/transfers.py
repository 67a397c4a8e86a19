"""An observed transfer: the bytes at both ends, and its plan, which is made on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvnative._observed import tables_of as table_pair
from kvplan.lease import BlockLease
from kvplan.observe.plans import Numbers, Regions
from kvplan.planning.plan import Plan


class Peer(NamedTuple):
    """The facts about a peer that recordings need."""

    cluster_id: int


class Spans(NamedTuple):
    """Ranges of bytes, sorted by address."""

    starts: Numbers
    ends: Numbers

    @classmethod
    def of(cls, starts: Numbers, nbytes: Numbers) -> Spans:
        """Sort ranges."""
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


def outside(ranges: Numbers, spans: Spans) -> tuple[int, int] | None:
    """Return address and size of a span that no single range contains, or None."""
    ranges = np.vstack(([[0, 0]], ranges))  # an empty one, before all spans
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    place = np.searchsorted(ranges[:, 0], spans.starts, side="right") - 1
    bad = np.flatnonzero(np.maximum.accumulate(ranges.sum(axis=1))[place] < spans.ends)
    if not len(bad):
        return None
    start, end = (int(column[bad[0]]) for column in spans)
    return start, end - start


class Table(NamedTuple):
    """Rows that a transfer moves in each of several tensors."""

    regions: Regions
    first: int
    num_tensors: int
    rows: bytes  # as int64
    different: bool  # True if no two rows are equal


def tables_of(
    ours: Regions, here: bytes, theirs: Regions, there: bytes
) -> tuple[Table, Table] | tuple[None, None]:
    """Return the tables of both ends of a transfer; (None, None) if its rows form no table."""
    if ours.whole and theirs.whole and ours.sides[0].stride == theirs.sides[0].stride > 0:
        mine, other = ours.sides[0], theirs.sides[0]
        found = table_pair(
            here, there, mine.num_tensors, mine.count, other.num_tensors, other.count
        )
        if found is not None:
            num, first, rows, differ, there_first, there_rows, there_differ = found
            return (
                Table(ours, first, num, rows, differ),
                Table(theirs, there_first, num, there_rows, there_differ),
            )
    return None, None


class End:
    """The bytes of a transfer at one end.

    Args:
        ranges: returns the addresses and the sizes of the descriptors.
        table: the descriptors as a table, if they form one.
    """

    __slots__ = ("_rows", "_spans", "ranges", "table")

    def __init__(
        self, ranges: Callable[[], tuple[Numbers, Numbers]], table: Table | None = None
    ) -> None:
        self.ranges = ranges
        self.table = table
        self._spans: Spans | None = None
        self._rows: frozenset[int] | None = None

    @property
    def spans(self) -> Spans:
        """The ranges, sorted by address."""
        if self._spans is None:
            self._spans = Spans.of(*self.ranges())
        return self._spans

    def twice(self) -> int | None:
        """Return an address that two descriptors contain, or None."""
        table = self.table
        if table is not None and table.different and table.regions.apart:
            return None
        return self.spans.twice()

    def common(self, other: End) -> int | None:
        """Return an address in the descriptors of both ends, or None."""
        ours, theirs = self.table, other.table
        if ours is not None and theirs is not None and ours.regions is theirs.regions and (
            ours.regions.apart and self._row_set(ours).isdisjoint(other._row_set(theirs))
        ):  # fmt: skip
            return None
        return self.spans.common(other.spans)

    def _row_set(self, table: Table) -> frozenset[int]:
        if self._rows is None:
            self._rows = frozenset(memoryview(table.rows).cast("q"))
        return self._rows


@dataclass(slots=True)
class Observed:
    """A transfer, which `Recorder` records when it ends.

    Attributes:
        name, tag, started, cache_id, link, leases: see `kvplan.recording.writer.Ended`.
        pulls: True if the transfer reads.
        here, there: the bytes of this process and of the peer.
        nbytes: size of the transfer.
        make_plan: makes the plan; None: see `plan`.
        deregistered: True if its memory was deregistered in flight.
        uneven: see `kvplan.observe.plans.uneven`.
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
    deregistered: bool = False
    uneven: str = ""

    @property
    def written(self) -> End:
        """The bytes that the transfer writes."""
        return self.here if self.pulls else self.there

    @property
    def plan(self) -> Plan | None:
        """The plan; None: no range, an empty or unregistered one, or a byte written twice."""
        nbytes = self.here.ranges()[1]
        if self.make_plan is None or not nbytes.size or nbytes.min() <= 0:
            return None
        return self.make_plan()

    @property
    def fields(self) -> dict[str, object]:
        """The fields of the transfer in events of a recording."""
        named: dict[str, object] = {"tag": self.tag, "transfer": self.name}
        return named if self.link is None else named | {"peer": self.link.cluster_id}

    def __str__(self) -> str:
        return f"{self.name} of {self.tag}" if self.tag else self.name
