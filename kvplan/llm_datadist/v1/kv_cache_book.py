"""Caches of this process as version 1 of the original makes them, and gives them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from kvplan.llm_datadist.configs import LLMRole
from kvplan.llm_datadist.conversion import desc_of, key_of
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import check_int32, check_isinstance
from kvplan.llm_datadist.v1.tensor import Tensor
from kvplan.llm_datadist.v2.cache_book import CacheBook
from kvplan.llm_datadist.v2.engine_options import wait_time_ms
from kvplan.llm_datadist.v2.llm_types import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    KvCache,
    Placement,
)
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import NO_ID
from kvplan.types import Cache as EngineCache
from kvplan.types import CacheKey as EngineKey

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist
    from kvplan.types import CacheDesc as EngineDesc

_Keys = TypeVar("_Keys")

_POOL = "ge.flowGraphMemMaxSize"


class KvCacheBook:
    """The half of `KvCacheManager` that makes and ends caches; see there.

    Args:
        datadist: the engine.
        role: of the LLMDataDist.
        options: as `LLMDataDist.init` completes them.
    """

    def __init__(self, datadist: LlmDataDist, role: LLMRole, options: dict[str, str]) -> None:
        self._datadist = datadist
        self._role = role
        self._initialized = True
        self._wait_time_ms = wait_time_ms(options)
        pool = options.get(_POOL)
        self._pool_nbytes = None if pool is None else int(pool)
        self._allocating = Lock()

    def is_initialized(self) -> bool:
        """Whether calls are taken: the LLMDataDist is not finalized."""
        return self._initialized and self._datadist.initialized

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Refuse a key that does not name either a request or a prefix."""
        CacheBook.check_cache_key(cache_key)

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> KvCache:
        """Make a contiguous cache; of Placement.DEVICE.

        It lives as long as its id (`deallocate_cache`, or the KvCache itself) and each of its keys
        (`remove_cache_key`, or a pull).

        Args:
            cache_desc: its description.
            cache_keys: PROMPT's: key i names slot i; one with req_id=2**64-1 skips a slot, and of
                equal ones the last counts.

        Raises:
            LLMException: LLM_DEVICE_OUT_OF_MEMORY: no memory, or more than ge.flowGraphMemMaxSize;
                LLM_PARAM_INVALID: also more keys than slots, or one that is taken.
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
        """Free a cache; a contiguous one lives on by its keys. Repeating is fine."""
        self._engine.deallocate_cache(device_cache_of("cache", cache))
        cache._per_device_tensor_addrs = []
        cache._valid = False

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Forget a key; an unknown one is fine. PROMPT only."""
        self._check_role("remove_cache_key", LLMRole.PROMPT)
        check_isinstance("cache_key", cache_key, CacheKey, allow_none=False)
        self._engine.remove_cache_key(key_of(cache_key))

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return a tensor of the cache, for each of its devices.

        It is the cache's memory, nothing is copied; of a cache on an accelerator a copy.

        Raises:
            LLMException: LLM_PARAM_INVALID: no such tensor; LLM_KV_CACHE_NOT_EXIST: no such cache.
        """
        check_isinstance("cache", cache, KvCache, allow_none=False)
        check_int32("tensor_index", tensor_index)
        if not 0 <= tensor_index < cache.cache_desc.num_tensors:
            end = cache.cache_desc.num_tensors
            raise invalid(f"tensor_index={tensor_index} is out of range [0, {end})")
        held, engine = kv_cache_of("cache", cache), self._engine
        arrays = (engine.read_cache if engine.memory(held).on_device else engine.arrays)(held)
        return [Tensor._over(arrays[tensor_index], cache.cache_desc.data_type)]

    @property
    def _engine(self) -> LlmDataDist:
        if not self._initialized:
            raise invalid("the LLMDataDist of this cache manager is finalized")
        return self._datadist

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
        log.info("cache %d is made of %s", made.cache_id, cache_desc)
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


def kv_cache_of(name: str, cache: KvCache) -> EngineCache:
    """Return the cache that the engine knows.

    Raises:
        TypeError: no KvCache.
        LLMException: LLM_PARAM_INVALID: it has tensors on several devices.
    """
    check_isinstance(name, cache, KvCache, allow_none=False)
    devices = cache.per_device_tensor_addrs
    if len(devices) > 1:
        raise invalid(f"{name} has tensors on {len(devices)} devices; one is supported")
    addresses = tuple(map(int, devices[0])) if devices else ()
    return EngineCache(desc_of(cache.cache_desc), cache.cache_id, addresses)


def device_cache_of(name: str, cache: KvCache) -> EngineCache:
    """Return the cache that the engine knows; also LLM_PARAM_INVALID: it is of Placement.HOST."""
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
