"""Transfers of a `CacheManager`: check and convert the arguments, then call the engine."""

from __future__ import annotations

from typing import Any

from kvplan.engine.datadist import LlmDataDist
from kvplan.llm_datadist.conversion import (
    TENSORS_PER_LAYER,
    Indices,
    cache_of,
    check_alike,
    check_kind,
    check_some,
    copies_of,
    key_of,
    last_wins,
    layers_given,
    pushed_layers_of,
    table_of,
)
from kvplan.llm_datadist.utils.utils import (
    check_dict,
    check_int64,
    check_isinstance,
    check_uint32,
    check_uint64,
    checked,
    kind_of,
)
from kvplan.llm_datadist.v2.config import REMOTE_ACCESS, wait_time_ms
from kvplan.llm_datadist.v2.layer_transfer import Configs, LayerSource, transfer_layers
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    LayerSynchronizer,
    Placement,
)
from kvplan.status import invalid, not_exist
from kvplan.validation import shown

Layers = range | None


def _check_request(name: str, req_id: int | None) -> None:
    if req_id is not None:
        check_uint64(name, req_id)


def _check_remote(_: str, manager: CacheTransfers) -> None:
    if not manager._enable_remote_cache_accessible:
        raise invalid("a push needs enable_remote_cache_accessible=True in the LLMConfig")


_cache = kind_of(Cache)
_checked = checked(
    {
        "cache": _cache,
        "src_cache": _cache,
        "dst_cache": _cache,
        "src": _cache,
        "dst": _cache,
        "batch_index": check_uint32,
        "src_batch_index": check_uint32,
        "dst_batch_index": check_uint32,
        "offset": check_uint64,
        "size": check_int64,
        "req_id": _check_request,
        "copy_block_info": kind_of(dict),
        "src_to_dst": kind_of(dict),
    }
)


