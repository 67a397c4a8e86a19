"""The operations of the reference, as functions from descriptions to a Plan.

Everywhere: `src` and `dst` say the direction of the bytes; a cache is given as `CacheDesc`,
`Cache` or `RemoteCache`; offsets and sizes are bytes. `ext_param` cuts the transfer to layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from kvplan.planning.axes import BlockTables
from kvplan.planning.blocks import (
    BlockPairs,
    Blocks,
    block_indices,
    check_distinct,
    table_pairs,
)
from kvplan.planning.kinds import plan_block_to_block, plan_slot_to_slot, plan_to_blocks
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.plan import Plan
from kvplan.planning.segments import DEFAULT_COALESCE, Coalesce
from kvplan.planning.side import Described, is_same_cache, side
from kvplan.status import invalid
from kvplan.types import KvCacheExtParam, Placement
from kvplan.validation import shown

_BLOCK_LISTS = (Sequence, np.ndarray)


def plan_pull_cache(
    src: Described,
    dst: Described,
    *,
    src_batch_index: int | None = None,
    dst_batch_index: int | None = None,
    size: int = -1,
    src_offset: int = 0,
    dst_offset: int = 0,
    num_tokens: int | None = None,
    ext_param: KvCacheExtParam = ALL_LAYERS,
    coalesce: Coalesce | bool = DEFAULT_COALESCE,
    reinterpret: bool = False,
) -> Plan:
    """Plan a pull of a slot of a remote cache into a slot of a local one (C2C).

    Args:
        src_batch_index, dst_batch_index: the slots; None: the one that the key of a `RemoteCache`
            names, otherwise 0.
        size: bytes of a row to copy; -1 for all of the local (destination) row from its offset on.
        src_offset, dst_offset: bytes into the row at which to begin.
        num_tokens: tokens to copy, from the first on, instead of bytes; rows that lie differently
            are copied as far as both reach.
        reinterpret: copy bytes as they are, whatever the descriptions say that they mean.

    Raises:
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID for a slot, size, offset, number of tokens or layer out of
            range, or caches that cannot match: other data types, heads or dimensions.
    """
    return plan_slot_to_slot(
        "pull_cache", src, dst, src_batch_index, dst_batch_index, size, src_offset, dst_offset,
        num_tokens, ext_param, coalesce, reinterpret, False,
    )  # fmt: skip


def plan_push_cache(
    src: Described,
    dst: Described,
    *,
    src_batch_index: int | None = None,
    dst_batch_index: int | None = None,
    size: int = -1,
    src_offset: int = 0,
    dst_offset: int = 0,
    num_tokens: int | None = None,
    ext_param: KvCacheExtParam = ALL_LAYERS,
    coalesce: Coalesce | bool = DEFAULT_COALESCE,
    reinterpret: bool = False,
    by_layer: bool = False,
) -> Plan:
    """Plan a push of a slot of a local cache into a slot of a remote one (C2C).

    Arguments as for `plan_pull_cache`; the local row is the source. (The reference
    pushes whole rows only; sizes and offsets are kvplan's own.)

    Args:
        by_layer: whether each layer is to move by itself, also where a row holds several.

    Raises:
        TypeError, LLMException: as `plan_pull_cache`.
    """
    return plan_slot_to_slot(
        "push_cache", src, dst, src_batch_index, dst_batch_index, size, src_offset, dst_offset,
        num_tokens, ext_param, coalesce, reinterpret, by_layer,
    )  # fmt: skip


def plan_copy_cache(
    src: Described,
    dst: Described,
    *,
    src_batch_index: int = 0,
    dst_batch_index: int = 0,
    offset: int = 0,
    size: int = -1,
    coalesce: Coalesce | bool = DEFAULT_COALESCE,
    reinterpret: bool = False,
) -> Plan:
    """Plan a copy of a slot into another, both in this process (C2C).

    Args:
        offset: bytes into the row at which to begin, on both sides.
        size: bytes to copy; -1 for the rest of the source row.

    Raises:
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID for a slot, size or offset out of range.
    """
    return plan_slot_to_slot(
        "copy_cache", src, dst, src_batch_index, dst_batch_index, size, offset, offset,
        None, ALL_LAYERS, coalesce, reinterpret, False,
    )  # fmt: skip


def plan_pull_blocks(
    src: Described,
    dst: Described,
    src_blocks: Blocks | None,
    dst_blocks: Blocks,
    *,
    src_batch_index: int | None = None,
    num_tokens: int | None = None,
    src_token: int = 0,
    dst_token: int = 0,
    ext_param: KvCacheExtParam = ALL_LAYERS,
    coalesce: Coalesce | bool = DEFAULT_COALESCE,
    reinterpret: bool = False,
) -> Plan:
    """Plan a pull into blocks of a local paged cache, from blocks (B2B) or from a slot (C2B).

    Args:
        src_blocks: blocks of the remote paged cache, one for each of `dst_blocks`. None or empty:
            the remote cache is contiguous, its slot `src_batch_index` is cut into chunks of one
            block stride, and chunk i goes to `dst_blocks[i]`; a last chunk that the row does not
            fill is copied as far as the row reaches.
        dst_blocks: the blocks that are written. Empty, with `src_blocks` that are too: no bytes.
        src_batch_index: the slot; None: the one that the key of a `RemoteCache` names, otherwise 0.
        num_tokens: how many tokens are moved, where the last block is not full or the blocks are of
            unequal size; None: whole blocks, which must hold as many on both sides. It needs a
            layout on both sides, as do blocks that lie differently, or of other heads.
        src_token, dst_token: tokens of `src_blocks` and `dst_blocks` to skip.
        reinterpret: copy bytes as they are, whatever the descriptions say that they mean.

    Raises:
        ValueError: num_tokens, src_token or dst_token outside int64.
        TypeError: an argument of another type, or block tables that do not hold integers.
        LLMException: LLM_PARAM_INVALID for a block, slot, token or layer out of range, tables of
            unequal length or not of one request, a destination block named twice, blocks of
            unequal size, or caches that cannot match: other data types, heads or dimensions.
    """
    return plan_to_blocks(
        "pull_blocks", src, dst, src_blocks, dst_blocks, src_batch_index, num_tokens, src_token,
        dst_token, ext_param, coalesce, reinterpret, False,
    )  # fmt: skip


def plan_push_blocks(
    src: Described,
    dst: Described,
    src_blocks: Blocks | None,
    dst_blocks: Blocks,
    *,
    src_batch_index: int | None = None,
    num_tokens: int | None = None,
    src_token: int = 0,
    dst_token: int = 0,
    ext_param: KvCacheExtParam = ALL_LAYERS,
    coalesce: Coalesce | bool = DEFAULT_COALESCE,
    reinterpret: bool = False,
    by_layer: bool = False,
) -> Plan:
    """Plan a push into blocks of a remote paged cache, from blocks (B2B) or from a slot (C2B).

    Arguments as for `plan_pull_blocks`.

    Args:
        by_layer: whether each layer is to move by itself, also where a block holds several.

    Raises:
        TypeError, ValueError, LLMException: as `plan_pull_blocks`.
    """
    return plan_to_blocks(
        "push_blocks", src, dst, src_blocks, dst_blocks, src_batch_index, num_tokens, src_token,
        dst_token, ext_param, coalesce, reinterpret, by_layer,
    )  # fmt: skip


def plan_copy_blocks(
    src: Described,
    blocks: Mapping[int, Sequence[int]] | BlockPairs,
    dst: Described | None = None,
    *,
    coalesce: Coalesce | bool = DEFAULT_COALESCE,
    reinterpret: bool = False,
) -> Plan:
    """Plan copies of blocks, each to any number of others, in this process (B2B).

    Args:
        blocks: source block -> the blocks that it is copied to; or pairs of source and destination
            block, or an array or tensor of two such columns.
        dst: the cache copied to; None, or one with the id or the addresses of `src`, for the same.

    Raises:
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID for a block out of range, a destination block named twice,
            or, inside one cache, a block that is both read and written: the result would depend
            on the order.
    """
    if not isinstance(blocks, Mapping):
        blocks = _grouped(table_pairs("blocks", blocks))
    source = side("src", src, paged=True)
    within = dst is None or is_same_cache(src, dst)
    target = source if dst is None else side("dst", dst, paged=True)
    odd = {kind for kind in set(map(type, blocks.values())) if not issubclass(kind, _BLOCK_LISTS)}
    if odd:
        block, to = next((block, to) for block, to in blocks.items() if type(to) in odd)
        raise TypeError(
            f"blocks[{block!r}]={shown(to)} must be a sequence of int, of the blocks that it is "
            "copied to"
        )
    read = block_indices("blocks (source)", list(blocks), source)
    dst_table = block_indices("blocks (destination)", [*chain(*blocks.values())], target)
    check_distinct("blocks (destination)", dst_table, target)
    src_table = np.repeat(read, list(map(len, blocks.values())))
    if within:
        # A block copied to itself changes nothing, so no read of it can come too late.
        moved = dst_table[src_table != dst_table]
        clash = moved[np.isin(moved, src_table)]
        if len(clash):
            raise invalid(
                f"block {int(clash[0])} is both read and written by this copy inside one cache; "
                "the result would depend on the order: copy in two steps"
            )
    return plan_block_to_block(
        "copy_blocks", source, target, BlockTables(src_table, dst_table), ALL_LAYERS,
        coalesce, reinterpret, False,
    )  # fmt: skip


def plan_swap_blocks(
    src: Described,
    dst: Described,
    src_to_dst: Mapping[int, int] | BlockPairs,
    *,
    coalesce: Coalesce | bool = DEFAULT_COALESCE,
    reinterpret: bool = False,
) -> Plan:
    """Plan a swap in (host to device) or out (device to host) of blocks, in this process (B2B).

    Args:
        src_to_dst: source block -> destination block; or pairs of them, or an array or tensor of
            two such columns.

    Raises:
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID for caches of which not exactly one is on the host, of
            unequal num_tensors or block size, a block out of range, or a destination block named
            twice.
    """
    if isinstance(src_to_dst, Mapping):
        read, written = list(src_to_dst), list(src_to_dst.values())
    else:
        pairs = table_pairs("src_to_dst", src_to_dst)
        read, written = [src for src, _ in pairs], [dst for _, dst in pairs]
    source, target = side("src", src, paged=True), side("dst", dst, paged=True)
    if {source.placement, target.placement} != {Placement.HOST, Placement.DEVICE}:
        raise invalid(
            f"src placement={source.placement.name} and dst placement={target.placement.name}: a "
            "swap needs one HOST and one DEVICE"
        )
    src_table = block_indices("src_to_dst (source)", read, source)
    dst_table = block_indices("src_to_dst (destination)", written, target)
    check_distinct("src_to_dst (destination)", dst_table, target)
    return plan_block_to_block(
        "swap_blocks", source, target, BlockTables(src_table, dst_table), ALL_LAYERS,
        coalesce, reinterpret, False,
    )  # fmt: skip


def _grouped(pairs: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Return source block -> the blocks that it is copied to."""
    grouped: dict[int, list[int]] = {}
    for src, dst in pairs:
        grouped.setdefault(src, []).append(dst)
    return grouped
