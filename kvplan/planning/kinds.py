"""The kinds of transfer (C2C, C2B, B2B): check the arguments, lay out slices, make the Part.

Rows of equal meaning are copied as bytes; others are cut axis by axis.
"""

from __future__ import annotations

import numpy as np

from kvplan.planning.axes import WHOLE_SHARE, Share, cut, refuse_unlike, rows_are_alike, rows_differ
from kvplan.planning.blocks import (
    Blocks,
    Indices,
    block_table,
    check_distinct,
    check_indices,
    sorted_pairs,
)
from kvplan.planning.layers import ALL_LAYERS, has_layers, pair_views
from kvplan.planning.part import Kind, Operation, Part
from kvplan.planning.segments import DEFAULT_COALESCE, Coalesce, Segments
from kvplan.planning.side import Described, Side, side, slot_index
from kvplan.planning.texts import plural
from kvplan.planning.tokens import BlockTables, room
from kvplan.status import invalid
from kvplan.types import BlocksCacheKey, CacheDesc, KvCacheExtParam, RemoteCache
from kvplan.validation import INT64_MAX, as_int, check_index, check_type, check_width


def plan_slot_to_slot(
    operation: Operation,
    src: Described,
    dst: Described,
    src_slot: int | None,
    dst_slot: int | None,
    nbytes: int | None,
    src_offset: int,
    dst_offset: int,
    num_tokens: int | None,
    ext_param: KvCacheExtParam,
    how: Coalesce | bool,
    reinterpret: bool,
    by_layer: bool,
) -> Part:
    """Plan C2C: `nbytes` from an offset in each slot, or `num_tokens` tokens."""
    source = src if type(src) is Side and not src.paged else side("src", src, paged=False)
    target = dst if type(dst) is Side and not dst.paged else side("dst", dst, paged=False)
    how = how if type(how) is Coalesce else _coalesce(how)
    src_slot = slot_index("src.slot", src_slot, src, source)
    dst_slot = slot_index("dst.slot", dst_slot, dst, target)
    if nbytes is not None:
        nbytes = as_int("nbytes", nbytes)
    if type(src_offset) is not int or type(dst_offset) is not int:
        src_offset, dst_offset = as_int("src.offset", src_offset), as_int("dst.offset", dst_offset)
    if num_tokens is not None:
        num_tokens = as_int("num_tokens", num_tokens)
    if num_tokens is not None or not move_as_bytes(
        source, target, ext_param, by_layer, chunked=True, reinterpret=reinterpret
    ):
        for name, value, whole in (
            ("nbytes", nbytes, None), ("src.offset", src_offset, 0), ("dst.offset", dst_offset, 0)
        ):  # fmt: skip
            if value != whole:
                raise invalid(
                    f"{name}={value} must be left out with num_tokens, and between rows that lie "
                    "differently in memory; move whole rows, or give only num_tokens"
                )
        tables = _slot_tables(source, target, src_slot, np.array([dst_slot]), num_tokens)
        return _by_axes(
            operation, "C2C", source, target, tables, ext_param, how, reinterpret=reinterpret
        )
    sides = ("src", src_offset, source.row_nbytes), ("dst", dst_offset, target.row_nbytes)
    for name, offset, row in sides:
        check_index(f"{name}.offset", offset, row)
    # None means the local row, as in LLM-DataDist: a pull fills it, other calls send it.
    pulls = operation == "pull_cache"
    rest = target.row_nbytes - dst_offset if pulls else source.row_nbytes - src_offset
    moved = rest if nbytes is None else nbytes
    for name, offset, row in sides:
        if not 1 <= moved <= row - offset:
            given = "" if nbytes is None else f"nbytes={nbytes}: "
            raise invalid(
                f"{given}{moved} bytes from {name}.offset={offset} are out of range "
                f"[1, {row - offset}] of the {name} row of {row} bytes"
            )
    segments = Segments.single(
        src_slot * source.stride + src_offset, dst_slot * target.stride + dst_offset, moved
    )
    return _plan(operation, "C2C", source, target, segments, 1, moved, ext_param, how, reinterpret)


