"""Pushes that go on while the source is still being computed: layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvplan.engine.peer_tensors import PeerTensors
from kvplan.engine.runner import Operation, OperationRunner, Prepared
from kvplan.lease import BlockLease
from kvplan.planning.blocks import are_whole, read_blocks
from kvplan.planning.layers import ALL_LAYERS, source_tensors
from kvplan.planning.planner import plan_push_blocks, plan_push_cache
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.status import invalid
from kvplan.types import BlocksCacheKey, CacheIndex, KvCacheExtParam
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.execution import LayerTask
    from kvplan.planning import Coalesce, Plan
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.side import Side
    from kvplan.types import Cache


class LayerOperations(OperationRunner):
    """Planned, checked and lowered as one transfer, and moved one layer at a time."""

    def push_layers(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey | BlockLease | PeerTensors,
        *,
        src_batch_index: int = 0,
        src_blocks: Blocks | None = None,
        dst_blocks: Blocks | None = None,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        verify: bool = False,
        tag: str = "",
    ) -> LayerTask:
        """Begin a push of which nothing moves until a layer of its task is made ready.

        Without block tables a slot goes into a slot; with both, blocks into blocks; with
        `dst_blocks` alone a slot is cut into chunks of one block, and chunk i goes to
        `dst_blocks[i]`.

        Args:
            src: the local cache.
            dst: the remote slot or paged cache; or a lease, which names blocks; or addresses, which
                then are all destination tensors: a `dst_layer_range` must be None or hold all of
                them.
            src_batch_index: the local slot.
            src_blocks: local blocks, one for each of `dst_blocks`.
            dst_blocks: remote blocks. Of a lease None: all that it names.
            num_tokens: tokens that are moved; None: whole blocks, or the whole row.
            src_token, dst_token: tokens of the block tables to skip, on each side.
            ext_param: the layers.
            coalesce: how slices become segments.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.
            notify: sent to the peer when all layers have arrived, 1 to 4096 bytes: the task
                succeeds when its engine has it. None: nothing is sent.
            notify_failure: sent instead if the push fails and the link stands.
            tag: what logs and recordings call the transfer, such as the id of the request: at most
                128 printable characters.

        Returns:
            The task: `ready(layer)` submits a source layer, `wait()` ends when all have arrived.
            Several destinations are several tasks, each of which fails alone. Until its end it
            keeps its link: `unlink_clusters` waits, then reports LLM_LINK_BUSY.

        Raises:
            ValueError: a number outside its C type.
            TypeError: an argument of another type.
            LLMException: LLM_PARAM_INVALID: a slot, block or layer out of range, a cache of the
                wrong kind, `src_blocks` alone, addresses of several caches, or this engine's own
                cluster; LLM_NOT_YET_LINK: no link to that cluster; LLM_LINK_FAILED: it is broken;
                LLM_KV_CACHE_NOT_EXIST: no such cache here, or no such cache or address there (any
                more); LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        with Operation(
            self._running(),
            "push_layers",
            notify=notify,
            notify_failure=notify_failure,
            verify=verify,
            tag=tag,
        ) as operation:
            prepared = _push_layers(
                operation,
                src,
                dst,
                src_batch_index,
                src_blocks,
                dst_blocks,
                num_tokens,
                src_token,
                dst_token,
                ext_param,
                coalesce,
                reinterpret,
            )
            return self._layer(operation, prepared)

    def plan_push_layers(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey | BlockLease | PeerTensors,
        *,
        src_batch_index: int = 0,
        src_blocks: Blocks | None = None,
        dst_blocks: Blocks | None = None,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
    ) -> Plan:
        """Plan `push_layers` with the peer's own description; nothing moves.

        Raises:
            TypeError, LLMException: as `push_layers`.
            ValueError: a number outside its C type.
        """
        operation = Operation(self._running(), "push_layers")
        return _push_layers(
            operation,
            src,
            dst,
            src_batch_index,
            src_blocks,
            dst_blocks,
            num_tokens,
            src_token,
            dst_token,
            ext_param,
            coalesce,
            reinterpret,
        )[0]


