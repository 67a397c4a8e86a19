"""What each operation makes of its arguments: caches are looked up, and the plan is made.

Each function here is one operation; executing, submitting and planning it begin alike with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias

from kvplan.engine.call import Call
from kvplan.engine.peer_tensors import PeerTensors
from kvplan.planning import (
    plan_copy_blocks,
    plan_copy_cache,
    plan_pull_blocks,
    plan_pull_cache,
    plan_push_blocks,
    plan_push_cache,
    plan_swap_blocks,
)
from kvplan.planning.selection import source_tensors
from kvplan.status import invalid
from kvplan.types import BlocksCacheKey, CacheIndex, CacheKey
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.execution import TensorMemory
    from kvplan.planning import Coalesce, Plan
    from kvplan.planning.layout import Side
    from kvplan.planning.selection import Blocks
    from kvplan.types import AnyCacheKey, Cache, KvCacheExtParam

P = ParamSpec("P")
Prepared: TypeAlias = "tuple[Plan, TensorMemory, TensorMemory]"
"""What is executed: the plan, and the memory of src and of dst."""
Operation = Callable[Concatenate[Call, P], Prepared]


def pull_cache(
    call: Call,
    src: CacheIndex | CacheKey,
    dst: Cache,
    batch_index: int,
    size: int,
    ext_param: KvCacheExtParam,
    src_offset: int,
    dst_offset: int,
    coalesce: Coalesce | bool,
) -> Prepared:
    """A remote slot into a local one."""
    target, ours = call.own("dst", dst, paged=False)
    source, slot, theirs = call.peer(
        "src", src, (CacheIndex, CacheKey), paged=False, writable=False
    )
    plan = plan_pull_cache(
        source,
        target,
        src_batch_index=slot,
        dst_batch_index=batch_index,
        size=size,
        src_offset=src_offset,
        dst_offset=dst_offset,
        ext_param=ext_param,
        coalesce=coalesce,
    )
    return plan, theirs, ours


def pull_blocks(
    call: Call,
    src: AnyCacheKey,
    dst: Cache,
    src_blocks: Blocks | None,
    dst_blocks: Blocks,
    ext_param: KvCacheExtParam,
    coalesce: Coalesce | bool,
) -> Prepared:
    """Remote blocks, or without `src_blocks` a remote slot, into local blocks."""
    target, ours = call.own("dst", dst, paged=True)
    kinds = (CacheIndex, CacheKey, BlocksCacheKey)
    source, slot, theirs = call.peer(
        "src", src, kinds, paged=_has_blocks(src_blocks), writable=False, table="src_blocks"
    )
    plan = plan_pull_blocks(
        source,
        target,
        src_blocks,
        dst_blocks,
        src_batch_index=slot,
        ext_param=ext_param,
        coalesce=coalesce,
    )
    return plan, theirs, ours


def push_cache(
    call: Call,
    src: Cache,
    dst: CacheIndex,
    src_batch_index: int,
    size: int,
    ext_param: KvCacheExtParam,
    coalesce: Coalesce | bool,
) -> Prepared:
    """A local slot into a remote one."""
    if check_type("size", size, int) != -1:
        raise invalid(f"size={size} must be -1: a push moves the whole row")
    source, ours = call.own("src", src, paged=False)
    target, slot, theirs = call.peer("dst", dst, (CacheIndex,), paged=False, writable=True)
    plan = plan_push_cache(
        source,
        target,
        src_batch_index=src_batch_index,
        dst_batch_index=slot,
        ext_param=ext_param,
        coalesce=coalesce,
    )
    return plan, ours, theirs


def push_blocks(
    call: Call,
    src: Cache,
    dst: CacheIndex | BlocksCacheKey,
    src_blocks: Blocks,
    dst_blocks: Blocks,
    ext_param: KvCacheExtParam,
    coalesce: Coalesce | bool,
) -> Prepared:
    """Local blocks into remote ones."""
    if not _has_blocks(src_blocks):
        raise invalid(f"src_blocks={src_blocks} must name a block for each of dst_blocks")
    source, ours = call.own("src", src, paged=True)
    target, _, theirs = call.peer(
        "dst", dst, (CacheIndex, BlocksCacheKey), paged=True, writable=True
    )
    plan = plan_push_blocks(
        source,
        target,
        src_blocks,
        dst_blocks,
        ext_param=ext_param,
        coalesce=coalesce,
    )
    return plan, ours, theirs


def push_layers(
    call: Call,
    src: Cache,
    dst: CacheIndex | BlocksCacheKey | PeerTensors,
    src_batch_index: int,
    src_blocks: Blocks | None,
    dst_blocks: Blocks | None,
    ext_param: KvCacheExtParam,
    coalesce: Coalesce | bool,
) -> Prepared:
    """A local slot into a remote one or into remote blocks, or local blocks into remote ones."""
    from_blocks, to_blocks = _has_blocks(src_blocks), dst_blocks is not None
    if from_blocks and not to_blocks:
        raise invalid(f"src_blocks={shown(src_blocks)} go to blocks; dst_blocks must name them")
    source, ours = call.own("src", src, paged=from_blocks, table="src_blocks")
    slot: int | None = None
    target: Side
    if isinstance(dst, PeerTensors):
        _check_addresses(dst, source, ext_param)
        target, theirs = call.peer_tensors("dst", dst, source.stride, paged=to_blocks)
    else:
        kinds = (CacheIndex, BlocksCacheKey)
        target, slot, theirs = call.peer(
            "dst", dst, kinds, paged=to_blocks, writable=True, table="dst_blocks"
        )
    if dst_blocks is None:
        plan = plan_push_cache(
            source,
            target,
            src_batch_index=src_batch_index,
            dst_batch_index=slot,
            ext_param=ext_param,
            coalesce=coalesce,
        )
    else:
        plan = plan_push_blocks(
            source,
            target,
            src_blocks,
            dst_blocks,
            src_batch_index=src_batch_index,
            ext_param=ext_param,
            coalesce=coalesce,
        )
    return plan, ours, theirs


def _check_addresses(dst: PeerTensors, source: Side, ext_param: KvCacheExtParam) -> None:
    needed = len(source_tensors(source, ext_param))
    if len(dst.addresses) != needed:
        raise invalid(
            f"addresses has {len(dst.addresses)} elements; {needed} are needed, one for each "
            "tensor of src that is transferred"
        )


def copy_cache(
    call: Call,
    src: Cache,
    dst: Cache,
    src_batch_index: int,
    dst_batch_index: int,
    offset: int,
    size: int,
    coalesce: Coalesce | bool,
) -> Prepared:
    """A local slot into another."""
    source, src_memory = call.own("src", src, paged=False)
    target, dst_memory = call.own("dst", dst, paged=False)
    plan = plan_copy_cache(
        source,
        target,
        src_batch_index=src_batch_index,
        dst_batch_index=dst_batch_index,
        offset=offset,
        size=size,
        coalesce=coalesce,
    )
    return plan, src_memory, dst_memory


def copy_blocks(
    call: Call, cache: Cache, blocks: Mapping[int, Sequence[int]], coalesce: Coalesce | bool
) -> Prepared:
    """Blocks of one cache to others of it."""
    own, memory = call.own("cache", cache, paged=True)
    plan = plan_copy_blocks(own, blocks, coalesce=coalesce)
    return plan, memory, memory


def swap_blocks(
    call: Call, src: Cache, dst: Cache, src_to_dst: Mapping[int, int], coalesce: Coalesce | bool
) -> Prepared:
    """Local blocks of a host cache to a device cache, or the other way round."""
    source, src_memory = call.own("src", src, paged=True)
    target, dst_memory = call.own("dst", dst, paged=True)
    plan = plan_swap_blocks(source, target, src_to_dst, coalesce=coalesce)
    return plan, src_memory, dst_memory


def _has_blocks(blocks: object) -> bool:
    """Whether a block table was given; what is none is the planner's to refuse."""
    return blocks is not None and not (isinstance(blocks, Sized) and len(blocks) == 0)