def _slot_tables(
    source: Side,
    target: Side,
    slot: int,
    dst_rows: Indices,
    num_tokens: int | None,
    src_token: int = 0,
    dst_token: int = 0,
) -> BlockTables:
    """Return tables of one slot; `num_tokens` None: as many as both sides have room for."""
    if num_tokens is None and source.layout is not None and "token" in source.layout.axes:
        src_has, dst_has = room(source, 1, src_token), room(target, len(dst_rows), dst_token)
        num_tokens = max(1, min(src_has, dst_has)) if len(dst_rows) else 0
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
    share: Share | None = None,
) -> Part:
    """Plan B2B, or from a slot C2B: the slot is cut into chunks of one block.

    A `share` limits what is taken from the source.
    """
    target = dst if type(dst) is Side and dst.paged else side("dst", dst, paged=True)
    dst_table = check_indices("dst.blocks", block_table("dst.blocks", dst_blocks), target)
    check_distinct("dst.blocks", dst_table, target)
    given = np.empty(0) if src_blocks is None else block_table("src.blocks", src_blocks)
    paged = given.size > 0 or (
        (dst_table.size == 0 or _may_lack_tokens(src)) and _is_paged(src, src_blocks)
    )
    source = src if type(src) is Side and src.paged is paged else side("src", src, paged=paged)
    if type(src_token) is not int or type(dst_token) is not int:
        src_token = as_int("src.first_token", src_token)
        dst_token = as_int("dst.first_token", dst_token)
    by_tokens = num_tokens is not None or src_token != 0 or dst_token != 0
    if by_tokens:
        for name, value in (("src.first_token", src_token), ("dst.first_token", dst_token)):
            check_width(name, value, 0, INT64_MAX)
        if num_tokens is not None:
            num_tokens = as_int("num_tokens", num_tokens)
            check_width("num_tokens", num_tokens, 0, INT64_MAX)
    if paged:
        if src_batch_index is not None:  # only 0 is valid
            slot_index("src.slot", src_batch_index, src, source)
        src_table = check_indices("src.blocks", given, source)
        tables = BlockTables(src_table, dst_table, src_token, dst_token, num_tokens)
        if num_tokens is not None:
            tables = tables.of_leases(source, target, src_blocks, dst_blocks)
        return plan_block_to_block(
            operation, source, target, tables, ext_param, how, reinterpret, by_layer, share
        )

    how = how if type(how) is Coalesce else _coalesce(how)
    slot = slot_index("src.slot", src_batch_index, src, source)
    if (
        by_tokens
        or share is not None
        or not move_as_bytes(
            source, target, ext_param, by_layer, chunked=True, reinterpret=reinterpret
        )
    ):
        row, block = source.extent("token"), target.extent("token")
        has_all = source.has_all_tokens and target.has_all_tokens
        if has_all and not by_tokens and (len(dst_table) - 1) * block >= row:
            raise invalid(
                f"dst.blocks has {plural(len(dst_table), 'block')} of {plural(block, 'token')}; "
                f"the src row of {plural(row, 'token')} fills at most {-(-row // block)}"
            )
        tables = _slot_tables(source, target, slot, dst_table, num_tokens, src_token, dst_token)
        return _by_axes(
            operation, "C2B", source, target, tables, ext_param, how, share, reinterpret
        )
    starts = np.arange(len(dst_table), dtype=np.int64) * target.row_nbytes
    if len(starts) and int(starts[-1]) >= source.row_nbytes:
        raise invalid(
            f"dst.blocks has {plural(len(dst_table), 'block')} of {target.row_nbytes} bytes; the "
            f"src row of {source.row_nbytes} bytes fills at most "
            f"{-(-source.row_nbytes // target.row_nbytes)}"
        )
    segments = Segments.adopt(
        (starts + slot * source.stride).view(np.uint64),
        (dst_table * target.stride).view(np.uint64),
        np.minimum(source.row_nbytes - starts, target.row_nbytes).view(np.uint64),
        merged=how is not Coalesce.NONE,
    )
    nbytes = min(source.row_nbytes, len(dst_table) * target.row_nbytes)
    tables = BlockTables(np.array([slot]), dst_table)
    return _plan(
        operation, "C2B", source, target, segments, len(dst_table), nbytes, ext_param, how,
        reinterpret, tables, by_rows=True,
    )  # fmt: skip


def _may_lack_tokens(cache: Described) -> bool:
    """Return whether a cache holds only some tokens, so that a request may have no block in it."""
    if isinstance(cache, Side):
        return not cache.has_all_tokens
    desc = cache if isinstance(cache, CacheDesc) else cache.cache_desc
    return desc.shard is not None and desc.shard.tokens is not None


def _is_paged(cache: Described, blocks: Blocks | None) -> bool:
    """Return whether a cache is paged, for a request that moves no block of it."""
    if isinstance(cache, Side):
        return cache.paged
    if isinstance(cache, RemoteCache):
        return isinstance(cache.key, BlocksCacheKey)
    return blocks is not None


