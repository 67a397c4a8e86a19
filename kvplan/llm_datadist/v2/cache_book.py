"""Caches of this process as the original makes them: allocated, registered, and given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.llm_datadist.conversion import cache_of, desc_of, key_of
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import check_int64, check_isinstance
from kvplan.llm_datadist.v2.engine_options import HOST_POOL, POOL, REMOTE_ACCESS, wait_time_ms
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
from kvplan.llm_datadist.v2.move_checks import check_kind
from kvplan.status import invalid
from kvplan.validation import UINT64_MAX, shown

if TYPE_CHECKING:
    import kvplan
    from kvplan.engine.datadist import LlmDataDist

CacheKeys = list[CacheKey] | tuple[CacheKey, ...]


class CacheBook:
    """The half of `CacheManager` that makes and ends caches; see there.

    Args:
        llm_datadist: the engine.
        options: as `LLMDataDist.init` completes them.
    """

    def __init__(self, llm_datadist: LlmDataDist, options: dict[str, str]) -> None:
        self._llm_datadist = llm_datadist
        self._initialized = True
        self._is_call_linked = False
        self._pools = {Placement.DEVICE: options.get(POOL), Placement.HOST: options.get(HOST_POOL)}
        self._enable_remote_cache_accessible = options.get(REMOTE_ACCESS) == "1"
        self._wait_time_ms = wait_time_ms(options)

    @property
    def _engine(self) -> LlmDataDist:
        if not self._initialized:
            raise invalid("the LLMDataDist of this cache manager is finalized")
        return self._llm_datadist

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Refuse a key that does not name either a request or a prefix."""
        check_isinstance("cache_key", cache_key, CacheKey, allow_none=False)
        if is_invalid_id(cache_key.req_id) is is_invalid_id(cache_key.prefix_id):
            raise invalid(f"{cache_key} must name either a request (req_id) or a prefix")

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: CacheKeys = ()) -> Cache:
        """Make a contiguous cache in the pool of its placement.

        It lives as long as its id (`deallocate_cache`) and each of its keys (`remove_cache_key`, or
        a pull).

        Args:
            cache_desc: its description.
            cache_keys: key i names slot i; one with req_id=2**64-1 skips a slot.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY; LLM_PARAM_INVALID: no pool for this placement, more
                keys than slots, or a key that is taken.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
        check_isinstance("cache_keys", cache_keys, [list, tuple], CacheKey, allow_none=False)
        self._check_pool(cache_desc)
        keys = [key_of(key) for key in cache_keys]
        made = self._engine.allocate_cache(desc_of(cache_desc), keys)
        return self._made(made, cache_desc, is_registered=False, is_blocks=False)

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
        check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        self._check_pool(cache_desc)
        key = None if blocks_cache_key is None else key_of(blocks_cache_key)
        made = self._engine.allocate_blocks_cache(desc_of(cache_desc), key)
        return self._made(made, cache_desc, is_registered=False, is_blocks=True)

    def deallocate_cache(self, cache: Cache) -> None:
        """Free a contiguous cache that was allocated; it lives on by its keys. Repeating is fine.

        Raises:
            LLMException: LLM_PARAM_INVALID: it is paged, or was registered.
        """
        self._deallocate(cache, is_blocks=False)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Free a paged cache that was allocated. Repeating is fine.

        Raises:
            LLMException: LLM_PARAM_INVALID: it is contiguous, or was registered.
        """
        self._deallocate(cache, is_blocks=True)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Forget a key of an allocated cache; an unknown one is fine."""
        check_isinstance("cache_key", cache_key, CacheKey, allow_none=False)
        self._engine.remove_cache_key(key_of(cache_key))

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: CacheKeys = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Make a contiguous cache of memory that the caller keeps until it is unregistered.

        Args:
            cache_desc: its description.
            addrs: one for each tensor.
            cache_keys: key i names slot i; they are never consumed.
            remote_accessible: whether peers may reach it. None: in request mode yes; in remote mode
                Placement.DEVICE, unless `LLMDataDist.link` was called.

        Raises:
            LLMException: LLM_PARAM_INVALID: addresses that do not fit the description, or are not
                mapped; a key that is taken; remote_accessible=True after `LLMDataDist.link`.
        """
        check_isinstance("cache_keys", cache_keys, [tuple, list], CacheKey, allow_none=False)
        accessible = self._check_registered(cache_desc, addrs, remote_accessible)
        made = self._engine.register_cache(
            desc_of(cache_desc),
            addrs,
            [key_of(key) for key in cache_keys],
            remote_accessible=accessible,
        )
        return self._made(made, cache_desc, is_registered=True, is_blocks=False)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Make a paged cache of memory that the caller keeps until it is unregistered.

        Arguments and errors as for `register_cache`; `blocks_cache_key` names the whole cache.
        """
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        accessible = self._check_registered(cache_desc, addrs, remote_accessible)
        key = None if blocks_cache_key is None else key_of(blocks_cache_key)
        made = self._engine.register_blocks_cache(
            desc_of(cache_desc), addrs, key, remote_accessible=accessible
        )
        return self._made(made, cache_desc, is_registered=True, is_blocks=True)

    def unregister_cache(self, cache_id: int) -> None:
        """End a registered cache; an unknown id is fine.

        Raises:
            LLMException: LLM_PARAM_INVALID: it was allocated.
        """
        check_int64("cache_id", cache_id)
        self._engine.unregister_cache(int(cache_id))

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Check anew how registered memory is mapped, and offer its caches to the peers anew.

        For memory that was repaired: transfers before this fail, transfers after it work.

        Args:
            mem_infos: of Memtype.MEM_TYPE_DEVICE, inside of registered caches.

        Raises:
            LLMException: LLM_NOT_YET_LINK: no link lives; LLM_PARAM_INVALID: also for another type.
        """
        infos = mem_infos if isinstance(mem_infos, list) else [mem_infos]
        for position, it in enumerate(infos):
            if not isinstance(it, MemInfo):
                raise invalid(f"mem_infos[{position}]={it!r} must be MemInfo")
            if it.mem_type is not Memtype.MEM_TYPE_DEVICE or it.addr == 0 or it.size <= 0:
                raise invalid(
                    f"mem_infos[{position}]={it} must be MEM_TYPE_DEVICE, with addr != 0, size > 0"
                )
        self._engine.remap_registered_memory([(int(it.addr), int(it.size)) for it in infos])

    def set_is_call_linked(self) -> None:
        """Say that `LLMDataDist.link` was called; see `register_cache`."""
        self._is_call_linked = True

    def _check_pool(self, cache_desc: CacheDesc) -> None:
        if cache_desc.num_tensors < 1:
            raise invalid(f"num_tensors={cache_desc.num_tensors} must be > 0")
        check_isinstance("placement", cache_desc.placement, Placement, allow_none=False)
        if not self._pools[cache_desc.placement]:
            option = POOL if cache_desc.placement is Placement.DEVICE else HOST_POOL
            raise invalid(
                f"a cache of {cache_desc.placement} is allocated in a pool: give {option}"
            )

    def _check_registered(
        self, cache_desc: CacheDesc, addrs: list[int], remote_accessible: bool | None
    ) -> bool:
        check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
        check_isinstance("addrs", addrs, list, int, allow_none=False)
        check_isinstance("remote_accessible", remote_accessible, bool)
        if remote_accessible and self._is_call_linked:
            raise invalid("remote_accessible=True: caches must be registered before link")
        if len(addrs) != cache_desc.num_tensors or not all(addrs):
            raise invalid(
                f"addrs={shown(addrs)} must be num_tensors={cache_desc.num_tensors} addresses, "
                "none zero"
            )
        if min(addrs) < 0 or max(addrs) > UINT64_MAX:
            raise TypeError(f"addrs={shown(addrs)}: an address is in [1, 2**64)")
        if remote_accessible is not None:
            return remote_accessible
        if not self._enable_remote_cache_accessible:
            return True  # what the original's peers pull from any cache, through its buffers
        return cache_desc.placement is Placement.DEVICE and not self._is_call_linked

    def _deallocate(self, cache: Cache, *, is_blocks: bool) -> None:
        check_isinstance("cache", cache, Cache, allow_none=False)
        check_kind("cache", cache, is_blocks=is_blocks)
        self._engine.deallocate_cache(cache_of(cache))
        cache._tensor_addrs = []
        cache._valid = False

    def _made(
        self, made: kvplan.Cache, cache_desc: CacheDesc, *, is_registered: bool, is_blocks: bool
    ) -> Cache:
        log.info("cache %d is made of %s", made.cache_id, cache_desc)
        addrs = list(made.tensor_addrs)
        cache = Cache(made.cache_id, cache_desc, addrs, self, is_registered, is_blocks)
        cache._engine_cache = made
        return cache
