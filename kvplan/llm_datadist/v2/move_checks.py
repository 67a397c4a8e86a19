"""Checks of arguments that the moves of a CacheManager share."""

from __future__ import annotations

from collections.abc import Sized

from kvplan.llm_datadist.conversion import desc_of
from kvplan.llm_datadist.utils.utils import check_int64, check_isinstance
from kvplan.llm_datadist.v2.llm_types import Cache
from kvplan.status import invalid


def check_size(size: int) -> None:
    """Refuse a size that is neither -1 (the whole row) nor positive.

    Raises:
        TypeError, ValueError: no int64.
        LLMException: LLM_PARAM_INVALID.
    """
    check_int64("size", size)
    if size != -1 and size <= 0:
        raise invalid(f"size={size} must be -1 or > 0")


def check_kind(name: str, cache: Cache, *, is_blocks: bool) -> None:
    """Refuse a cache of the other kind: LLM_PARAM_INVALID."""
    if cache.is_blocks_cache is not is_blocks:
        raise invalid(f"{name}={cache} must be {'paged' if is_blocks else 'contiguous'}")


def check_alike(src_name: str, src: Cache, dst_name: str, dst: Cache) -> None:
    """Refuse caches that cannot swap blocks, whichever they are.

    Raises:
        TypeError: no placement or data type.
        LLMException: LLM_PARAM_INVALID: not one of each placement, another number of tensors, or
            size of a block.
    """
    ends = {src_name: desc_of(src.cache_desc), dst_name: desc_of(dst.cache_desc)}
    for what, values in (
        ("placement", [it.placement.name for it in ends.values()]),
        ("num_tensors", [it.num_tensors for it in ends.values()]),
        ("bytes of a block", [it.tensor_nbytes // it.shape[0] for it in ends.values()]),
    ):
        if (values[0] == values[1]) is (what == "placement"):
            raise invalid(
                f"{what} is {values[0]} of {src_name} and {values[1]} of {dst_name}; a swap is "
                "between HOST and DEVICE, of as many tensors, and of blocks of one size"
            )


def check_some(name: str, blocks: Sized) -> None:
    """Refuse an empty block table: LLM_PARAM_INVALID."""
    if not len(blocks):
        raise invalid(f"{name} is empty; at least one block is needed")


def check_table(name: str, blocks: object) -> None:
    """Refuse None, which is only the type's to allow: TypeError."""
    check_isinstance(name, blocks, [list, tuple], allow_none=False)
