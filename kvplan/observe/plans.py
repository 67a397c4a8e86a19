"""Plans of observed transfers: descriptors as tensors of blocks, indices as block tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.segments import Coalesce, Segments
from kvplan.planning.side import Side
from kvplan.planning.texts import plural
from kvplan.planning.tokens import BlockTables
from kvplan.tensors.strided import pieces_of
from kvplan.types import Placement

Numbers = NDArray[np.int64]

INDEX: Final = 8
"""Bytes of an index. Indices of a transfer are int64 as bytes: most need no array."""

ADDRESSES: Final = Side(1, 1, 2**62, False, Placement.HOST, name="addresses")
"""Memory of a peer whose registrations are unknown: offsets are addresses."""


@dataclass(frozen=True, eq=False)
class Regions:
    """Ranges of memory, as (address, nbytes), in the order in which they were given.

    Equality is identity.

    Attributes:
        addresses, nbytes: address and size of each range.
        group, tensor, row: the place of each range: index in `sides`, tensor and row.
        sides: the caches whose rows are the ranges.
    """

    addresses: Numbers
    nbytes: Numbers
    group: Numbers
    tensor: Numbers
    row: Numbers
    sides: tuple[Side, ...]

    @cached_property
    def apart(self) -> bool:
        """True if no two ranges have a byte in common."""
        order = np.argsort(self.addresses, kind="stable")
        starts, ends = self.addresses[order], (self.addresses + self.nbytes)[order]
        return not (starts[1:] < ends[:-1]).any()

    @cached_property
    def whole(self) -> bool:
        """True if range i is row `i % count` of tensor `i // count` of one cache, without gaps."""
        return len(self.sides) == 1 and bool((self.nbytes == self.sides[0].stride).all())

    def cut(self, num_tensors: int) -> Regions:
        """Return the ranges, which are one cache, cut into this number of equal tensors."""
        (side,) = self.sides
        tensor, row = np.divmod(np.arange(len(self.addresses)), side.count // num_tensors)
        cut = replace(side, num_tensors=num_tensors, count=side.count // num_tensors)
        return Regions(self.addresses, self.nbytes, self.group, tensor, row, (cut,))

    def total(self, indices: bytes) -> int:
        """Return the number of bytes of the ranges at these indices."""
        return int(self.nbytes[_numbers(indices)].sum())

    def num_layers(self, indices: Numbers) -> int:
        """Infer from a transfer's indices how many tensors a list without visible borders has.

        The indices show tensors if they name the same rows in each of several equal pieces of the
        list. The highest number of pieces counts, because two layers together also form a piece.
        At least two rows are needed, so that a coincidence is rare.
        """
        (side,), pieces = self.sides, math.gcd(side_count := len(self.addresses), len(indices))
        if side.num_tensors != 1 or (np.diff(indices) == 1).all():
            return 1
        for count in range(min(pieces, len(indices) // 2), 1, -1):
            if side_count % count or len(indices) % count:
                continue
            rows, piece = indices.reshape(count, -1), side_count // count
            if (rows[1:] - rows[:-1] == piece).all():
                return count
        return 1


def as_indices(given: Any) -> bytes:
    """Return the indices of a transfer as bytes."""
    return given if type(given) is bytes else np.array(given, np.int64).tobytes()


def _numbers(indices: bytes) -> Numbers:
    return np.frombuffer(indices, np.int64)


def ranges_at(
    regions: Regions, indices: bytes, sized: Regions, their_indices: bytes
) -> tuple[Numbers, Numbers]:
    """Return the addresses of chosen ranges, and the sizes of chosen ranges of another list."""
    return regions.addresses[_numbers(indices)], sized.nbytes[_numbers(their_indices)]


def ranges_of(given: Any) -> tuple[Numbers, list[str]]:
    """Return (address, nbytes) and the name of each entry, for any argument that NIXL accepts."""
    if isinstance(given, np.ndarray):
        rows = pieces_of(given.astype(np.uint64))  # vLLM 0.33 gives rows of several ranges
        return np.array(rows[:, :2], np.int64), [""] * len(rows)
    if hasattr(given, "descCount"):
        given = [given[index] for index in range(given.descCount())]
    elif hasattr(given, "data_ptr"):
        given = [given]
    found, names = [], []
    for entry in given:
        if hasattr(entry, "data_ptr"):
            found.append((entry.data_ptr(), entry.numel() * entry.element_size()))
            names.append("")
        else:
            found.append((entry[0], entry[1]))
            text = entry[3] if len(entry) > 3 else ""
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            names.append(text if text.isprintable() else "")
    return np.array(found, np.int64).reshape(-1, 2), names


def regions_of(
    ranges: Numbers, name: str, cuts: Numbers, cache_id: int, num_tensors: int = 1
) -> Regions:
    """Return ranges as tensors of blocks. Ranges of equal size and distance form a tensor.

    Args:
        ranges: (n, 2) of address and nbytes.
        name: the name of the caches in texts.
        cuts: addresses at which a tensor begins, such as those of registrations.
        cache_id: the number of the first cache.
        num_tensors: the minimum number of equal tensors, if it divides the list: adjacent tensors
            have no visible border.
    """
    addresses, nbytes = ranges[:, 0], ranges[:, 1]
    count = len(addresses)
    first = np.ones(count, bool)
    steps = np.diff(addresses)
    if count > 1:
        like = np.zeros(count + 1, bool)
        like[1:-2] = steps[1:] == steps[:-1]
        # A step that is not repeated leads to another tensor.
        inside = (steps == nbytes[:-1]) | ((steps > nbytes[:-1]) & (like[1:-1] | like[:-2]))
        inside &= nbytes[1:] == nbytes[:-1]
        first[1:] = ~inside | np.isin(addresses[1:], cuts)
        first[2:] |= inside[1:] & inside[:-1] & ~like[1:-2]
    if num_tensors and count % num_tensors == 0:
        first[:: count // num_tensors or 1] = True
    starts = np.flatnonzero(first)
    sizes = np.diff(np.append(starts, count))
    strides = nbytes[starts]
    if count > 1:
        strides = np.where(sizes > 1, steps[np.minimum(starts, count - 2)], strides)
    forms = np.stack([sizes, strides], axis=1)
    new = np.ones(len(starts), bool)
    new[1:] = (forms[1:] != forms[:-1]).any(axis=1)
    groups = np.cumsum(new) - 1
    within = np.arange(len(starts)) - np.flatnonzero(new)[groups]
    sides = tuple(
        Side(
            int((groups == number).sum()), int(forms[at, 0]), int(forms[at, 1]), True,
            Placement.HOST, name=f"{name}.{number}" if groups[-1] else name,
            cache_id=cache_id + number,
        )
        for number, at in enumerate(np.flatnonzero(new))
    )  # fmt: skip
    of = np.repeat(np.arange(len(starts)), sizes)
    rows = np.arange(count) - starts[of]
    return Regions(addresses, nbytes, groups[of], within[of], rows, sides)


def cut_alike(
    ours: Regions, here: bytes, theirs: Regions, there: bytes
) -> tuple[Regions, Regions] | None:
    """Return both lists cut into tensors; None: the indices of a transfer do not show where."""
    if (
        len(here) < 4 * INDEX  # two rows of two layers
        or not (ours.whole and theirs.whole)
        or max(ours.sides[0].num_tensors, theirs.sides[0].num_tensors) > 1
        or (count := ours.num_layers(_numbers(here))) == 1
        or count != theirs.num_layers(_numbers(there))
    ):
        return None
    return ours.cut(count), theirs.cut(count)


def uneven(regions: Regions, indices: bytes) -> str:
    """Return text about layers of a cache with unequal numbers of blocks; empty: equal numbers.

    A transfer may leave out whole layers.
    """
    rows = _numbers(indices)
    for number, side in enumerate(regions.sides):
        chosen = rows[regions.group[rows] == number]
        counts = np.bincount(regions.tensor[chosen], minlength=side.num_tensors)
        if counts.all() and (most := int(counts.max())) != (least := int(counts.min())):
            return (
                f"layer {int(counts.argmin())} of {side.name} gets {plural(least, 'block')}, and "
                f"layer {int(counts.argmax())} {plural(most, 'block')}"
            )
    return ""


def plan_of(
    pulls: bool, local: Regions, local_indices: bytes, remote: Regions, remote_indices: bytes
) -> Plan:
    """Return the plan of a transfer between entries of two lists."""
    here, there = _numbers(local_indices), _numbers(remote_indices)
    src, dst = (remote, local) if pulls else (local, remote)
    read, written = (there, here) if pulls else (here, there)
    keys = np.stack(
        [src.group[read], dst.group[written], src.tensor[read], dst.tensor[written]], axis=1
    )
    edges = np.append(np.flatnonzero((np.diff(keys, axis=0) != 0).any(axis=1)) + 1, len(keys))
    parts: list[tuple[Numbers, int, int, int]] = []  # key of the first pair, pairs, first, last
    begin = 0
    for end in edges.tolist():
        key = keys[begin]
        if parts:
            known, pairs, first, last = parts[-1]
            step = np.array([0, 0, pairs, pairs])
            if end - begin == last - first and bool((key == known + step).all()) and (
                np.array_equal(src.row[read[begin:end]], src.row[read[first:last]])
                and np.array_equal(dst.row[written[begin:end]], dst.row[written[first:last]])
            ):  # fmt: skip
                parts[-1] = known, pairs + 1, first, last
                begin = end
                continue
        parts.append((key, 1, begin, end))
        begin = end
    made = []
    for number, (key, pairs, first, last) in enumerate(parts):
        from_group, to_group, from_tensor, to_tensor = key.tolist()
        source, target = src.sides[from_group], dst.sides[to_group]
        src_rows, dst_rows = src.row[read[first:last]], dst.row[written[first:last]]
        made.append(
            Part(
                operation="pull_blocks" if pulls else "push_blocks",
                kind="B2B",
                src=source,
                dst=target,
                src_tensors=range(from_tensor, from_tensor + pairs),
                dst_tensors=range(to_tensor, to_tensor + pairs),
                tensors_per_layer=1,
                segments=Segments(
                    src_rows * source.stride,
                    dst_rows * target.stride,
                    local.nbytes[here[first:last]],
                ),
                num_slices=last - first,
                coalesce=Coalesce.NONE,
                tables=BlockTables(src_rows, dst_rows),
                name="" if len(parts) == 1 else str(number),
            )
        )
    return Plan(made)


def plan_of_ranges(
    pulls: bool, bases: Numbers, sides: list[Side], here: Numbers, there: Numbers, nbytes: Numbers
) -> Plan:
    """Return the plan of ranges between registered memory here and addresses of a peer.

    Args:
        pulls: True for a read.
        bases: addresses of registrations, ascending.
        sides: the registrations.
        here, there, nbytes: the ranges.
    """
    owner = np.searchsorted(bases, here, side="right") - 1
    made = []
    for number in dict.fromkeys(owner.tolist()):
        rows = np.flatnonzero(owner == number)
        base, mine = (int(bases[number]), sides[number]) if number >= 0 else (0, ADDRESSES)
        ends = (here[rows] - base, there[rows])
        src, dst = reversed(ends) if pulls else ends
        made.append(
            Part(
                operation="pull_ranges" if pulls else "push_ranges",
                kind="C2C",
                src=ADDRESSES if pulls else mine,
                dst=mine if pulls else ADDRESSES,
                src_tensors=range(1),
                dst_tensors=range(1),
                tensors_per_layer=1,
                segments=Segments(src, dst, nbytes[rows]),
                num_slices=len(rows),
                coalesce=Coalesce.NONE,
                name=mine.name,
            )
        )
    return Plan(made)
