"""The caches of this process: registered, allocated, looked at, and given back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from kvnative._signals import signals_deferred
from kvplan.device.memory import DeviceMemory
from kvplan.engine.arrays import block_checksum, read_tensors, tensor_arrays, write_tensors
from kvplan.engine.runner import OperationRunner
from kvplan.execution.memory import check_lent, using
from kvplan.lease import BlockLease
from kvplan.planning.blocks import block_indices
from kvplan.status import invalid
from kvplan.types import BlocksCacheKey, Cache, CacheDesc, CacheKey
from kvplan.validation import check_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.planning.blocks import Blocks


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """A cache as it was when asked for.

    Attributes:
        cache_id: rises by one with every attempt to make one.
        cache_desc: its description.
        paged: whether its rows are blocks.
        nbytes: of all tensors.
        allocated: by the engine; otherwise registered.
        remote_accessible: whether peers may reach it.
        deallocated: whether it lives by its keys only, or a pull by one, and its id is gone.
        age_s: seconds since it was made.
    """

    cache_id: int
    cache_desc: CacheDesc
    paged: bool
    nbytes: int
    allocated: bool
    remote_accessible: bool
    deallocated: bool
    age_s: float


@dataclass(frozen=True, slots=True)
class PeerCacheStatus:
    """A cache that a linked peer offers, as it was when asked for.

    Attributes:
        cache_id: in the peer.
        cache_desc: its description.
        paged: whether its rows are blocks.
        writable: whether it can be pushed to.
        reachable: whether the transport of the link reaches its memory.
        blocks_key: by which it is pulled from and pushed to; None: it has none.
    """

    cache_id: int
    cache_desc: CacheDesc
    paged: bool
    writable: bool
    reachable: bool
    blocks_key: BlocksCacheKey | None


class CacheOperations(OperationRunner):
    """Caches and their keys."""

    def register_cache(
        self,
        cache_desc: CacheDesc,
        tensors: Sequence[Any],
        cache_keys: Sequence[CacheKey] = (),
        *,
        remote_accessible: bool = True,
    ) -> Cache:
        """Make a contiguous cache of memory that the caller has.

        Args:
            cache_desc: its description; shape[batch_dim_index] counts slots. With an accelerator
                its placement says where the memory is.
            tensors: for each an address, whose memory the caller keeps until it is unregistered; or
                for each an array (NumPy, torch, DLPack, CUDA array interface, buffer protocol),
                which is held until then.
            cache_keys: key i names slot i; they are never consumed.
            remote_accessible: whether peers may reach it.

        Raises:
            TypeError, ValueError: an argument of another type, an address outside uint64.
            LLMException: LLM_PARAM_INVALID: tensors that do not fit the description, more than
                max_tensors, memory that is not mapped, or a key that is taken; LLM_FAILED: not
                initialized; LLM_ENGINE_FINALIZED.
        """
        return self._register(cache_desc, tensors, cache_keys, False, remote_accessible)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        tensors: Sequence[Any],
        blocks_cache_key: BlocksCacheKey | None = None,
        *,
        remote_accessible: bool = True,
    ) -> Cache:
        """Make a paged cache of memory that the caller has.

        Arguments as for `register_cache`; shape[batch_dim_index] counts blocks, and
        `blocks_cache_key` names the whole cache.

        Raises:
            TypeError, ValueError, LLMException: as `register_cache`.
        """
        return self._register(
            cache_desc, tensors, _blocks_keys(blocks_cache_key), True, remote_accessible
        )

    def unregister_cache(self, cache_id: int) -> None:
        """End a registered cache and its keys; an unknown id is fine.

        On return no byte of it is read or written any more, and no peer reports a success for it,
        whichever of several calls has ended it. What moves then is stopped, and ends with
        LLM_KV_CACHE_NOT_EXIST: transfers of this engine, and calls of other threads.

        Raises:
            TypeError, ValueError: cache_id is no int64.
            LLMException: LLM_PARAM_INVALID: it was allocated; LLM_FAILED: not initialized;
                LLM_ENGINE_FINALIZED.
        """
        with self._recorded("unregister_cache", cache=cache_id) as engine:
            engine.registry.unregister(cache_id)
            engine.leases.end_cache(cache_id)

    def remap_registered_memory(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Say that other memory was mapped at addresses of registered caches.

        Each cache that one of the ranges touches is checked to be mapped, and offered to peers
        again. Their transfers in flight fail (LLM_KV_CACHE_NOT_EXIST), and on return they know the
        cache as it is now. A peer that does not answer within SyncKvCacheWaitTime is updated
        later, and until then its transfers fail.

        Args:
            ranges: (address, nbytes) of each.

        Raises:
            TypeError: no sequence of pairs of int.
            ValueError: a number outside uint64.
            LLMException: LLM_PARAM_INVALID: no range, an empty one, or one that is not inside of
                registered caches, or not mapped: nothing has changed then; LLM_NOT_YET_LINK: no
                link stands; LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        with self._recorded("remap_registered_memory") as engine:
            engine.remap(ranges)

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """Make a contiguous cache in memory of the engine, which peers reach best.

        Args:
            cache_desc: its description; its placement's pool is used, if one is configured.
            cache_keys: key i names slot i. A request's key is consumed by the pull that has brought
                the last of its tensors. A key of neither request nor prefix skips a slot.

        Raises:
            TypeError: an argument of another type.
            LLMException: LLM_OUT_OF_MEMORY; LLM_PARAM_INVALID: more keys than slots, or one that is
                taken; LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        return self._allocate(cache_desc, cache_keys, False)

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> Cache:
        """Make a paged cache in memory of the engine, which peers reach best.

        Arguments as for `allocate_cache`; shape[batch_dim_index] counts blocks, and
        `blocks_cache_key` names the whole cache.

        Raises:
            TypeError, LLMException: as `allocate_cache`.
        """
        return self._allocate(cache_desc, _blocks_keys(blocks_cache_key), True)

    def deallocate_cache(self, cache: Cache) -> None:
        """Free an allocated cache: a paged one now, a contiguous one when its keys are gone.

        Until then it can be pulled by key, and no longer by id. Its memory stays as long as an
        array or a transfer of this process uses it. A second time, and an unknown id, are fine.

        Raises:
            TypeError: no Cache.
            LLMException: LLM_PARAM_INVALID: it was registered, or the cache of its id is another;
                LLM_KV_CACHE_NOT_EXIST: a cache of another engine; LLM_FAILED: not initialized;
                LLM_ENGINE_FINALIZED.
        """
        check_type("cache", cache, Cache)
        with self._recorded("deallocate_cache", cache=cache.cache_id) as engine, signals_deferred:
            engine.registry.check_owner(cache, "cache")
            if cache.cache_id in engine.registry.living:
                engine.registry.resolve(cache)
            engine.registry.deallocate(cache.cache_id)
            engine.leases.end_cache(cache.cache_id)

    def remove_cache_key(self, key: CacheKey) -> None:
        """Forget a key of an allocated cache; an unknown one is fine, registered ones stay.

        Raises:
            TypeError: no CacheKey.
            LLMException: LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        with self._recorded("remove_cache_key") as engine, signals_deferred:
            engine.registry.remove_key(key)

    def arrays(self, cache: Cache, *, copy: bool = False) -> list[NDArray[Any]]:
        """Return a NumPy array of each tensor, of the cache's shape.

        An allocated cache's memory lives as long as views of it do. Types that NumPy lacks
        (bfloat16, float8) come as unsigned integers of the same width; `torch.from_numpy(array)
        .view(torch.bfloat16)` reads them as what they are.

        Args:
            cache: a cache of this engine.
            copy: whether each array is a copy, also of a cache on a device; transfers in flight may
                write to the cache meanwhile. False: a view, which copies nothing.

        Raises:
            TypeError: no Cache.
            LLMException: LLM_KV_CACHE_NOT_EXIST: there is none; LLM_FEATURE_NOT_ENABLED: a view of
                memory of a device; what its device says; LLM_FAILED: not initialized;
                LLM_ENGINE_FINALIZED.
        """
        if not copy:
            entry = self._running().registry.resolve(cache)
            return tensor_arrays(entry.cache.cache_desc, entry.memory)
        with self._recorded("read_cache") as engine:
            entry = engine.registry.resolve(cache)
            return read_tensors(entry.cache.cache_desc, entry.memory)

    def fingerprint(self, cache: Cache | BlockLease, blocks: Blocks | None = None) -> list[str]:
        """Return a checksum of each block: to log, and to compare with that of another engine.

        It is BLAKE2b-64, as 16 hex digits, of the bytes that the block has in each tensor, one
        after another. So equal contents have equal checksums, whatever number the block has.

        Args:
            cache: a cache; or a lease of this engine that has not ended.
            blocks: of a paged cache, or slots of another one; None: those of the lease, or all.

        Raises:
            TypeError: an argument of another type.
            LLMException: LLM_KV_CACHE_NOT_EXIST: no such cache, or the lease has ended;
                LLM_PARAM_INVALID: a block out of range or not of the lease, or a cache that was
                registered by addresses alone; what its device says; LLM_FAILED: not
                initialized; LLM_ENGINE_FINALIZED.
        """
        with self._recorded("fingerprint") as engine:
            if isinstance(cache, BlockLease):
                entry = engine.registry.get(engine.leases.standing(cache).cache_id)
                blocks = cache.named("blocks", blocks)
            else:
                entry = engine.registry.resolve(cache)
            if entry.side is None:
                raise invalid(f"cache={cache} has no description: what its blocks are is not known")
            chosen = range(entry.side.count) if blocks is None else blocks
            table = block_indices("blocks", chosen, entry.side)
            desc, memory = entry.cache.cache_desc, entry.memory
            on_device = isinstance(memory, DeviceMemory)
            memory.check()
            tensors = (read_tensors if on_device else tensor_arrays)(desc, memory)
            axis = desc.batch_dim_index
            sums = []
            with using(memory):
                for it in table.tolist():
                    check_lent(memory)
                    sums.append(block_checksum(tensors, axis, it))
            memory.check()
            if isinstance(cache, BlockLease):
                engine.leases.standing(cache)  # it was, all the time
            return sums

    def write_cache(self, cache: Cache, arrays: Sequence[Any] | NDArray[Any]) -> None:
        """Fill each tensor, wherever the cache is.

        Args:
            cache: a cache of this engine.
            arrays: one for each tensor, of the shape that `arrays` has, and of elements as wide.

        Raises:
            TypeError: no Cache, or no sequence of arrays.
            LLMException: LLM_KV_CACHE_NOT_EXIST: there is none; LLM_PARAM_INVALID: arrays that do
                not fit, or a cache that must not be written; what its device says; LLM_FAILED: not
                initialized; LLM_ENGINE_FINALIZED.
        """
        with self._recorded("write_cache") as engine:
            entry = engine.registry.resolve(cache)
            write_tensors(entry.cache.cache_desc, entry.memory, arrays)

    @overload
    def caches(self) -> list[CacheStatus]: ...

    @overload
    def caches(self, cluster_id: int) -> list[PeerCacheStatus]: ...

    def caches(self, cluster_id: int | None = None) -> list[CacheStatus] | list[PeerCacheStatus]:
        """Return every cache that lives, by its id or its keys, in the order of ids.

        Args:
            cluster_id: of a peer: what it offers now. The peer is asked. None: those of this
                engine.

        Raises:
            LLMException: LLM_NOT_YET_LINK, LLM_LINK_FAILED: the peer is not linked; LLM_TIMEOUT:
                the peer does not answer; LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        if cluster_id is not None:
            return self._peer_caches(cluster_id)
        now = time.time()
        return [
            CacheStatus(
                cache_id=it.cache.cache_id,
                cache_desc=it.cache.cache_desc,
                paged=bool(it.paged),
                nbytes=it.cache.cache_desc.nbytes,
                allocated=it.owned,
                remote_accessible=it.remote_accessible,
                deallocated=not has_id,
                age_s=max(0.0, now - it.created),
            )
            for it, has_id in self._running().registry.entries()
        ]

    def _peer_caches(self, cluster_id: int) -> list[PeerCacheStatus]:
        link = self._running().links.get(cluster_id)
        link.sync()
        return [
            PeerCacheStatus(
                cache_id=it.cache_id,
                cache_desc=it.desc,
                paged=it.paged,
                writable=it.writable,
                reachable=bool(it.metadata),
                blocks_key=None
                if it.model_id is None
                else BlocksCacheKey(it.cluster_id, it.model_id),
            )
            for it in sorted(link.caches(), key=lambda it: it.cache_id)
        ]

    def _register(
        self,
        desc: CacheDesc,
        tensors: Sequence[Any],
        keys: Sequence[CacheKey | BlocksCacheKey],
        paged: bool,
        remote_accessible: bool,
    ) -> Cache:
        operation = "register_blocks_cache" if paged else "register_cache"
        check_type("cache_desc", desc, CacheDesc)
        with self._recorded(operation, bytes=desc.nbytes) as engine, signals_deferred:
            return engine.registry.register(
                desc, tensors, paged=paged, keys=keys, remote_accessible=remote_accessible
            ).cache

    def _allocate(
        self, desc: CacheDesc, keys: Sequence[CacheKey | BlocksCacheKey], paged: bool
    ) -> Cache:
        operation = "allocate_blocks_cache" if paged else "allocate_cache"
        check_type("cache_desc", desc, CacheDesc)
        with self._recorded(operation, bytes=desc.nbytes) as engine, signals_deferred:
            return engine.registry.allocate(desc, paged=paged, keys=keys).cache


def _blocks_keys(key: BlocksCacheKey | None) -> tuple[BlocksCacheKey, ...]:
    if key is None:
        return ()
    return (check_type("blocks_cache_key", key, BlocksCacheKey),)
