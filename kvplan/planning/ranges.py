"""The plan of a transfer between ranges of addresses; its parts are made at their first use.

Making the parts of thousands of ranges takes longer than binding the ranges. Only texts,
recordings and errors need the parts, and make them from the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.segments import Coalesce, Column, Segments
from kvplan.planning.side import Side
from kvplan.validation import check_index


@dataclass(frozen=True, slots=True)
class RangePart:
    """The ranges between one tensor of src and one of dst: one part of the plan.

    Attributes:
        src, dst: the sides.
        src_tensor, dst_tensor: the tensor of each side.
        src_address, dst_address: the addresses of these tensors.
        first, last: the ranges, as [first, last) of the columns.
        num_slices: number of the caller's ranges, before adjacent ones were merged.
    """

    src: Side
    dst: Side
    src_tensor: int
    dst_tensor: int
    src_address: int
    dst_address: int
    first: int
    last: int
    num_slices: int

    @property
    def name(self) -> str:
        """The name of the part: both cache ids, with the tensor if a cache has several."""
        places = (
            str(side.cache_id) if side.num_tensors == 1 else f"{side.cache_id}.{tensor}"
            for side, tensor in ((self.src, self.src_tensor), (self.dst, self.dst_tensor))
        )
        return " to ".join(places)


class Ranges(NamedTuple):
    """The ranges of a plan in the order of its descriptors, as addresses in each side's process."""

    src: Column
    dst: Column
    nbytes: Column
    pulls: bool

    def text(self, descriptor: int) -> str:
        """Return the addresses that a descriptor reads and writes, for messages."""
        check_index("descriptor", descriptor, len(self.nbytes))
        nbytes = int(self.nbytes[descriptor])
        src, dst = (
            span_text(int(addresses[descriptor]), nbytes) for addresses in (self.src, self.dst)
        )
        here, there = (dst, src) if self.pulls else (src, dst)
        return f"local {here}, remote {there}, {nbytes} bytes"

    def part(self, pair: RangePart) -> Part:
        """Return the part of a plan that copies the ranges of one pair of tensors."""
        rows = slice(pair.first, pair.last)
        segments = Segments.adopt(
            self.src[rows] - np.uint64(pair.src_address),
            self.dst[rows] - np.uint64(pair.dst_address),
            self.nbytes[rows].copy(),
        )
        return Part(
            operation="pull_ranges" if self.pulls else "push_ranges",
            kind="C2C",
            src=pair.src,
            dst=pair.dst,
            src_tensors=range(pair.src_tensor, pair.src_tensor + 1),
            dst_tensors=range(pair.dst_tensor, pair.dst_tensor + 1),
            tensors_per_layer=1,
            segments=segments,
            num_slices=pair.num_slices,
            coalesce=Coalesce.SORTED,
            name=pair.name,
        )


class RangePlan(Plan):
    """A plan of ranges that were checked. Descriptor i is range i.

    Args:
        ranges: the ranges, part by part, in columns that do not change.
        num_parts: the number of parts.
        nbytes: the sum of all ranges.
        made_parts: makes the parts; the function must not keep memory alive.
    """

    ranges: Ranges

    def __init__(
        self,
        ranges: Ranges,
        num_parts: int,
        nbytes: int,
        made_parts: Callable[[], Sequence[RangePart]],
    ) -> None:
        vars(self).update(
            ranges=ranges,
            operation="pull_ranges" if ranges.pulls else "push_ranges",
            kind="C2C",  # each side is one slot
            local="dst" if ranges.pulls else "src",
            reinterpret=False,  # bytes of ranges have no meaning here
            num_descriptors=len(ranges.nbytes),
            num_tensor_pairs=num_parts,
            nbytes=nbytes,
            made_parts=made_parts,
        )
        self._observe()

    def missing_text(self, unconfirmed: Sequence[tuple[int, int]]) -> str:
        """See `Plan.missing_text`: names the first range that may be missing."""
        if not unconfirmed:
            return ""
        return f"; the first that is not confirmed: {self.ranges.text(unconfirmed[0][0])}"

    if not TYPE_CHECKING:  # a type checker sees the attribute of Plan

        @cached_property
        def parts(self) -> tuple[Part, ...]:
            """The parts, one for each pair of tensors."""
            return tuple(map(self.ranges.part, self.made_parts()))


def span_text(address: int, nbytes: int) -> str:
    """Return a range of addresses as messages show it."""
    return f"[{address:#x}, {address + nbytes:#x})"
