"""CacheManager of the original over `kvplan.LlmDataDist`: it checks, converts and delegates."""

from __future__ import annotations

from typing import Any

from kvplan.llm_datadist.conversion import cache_of, key_of
from kvplan.llm_datadist.utils.utils import (
    check_int64,
    check_isinstance,
    check_uint32,
)
from kvplan.llm_datadist.v2.block_tables import (
    TENSORS_PER_LAYER,
    Indices,
    last_wins,
    layers_of,
    pushed_layers_of,
    table_of,
)
from kvplan.llm_datadist.v2.cache_task import CacheTask
from kvplan.llm_datadist.v2.layer_feed import LayerFeed
from kvplan.llm_datadist.v2.layer_transfer import Configs, LayerSource, destinations_of
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    Placement,
)
from kvplan.llm_datadist.v2.local_moves import LocalMoves
from kvplan.llm_datadist.v2.move_checks import check_kind, check_size, check_some, check_table
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import KvCacheExtParam
from kvplan.validation import shown

Layers = range | None


class CacheManager(LocalMoves):
    """The caches of an LLMDataDist, and what moves their bytes. Get it from there.

    In *request mode* peers pull by CacheKey, and a request's key goes with the pull. In *remote
    mode* (llm.EnableRemoteCacheAccessible) they pull by id, and push. Every method may raise,
    besides what it says itself, the following.

    Args:
        llm_datadist: the engine.
        options: as `LLMDataDist.init` completes them.

    Raises:
        TypeError: an argument of another type.
        ValueError: an integer outside its width.
        LLMException: LLM_PARAM_INVALID: an argument that breaks a rule, or the LLMDataDist is
            finalized. Of what moves bytes between clusters also LLM_NOT_YET_LINK, LLM_LINK_FAILED,
            LLM_KV_CACHE_NOT_EXIST: no such cache, slot or key there; LLM_TIMEOUT: sync_kv_timeout
            has passed.
    """

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Pull a slot of a remote cache into one of a contiguous local cache.

        Args:
            cache_key: the remote slot; in remote mode CacheKeyByIdAndIndex.
            cache: the local cache.
            batch_index: the local slot.
            size: bytes of a row; -1: the whole local row.
            **kwargs: src_layer_range, dst_layer_range: layers, as range of step 1;
                tensor_num_per_layer=2. Others are ignored.
        """
        kinds: list[type] = [CacheKeyByIdAndIndex]
        if not self._enable_remote_cache_accessible:
            kinds.append(CacheKey)
        check_isinstance("cache_key", cache_key, kinds, allow_none=False)
        check_isinstance("cache", cache, Cache, allow_none=False)
        check_uint32("batch_index", batch_index)
        check_size(size)
        check_kind("cache", cache, is_blocks=False)
        layers = _layers(kwargs)
        if isinstance(cache_key, CacheKey):
            self.check_cache_key(cache_key)
        self._engine.pull_cache(
            key_of(cache_key), cache_of(cache), int(batch_index), int(size), layers
        )

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Indices | None = (),
        dst_blocks: Indices = (),
        **kwargs: Any,
    ) -> None:
        """Pull into blocks of a paged local cache, from blocks of a remote one or from a slot.

        Args:
            src_cache_key: the remote paged cache (BlocksCacheKey), or slot.
            dst_cache: the local cache.
            src_blocks: remote blocks, one for each of `dst_blocks`; of a slot none: it is cut into
                chunks of one block, and chunk i goes to `dst_blocks[i]`.
            dst_blocks: local blocks; of one that comes twice the last counts.
            **kwargs: as of `pull_cache`.
        """
        kinds: list[type] = [CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey]
        check_isinstance("src_cache_key", src_cache_key, kinds, allow_none=False)
        check_isinstance("dst_cache", dst_cache, Cache, allow_none=False)
        check_table("src_blocks", src_blocks)
        check_table("dst_blocks", dst_blocks)
        src, dst = table_of("src_blocks", src_blocks), table_of("dst_blocks", dst_blocks)
        check_kind("dst_cache", dst_cache, is_blocks=True)
        check_some("dst_blocks", dst)
        layers = _layers(kwargs)
        if isinstance(src_cache_key, BlocksCacheKey):
            check_some("src_blocks", src)
        elif len(src):
            raise invalid(
                f"src_blocks={shown(src_blocks)} must be empty: {src_cache_key} names a slot"
            )
        if isinstance(src_cache_key, CacheKey):
            self.check_cache_key(src_cache_key)
            if self._enable_remote_cache_accessible:
                raise LLMException(
                    f"src_cache_key={src_cache_key}: in remote mode there are no keys of requests",
                    status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
                )
        self._engine.pull_blocks(
            key_of(src_cache_key), cache_of(dst_cache), *last_wins(src, dst), layers
        )

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: Layers = None,
        dst_layer_range: Layers = None,
        size: int = -1,
        tensor_num_per_layer: int = TENSORS_PER_LAYER,
    ) -> None:
        """Push a slot of a contiguous local cache into one of a remote cache; in remote mode only.

        Args:
            dst_cache_key: the remote slot.
            src_cache: the local cache.
            src_batch_index: the local slot.
            src_layer_range, dst_layer_range: layers, as many here as there; None: all of src_cache.
            size: -1: the whole row; nothing else.
            tensor_num_per_layer: consecutive tensors that are one layer.
        """
        self._check_may_push("push_cache")
        check_isinstance("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex, allow_none=False)
        check_isinstance("src_cache", src_cache, Cache, allow_none=False)
        check_uint32("src_batch_index", src_batch_index)
        check_kind("src_cache", src_cache, is_blocks=False)
        num_tensors = src_cache.cache_desc.num_tensors
        layers = pushed_layers_of(
            src_layer_range, dst_layer_range, tensor_num_per_layer, num_tensors
        )
        check_int64("size", size)
        if size != -1:
            raise invalid(f"size={size} must be -1: a push moves the whole row")
        self._engine.push_cache(
            cache_of(src_cache), key_of(dst_cache_key), int(src_batch_index), -1, layers
        )

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Indices | None = (),
        dst_blocks: Indices = (),
        src_layer_range: Layers = None,
        dst_layer_range: Layers = None,
        tensor_num_per_layer: int = TENSORS_PER_LAYER,
    ) -> None:
        """Push blocks of a paged local cache into blocks of a remote one; in remote mode only.

        Args:
            dst_cache_key: the remote cache.
            src_cache: the local cache.
            src_blocks: local blocks.
            dst_blocks: remote blocks, one for each of `src_blocks`; of one that comes twice the
                last counts.
            src_layer_range, dst_layer_range, tensor_num_per_layer: as of `push_cache`.
        """
        self._check_may_push("push_blocks")
        check_isinstance("dst_cache_key", dst_cache_key, BlocksCacheKey, allow_none=False)
        check_isinstance("src_cache", src_cache, Cache, allow_none=False)
        check_table("dst_blocks", dst_blocks)
        src, dst = table_of("src_blocks", src_blocks), table_of("dst_blocks", dst_blocks)
        check_kind("src_cache", src_cache, is_blocks=True)
        check_some("dst_blocks", dst)
        num_tensors = src_cache.cache_desc.num_tensors
        layers = pushed_layers_of(
            src_layer_range, dst_layer_range, tensor_num_per_layer, num_tensors
        )
        self._engine.push_blocks(
            cache_of(src_cache), key_of(dst_cache_key), *last_wins(src, dst), layers
        )

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Configs,
        src_block_indices: Indices | None = None,
        dst_block_indices: Indices | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Push a cache layer by layer, each as soon as `layer_synchronizer` says that it is there.

        A thread calls it for each layer that is needed, in ascending order; while a layer is
        copied, the next one is awaited. Two tensors are one layer.

        Args:
            src_cache: the local cache, of Placement.DEVICE.
            layer_synchronizer: returns once a layer is computed.
            transfer_configs: destinations: in remote mode TransferWithCacheKeyConfig, otherwise
                TransferConfig. Each fails alone.
            src_block_indices: blocks of a paged src_cache, one for each of `dst_block_indices`.
            dst_block_indices: blocks of paged destinations.
            dst_block_memory_size: bytes of such a block; needed if src_cache is contiguous.

        Returns:
            The task that tells what has become of each destination.
        """
        check_isinstance("src_cache", src_cache, Cache, allow_none=False)
        if src_cache.cache_desc.placement is not Placement.DEVICE:
            raise invalid(f"src_cache is of {src_cache.cache_desc.placement}; DEVICE is needed")
        source = LayerSource.of(
            cache_of(src_cache),
            src_cache.is_blocks_cache,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
        )
        check_isinstance(
            "layer_synchronizer", layer_synchronizer, LayerSynchronizer, allow_none=False
        )
        destinations = destinations_of(
            self._engine,
            source,
            transfer_configs,
            remote_mode=self._enable_remote_cache_accessible,
        )
        feed = LayerFeed(destinations, layer_synchronizer, self._wait_time_ms)
        feed.start()
        return CacheTask(feed)

    def _check_may_push(self, name: str) -> None:
        if not self._enable_remote_cache_accessible:
            raise invalid(f"{name} needs enable_remote_cache_accessible")


def _layers(kwargs: dict[str, Any]) -> KvCacheExtParam:
    return layers_of(
        kwargs.get("src_layer_range"),
        kwargs.get("dst_layer_range"),
        kwargs.get("tensor_num_per_layer", TENSORS_PER_LAYER),
    )