def plan_block_to_block(
    operation: Operation,
    source: Side,
    target: Side,
    tables: BlockTables,
    ext_param: KvCacheExtParam,
    how: Coalesce | bool,
    reinterpret: bool,
    by_layer: bool,
    share: Share | None = None,
) -> Part:
    """Plan B2B between checked tables."""
    how = how if type(how) is Coalesce else _coalesce(how)
    if (
        share is not None
        or tables.num_tokens is not None
        or tables.src_token
        or tables.dst_token
        or not move_as_bytes(
            source, target, ext_param, by_layer, chunked=False, reinterpret=reinterpret
        )
    ):
        return _by_axes(
            operation, "B2B", source, target, tables, ext_param, how, share, reinterpret
        )
    nbytes = target.row_nbytes
    if source.row_nbytes != nbytes:
        raise invalid(
            f"src block of {source.row_nbytes} bytes and dst block of {nbytes} bytes must be equal"
        )
    src_table, dst_table = tables.src, tables.dst
    if len(src_table) != len(dst_table):
        raise invalid(
            f"src.blocks has {plural(len(src_table), 'block')} and dst.blocks "
            f"{len(dst_table)}; they must be of equal length"
        )
    num_blocks = len(src_table)
    if num_blocks == 1:
        segments = Segments.single(
            src_table.item() * source.stride, dst_table.item() * target.stride, nbytes
        )
    else:
        if how is Coalesce.SORTED and num_blocks:
            count = max(source.count, target.count)
            src_table, dst_table = sorted_pairs(src_table, dst_table, count)
        # Sorted pairs are new arrays: reuse them, to touch fewer pages in a large plan.
        out = (None, None) if src_table is tables.src else (src_table, dst_table)
        sizes = np.empty(num_blocks, np.uint64)
        sizes.fill(nbytes)
        segments = Segments.adopt(
            np.multiply(src_table, source.stride, out[0]).view(np.uint64),
            np.multiply(dst_table, target.stride, out[1]).view(np.uint64),
            sizes,
            merged=how is not Coalesce.NONE,
        )
    return _plan(
        operation, "B2B", source, target, segments, num_blocks, num_blocks * nbytes, ext_param, how,
        reinterpret, tables, by_rows=True,
    )  # fmt: skip


def plan_rows(
    operation: Operation,
    kind: Kind,
    src: Side,
    dst: Side,
    src_rows: Blocks,
    dst_rows: Blocks,
    ext_param: KvCacheExtParam = ALL_LAYERS,
    by_layer: bool = False,
    num_tokens: int | None = None,
    src_token: int = 0,
    dst_token: int = 0,
    reinterpret: bool = False,
    heads: range | None = None,
) -> Part:
    """Plan rows of two sides; a side of slots has one row."""
    slot = None
    if kind != "B2B":
        (slot,) = map(int, src_rows)
    if kind == "C2C":
        (dst_slot,) = map(int, dst_rows)
        return plan_slot_to_slot(
            operation, src, dst, slot, dst_slot, None, 0, 0, num_tokens, ext_param,
            DEFAULT_COALESCE, reinterpret, by_layer,
        )  # fmt: skip
    return plan_to_blocks(
        operation, src, dst, src_rows if slot is None else None, dst_rows, slot, num_tokens,
        src_token, dst_token, ext_param, DEFAULT_COALESCE, reinterpret, by_layer,
        None if heads is None else Share(heads),
    )  # fmt: skip


def move_as_bytes(
    source: Side,
    target: Side,
    ext_param: KvCacheExtParam,
    by_layer: bool,
    *,
    chunked: bool,
    reinterpret: bool,
) -> bool:
    """Return whether rows are copied as bytes; otherwise they are copied axis by axis."""
    if source.meaning == target.meaning and source.is_plain:
        return True
    if not rows_are_alike(source, target, chunked=chunked, reinterpret=reinterpret):
        return False
    check_type("layers", ext_param, KvCacheExtParam)
    # Rows of several layers are cut if only some layers move, or each moves by itself.
    return source.extent("layer") == 1 or not (
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
    share: Share | None = None,
    reinterpret: bool = False,
) -> Part:
    """Plan the intersection of both sides; reinterpreted data types must be equally wide."""
    src_type, dst_type = source.data_type, target.data_type
    if src_type is not dst_type and None not in (source.layout, target.layout):
        assert src_type is not None  # every layout has a data type
        assert dst_type is not None
        if not reinterpret or src_type.bits != dst_type.bits:
            refuse_unlike("data type", source, target)
    segments, split, num_slices = cut(source, target, tables, how, share or WHOLE_SHARE)
    part = _plan(
        operation, kind, source, target, segments, num_slices, segments.total_nbytes, ext_param,
        how, False, tables, split,
    )  # fmt: skip
    if src_type is not dst_type:
        vars(part).update(reinterpret=True)
    return part


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
    *,
    by_rows: bool = False,
) -> Part:
    per_layer = source.usual_tensors_per_layer
    if (
        ext_param is ALL_LAYERS
        and not split
        and source.num_tensors == target.num_tensors
        and source.meaning == target.meaning
    ):  # the usual case: all layers of equal caches
        src_views = dst_views = range(source.num_tensors)
    else:
        src_views, dst_views, per_layer = pair_views(
            source, target, ext_param, split, as_bytes=reinterpret
        )
    part = Part.__new__(Part)
    # The constructor of a frozen dataclass takes 1 us more.
    vars(part).update(
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
        # True only if the plan is impossible without reinterpretation.
        reinterpret=reinterpret
        and (
            rows_differ(source, target, chunked=kind != "B2B")
            or any(
                has_layers(cache) and cache.numbered_layers(split, per_layer) is None
                for cache in (source, target)
            )
        ),
        tables=tables,
        by_rows=by_rows,
        # Known here; otherwise a part sums its segments.
        nbytes_per_tensor=nbytes_per_tensor,
        nbytes=len(src_views) * nbytes_per_tensor,
    )
    return part


def _coalesce(how: Coalesce | bool) -> Coalesce:
    if isinstance(how, bool):
        return DEFAULT_COALESCE if how else Coalesce.NONE
    return check_type("coalesce", how, Coalesce)
