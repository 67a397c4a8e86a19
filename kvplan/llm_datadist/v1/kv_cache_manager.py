"""KvCacheManager of version 1 over `kvplan.LlmDataDist`: it checks, converts and delegates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplan.llm_datadist.configs import LLMRole
from kvplan.llm_datadist.conversion import key_of
from kvplan.llm_datadist.utils.utils import (
    check_dict,
    check_int64,
    check_isinstance,
    check_uint32,
    check_uint64,
)
from kvplan.llm_datadist.v1.kv_cache_book import KvCacheBook, device_cache_of, kv_cache_of
from kvplan.llm_datadist.v2.block_tables import (
    TENSORS_PER_LAYER,
    Indices,
    copies_of,
    indices_of,
    last_wins,
    layers_of,
    table_of,
)
from kvplan.llm_datadist.v2.cache_task import CacheTask
from kvplan.llm_datadist.v2.layer_feed import LayerFeed
from kvplan.llm_datadist.v2.layer_transfer import LayerSource, destinations_of
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    KvCache,
    LayerSynchronizer,
    TransferConfig,
)
from kvplan.llm_datadist.v2.move_checks import check_size
from kvplan.status import LLMStatusCode, invalid

if TYPE_CHECKING:
    from kvplan.execution import TensorMemory
    from kvplan.types import KvCacheExtParam


class KvCacheManager(KvCacheBook):
    """The caches of an LLMDataDist without llm.EnableCacheManager. Get it from there.

    PROMPT gives caches keys, and pushes layer by layer; DECODER pulls. Each method may raise,
    besides what it says itself, the following.

    Args:
        datadist: the engine.
        role: of the LLMDataDist.
        options: as `LLMDataDist.init` completes them.

    Raises:
        TypeError: an argument of another type.
        ValueError: an integer outside its width.
        LLMException: LLM_PARAM_INVALID: an argument that breaks a rule, another role, or the
            LLMDataDist is finalized. Of what moves bytes between clusters also LLM_NOT_YET_LINK,
            LLM_LINK_FAILED, LLM_KV_CACHE_NOT_EXIST: no such cache, slot or key there; LLM_TIMEOUT:
            sync_kv_timeout has passed.
    """

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Pull a slot of a remote cache into one of a contiguous local cache. DECODER only.

        Args:
            cache_key: the remote slot.
            kv_cache: the local cache.
            batch_index: the local slot.
            size: bytes of a row; -1: the rest of the local row.
            **kwargs: src_layer_range, dst_layer_range: layers, as range of step 1;
                tensor_num_per_layer=2; src_cache_offset=0, dst_cache_offset=0: bytes into the row
                at which to begin. Others are ignored.
        """
        self._check_role("pull_cache", LLMRole.DECODER)
        kinds = [CacheKey, CacheKeyByIdAndIndex]
        check_isinstance("cache_key", cache_key, kinds, allow_none=False)
        target = device_cache_of("kv_cache", kv_cache)
        check_uint32("batch_index", batch_index)
        check_size(size)
        if isinstance(cache_key, CacheKey):
            self.check_cache_key(cache_key)
        self._engine.pull_cache(
            key_of(cache_key),
            target,
            int(batch_index),
            int(size),
            _layers(kwargs),
            src_offset=_offset("src_cache_offset", kwargs),
            dst_offset=_offset("dst_cache_offset", kwargs),
        )

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: list[int],
        decoder_blocks: list[int],
        **kwargs: Any,
    ) -> None:
        """Pull blocks of a remote paged cache into blocks of a local one. DECODER only.

        Args:
            prompt_cache_key: the remote cache.
            decoder_kv_cache: the local cache.
            prompt_blocks: remote blocks.
            decoder_blocks: local blocks, one for each; of one that comes twice the last counts.
            **kwargs: src_layer_range, dst_layer_range, tensor_num_per_layer as of `pull_cache`.
        """
        self._check_role("pull_blocks", LLMRole.DECODER)
        check_isinstance("prompt_cache_key", prompt_cache_key, BlocksCacheKey, allow_none=False)
        target = device_cache_of("decoder_kv_cache", decoder_kv_cache)
        check_isinstance("prompt_blocks", prompt_blocks, list, allow_none=False)
        check_isinstance("decoder_blocks", decoder_blocks, list, allow_none=False)
        src = table_of("prompt_blocks", prompt_blocks)
        dst = table_of("decoder_blocks", decoder_blocks)
        if len(src) != len(dst) or not len(src):
            raise invalid(f"{len(src)} prompt_blocks, {len(dst)} decoder_blocks: as many, and some")
        layers = _layers(kwargs)
        self._engine.pull_blocks(key_of(prompt_cache_key), target, *last_wins(src, dst), layers)

    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy a slot of a contiguous cache into another.

        Args:
            dst, src: the caches; mind the order.
            dst_batch_index, src_batch_index: the slots.
            offset: bytes into the row at which to begin, on both sides.
            size: bytes to copy; -1: the rest of the source row.
            req_id: whose it is; only checked.
        """
        target, source = device_cache_of("dst", dst), device_cache_of("src", src)
        check_uint32("dst_batch_index", dst_batch_index)
        check_uint32("src_batch_index", src_batch_index)
        check_uint64("offset", offset)
        check_size(size)
        check_isinstance("req_id", req_id, int)
        slots = int(src_batch_index), int(dst_batch_index)
        self._engine.copy_cache(source, target, *slots, int(offset), int(size))

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks of a paged cache, each to any number of others of it.

        Args:
            cache: the cache.
            copy_block_info: source block -> the blocks that it is copied to; empty: nothing.
        """
        target = device_cache_of("cache", cache)
        check_isinstance("copy_block_info", copy_block_info, dict, allow_none=False)
        check_dict("copy_block_info", copy_block_info, int, list, int)
        self._engine.copy_blocks(target, copies_of(copy_block_info))

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks from a host cache to a device cache (in), or the other way round (out).

        Args:
            src, dst: paged caches, one of each placement, with equal blocks; the one on the host is
                made by `KvCache.create_cpu_cache`.
            src_to_dst: source block -> destination block; empty: nothing.
        """
        source, target = kv_cache_of("src", src), kv_cache_of("dst", dst)
        check_isinstance("src_to_dst", src_to_dst, dict, int, allow_none=False)
        check_dict("src_to_dst", src_to_dst, int, int)
        blocks = last_wins(
            indices_of("src_to_dst", list(src_to_dst)),
            indices_of("src_to_dst", list(src_to_dst.values())),
        )
        if src_to_dst:
            self._engine.swap_blocks(source, target, dict(zip(*blocks, strict=True)))

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: list[TransferConfig] | tuple[TransferConfig, ...],
        src_block_indices: Indices | None = None,
        dst_block_indices: Indices | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Push a cache layer by layer, as `CacheManager.transfer_cache_async`. PROMPT only.

        A destination that goes on when the time of a waiting call has passed is told as
        LLM_WAIT_PROCESS_TIMEOUT.
        """
        self._check_role("transfer_cache_async", LLMRole.PROMPT)
        held = device_cache_of("src_cache", src_cache)
        check_isinstance(
            "layer_synchronizer", layer_synchronizer, LayerSynchronizer, allow_none=False
        )
        synchronizer, paged = layer_synchronizer, bool(src_block_indices)
        if paged:
            # By address: of a contiguous cache, too, the rows are blocks here.
            synchronizer = _Holding(layer_synchronizer, self._engine.memory(held))
            held = replace(held, cache_id=-1)
        source = LayerSource.of(
            held, paged, src_block_indices, dst_block_indices, dst_block_memory_size
        )
        feed = LayerFeed(
            destinations_of(self._engine, source, transfer_configs, remote_mode=False),
            synchronizer,
            self._wait_time_ms,
            LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
        )
        feed.start()
        return CacheTask(feed)


class _Holding(LayerSynchronizer):
    """A synchronizer, and the memory that the transfer it belongs to reads until its end."""

    def __init__(self, synchronizer: LayerSynchronizer, memory: TensorMemory) -> None:
        self._synchronizer = synchronizer
        self._memory = memory

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self._synchronizer.synchronize_layer(layer_index, timeout_in_millis)


def _layers(kwargs: dict[str, Any]) -> KvCacheExtParam:
    return layers_of(
        kwargs.get("src_layer_range"),
        kwargs.get("dst_layer_range"),
        kwargs.get("tensor_num_per_layer", TENSORS_PER_LAYER),
    )


def _offset(name: str, kwargs: dict[str, Any]) -> int:
    offset = kwargs.get(name)
    if offset is None:
        return 0
    check_int64(name, offset)
    if offset < 0:
        raise invalid(f"{name}={offset} must be >= 0")
    return int(offset)
