"""One side of a plan: how a cache's rows lie in memory, without saying where."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvplan.status import invalid
from kvplan.types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    Placement,
    RemoteCache,
)
from kvplan.validation import check_type


@dataclass(frozen=True)
class Side:
    """A cache as the plan sees it: `num_tensors` tensors of `count` rows of `stride` bytes."""

    num_tensors: int
    count: int
    stride: int
    paged: bool
    placement: Placement
    name: str = field(default="", compare=False)
    """What people call it; no part of what the plan does."""
    way: str = field(default="", compare=False)
    """Of a peer's: how it is reached from here, for people. A plan that is read again has none."""

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of one tensor."""
        return self.count * self.stride

    @property
    def row(self) -> str:
        """The word for one row: slot or block."""
        return "block" if self.paged else "slot"


Described = CacheDesc | Cache | RemoteCache | Side
"""Whatever describes a cache to the planner; addresses, if it has any, are not looked at. A Side is
for those who plan with one cache again and again."""


def side(argument: str, cache: Described, *, paged: bool) -> Side:
    """Return the side for `cache`, read as paged (rows are blocks) or contiguous (slots).

    Raises:
        TypeError: `cache` is not a description; names `argument`.
        LLMException: LLM_PARAM_INVALID for a side, or a remote cache whose key says so, of the
            other kind: a paged cache read as slots would be copied in silence, and wrong.
    """
    if isinstance(cache, Side):
        if cache.paged is not paged:
            word = "blocks" if paged else "slots"
            raise invalid(f"{argument}={cache.name} has {cache.row}s, and cannot be read as {word}")
        return cache
    if isinstance(cache, RemoteCache):
        desc, key, name = cache.cache_desc, cache.key, repr(cache.key)
        if isinstance(key, BlocksCacheKey) and not paged:
            raise invalid(
                f"{argument}={name} names a paged cache; its blocks must be given, "
                "as plan_pull_blocks and plan_push_blocks take them"
            )
        slot = isinstance(key, CacheKeyByIdAndIndex) and key.batch_index
        if paged and (slot or isinstance(key, CacheKey)):
            raise invalid(
                f"{argument}={name} names a slot, and a paged cache has none; its key is a "
                "BlocksCacheKey or a CacheIndex of batch_index 0"
            )
    elif isinstance(cache, Cache):
        desc, name = cache.cache_desc, f"cache {cache.cache_id}" if cache.cache_id >= 0 else ""
    else:
        desc, name = check_type(argument, cache, CacheDesc), ""
    found = Side.__new__(Side)
    vars(found).update(  # past a constructor that sets each field through `object.__setattr__`
        num_tensors=desc.num_tensors,
        count=desc.batch_size,
        stride=desc.stride,
        paged=paged,
        placement=desc.placement,
        name=name,
        way="",
    )
    return found
