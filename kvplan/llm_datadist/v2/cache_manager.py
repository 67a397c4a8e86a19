"""`CacheManager`: makes, registers and frees caches. Its transfers are `CacheTransfers`."""

from __future__ import annotations

import kvplan
from kvplan.engine.datadist import LlmDataDist
from kvplan.llm_datadist.conversion import cache_of, check_kind, desc_of, key_of
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import check_int64, check_isinstance, checked, kind_of
from kvplan.llm_datadist.v2.cache_transfers import CacheTransfers
from kvplan.llm_datadist.v2.config import HOST_POOL, POOL
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    MemInfo,
    Memtype,
    Placement,
)
from kvplan.llm_datadist.v2.llm_utils import is_invalid_id
from kvplan.status import invalid
from kvplan.validation import UINT64_MAX, shown

CacheKeys = list[CacheKey] | tuple[CacheKey, ...]

_checked = checked(
    {
        "cache": kind_of(Cache),
        "cache_desc": kind_of(CacheDesc),
        "cache_keys": kind_of(list, tuple, inner=CacheKey),
        "cache_key": kind_of(CacheKey),
        "blocks_cache_key": kind_of(BlocksCacheKey, allow_none=True),
        "addrs": kind_of(list, inner=int),
        "remote_accessible": kind_of(bool, allow_none=True),
        "cache_id": check_int64,
    }
)


class CacheManager(CacheTransfers):
    """The caches of an LLMDataDist and their transfers; see `LLMDataDist.cache_manager`.

    In *request mode* peers pull by CacheKey; the pull of the last tensor consumes a request's key.
    In *remote mode* (llm.EnableRemoteCacheAccessible) peers pull by id, and push.

    Every method raises TypeError for an argument of the wrong type, except for `mem_infos`, and
    TypeError or ValueError for an integer outside its width.

    Args:
        llm_datadist: the engine.
        options: the options after `LLMDataDist.init` has completed them.
    """

    def __init__(self, llm_datadist: LlmDataDist, options: dict[str, str]) -> None:
        super().__init__(llm_datadist, options)
        self._is_call_linked = False
        self._pools = {Placement.DEVICE: options.get(POOL), Placement.HOST: options.get(HOST_POOL)}

    @staticmethod
    @_checked()
    def check_cache_key(cache_key: CacheKey) -> None:
        """Refuse a key unless it names either a request or a prefix.

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
            cache_keys: key i names slot i; a key without a request and a prefix skips its slot.

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
        """Free an allocated contiguous cache, once all of its keys are removed; idempotent.

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
        """Register the caller's memory as a cache. Keep the memory until `unregister_cache`.

        Args:
            cache_desc: its description.
            addrs: an address for each tensor.
            cache_keys: key i names slot i; pulls do not consume them.
            remote_accessible: True if peers may reach the cache. None: True in request mode; in
                remote mode True for Placement.DEVICE, unless `LLMDataDist.link` was called.

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
        """Register the caller's memory as a paged cache. Keep the memory until `unregister_cache`.

        Arguments as for `register_cache`; `blocks_cache_key` names the whole cache.

        Raises:
            LLMException: as for `register_cache`.
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
        """Register caches again after new memory was mapped at their addresses.

        Call this after a repair of memory: transfers fail until then.

        Args:
            mem_infos: ranges of Memtype.MEM_TYPE_DEVICE inside registered caches.

        Raises:
            LLMException: LLM_NOT_YET_LINK: no cluster is linked; LLM_PARAM_INVALID: a range that is
                not registered or not mapped, or a wrong type; LLM_ENGINE_FINALIZED.
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
            raise TypeError(f"addrs={shown(addrs)}: addresses must be in range [0, 2**64)")
        if remote_accessible is not None:
            return remote_accessible
        if not self._enable_remote_cache_accessible:
            return True  # in the original, peers pull from any cache through buffers
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