def _push_layers(
    operation: Operation,
    src: Cache,
    dst: CacheIndex | BlocksCacheKey | BlockLease | PeerTensors,
    src_batch_index: int,
    src_blocks: Blocks | None,
    dst_blocks: Blocks | None,
    num_tokens: int | None,
    src_token: int,
    dst_token: int,
    ext_param: KvCacheExtParam,
    coalesce: Coalesce | bool,
    reinterpret: bool,
) -> Prepared:
    """A local slot into a remote one or into remote blocks, or local blocks into remote ones."""
    if type(dst) is BlockLease:
        dst_blocks, num_tokens = dst.request("dst_blocks", dst_blocks, num_tokens, dst_token)
    from_blocks, to_blocks = read_blocks(src_blocks, dst_blocks), dst_blocks is not None
    if from_blocks and not to_blocks:
        raise invalid(f"src_blocks={shown(src_blocks)} go to blocks; dst_blocks must name them")
    source, ours = operation.own("src", src, paged=from_blocks, table="src_blocks")
    as_bytes = reinterpret or operation.engine.reinterpret
    if check_type("ext_param", ext_param, KvCacheExtParam).tensor_num_per_layer is None:
        said = source.said_tensors_per_layer("src", None)
        if said is None:
            raise invalid(
                f"tensor_num_per_layer=None of a cache of which nothing says it, {source}: layers "
                "become ready one by one, so how many tensors are one must be said (2: K and V), "
                "here or by the layout or the shard of the cache"
            )
        if as_bytes:  # else the planner finds it, on both sides
            ext_param = replace(ext_param, tensor_num_per_layer=said)
    slot: int | None = None
    target: Side
    if isinstance(dst, PeerTensors):
        _check_addresses(dst, source, ext_param)
        target, theirs = operation.peer_tensors("dst", dst, source.stride, paged=to_blocks)
    else:
        kinds = (CacheIndex, BlocksCacheKey, BlockLease)
        target, slot, theirs = operation.peer(
            "dst", dst, kinds, paged=to_blocks, writable=True, table="dst_blocks"
        )
    whole = operation.moves and are_whole(num_tokens, coalesce, src_token, dst_token)
    rows = operation.engine.transfers.rows
    if whole and dst_blocks is not None and src_blocks is not None and src_batch_index == 0:
        bound = rows.bind(
            "push_blocks", "B2B", source, target, ours, theirs, src_blocks, dst_blocks, ext_param,
            by_layer=True,
        )  # fmt: skip
        if bound is not None:
            return bound[0], ours, theirs, bound[1]
    if dst_blocks is None:
        if src_token or dst_token:
            raise invalid(
                f"src_token={shown(src_token)} and dst_token={shown(dst_token)} skip tokens of "
                "block tables; a slot begins at its first token"
            )
        if whole and slot is not None:
            bound = rows.bind(
                "push_cache", "C2C", source, target, ours, theirs, (src_batch_index,), (slot,),
                ext_param, by_layer=True,
            )  # fmt: skip
            if bound is not None:
                return bound[0], ours, theirs, bound[1]
        plan = plan_push_cache(
            source,
            target,
            src_batch_index=src_batch_index,
            dst_batch_index=slot,
            num_tokens=num_tokens,
            ext_param=ext_param,
            coalesce=coalesce,
            reinterpret=as_bytes,
            by_layer=True,
        )
    else:
        plan = plan_push_blocks(
            source,
            target,
            src_blocks,
            dst_blocks,
            src_batch_index=src_batch_index,
            num_tokens=num_tokens,
            src_token=src_token,
            dst_token=dst_token,
            ext_param=ext_param,
            coalesce=coalesce,
            reinterpret=as_bytes,
            by_layer=True,
        )
    return plan, ours, theirs, None


def _check_addresses(dst: PeerTensors, source: Side, ext_param: KvCacheExtParam) -> None:
    needed = len(source_tensors(source, ext_param))
    if len(dst.addresses) != needed:
        raise invalid(
            f"addresses has {len(dst.addresses)} elements; {needed} are needed, one for each "
            "tensor of src that is transferred"
        )