class CacheTransfers:
    """The methods of a `CacheManager` that move bytes.

    Args:
        llm_datadist: the engine.
        options: the options after `LLMDataDist.init` has completed them.
    """

    def __init__(self, llm_datadist: LlmDataDist, options: dict[str, str]) -> None:
        self._engine = llm_datadist
        self._enable_remote_cache_accessible = options.get(REMOTE_ACCESS) == "1"
        self._wait_time_ms = wait_time_ms(options)

    @_checked(cache_key=kind_of(CacheKey, CacheKeyByIdAndIndex))
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
            cache_key: the remote slot; in remote mode a CacheKeyByIdAndIndex.
            cache: the local cache.
            batch_index: the local slot.
            size: bytes of each row to pull; -1: the whole local row.
            **kwargs: src_layer_range, dst_layer_range: layers, ranges of step 1;
                tensor_num_per_layer=2. Other keywords are ignored.

        Raises:
            LLMException: LLM_PARAM_INVALID: a slot, size or layer out of range, a paged cache, a
                key that names neither a request nor a prefix; LLM_ENGINE_FINALIZED;
                LLM_NOT_YET_LINK: the cluster is not linked; LLM_LINK_FAILED: the link is broken, or
                broke during the transfer; LLM_KV_CACHE_NOT_EXIST: the peer has no such cache, slot
                or key; LLM_TIMEOUT: sync_kv_timeout has passed.
        """
        if self._enable_remote_cache_accessible:
            check_isinstance("cache_key", cache_key, CacheKeyByIdAndIndex)
        layers = layers_given(kwargs)
        self._engine.pull_cache(
            key_of(cache_key), cache_of(cache), int(batch_index), int(size), layers
        )

    @_checked(src_cache_key=kind_of(CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey))
    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Indices | None = (),
        dst_blocks: Indices = (),
        **kwargs: Any,
    ) -> None:
        """Pull blocks of a remote paged cache, or a remote slot, into blocks of a local cache.

        Args:
            src_cache_key: the remote paged cache (BlocksCacheKey), or slot.
            dst_cache: the local cache.
            src_blocks: remote blocks, one for each of `dst_blocks`. Empty for a slot, which is cut
                into chunks of one block: chunk i goes to `dst_blocks[i]`.
            dst_blocks: local blocks; the last of duplicates counts.
            **kwargs: as for `pull_cache`.

        Raises:
            LLMException: as for `pull_cache`; LLM_PARAM_INVALID: a block out of range, tables of
                unequal length or empty, a contiguous local cache; LLM_KV_CACHE_NOT_EXIST: a
                CacheKey in remote mode.
        """
        src = table_of("src_blocks", src_blocks, allow_none=False)
        dst = table_of("dst_blocks", dst_blocks, allow_none=False)
        check_some("dst_blocks", dst)
        layers = layers_given(kwargs)
        if isinstance(src_cache_key, BlocksCacheKey):
            check_some("src_blocks", src)
        elif len(src):
            raise invalid(
                f"src_blocks={shown(src_blocks)} must be empty: {src_cache_key} names a slot"
            )
        if isinstance(src_cache_key, CacheKey) and self._enable_remote_cache_accessible:
            raise not_exist(f"src_cache_key={src_cache_key}: in remote mode requests have no keys")
        self._engine.pull_blocks(
            key_of(src_cache_key), cache_of(dst_cache), *last_wins(src, dst), layers
        )

    @_checked(self=_check_remote, dst_cache_key=kind_of(CacheKeyByIdAndIndex))
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
        """Push a slot of a contiguous local cache into a remote slot; in remote mode only.

        Args:
            dst_cache_key: the remote slot.
            src_cache: the local cache.
            src_batch_index: the local slot.
            src_layer_range, dst_layer_range: layers, ranges of equal length; None: all layers of
                src_cache.
            size: must be -1: the whole row.
            tensor_num_per_layer: number of consecutive tensors of one layer.

        Raises:
            LLMException: as for `pull_cache`; LLM_PARAM_INVALID: also request mode, or a size
                other than -1.
        """
        num_tensors = src_cache.cache_desc.num_tensors
        layers = pushed_layers_of(
            src_layer_range, dst_layer_range, tensor_num_per_layer, num_tensors
        )
        if size != -1:
            raise invalid(f"size={size} must be -1: a push moves the whole row")
        self._engine.push_cache(
            cache_of(src_cache), key_of(dst_cache_key), int(src_batch_index), -1, layers
        )

    @_checked(self=_check_remote, dst_cache_key=kind_of(BlocksCacheKey))
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
            dst_blocks: remote blocks, one for each of `src_blocks`; the last of duplicates counts.
            src_layer_range, dst_layer_range, tensor_num_per_layer: as for `push_cache`.

        Raises:
            LLMException: as for `push_cache`; LLM_PARAM_INVALID: a block out of range, tables of
                unequal length or empty, a contiguous cache.
        """
        src = table_of("src_blocks", src_blocks)
        dst = table_of("dst_blocks", dst_blocks, allow_none=False)
        check_some("dst_blocks", dst)
        num_tensors = src_cache.cache_desc.num_tensors
        layers = pushed_layers_of(
            src_layer_range, dst_layer_range, tensor_num_per_layer, num_tensors
        )
        self._engine.push_blocks(
            cache_of(src_cache), key_of(dst_cache_key), *last_wins(src, dst), layers
        )

    @_checked(layer_synchronizer=kind_of(LayerSynchronizer))
    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Configs,
        src_block_indices: Indices | None = None,
        dst_block_indices: Indices | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Push a cache layer by layer, each layer once `layer_synchronizer` reports it ready.

        A thread calls the synchronizer for each needed layer, in ascending order, while earlier
        layers are copied. Each layer has two tensors.

        Args:
            src_cache: the local cache, of Placement.DEVICE.
            layer_synchronizer: waits until a layer is computed.
            transfer_configs: the destinations: in remote mode TransferWithCacheKeyConfig, otherwise
                TransferConfig. A failure of one does not affect the others.
            src_block_indices: blocks of a paged src_cache, one for each of `dst_block_indices`.
            dst_block_indices: blocks of paged destinations.
            dst_block_memory_size: bytes of a destination block; required to push a slot to blocks.

        Returns:
            A task with the status of each destination.

        Raises:
            LLMException: LLM_PARAM_INVALID: a cache of Placement.HOST, blocks that do not fit the
                cache or each other, a config that does not fit the cache; LLM_ENGINE_FINALIZED.
                Other failures of a destination are its status in the task.
        """
        if src_cache.cache_desc.placement is not Placement.DEVICE:
            raise invalid(f"src_cache is in {src_cache.cache_desc.placement}; it must be in DEVICE")
        source = LayerSource.of(
            cache_of(src_cache),
            src_cache.is_blocks_cache,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
        )
        return transfer_layers(
            self._engine,
            source,
            transfer_configs,
            layer_synchronizer,
            self._wait_time_ms,
            remote_mode=self._enable_remote_cache_accessible,
        )

    @_checked()
    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy a slot of a contiguous cache into another.

        Args:
            dst, src: the caches, in this order.
            dst_batch_index, src_batch_index: the slots.
            offset: first byte of the row to copy, on both sides.
            size: bytes to copy; -1: the rest of the source row.
            req_id: the request; only checked.

        Raises:
            LLMException: LLM_PARAM_INVALID: a slot, offset or size out of range, a paged cache;
                LLM_ENGINE_FINALIZED; LLM_KV_CACHE_NOT_EXIST: a cache does not exist.
        """
        check_isinstance("src", src, Cache, allow_none=False)
        self._engine.copy_cache(
            cache_of(src),
            cache_of(dst),
            int(src_batch_index),
            int(dst_batch_index),
            int(offset),
            int(size),
        )

    @_checked()
    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks of a paged cache to other blocks of the same cache.

        Args:
            cache: the cache.
            copy_block_info: source block -> its destination blocks; the last of duplicates counts.

        Raises:
            LLMException: LLM_PARAM_INVALID: a block out of range, a block that is both read and
                written, a contiguous cache; LLM_ENGINE_FINALIZED; LLM_KV_CACHE_NOT_EXIST: the cache
                does not exist.
        """
        check_dict("copy_block_info", copy_block_info, int, list, int)
        self._engine.copy_blocks(cache_of(cache), copies_of(copy_block_info))

    @_checked()
    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks from a host cache to a device cache, or from a device cache to a host cache.

        Args:
            src_cache, dst_cache: paged caches, one of each placement, with equal blocks.
            src_to_dst: source block -> destination block; may be empty.

        Raises:
            LLMException: LLM_PARAM_INVALID: a block out of range, unequal blocks, two caches of one
                placement, a contiguous cache; LLM_ENGINE_FINALIZED; LLM_KV_CACHE_NOT_EXIST: a cache
                does not exist.
        """
        check_dict("src_to_dst", src_to_dst, int, int)
        check_kind("src_cache", src_cache, is_blocks=True)
        check_kind("dst_cache", dst_cache, is_blocks=True)
        check_alike(src_cache, dst_cache)  # even if `src_to_dst` is empty
        pairs = zip(*last_wins(list(src_to_dst), list(src_to_dst.values())), strict=True)
        if src_to_dst:
            self._engine.swap_blocks(
                cache_of(src_cache), cache_of(dst_cache), {int(s): int(d) for s, d in pairs}
            )
