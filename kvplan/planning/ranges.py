"""The plan of a transfer that its caller lists by addresses: made when somebody looks at it.

Thousands of ranges are bound in less time than a plan of them takes; what a text, a recording or an
error needs of the plan is made of the same columns then.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvplan.planning.groups import GroupPlan
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
    """The ranges that one tensor of src and one of dst have, which are a group of the plan.

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
        """Of the group: the caches, and of those with several tensors which."""
        places = (
            str(side.cache_id) if side.num_tensors == 1 else f"{side.cache_id}.{tensor}"
            for side, tensor in ((self.src, self.src_tensor), (self.dst, self.dst_tensor))
        )
        return " to ".join(places)


class RangePlan(GroupPlan):
    """A plan of groups, one for each pair of tensors that ranges go between.

    Descriptor i is range i. Apart from its `operation` it is as any `GroupPlan`, and read back it
    is one.

    Attributes:
        src_addresses, dst_addresses, range_nbytes: the ranges, in the order of the descriptors,
            each address as its own process knows it.
    """

    src_addresses: Column
    dst_addresses: Column
    range_nbytes: Column
    _pulls: bool
    _made_parts: Callable[[], Sequence[RangePart]]

    @classmethod
    def of(
        cls,
        pulls: bool,
        src: Column,
        dst: Column,
        nbytes: Column,
        num_parts: int,
        made_parts: Callable[[], Sequence[RangePart]],
    ) -> RangePlan:
        """The plan of ranges that were checked; it takes the columns over.

        Args:
            pulls: whether dst is this process.
            src, dst, nbytes: the ranges, part by part.
            num_parts: how many there are.
            made_parts: makes them; it must hold no memory.
        """
        plan = cls.__new__(cls)
        vars(plan).update(
            src_addresses=src,
            dst_addresses=dst,
            range_nbytes=nbytes,
            num_descriptors=len(nbytes),
            num_tensor_pairs=num_parts,
            nbytes=int(nbytes.sum()),
            _pulls=pulls,
            _made_parts=made_parts,
        )
        for observe in OBSERVERS:
            observe(plan)
        return plan

    if not TYPE_CHECKING:  # as to mypy: every field is there

        def __getattr__(self, name: str) -> Any:
            """Make the groups, now that one asks."""
            if name != "groups" or "_made_parts" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            made = vars(self)["groups"] = MappingProxyType(self._made_groups())
            return made

    @property
    def operation(self) -> str:
        """`pull_ranges` or `push_ranges`."""
        return "pull_ranges" if self._pulls else "push_ranges"

    @property
    def kind(self) -> str:
        """C2C: each side is as one slot, of which bytes are moved."""
        return "C2C"

    @property
    def local(self) -> Literal["src", "dst", "both"]:
        """Which side is this process's own."""
        return "dst" if self._pulls else "src"

    @property
    def reinterpret(self) -> bool:
        """False: the ranges are bytes, which mean nothing here."""
        return False

    def range_text(self, descriptor: int) -> str:
        """Where a descriptor reads and writes, by addresses.

        Raises:
            LLMException: LLM_PARAM_INVALID: there is no such descriptor.
        """
        check_index("descriptor", descriptor, self.num_descriptors)
        nbytes = int(self.range_nbytes[descriptor])
        src, dst = (
            span_text(int(it[descriptor]), nbytes)
            for it in (self.src_addresses, self.dst_addresses)
        )
        here, there = (dst, src) if self._pulls else (src, dst)
        return f"local {here}, remote {there}, {nbytes} bytes"

    def _made_groups(self) -> dict[str, Plan]:
        groups: dict[str, Plan] = {}
        for part in self._made_parts():
            rows = slice(part.first, part.last)
            segments = Segments.adopt(
                self.src_addresses[rows] - np.uint64(part.src_address),
                self.dst_addresses[rows] - np.uint64(part.dst_address),
                self.range_nbytes[rows].copy(),
            )
            groups[part.name] = Plan(
                operation="pull_cache" if self._pulls else "push_cache",
                kind="C2C",
                src=part.src,
                dst=part.dst,
                src_tensors=range(part.src_tensor, part.src_tensor + 1),
                dst_tensors=range(part.dst_tensor, part.dst_tensor + 1),
                tensors_per_layer=1,
                segments=segments,
                num_slices=part.num_slices,
                coalesce=Coalesce.SORTED,
            )
        return groups


def span_text(address: int, nbytes: int) -> str:
    """A range of addresses as messages have it."""
    return f"[{address:#x}, {address + nbytes:#x})"
