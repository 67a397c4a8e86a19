"""One side of a plan: how a cache's rows lie in memory, without saying where."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvplan.types import Cache, CacheDesc, Placement, RemoteCache
from kvplan.validation import check_type

Described = CacheDesc | Cache | RemoteCache
"""Whatever describes a cache to the planner; addresses, if it has any, are not looked at."""


@dataclass(frozen=True, slots=True)
class Side:
    """A cache as the plan sees it: `num_tensors` tensors of `count` rows of `stride` bytes."""

    num_tensors: int
    count: int
    stride: int
    paged: bool
    placement: Placement
    name: str = field(default="", compare=False)
    """What people call it; no part of what the plan does."""

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of one tensor."""
        return self.count * self.stride

    @property
    def row(self) -> str:
        """The word for one row: slot or block."""
        return "block" if self.paged else "slot"


def side(argument: str, cache: Described, *, paged: bool) -> Side:
    """Return the side for `cache`, read as paged (rows are blocks) or contiguous (slots).

    Raises:
        TypeError: `cache` is not a description; names `argument`.
    """
    name = ""
    match cache:
        case Cache(desc, cache_id):
            name = f"cache {cache_id}" if cache_id >= 0 else ""
        case RemoteCache(key, desc):
            name = repr(key)
        case _:
            desc = check_type(argument, cache, CacheDesc)
    return Side(
        num_tensors=desc.num_tensors,
        count=desc.batch_size,
        stride=desc.stride,
        paged=paged,
        placement=desc.placement,
        name=name,
    )
