"""The operations of the reference, as functions from descriptions to a Plan.

Everywhere: `src` and `dst` say the direction of the bytes; a cache is given as `CacheDesc`,
`Cache` or `RemoteCache`; offsets and sizes are bytes. `ext_param` cuts the transfer to layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from kvplan.inspection.units import plural
from kvplan.planning.axes import BlockTables, cut, refuse_unlike, rows_are_alike, rows_differ
from kvplan.planning.blocks import (
    Blocks,
    Indices,
    block_indices,
    block_table,
    check_distinct,
    check_indices,
    sorted_pairs,
)
from kvplan.planning.plan import Kind, Operation, Plan
from kvplan.planning.segments import DEFAULT_COALESCE, Coalesce, Segments
from kvplan.planning.side import (
    Described,
    Side,
    is_same_cache,
    pair_views,
    side,
    slot_index,
)
from kvplan.status import LLMException, invalid
from kvplan.types import KvCacheExtParam, Placement
from kvplan.validation import INT64_MAX, check_index, check_mapping, check_type, check_width, shown

ALL_LAYERS = KvCacheExtParam()
_TENSOR_BY_TENSOR = KvCacheExtParam(tensor_num_per_layer=1)

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
    return _slot_to_slot(
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

    Arguments and errors as for `plan_pull_cache`; the local row is the source. (The reference
    pushes whole rows only; sizes and offsets are kvplan's own.)

    Args:
        by_layer: whether each layer is to move by itself, also where a row holds several.
    """
    return _slot_to_slot(
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
    return _slot_to_slot(
        "copy_cache", src, dst, src_batch_index, dst_batch_index, size, offset, offset,
        None, _ungrouped(src), coalesce, reinterpret, False,
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
        src_batch_index: the slot; None: the one that the key of a `RemoteCache` names, otherwise 0.
        num_tokens: how many tokens are moved, where the last block is not full or the blocks are of
            unequal size; None: whole blocks, which must hold as many on both sides. It needs a
            layout on both sides, as do blocks that lie differently, or of other heads.
        src_token, dst_token: tokens of `src_blocks` and `dst_blocks` to skip.
        reinterpret: copy bytes as they are, whatever the descriptions say that they mean.

    Raises:
        TypeError: an argument of another type, or block tables that do not hold integers.
        LLMException: LLM_PARAM_INVALID for a block, slot, token or layer out of range, tables of
            unequal length, a destination block named twice, blocks of unequal size, or caches that
            cannot match: other data types, heads or dimensions.
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

    Arguments and errors as for `plan_pull_blocks`.

    Args:
        by_layer: whether each layer is to move by itself, also where a block holds several.
    """
    return plan_to_blocks(
        "push_blocks", src, dst, src_blocks, dst_blocks, src_batch_index, num_tokens, src_token,
        dst_token, ext_param, coalesce, reinterpret, by_layer,
    )  # fmt: skip


def plan_copy_blocks(
    src: Described,
    blocks: Mapping[int, Sequence[int]],
    dst: Described | None = None,
    *,
    coalesce: Coalesce | bool = DEFAULT_COALESCE,
    reinterpret: bool = False,
) -> Plan:
    """Plan copies of blocks, each to any number of others, in this process (B2B).

    Args:
        blocks: source block -> the blocks that it is copied to.
        dst: the cache copied to; None, or one with the id or the addresses of `src`, for the same.

    Raises:
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID for a block out of range, a destination block named twice,
            nothing to copy, or, inside one cache, a block that is both read and written: the
            result would depend on the order.
    """
    check_mapping("blocks", blocks)
    source = side("src", src, paged=True)
    within = dst is None or is_same_cache(src, dst)
    target = source if dst is None else side("dst", dst, paged=True)
    odd = {kind for kind in set(map(type, blocks.values())) if not issubclass(kind, _BLOCK_LISTS)}
    if odd:
        block, to = next((block, to) for block, to in blocks.items() if type(to) in odd)
        raise TypeError(f"blocks[{block!r}]={shown(to)} must be a sequence of int")
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
    return _block_to_block(
        "copy_blocks", source, target, BlockTables(src_table, dst_table), _ungrouped(source),
        coalesce, reinterpret, False,
    )  # fmt: skip


def plan_swap_blocks(
    src: Described,
    dst: Described,
    src_to_dst: Mapping[int, int],
    *,
    coalesce: Coalesce | bool = DEFAULT_COALESCE,
    reinterpret: bool = False,
) -> Plan:
    """Plan a swap in (host to device) or out (device to host) of blocks, in this process (B2B).

    Args:
        src_to_dst: source block -> destination block.

    Raises:
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID for caches of which not exactly one is on the host, of
            unequal num_tensors or block size, a block out of range, a destination block named
            twice, or nothing to swap.
    """
    check_mapping("src_to_dst", src_to_dst)
    source, target = side("src", src, paged=True), side("dst", dst, paged=True)
    if {source.placement, target.placement} != {Placement.HOST, Placement.DEVICE}:
        raise invalid(
            f"src placement={source.placement.name} and dst placement={target.placement.name}: a "
            "swap needs one HOST and one DEVICE"
        )
    src_table = block_indices("src_to_dst (source)", list(src_to_dst), source)
    dst_table = block_indices("src_to_dst (destination)", list(src_to_dst.values()), target)
    check_distinct("src_to_dst (destination)", dst_table, target)
    return _block_to_block(
        "swap_blocks", source, target, BlockTables(src_table, dst_table), _ungrouped(source),
        coalesce, reinterpret, False,
    )  # fmt: skip


# The kinds of transfer: each checks what it is given, lays out the slices, and makes the Plan.


def _slot_to_slot(
    operation: Operation,
    src: Described,
    dst: Described,
    src_batch_index: int | None,
    dst_batch_index: int | None,
    size: int,
    src_offset: int,
    dst_offset: int,
    num_tokens: int | None,
    ext_param: KvCacheExtParam,
    how: Coalesce | bool,
    reinterpret: bool,
    by_layer: bool,
) -> Plan:
    """Plan C2C: `size` bytes of a slot, from an offset into each row on, or tokens of it."""
    source = src if type(src) is Side and not src.paged else side("src", src, paged=False)
    target = dst if type(dst) is Side and not dst.paged else side("dst", dst, paged=False)
    how = how if type(how) is Coalesce else _coalesce(how)
    src_slot = slot_index("src_batch_index", src_batch_index, src, source)
    dst_slot = slot_index("dst_batch_index", dst_batch_index, dst, target)
    both = operation == "copy_cache"  # which has one offset
    src_name, dst_name = ("offset", "offset") if both else ("src_offset", "dst_offset")
    alike = source.meaning == target.meaning and source.is_plain
    if num_tokens is not None or not (
        alike
        or (
            rows_are_alike(source, target, chunked=True, reinterpret=reinterpret)
            and not _cuts_rows(source, ext_param, by_layer)
        )
    ):
        for name, value, whole in (
            ("size", size, -1), (src_name, src_offset, 0), (dst_name, dst_offset, 0)
        ):  # fmt: skip
            if value != whole:
                raise invalid(
                    f"{name}={value} must be {whole}: bytes do not say what is moved between rows "
                    "that lie differently, or of num_tokens; give num_tokens alone"
                )
        tables = _slot_tables(source, target, src_slot, np.array([dst_slot]), num_tokens)
        return _by_axes(
            operation, "C2C", source, target, tables, ext_param, how, reinterpret=reinterpret
        )
    for name, offset, row in ((src_name, src_offset, source), (dst_name, dst_offset, target)):
        if type(offset) is not int or not 0 <= offset < row.stride:
            check_index(name, offset, row.stride)
    if type(size) is not int:
        check_type("size", size, int)
    if size != -1 and size <= 0:
        raise invalid(f"size={size} must be -1 or > 0")
    # -1 is measured on the local row, as in the reference: what a pull fills, what others send.
    pulls = operation == "pull_cache"
    rest = target.stride - dst_offset if pulls else source.stride - src_offset
    nbytes = rest if size == -1 else size
    if nbytes > source.stride - src_offset:
        raise _too_long(size, nbytes, src_name, src_offset, "src", source)
    if nbytes > target.stride - dst_offset:
        raise _too_long(size, nbytes, dst_name, dst_offset, "dst", target)
    segments = Segments.single(
        src_slot * source.stride + src_offset, dst_slot * target.stride + dst_offset, nbytes
    )
    return _plan(operation, "C2C", source, target, segments, 1, nbytes, ext_param, how, reinterpret)


def _too_long(size: int, nbytes: int, name: str, offset: int, word: str, row: Side) -> LLMException:
    return invalid(
        f"size={size}: {nbytes} bytes from {name}={offset} are out of range "
        f"[1, {row.stride - offset}] of the {word} row of {row.stride} bytes"
    )


def _slot_tables(
    source: Side,
    target: Side,
    slot: int,
    dst_rows: Indices,
    num_tokens: int | None,
    src_token: int = 0,
    dst_token: int = 0,
) -> BlockTables:
    """A slot as a table of one row; without `num_tokens`, as many as it and `dst_rows` hold."""
    if num_tokens is None and source.layout is not None and "token" in source.layout.axes:
        src_has = source.extent("token") - src_token
        dst_has = len(dst_rows) * target.extent("token") - dst_token
        num_tokens = max(1, min(src_has, dst_has))
    return BlockTables(np.array([slot]), dst_rows, src_token, dst_token, num_tokens)


def plan_to_blocks(
    operation: Operation,
    src: Described,
    dst: Described,
    src_blocks: Blocks | None,
    dst_blocks: Blocks,
    src_batch_index: int | None,
    num_tokens: int | None,
    src_token: int,
    dst_token: int,
    ext_param: KvCacheExtParam,
    how: Coalesce | bool,
    reinterpret: bool,
    by_layer: bool,
    heads: range | None = None,
) -> Plan:
    """Plan B2B if there are `src_blocks`, otherwise C2B: the slot cut into chunks of one block.

    Of the KV heads `heads` alone, where those are given.
    """
    target = dst if type(dst) is Side and dst.paged else side("dst", dst, paged=True)
    dst_table = check_indices("dst_blocks", block_table("dst_blocks", dst_blocks), target)
    check_distinct("dst_blocks", dst_table, target)
    given = np.empty(0) if src_blocks is None else block_table("src_blocks", src_blocks)
    paged = given.size > 0
    source = src if type(src) is Side and src.paged is paged else side("src", src, paged=paged)
    how = how if type(how) is Coalesce else _coalesce(how)
    by_tokens = num_tokens is not None or src_token != 0 or dst_token != 0
    if by_tokens:
        for name, value in (("src_token", src_token), ("dst_token", dst_token)):
            check_width(name, value, 0, INT64_MAX)
        if num_tokens is not None:
            check_width("num_tokens", num_tokens, 0, INT64_MAX)
    if paged:
        if src_batch_index is not None:  # only 0 will do
            slot_index("src_batch_index", src_batch_index, src, source)
        src_table = check_indices("src_blocks", given, source)
        tables = BlockTables(src_table, dst_table, src_token, dst_token, num_tokens)
        if heads is not None:
            return _by_axes(
                operation, "B2B", source, target, tables, ext_param, how, heads, reinterpret
            )
        return _block_to_block(
            operation, source, target, tables, ext_param, how, reinterpret, by_layer
        )

    slot = slot_index("src_batch_index", src_batch_index, src, source)
    if (
        by_tokens
        or heads is not None
        or not rows_are_alike(source, target, chunked=True, reinterpret=reinterpret)
        or _cuts_rows(source, ext_param, by_layer)
    ):
        row, block = source.extent("token"), target.extent("token")
        if not by_tokens and (len(dst_table) - 1) * block >= row:
            raise invalid(
                f"dst_blocks has {plural(len(dst_table), 'block')} of {plural(block, 'token')}; "
                f"the src row of {plural(row, 'token')} fills at most {-(-row // block)}"
            )
        tables = _slot_tables(source, target, slot, dst_table, num_tokens, src_token, dst_token)
        return _by_axes(
            operation, "C2B", source, target, tables, ext_param, how, heads, reinterpret
        )
    starts = np.arange(len(dst_table), dtype=np.int64) * target.stride
    if int(starts[-1]) >= source.stride:
        raise invalid(
            f"dst_blocks has {plural(len(dst_table), 'block')} of {target.stride} bytes; the src "
            f"row of {source.stride} bytes fills at most {-(-source.stride // target.stride)}"
        )
    segments = Segments.adopt(
        (starts + slot * source.stride).view(np.uint64),
        (dst_table * target.stride).view(np.uint64),
        np.minimum(source.stride - starts, target.stride).view(np.uint64),
        merged=how is not Coalesce.NONE,
    )
    nbytes = min(source.stride, len(dst_table) * target.stride)
    tables = BlockTables(np.array([slot]), dst_table)
    return _plan(
        operation, "C2B", source, target, segments, len(dst_table), nbytes, ext_param, how,
        reinterpret, tables,
    )  # fmt: skip


def _block_to_block(
    operation: Operation,
    source: Side,
    target: Side,
    tables: BlockTables,
    ext_param: KvCacheExtParam,
    how: Coalesce | bool,
    reinterpret: bool,
    by_layer: bool,
) -> Plan:
    """Plan B2B between checked tables: block `tables.src[i]` to block `tables.dst[i]`."""
    if type(how) is not Coalesce:
        how = _coalesce(how)
    alike = source.meaning == target.meaning and source.is_plain
    if (
        tables.num_tokens is not None
        or tables.src_token
        or tables.dst_token
        or not (
            alike
            or (
                rows_are_alike(source, target, chunked=False, reinterpret=reinterpret)
                and not _cuts_rows(source, ext_param, by_layer)
            )
        )
    ):
        return _by_axes(
            operation, "B2B", source, target, tables, ext_param, how, reinterpret=reinterpret
        )
    if source.stride != target.stride:
        raise invalid(
            f"src block of {source.stride} bytes and dst block of {target.stride} bytes must be "
            "equal"
        )
    src_table, dst_table = tables.src, tables.dst
    if len(src_table) != len(dst_table):
        raise invalid(
            f"src_blocks has {plural(len(src_table), 'block')} and dst_blocks "
            f"{len(dst_table)}; they must be of equal length"
        )
    num_blocks, stride = len(src_table), target.stride
    if num_blocks == 1:
        segments = Segments.single(src_table.item() * stride, dst_table.item() * stride, stride)
    else:
        if how is Coalesce.SORTED:
            src_table, dst_table = sorted_pairs(src_table, dst_table)
        segments = Segments.adopt(
            (src_table * stride).view(np.uint64),
            (dst_table * stride).view(np.uint64),
            np.full(num_blocks, stride, dtype=np.uint64),
            merged=how is not Coalesce.NONE,
        )
    nbytes = num_blocks * stride
    return _plan(
        operation, "B2B", source, target, segments, num_blocks, nbytes, ext_param, how,
        reinterpret, tables,
    )  # fmt: skip


def _ungrouped(cache: Described) -> KvCacheExtParam:
    """All layers of a copy, which knows none: tensor by tensor where 2 do not make a layer."""
    own = cache if isinstance(cache, Side) else side("src", cache, paged=False)
    return ALL_LAYERS if own.usual_tensors_per_layer is not None else _TENSOR_BY_TENSOR


def _cuts_rows(source: Side, ext_param: KvCacheExtParam, by_layer: bool) -> bool:
    """Whether rows hold several layers, of which a transfer takes some, or one after the other."""
    return source.extent("layer") > 1 and (
        by_layer or ext_param.src_layer_range is not None or ext_param.dst_layer_range is not None
    )


def _by_axes(
    operation: Operation,
    kind: Kind,
    source: Side,
    target: Side,
    tables: BlockTables,
    ext_param: KvCacheExtParam,
    how: Coalesce,
    heads: range | None = None,
    reinterpret: bool = False,
) -> Plan:
    """Plan what both sides have, axis by axis; elements of another type only if as wide."""
    src_type, dst_type = source.data_type, target.data_type
    if src_type is not dst_type and None not in (source.layout, target.layout):
        assert src_type is not None  # a layout comes with one
        assert dst_type is not None
        if not reinterpret or src_type.bits != dst_type.bits:
            refuse_unlike("data type", source, target)
    segments, split, num_slices = cut(source, target, tables, how, heads)
    plan = _plan(
        operation, kind, source, target, segments, num_slices, segments.total_nbytes, ext_param,
        how, False, tables, split,
    )  # fmt: skip
    if src_type is not dst_type:
        vars(plan).update(reinterpret=True)
    return plan


def _plan(
    operation: Operation,
    kind: Kind,
    source: Side,
    target: Side,
    segments: Segments,
    num_slices: int,
    nbytes_per_tensor: int,
    ext_param: KvCacheExtParam,
    how: Coalesce,
    reinterpret: bool,
    tables: BlockTables | None = None,
    split: tuple[str, ...] = (),
) -> Plan:
    src_views, dst_views, per_layer = pair_views(
        source, target, ext_param, split, as_bytes=reinterpret
    )
    plan = Plan.__new__(Plan)
    # The constructor of a frozen dataclass sets each through `object.__setattr__`: 1 us more.
    vars(plan).update(
        operation=operation,
        kind=kind,
        src=source,
        dst=target,
        src_tensors=src_views,
        dst_tensors=dst_views,
        tensors_per_layer=per_layer,
        segments=segments,
        num_slices=num_slices,
        coalesce=how,
        split=split,
        # Said only of a plan that could not be made otherwise.
        reinterpret=reinterpret and rows_differ(source, target, chunked=kind != "B2B"),
        tables=tables,
        # What a plan made otherwise has to sum.
        nbytes_per_tensor=nbytes_per_tensor,
        nbytes=len(src_views) * nbytes_per_tensor,
    )
    return plan


def _coalesce(how: Coalesce | bool) -> Coalesce:
    if isinstance(how, bool):
        return DEFAULT_COALESCE if how else Coalesce.NONE
    return check_type("coalesce", how, Coalesce)
