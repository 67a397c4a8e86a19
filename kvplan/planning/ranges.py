"""The plan of a transfer that its caller lists by addresses: made when somebody looks at it.

Thousands of ranges are bound in less time than a plan of them takes; what a text, a recording or an
error needs of the plan is made of the same columns then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.planning.part import Part
from kvplan.planning.plan import OBSERVERS, Plan
from kvplan.planning.segments import Coalesce, Segments
from kvplan.validation import check_index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvplan.planning.side import Side

    Column = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RangePart:
    """The ranges that one tensor of src and one of dst have, which are a part of the plan.

    Attributes:
        src, dst: the sides.
        src_tensor, dst_tensor: in them.
        src_address, dst_address: of these tensors.
        first, last: the ranges, [first, last) of the columns.
        num_slices: as many were given, before those that go on were merged.
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
        """Of the part: the caches, and of those with several tensors which."""
        places = (
            str(side.cache_id) if side.num_tensors == 1 else f"{side.cache_id}.{tensor}"
            for side, tensor in ((self.src, self.src_tensor), (self.dst, self.dst_tensor))
        )
        return " to ".join(places)


class Ranges(NamedTuple):
    """The ranges of a plan in the order of its descriptors, by addresses of each side's process."""

    src: Column
    dst: Column
    nbytes: Column
    pulls: bool
    num_parts: int
    total_nbytes: int

    def text(self, descriptor: int) -> str:
        """Where a descriptor reads and writes, by addresses.

        Raises:
            LLMException: LLM_PARAM_INVALID: there is no such descriptor.
        """
        check_index("descriptor", descriptor, len(self.nbytes))
        nbytes = int(self.nbytes[descriptor])
        src, dst = (span_text(int(it[descriptor]), nbytes) for it in (self.src, self.dst))
        here, there = (dst, src) if self.pulls else (src, dst)
        return f"local {here}, remote {there}, {nbytes} bytes"

    def part(self, it: RangePart) -> Part:
        """The part of a plan that these ranges are."""
        rows = slice(it.first, it.last)
        segments = Segments.adopt(
            self.src[rows] - np.uint64(it.src_address),
            self.dst[rows] - np.uint64(it.dst_address),
            self.nbytes[rows].copy(),
        )
        return Part(
            operation="pull_ranges" if self.pulls else "push_ranges",
            kind="C2C",
            src=it.src,
            dst=it.dst,
            src_tensors=range(it.src_tensor, it.src_tensor + 1),
            dst_tensors=range(it.dst_tensor, it.dst_tensor + 1),
            tensors_per_layer=1,
            segments=segments,
            num_slices=it.num_slices,
            coalesce=Coalesce.SORTED,
            name=it.name,
        )


def plan_ranges(ranges: Ranges, made_parts: Callable[[], Sequence[RangePart]]) -> Plan:
    """Return the plan of ranges that were checked. Descriptor i is range i.

    Args:
        ranges: part by part; the plan takes the columns over.
        made_parts: makes them; it must hold no memory.
    """
    plan: Plan = object.__new__(Plan)
    vars(plan).update(
        ranges=ranges,
        operation="pull_ranges" if ranges.pulls else "push_ranges",
        kind="C2C",  # each side is as one slot, of which bytes are moved
        local="dst" if ranges.pulls else "src",
        made_parts=lambda: tuple(map(ranges.part, made_parts())),
    )
    if OBSERVERS:
        plan.observe()
    return plan


def span_text(address: int, nbytes: int) -> str:
    """A range of addresses as messages have it."""
    return f"[{address:#x}, {address + nbytes:#x})"
