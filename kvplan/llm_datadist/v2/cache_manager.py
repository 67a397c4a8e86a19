"""`CacheManager` over `kvplan.LlmDataDist`: it checks and converts arguments, and delegates."""

from __future__ import annotations

from typing import Any

import kvplan
from kvplan.engine.datadist import LlmDataDist
from kvplan.llm_datadist.conversion import (
    TENSORS_PER_LAYER,
    Indices,
    cache_of,
    check_alike,
    check_kind,
    check_some,
    copies_of,
    desc_of,
    key_of,
    last_wins,
    layers_given,
    pushed_layers_of,
    table_of,
)
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import (
    check_dict,
    check_int64,
    check_isinstance,
    check_uint32,
    check_uint64,
    checked,
    kind_of,
)
from kvplan.llm_datadist.v2.config import HOST_POOL, POOL, REMOTE_ACCESS, wait_time_ms
from kvplan.llm_datadist.v2.layer_transfer import Configs, LayerSource, transfer_layers
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    LayerSynchronizer,
    MemInfo,
    Memtype,
    Placement,
)
from kvplan.llm_datadist.v2.llm_utils import is_invalid_id
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.validation import UINT64_MAX, shown

CacheKeys = list[CacheKey] | tuple[CacheKey, ...]
Layers = range | None


def _check_request(name: str, req_id: int | None) -> None:
    if req_id is not None:
        check_uint64(name, req_id)


def _check_remote(_: str, manager: CacheManager) -> None:
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
        "cache_desc": kind_of(CacheDesc),
        "cache_keys": kind_of(list, tuple, inner=CacheKey),
        "cache_key": kind_of(CacheKey),
        "blocks_cache_key": kind_of(BlocksCacheKey, allow_none=True),
        "addrs": kind_of(list, inner=int),
        "remote_accessible": kind_of(bool, allow_none=True),
        "cache_id": check_int64,
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
"""Checks the arguments of a method by their names."""


