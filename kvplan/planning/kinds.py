"""The kinds of transfer: slot to slot (C2C), slot to blocks (C2B), blocks to blocks (B2B).

Each checks what it is given, lays out the slices, and makes the Plan.
"""

from __future__ import annotations

import numpy as np

from kvplan.inspection.units import plural
from kvplan.planning.blocks import (
    Blocks,
    Indices,
    block_indices,
    block_table,
    check_distinct,
    check_indices,
    sorted_pairs,
)
from kvplan.planning.layer_range import tensor_ranges
from kvplan.planning.layout import Described, Side, assembled, side, slot_index
from kvplan.planning.plan import Kind, Operation, Plan
from kvplan.planning.segments import Coalesce, Segments, merge
from kvplan.status import LLMException, invalid
from kvplan.types import KvCacheExtParam
from kvplan.validation import check_index, check_type

DEFAULT_COALESCE = Coalesce.SORTED
"""Chosen by measurement: docs/adr/0001-coalescing-order.md."""


def slot_to_slot(
    operation: Operation,
    src: Described,
    dst: Described,
    src_batch_index: int | None,
    dst_batch_index: int | None,
    size: int,
    src_offset: int,
    dst_offset: int,
    ext_param: KvCacheExtParam,
    how: Coalesce | bool,
) -> Plan:
    """Plan C2C: `size` bytes of a slot, from an offset into each row on."""
    source, target = side("src", src, paged=False), side("dst", dst, paged=False)
    src_slot = slot_index("src_batch_index", src_batch_index, src, source)
    dst_slot = slot_index("dst_batch_index", dst_batch_index, dst, target)
    both = operation == "copy_cache"  # which has one offset
    src_name, dst_name = ("offset", "offset") if both else ("src_offset", "dst_offset")
    check_index(src_name, src_offset, source.stride)
    check_index(dst_name, dst_offset, target.stride)
    if check_type("size", size, int) != -1 and size <= 0:
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
    return _plan(operation, "C2C", source, target, segments, ext_param, how)


def _too_long(size: int, nbytes: int, name: str, offset: int, word: str, row: Side) -> LLMException:
    return invalid(
        f"size={size}: {nbytes} bytes from {name}={offset} are out of range "
        f"[1, {row.stride - offset}] of the {word} row of {row.stride} bytes"
    )


def to_blocks(
    operation: Operation,
    src: Described,
    dst: Described,
    src_blocks: Blocks | None,
    dst_blocks: Blocks,
    src_batch_index: int | None,
    ext_param: KvCacheExtParam,
    how: Coalesce | bool,
) -> Plan:
    """Plan B2B if there are `src_blocks`, otherwise C2B: the slot cut into chunks of one block."""
    target = side("dst", dst, paged=True)
    dst_table = block_indices("dst_blocks", dst_blocks, target)
    check_distinct("dst_blocks", dst_table, target)
    given = np.empty(0) if src_blocks is None else block_table("src_blocks", src_blocks)
    source = side("src", src, paged=given.size > 0)
    slot = slot_index("src_batch_index", src_batch_index, src, source)
    if source.paged:
        check_same_blocks(source, target)
        src_table = check_indices("src_blocks", given, source)
        if len(src_table) != len(dst_table):
            raise invalid(
                f"src_blocks has {plural(len(src_table), 'block')} and dst_blocks "
                f"{len(dst_table)}; they must be of equal length"
            )
        return block_to_block(operation, source, target, src_table, dst_table, ext_param, how)

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
    )
    return _plan(operation, "C2B", source, target, segments, ext_param, how)


def block_to_block(
    operation: Operation,
    source: Side,
    target: Side,
    src_table: Indices,
    dst_table: Indices,
    ext_param: KvCacheExtParam,
    how: Coalesce | bool,
) -> Plan:
    """Plan B2B between checked tables: block `src_table[i]` to block `dst_table[i]`."""
    how = _coalesce(how)
    if len(src_table) == 1:
        src_block, dst_block, stride = src_table.item(), dst_table.item(), target.stride
        segments = Segments.single(src_block * stride, dst_block * stride, stride)
        return _plan(operation, "B2B", source, target, segments, ext_param, how)

    if how is Coalesce.SORTED:
        src_table, dst_table = sorted_pairs(src_table, dst_table)
    segments = Segments.adopt(
        (src_table * source.stride).view(np.uint64),
        (dst_table * target.stride).view(np.uint64),
        np.full(len(src_table), target.stride, dtype=np.uint64),
    )
    return _plan(operation, "B2B", source, target, segments, ext_param, how)


def _plan(
    operation: Operation,
    kind: Kind,
    source: Side,
    target: Side,
    slices: Segments,
    ext_param: KvCacheExtParam,
    how: Coalesce | bool,
) -> Plan:
    how = _coalesce(how)
    src_tensors, dst_tensors = tensor_ranges(source, target, ext_param)
    num_slices = len(slices)
    return assembled(
        Plan,
        operation=operation,
        kind=kind,
        src=source,
        dst=target,
        src_tensors=src_tensors,
        dst_tensors=dst_tensors,
        tensors_per_layer=ext_param.tensor_num_per_layer,
        segments=slices if num_slices == 1 or how is Coalesce.NONE else merge(slices),
        num_slices=num_slices,
        coalesce=how,
    )


def _coalesce(how: Coalesce | bool) -> Coalesce:
    if type(how) is Coalesce:  # almost always
        return how
    if isinstance(how, bool):
        return DEFAULT_COALESCE if how else Coalesce.NONE
    return check_type("coalesce", how, Coalesce)


def check_same_blocks(source: Side, target: Side) -> None:
    """Refuse blocks of unequal size: one cannot hold what the other does."""
    if source.stride != target.stride:
        raise invalid(
            f"src block of {source.stride} bytes and dst block of {target.stride} bytes must be "
            "equal"
        )
