"""KvCacheManager of version 1 over `kvplan.LlmDataDist`: it checks, converts and delegates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvnative._signals import Mutex
from kvplan.llm_datadist.configs import LLMRole
from kvplan.llm_datadist.conversion import desc_of, key_of
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import (
    check_dict,
    check_int32,
    check_int64,
    check_isinstance,
    check_uint32,
    check_uint64,
)
from kvplan.llm_datadist.v1.tensor import Tensor
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from kvplan.llm_datadist.v2.engine_options import wait_time_ms
from kvplan.llm_datadist.v2.layer_transfer import LayerSource, transfer_layers
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    Placement,
    TransferConfig,
)
from kvplan.llm_datadist.v2.move_arguments import (
    Indices,
    check_size,
    copies_of,
    indices_of,
    last_wins,
    layers_given,
    table_of,
)
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import NO_ID
from kvplan.types import Cache as EngineCache
from kvplan.types import CacheKey as EngineKey

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist
    from kvplan.execution import TensorMemory
    from kvplan.types import CacheDesc as EngineDesc

_Keys = TypeVar("_Keys")

_POOL = "ge.flowGraphMemMaxSize"


class KvCacheManager:
    """The caches of an LLMDataDist without llm.EnableCacheManager. Get it from there.

    PROMPT gives caches keys, and pushes layer by layer; DECODER pulls.

    Args:
        datadist: the engine.
        role: of the LLMDataDist.
        options: as `LLMDataDist.init` completes them.
    """

    def __init__(self, datadist: LlmDataDist, role: LLMRole, options: dict[str, str]) -> None:
        self._engine = datadist
        self._role = role
        self._wait_time_ms = wait_time_ms(options)
        pool = options.get(_POOL)
        self._pool_nbytes = None if pool is None else int(pool)
        self._allocating = Mutex()

    def is_initialized(self) -> bool:
        """Whether calls are taken: the LLMDataDist is not finalized."""
        return self._engine._engine is not None

    check_cache_key = staticmethod(CacheManager.check_cache_key)

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> KvCache:
        """Make a contiguous cache; of Placement.DEVICE.

        It lives as long as its id (`deallocate_cache`, or the KvCache itself) and each of its keys
        (`remove_cache_key`, or a pull).

        Args:
            cache_desc: its description.
            cache_keys: PROMPT's: key i names slot i; one with req_id=2**64-1 skips a slot, and of
                equal ones the last counts.

        Raises:
            TypeError: an argument of another type.
            ValueError: an integer outside its width.
            LLMException: LLM_DEVICE_OUT_OF_MEMORY: no memory, or more than ge.flowGraphMemMaxSize;
                LLM_PARAM_INVALID: keys of another role, more keys than slots, one that is taken,
                Placement.HOST; LLM_ENGINE_FINALIZED.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
        check_isinstance("cache_keys", cache_keys, [list, tuple], CacheKey, allow_none=False)
        _check_device(cache_desc)
        if cache_keys:
            self._check_role("cache_keys", LLMRole.PROMPT)
        keys = [key_of(key) for key in cache_keys]
        last = {key: slot for slot, key in enumerate(keys)}
        padded = [
            key if last[key] == slot else EngineKey(key.cluster_id, NO_ID)
            for slot, key in enumerate(keys)
        ]
        return self._made(cache_desc, self._engine.allocate_cache, padded)

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> KvCache:
        """Make a paged cache; of Placement.DEVICE.

        Args:
            cache_desc: its description.
            blocks_cache_key: PROMPT's: names the whole cache.

        Raises:
            TypeError: an argument of another type.
            ValueError: an integer outside its width.
            LLMException: as for `allocate_cache`.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        _check_device(cache_desc)
        if blocks_cache_key is not None and self._role == LLMRole.DECODER:
            raise invalid(f"blocks_cache_key={blocks_cache_key}: the role must not be DECODER")
        key = None if blocks_cache_key is None else key_of(blocks_cache_key)
        return self._made(cache_desc, self._engine.allocate_blocks_cache, key)

    def deallocate_cache(self, cache: KvCache) -> None:
        """Free a cache; a contiguous one lives on by its keys. Repeating is fine.

        Raises:
            TypeError: no KvCache.
            ValueError: an integer outside its width.
            LLMException: LLM_PARAM_INVALID: a cache of Placement.HOST; LLM_ENGINE_FINALIZED.
        """
        self._engine.deallocate_cache(device_cache_of("cache", cache))
        cache._per_device_tensor_addrs = []
        cache._valid = False

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Forget a key; an unknown one is fine. PROMPT only.

        Raises:
            TypeError: no CacheKey.
            LLMException: LLM_PARAM_INVALID: another role; LLM_ENGINE_FINALIZED.
        """
        self._check_role("remove_cache_key", LLMRole.PROMPT)
        check_isinstance("cache_key", cache_key, CacheKey, allow_none=False)
        self._engine.remove_cache_key(key_of(cache_key))

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return a tensor of the cache, for each of its devices.

        It is the cache's memory, nothing is copied; of a cache on an accelerator a copy.

        Raises:
            TypeError: an argument of another type.
            ValueError: an integer outside its width.
            LLMException: LLM_PARAM_INVALID: no such tensor; LLM_ENGINE_FINALIZED;
                LLM_KV_CACHE_NOT_EXIST: no such cache.
        """
        check_isinstance("cache", cache, KvCache, allow_none=False)
        check_int32("tensor_index", tensor_index)
        if not 0 <= tensor_index < cache.cache_desc.num_tensors:
            end = cache.cache_desc.num_tensors
            raise invalid(f"tensor_index={tensor_index} is out of range [0, {end})")
        held, engine = kv_cache_of("cache", cache), self._engine
        on_device = engine._running().registry.resolve(held).memory.on_device
        arrays = engine.arrays(held, copy=on_device)
        return [Tensor._over(arrays[tensor_index], cache.cache_desc.data_type)]

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

        Raises:
            TypeError: an argument of another type.
            ValueError: an integer outside its width.
            LLMException: LLM_PARAM_INVALID: another role, a slot, size, offset or layer out of
                range, a paged cache, a key that names neither a request nor a prefix;
                LLM_ENGINE_FINALIZED; LLM_NOT_YET_LINK: no link to that cluster; LLM_LINK_FAILED: it
                is broken, or broke meanwhile; LLM_KV_CACHE_NOT_EXIST: no such cache, slot or key
                there; LLM_TIMEOUT: sync_kv_timeout has passed.
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
            layers_given(kwargs),
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

        Raises:
            TypeError: an argument of another type.
            ValueError: an integer outside its width.
            LLMException: LLM_PARAM_INVALID: another role, a block or layer out of range, block
                tables of unequal length or none, a contiguous cache; LLM_ENGINE_FINALIZED;
                LLM_NOT_YET_LINK: no link to that cluster; LLM_LINK_FAILED: it is broken, or broke
                meanwhile; LLM_KV_CACHE_NOT_EXIST: no such cache, slot or key there; LLM_TIMEOUT:
                sync_kv_timeout has passed.
        """
        self._check_role("pull_blocks", LLMRole.DECODER)
        check_isinstance("prompt_cache_key", prompt_cache_key, BlocksCacheKey, allow_none=False)
        target = device_cache_of("decoder_kv_cache", decoder_kv_cache)
        check_isinstance("prompt_blocks", prompt_blocks, list, allow_none=False)
        check_isinstance("decoder_blocks", decoder_blocks, list, allow_none=False)
        src = table_of("prompt_blocks", prompt_blocks)
        dst = table_of("decoder_blocks", decoder_blocks)
        if len(src) != len(dst) or not len(src):
            raise invalid(f"{len(src)} prompt_blocks, {len(dst)} decoder_blocks: as many, and > 0")
        layers = layers_given(kwargs)
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

        Raises:
            TypeError: an argument of another type.
            ValueError: an integer outside its width.
            LLMException: LLM_PARAM_INVALID: a slot, offset or size out of range, a paged cache, one
                of Placement.HOST; LLM_ENGINE_FINALIZED; LLM_KV_CACHE_NOT_EXIST: no such cache.
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

        Raises:
            TypeError: an argument of another type.
            ValueError: an integer outside its width.
            LLMException: LLM_PARAM_INVALID: a block out of range, a destination named twice, a
                contiguous cache, one of Placement.HOST; LLM_ENGINE_FINALIZED;
                LLM_KV_CACHE_NOT_EXIST: no such cache.
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

        Raises:
            TypeError: an argument of another type.
            ValueError: an integer outside its width.
            LLMException: LLM_PARAM_INVALID: a block out of range, unequal blocks, two caches of one
                placement; LLM_ENGINE_FINALIZED; LLM_KV_CACHE_NOT_EXIST: no such cache.
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

        A destination that has no outcome when a waiting call times out has the status
        LLM_WAIT_PROCESS_TIMEOUT.

        Raises:
            TypeError, ValueError, LLMException: as `CacheManager.transfer_cache_async`;
                LLM_PARAM_INVALID: also another role.
        """
        self._check_role("transfer_cache_async", LLMRole.PROMPT)
        held = device_cache_of("src_cache", src_cache)
        check_isinstance(
            "layer_synchronizer", layer_synchronizer, LayerSynchronizer, allow_none=False
        )
        synchronizer, paged = layer_synchronizer, bool(src_block_indices)
        if paged:
            # By address: of a contiguous cache, too, the rows are blocks here.
            synchronizer = _Holding(
                layer_synchronizer, self._engine._running().registry.resolve(held).memory
            )
            held = replace(held, cache_id=-1)
        source = LayerSource.of(
            held, paged, src_block_indices, dst_block_indices, dst_block_memory_size
        )
        return transfer_layers(
            self._engine,
            source,
            transfer_configs,
            synchronizer,
            self._wait_time_ms,
            remote_mode=False,
            running_status=LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
        )

    def _made(
        self,
        cache_desc: CacheDesc,
        allocate: Callable[[EngineDesc, _Keys], EngineCache],
        keys: _Keys,
    ) -> KvCache:
        desc = desc_of(cache_desc)
        with self._allocating:
            self._check_room(desc.nbytes)
            try:
                made = allocate(desc, keys)
            except LLMException as error:
                if error.status_code is not LLMStatusCode.LLM_OUT_OF_MEMORY:
                    raise
                raise _out_of_memory(str(error.args[0])) from error
        log.info("cache %d is made: %s", made.cache_id, cache_desc)
        return KvCache(made.cache_id, cache_desc, [list(made.tensor_addrs)], self)

    def _check_room(self, nbytes: int) -> None:
        if self._pool_nbytes is None:
            return
        used = sum(it.nbytes for it in self._engine.caches() if it.allocated)
        if used + nbytes > self._pool_nbytes:
            raise _out_of_memory(
                f"a cache of {nbytes} bytes: {used} of {_POOL}={self._pool_nbytes} are taken"
            )

    def _check_role(self, what: str, role: LLMRole) -> None:
        if self._role != role:
            raise invalid(f"{what}: the role must be {role.name}; it is {self._role.name}")

    def _switch_role(self, role: LLMRole) -> None:
        self._role = role


class _Holding(LayerSynchronizer):
    """A synchronizer that holds the memory which its transfer reads until the end."""

    def __init__(self, synchronizer: LayerSynchronizer, memory: TensorMemory) -> None:
        self._synchronizer = synchronizer
        self._memory = memory

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self._synchronizer.synchronize_layer(layer_index, timeout_in_millis)


def kv_cache_of(name: str, cache: KvCache) -> EngineCache:
    """Return the engine's cache; refuse tensors on several devices."""
    check_isinstance(name, cache, KvCache, allow_none=False)
    devices = cache.per_device_tensor_addrs
    if len(devices) > 1:
        raise invalid(f"{name} has tensors on {len(devices)} devices; one is supported")
    addresses = tuple(map(int, devices[0])) if devices else ()
    return EngineCache(desc_of(cache.cache_desc), cache.cache_id, addresses)


def device_cache_of(name: str, cache: KvCache) -> EngineCache:
    """Return the engine's cache; refuse Placement.HOST too."""
    found = kv_cache_of(name, cache)
    if found.cache_desc.placement != Placement.DEVICE:
        raise invalid(f"{name}={cache} must be of Placement.DEVICE")
    return found


def _out_of_memory(text: str) -> LLMException:
    return LLMException(text, status_code=LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY)


def _check_device(desc: CacheDesc) -> None:
    if desc.num_tensors < 1:
        raise invalid(f"num_tensors={desc.num_tensors} must be > 0")
    if desc.placement != Placement.DEVICE:
        raise invalid(f"{desc.placement}: a cache is allocated with Placement.DEVICE")


def _offset(name: str, kwargs: dict[str, Any]) -> int:
    offset = kwargs.get(name)
    if offset is None:
        return 0
    check_int64(name, offset)
    if offset < 0:
        raise invalid(f"{name}={offset} must be >= 0")
    return int(offset)
