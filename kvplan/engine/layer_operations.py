"""Pushes that go on while the source is still being computed: layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.engine import operations
from kvplan.engine.running import Running
from kvplan.planning.planner import ALL_LAYERS, DEFAULT_COALESCE

if TYPE_CHECKING:
    from kvplan.engine.peer_tensors import PeerTensors
    from kvplan.execution import LayerTask
    from kvplan.planning import Coalesce, Plan
    from kvplan.planning.selection import Blocks
    from kvplan.types import BlocksCacheKey, Cache, CacheIndex, KvCacheExtParam


class LayerOperations(Running):
    """Planned, checked and lowered as one transfer, and moved one layer at a time."""

    def push_layers(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey | PeerTensors,
        *,
        src_batch_index: int = 0,
        src_blocks: Blocks | None = None,
        dst_blocks: Blocks | None = None,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> LayerTask:
        """Begin a push of which nothing moves until its task is told that a layer is ready.

        Without block tables a slot goes into a slot; with both, blocks into blocks; with
        `dst_blocks` alone a slot is cut into chunks of one block, and chunk i goes to
        `dst_blocks[i]`.

        Args:
            src: the local cache; only its id matters, if it has one.
            dst: the remote slot or paged cache, or addresses, which then are all destination
                tensors: a `dst_layer_range` must be None or hold all of them.
            src_batch_index: the local slot.
            src_blocks: local blocks, one for each of `dst_blocks`.
            dst_blocks: remote blocks.
            ext_param: the layers.
            coalesce: how slices become segments.

        Returns:
            The task: `ready(layer)` submits a source layer, `wait()` ends when all have arrived.
            Several destinations are several tasks, each of which fails alone. Until its end it
            keeps its link: `unlink_clusters` waits, then reports LLM_LINK_BUSY.

        Raises:
            TypeError: an argument of another type.
            LLMException: LLM_PARAM_INVALID: a slot, block or layer out of range, a cache of the
                wrong kind, `src_blocks` alone, addresses of several caches, or this engine's own
                cluster; LLM_NOT_YET_LINK: no link to that cluster; LLM_LINK_FAILED: it is broken;
                LLM_KV_CACHE_NOT_EXIST: no such cache here, or no such cache or address there (any
                more); LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        return self._stage(
            operations.push_layers,
            src,
            dst,
            src_batch_index,
            src_blocks,
            dst_blocks,
            ext_param,
            coalesce,
        )

    def plan_push_layers(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey | PeerTensors,
        *,
        src_batch_index: int = 0,
        src_blocks: Blocks | None = None,
        dst_blocks: Blocks | None = None,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> Plan:
        """Plan `push_layers` with the peer's own description; nothing moves."""
        return self._plan(
            operations.push_layers,
            src,
            dst,
            src_batch_index,
            src_blocks,
            dst_blocks,
            ext_param,
            coalesce,
        )