class CacheManager:
    """The caches of an LLMDataDist and their transfers; see `LLMDataDist.cache_manager`.

    In *request mode* peers pull by CacheKey, and a pull consumes the key of its request. In *remote
    mode* (llm.EnableRemoteCacheAccessible) peers pull by id, and push.

    Every method raises TypeError for an argument of the wrong type, ValueError for an integer
    outside its width, and LLM_ENGINE_FINALIZED after `finalize`.

    Args:
        llm_datadist: the engine.
        options: as `LLMDataDist.init` completes them.
    """

    def __init__(self, llm_datadist: LlmDataDist, options: dict[str, str]) -> None:
        self._engine = llm_datadist
        self._is_call_linked = False
        self._pools = {Placement.DEVICE: options.get(POOL), Placement.HOST: options.get(HOST_POOL)}
        self._enable_remote_cache_accessible = options.get(REMOTE_ACCESS) == "1"
        self._wait_time_ms = wait_time_ms(options)

    @staticmethod
    @_checked()
    def check_cache_key(cache_key: CacheKey) -> None:
        """Refuse a key that does not name exactly one of a request and a prefix.

        Raises:
            LLMException: LLM_PARAM_INVALID: the key names both or neither.
        """
        if is_invalid_id(cache_key.req_id) is is_invalid_id(cache_key.prefix_id):
            raise invalid(
                f"{cache_key} must name either a request (req_id) or a prefix (prefix_id)"
            )

    @_checked()
    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: CacheKeys = ()) -> Cache:
        """Make a contiguous cache in the pool of its placement.

        The cache lives until its id is deallocated (`deallocate_cache`) and each of its keys is
        removed (`remove_cache_key`, or a pull).

        Args:
            cache_desc: its description.
            cache_keys: key i names slot i; one with req_id=2**64-1 skips a slot.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY; LLM_PARAM_INVALID: no pool for this placement, more
                keys than slots, a key in use; LLM_ENGINE_FINALIZED.
        """
        self._check_pool(cache_desc)
        keys = [key_of(key) for key in cache_keys]
        made = self._engine.allocate_cache(desc_of(cache_desc), keys)
        return self._made(made, cache_desc, is_registered=False, is_blocks=False)

    @_checked()
    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> Cache:
        """Make a paged cache in the pool of its placement.

        Args:
            cache_desc: its description.
            blocks_cache_key: names the whole cache.

        Raises:
            LLMException: as for `allocate_cache`.
        """
        self._check_pool(cache_desc)
        key = None if blocks_cache_key is None else key_of(blocks_cache_key)
        made = self._engine.allocate_blocks_cache(desc_of(cache_desc), key)
        return self._made(made, cache_desc, is_registered=False, is_blocks=True)

    @_checked()
    def deallocate_cache(self, cache: Cache) -> None:
        """Free an allocated contiguous cache, which lives on while it has keys; idempotent.

        Raises:
            LLMException: LLM_PARAM_INVALID: the cache is paged, or was registered;
                LLM_ENGINE_FINALIZED.
        """
        self._deallocate(cache, is_blocks=False)

    @_checked()
    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Free an allocated paged cache; idempotent.

        Raises:
            LLMException: LLM_PARAM_INVALID: the cache is contiguous, or was registered;
                LLM_ENGINE_FINALIZED.
        """
        self._deallocate(cache, is_blocks=True)

    @_checked()
    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Remove a key of an allocated cache. An unknown key has no effect.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED.
        """
        self._engine.remove_cache_key(key_of(cache_key))

    @_checked()
    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: CacheKeys = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register the caller's memory, which must live until `unregister_cache`, as a cache.

        Args:
            cache_desc: its description.
            addrs: an address for each tensor.
            cache_keys: key i names slot i; pulls do not consume them.
            remote_accessible: True if peers may reach the cache. None: always in request mode; in
                remote mode for Placement.DEVICE, unless `LLMDataDist.link` was called.

        Raises:
            LLMException: LLM_PARAM_INVALID: addresses that do not fit the description or are not
                mapped, a key in use, remote_accessible=True after `LLMDataDist.link`;
                LLM_ENGINE_FINALIZED.
        """
        accessible = self._check_registered(cache_desc, addrs, remote_accessible)
        made = self._engine.register_cache(
            desc_of(cache_desc),
            addrs,
            [key_of(key) for key in cache_keys],
            remote_accessible=accessible,
        )
        return self._made(made, cache_desc, is_registered=True, is_blocks=False)

    @_checked()
    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register the caller's memory, which must live until `unregister_cache`, as a paged cache.

        Arguments as for `register_cache`; `blocks_cache_key` names the whole cache.

        Raises:
            LLMException: as `register_cache`.
        """
        accessible = self._check_registered(cache_desc, addrs, remote_accessible)
        key = None if blocks_cache_key is None else key_of(blocks_cache_key)
        made = self._engine.register_blocks_cache(
            desc_of(cache_desc), addrs, key, remote_accessible=accessible
        )
        return self._made(made, cache_desc, is_registered=True, is_blocks=True)

    @_checked()
    def unregister_cache(self, cache_id: int) -> None:
        """Unregister a cache. An unknown id has no effect.

        Raises:
            LLMException: LLM_PARAM_INVALID: the cache was allocated; LLM_ENGINE_FINALIZED.
        """
        self._engine.unregister_cache(int(cache_id))

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Check the mapping of registered memory again, and offer its caches to peers again.

        Call it after memory was repaired: transfers fail before the call, and work after it.

        Args:
            mem_infos: ranges of Memtype.MEM_TYPE_DEVICE inside registered caches.

        Raises:
            LLMException: LLM_NOT_YET_LINK: no cluster is linked; LLM_PARAM_INVALID: also an
                argument of the wrong type; LLM_ENGINE_FINALIZED.
        """
        infos = mem_infos if isinstance(mem_infos, list) else [mem_infos]
        for position, info in enumerate(infos):
            if not isinstance(info, MemInfo):
                raise invalid(f"mem_infos[{position}]={info!r} must be MemInfo")
            if info.mem_type is not Memtype.MEM_TYPE_DEVICE or info.addr == 0 or info.size <= 0:
                raise invalid(
                    f"mem_infos[{position}]={info} must be MEM_TYPE_DEVICE, with addr != 0 and "
                    "size > 0"
                )
        self._engine.remap_registered_memory([(int(info.addr), int(info.size)) for info in infos])

    def set_is_call_linked(self) -> None:
        """Note that `LLMDataDist.link` was called; see `register_cache`."""
        self._is_call_linked = True

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
                tensor_num_per_layer=2. Others are ignored.

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
            **kwargs: as of `pull_cache`.

        Raises:
            LLMException: as `pull_cache`; LLM_PARAM_INVALID: a block out of range, block tables of
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
            raise LLMException(
                f"src_cache_key={src_cache_key}: in remote mode requests have no keys",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
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
            LLMException: as `pull_cache`; LLM_PARAM_INVALID: also request mode, or a size other
                than -1.
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
            src_layer_range, dst_layer_range, tensor_num_per_layer: as of `push_cache`.

        Raises:
            LLMException: as `push_cache`; LLM_PARAM_INVALID: a block out of range, block tables of
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
        """Push a cache layer by layer, each once `layer_synchronizer` returns for it.

        A thread calls the synchronizer for each needed layer, in ascending order, while earlier
        layers are copied. Two tensors are one layer.

        Args:
            src_cache: the local cache, of Placement.DEVICE.
            layer_synchronizer: waits until a layer is computed.
            transfer_configs: the destinations: in remote mode TransferWithCacheKeyConfig, otherwise
                TransferConfig. A failure of one does not affect the others.
            src_block_indices: blocks of a paged src_cache, one for each of `dst_block_indices`.
            dst_block_indices: blocks of paged destinations.
            dst_block_memory_size: bytes of one of them; required if src_cache is contiguous.

        Returns:
            The task, which returns the status of each destination.

        Raises:
            LLMException: LLM_PARAM_INVALID: a cache of Placement.HOST, blocks that do not fit the
                cache or each other, no destination; LLM_ENGINE_FINALIZED. The failure of one
                destination is its status in the task.
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
            dst, src: the caches; the destination comes first.
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
            copy_block_info: source block -> its destination blocks; may be empty.

        Raises:
            LLMException: LLM_PARAM_INVALID: a block out of range, a destination named twice, a
                contiguous cache; LLM_ENGINE_FINALIZED; LLM_KV_CACHE_NOT_EXIST: the cache does not
                exist.
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
        check_alike("src_cache", src_cache, "dst_cache", dst_cache)  # also if nothing moves
        pairs = zip(*last_wins(list(src_to_dst), list(src_to_dst.values())), strict=True)
        if src_to_dst:
            self._engine.swap_blocks(
                cache_of(src_cache), cache_of(dst_cache), {int(s): int(d) for s, d in pairs}
            )

    def _check_pool(self, cache_desc: CacheDesc) -> None:
        check_isinstance("placement", cache_desc.placement, Placement, allow_none=False)
        if not self._pools[cache_desc.placement]:
            option = POOL if cache_desc.placement is Placement.DEVICE else HOST_POOL
            raise invalid(f"a cache of {cache_desc.placement} needs a pool: give option {option}")

    def _check_registered(
        self, cache_desc: CacheDesc, addrs: list[int], remote_accessible: bool | None
    ) -> bool:
        if remote_accessible and self._is_call_linked:
            raise invalid("remote_accessible=True is not allowed after link; register before link")
        if addrs and (min(addrs) < 0 or max(addrs) > UINT64_MAX):
            raise TypeError(f"addrs={shown(addrs)}: addresses must be in range [1, 2**64)")
        if remote_accessible is not None:
            return remote_accessible
        if not self._enable_remote_cache_accessible:
            return True  # peers of the original pull from any cache, through its buffers
        return cache_desc.placement is Placement.DEVICE and not self._is_call_linked

    def _deallocate(self, cache: Cache, *, is_blocks: bool) -> None:
        check_kind("cache", cache, is_blocks=is_blocks)
        self._engine.deallocate_cache(cache_of(cache))
        cache._tensor_addrs = []
        cache._valid = False

    def _made(
        self, made: kvplan.Cache, cache_desc: CacheDesc, *, is_registered: bool, is_blocks: bool
    ) -> Cache:
        log.info("made cache %d: %s", made.cache_id, cache_desc)
        addrs = list(made.tensor_addrs)
        cache = Cache(made.cache_id, cache_desc, addrs, self, is_registered, is_blocks)
        cache._engine_cache = made
        return cache
