"""Public methods of an engine for caches: make, read, write, list and free them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, overload

from kvnative._signals import signals_deferred
from kvplan.device.memory import DeviceMemory
from kvplan.engine.memory import block_checksum, read_tensors, tensor_arrays, write_tensors
from kvplan.engine.runner import OperationRunner
from kvplan.engine.views import LeaseView, view_lease
from kvplan.execution.memory import check_lent, using
from kvplan.lease import BlockLease
from kvplan.planning.blocks import block_indices
from kvplan.status import invalid, not_exist
from kvplan.types import BlocksCacheKey, Cache, CacheDesc, CacheKey
from kvplan.validation import as_int, check_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.planning.blocks import Blocks


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The state of a cache at the time of the call.

    Attributes:
        cache_id: unique id, in ascending order; failed attempts may use numbers up.
        cache_desc: its description.
        paged: True if its rows are blocks.
        nbytes: bytes of all tensors.
        allocated: True if the engine allocated the cache, False if the user registered it.
        remote_accessible: True if peers may reach the cache.
        deallocated: True if its id was freed and only a key or a pull keeps the cache alive.
        age_s: seconds since the cache was made.
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
    """The state of a cache of a linked peer at the time of the call.

    Attributes:
        cache_id: its id in the peer.
        cache_desc: its description.
        paged: True if its rows are blocks.
        writable: True if pushes to the cache are allowed.
        reachable: True if a transport of the link reaches its memory.
        blocks_key: the key of a paged cache; None: the cache has no key.
    """

    cache_id: int
    cache_desc: CacheDesc
    paged: bool
    writable: bool
    reachable: bool
    blocks_key: BlocksCacheKey | None


class CacheOperations(OperationRunner):
    """Methods for caches and their keys."""

    def register_cache(
        self,
        cache_desc: CacheDesc,
        tensors: Sequence[Any],
        cache_keys: Sequence[CacheKey] = (),
        *,
        remote_accessible: bool = True,
    ) -> Cache:
        """Register the caller's memory as a contiguous cache.

        Args:
            cache_desc: description; shape[batch_dim_index] is the number of slots. With an
                accelerator, the placement says where the memory is.
            tensors: an address for each tensor, whose memory the caller keeps until the cache is
                unregistered; or an array for each tensor (NumPy, torch, DLPack, CUDA array
                interface, buffer protocol), which the engine holds until then.
            cache_keys: key i names slot i; these keys are never consumed.
            remote_accessible: True if peers may reach the cache.

        Raises:
            TypeError, ValueError: an argument of the wrong type, an address outside uint64.
            LLMException: LLM_PARAM_INVALID: tensors that do not fit the description, more tensors
                than max_tensors, memory that is not mapped, or a key that is in use; LLM_FAILED:
                not initialized; LLM_ENGINE_FINALIZED.
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
        """Register the caller's memory as a paged cache.

        The arguments are as for `register_cache`, but shape[batch_dim_index] is the number of
        blocks, and `blocks_cache_key` names the whole cache.

        Raises:
            TypeError, ValueError, LLMException: see `register_cache`.
        """
        return self._register(
            cache_desc, tensors, _blocks_keys(blocks_cache_key), True, remote_accessible
        )

    def unregister_cache(self, cache_id: int) -> None:
        """Remove a registered cache and its keys; an unknown id has no effect.

        After this call no byte of the cache is read or written, and no peer reports success for it.
        The same holds if several calls remove one cache. Transfers of this engine and calls of
        other threads that use the cache stop, and raise LLM_KV_CACHE_NOT_EXIST.

        Raises:
            TypeError, ValueError: cache_id is not an int64.
            LLMException: LLM_PARAM_INVALID: the cache was allocated; LLM_FAILED: not initialized;
                LLM_ENGINE_FINALIZED.
        """
        with self._recorded("unregister_cache", cache=cache_id) as engine:
            engine.registry.unregister(cache_id)
            engine.leases.end_cache(cache_id)

    def remap_registered_memory(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Register caches again after new memory was mapped at their addresses.

        Applies to each registered cache that overlaps a range. Peers' transfers in flight fail
        (LLM_KV_CACHE_NOT_EXIST); after this call peers use the new memory. A peer that does not
        answer within SyncKvCacheWaitTime is updated later, and its transfers fail until then.

        Args:
            ranges: (address, nbytes) of each range.

        Raises:
            TypeError: not a sequence of pairs of int.
            ValueError: a number outside uint64.
            LLMException: LLM_PARAM_INVALID: no range, or a range that is empty, not inside
                registered caches, or not mapped; LLM_NOT_YET_LINK: no peer is linked; LLM_FAILED:
                not initialized; LLM_ENGINE_FINALIZED. Nothing changes then.
        """
        with self._recorded("remap_registered_memory") as engine:
            engine.remap(ranges)

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """Make a contiguous cache in memory of the engine, which peers reach fastest.

        Args:
            cache_desc: description; the memory is from the pool for its placement, if configured.
            cache_keys: key i names slot i. The pull of the last tensor consumes a request's key.
                A key without a request or prefix id skips a slot.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_OUT_OF_MEMORY; LLM_PARAM_INVALID: more keys than slots, or a key that
                is in use; LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        return self._allocate(cache_desc, cache_keys, False)

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> Cache:
        """Make a paged cache in memory of the engine, which peers reach fastest.

        The description is as for `allocate_cache`, but shape[batch_dim_index] is the number of
        blocks, and `blocks_cache_key` names the whole cache.

        Raises:
            TypeError, LLMException: see `allocate_cache`.
        """
        return self._allocate(cache_desc, _blocks_keys(blocks_cache_key), True)

    def deallocate_cache(self, cache: Cache) -> None:
        """Free an allocated cache: a paged one at once, a contiguous one after its keys are gone.

        Until then peers pull it by key, but not by id. Its memory stays as long as an array or a
        transfer of this process uses it. A freed or unknown cache has no effect.

        Raises:
            TypeError: not a Cache.
            LLMException: LLM_PARAM_INVALID: the cache was registered, or its id names another
                cache; LLM_KV_CACHE_NOT_EXIST: a cache of another engine; LLM_FAILED: not
                initialized; LLM_ENGINE_FINALIZED.
        """
        check_type("cache", cache, Cache)
        with self._recorded("deallocate_cache", cache=cache.cache_id) as engine, signals_deferred:
            engine.registry.check_owner(cache, "cache")
            if cache.cache_id in engine.registry.living:
                engine.registry.resolve(cache)
            engine.registry.deallocate(cache.cache_id)
            engine.leases.end_cache(cache.cache_id)

    def remove_cache_key(self, key: CacheKey) -> None:
        """Remove a key of an allocated cache; other keys are not affected.

        Raises:
            TypeError: not a CacheKey.
            LLMException: LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        with self._recorded("remove_cache_key") as engine, signals_deferred:
            engine.registry.remove_key(key)

    @overload
    def arrays(self, cache: Cache, *, copy: bool = False) -> list[NDArray[Any]]: ...
    @overload
    def arrays(self, cache: BlockLease) -> LeaseView: ...
    def arrays(
        self, cache: Cache | BlockLease, *, copy: bool = False
    ) -> list[NDArray[Any]] | LeaseView:
        """Return a NumPy array of each tensor, with the shape of the cache.

        For a lease of a peer on this host, return read-only views of its blocks in the peer's
        memory: `with datadist.arrays(lease) as tensors: tensors[0][2]`. The end of the `with`
        block raises LLM_KV_CACHE_NOT_EXIST if the lease has ended meanwhile.

        Memory of an allocated cache lives as long as views of it. Types that NumPy lacks (bfloat16,
        float8) become unsigned integers of the same width; `torch.from_numpy(array)
        .view(torch.bfloat16)` restores them.

        Args:
            cache: a cache of this engine, or a lease of a peer.
            copy: True: return copies, even of a cache on a device; transfers in flight may write
                to the cache meanwhile. False: return views.

        Raises:
            TypeError: neither a Cache nor a BlockLease.
            LLMException: LLM_KV_CACHE_NOT_EXIST: the cache does not exist, or the lease has ended;
                LLM_FEATURE_NOT_ENABLED: a view of device memory, or of memory of a peer that is
                not mapped here; LLM_PARAM_INVALID: a lease of this engine, or copies of a lease;
                LLM_NOT_YET_LINK; errors of the device; LLM_FAILED: not initialized;
                LLM_ENGINE_FINALIZED.
        """
        if isinstance(cache, BlockLease):
            if check_type("copy", copy, bool):
                raise invalid(f"copy=True needs a cache of this engine; pull {cache} instead")
            return view_lease(self._running(), cache)
        if not check_type("copy", copy, bool):
            entry = self._running().registry.resolve(cache)
            return tensor_arrays(entry.cache.cache_desc, entry.memory)
        with self._recorded("read_cache") as engine:
            entry = engine.registry.resolve(cache)
            return read_tensors(entry.cache.cache_desc, entry.memory)

    def fingerprint(self, cache: Cache | BlockLease, blocks: Blocks | None = None) -> list[str]:
        """Return a checksum of each block, to log or to compare between engines.

        The checksum is BLAKE2b-64, as 16 hex digits, of the block's bytes in all tensors in order.
        Blocks with equal contents have equal checksums.

        Args:
            cache: a cache, or a live lease of this engine.
            blocks: blocks of a paged cache, or slots of a contiguous one; None: those of the
                lease, or all.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_KV_CACHE_NOT_EXIST: the cache does not exist, or the lease has ended;
                LLM_PARAM_INVALID: a block out of range or not of the lease, or a cache known only
                by its addresses; errors of the device; LLM_FAILED: not initialized;
                LLM_ENGINE_FINALIZED.
        """
        with self._recorded("fingerprint") as engine:
            lease = None
            if isinstance(cache, BlockLease):
                lease = engine.leases.standing(cache)
                entry = engine.registry.get(lease.cache_id)
                blocks = cache.named("blocks", blocks)
                if lease.moves > cache.moves:
                    blocks = lease.places_of("blocks", cache, blocks)
            else:
                entry = engine.registry.resolve(cache)
            if entry.side is None:
                raise invalid(f"cache={cache} is not registered, so its blocks are unknown")
            chosen = range(entry.side.count) if blocks is None else blocks
            table = block_indices("blocks", chosen, entry.side)
            desc, memory = entry.cache.cache_desc, entry.memory
            on_device = isinstance(memory, DeviceMemory)
            memory.check()
            tensors = (read_tensors if on_device else tensor_arrays)(desc, memory)
            axis = desc.batch_dim_index
            sums = []
            with using(memory):
                for block in table.tolist():
                    check_lent(memory)
                    sums.append(block_checksum(tensors, axis, block))
            memory.check()
            if isinstance(cache, BlockLease) and engine.leases.standing(cache) is not lease:
                raise not_exist(f"{cache} has moved to other blocks meanwhile; try again")
            return sums

    def write_cache(self, cache: Cache, arrays: Sequence[Any] | NDArray[Any]) -> None:
        """Copy an array into each tensor, in host or device memory.

        Args:
            cache: a cache of this engine.
            arrays: an array for each tensor, with the shape and item size that `arrays` returns.

        Raises:
            TypeError: not a Cache, or not a sequence of arrays.
            LLMException: LLM_KV_CACHE_NOT_EXIST: the cache does not exist; LLM_PARAM_INVALID:
                arrays that do not fit, or a read-only cache; errors of the device; LLM_FAILED: not
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
        """Return all caches in order of id, including those that only keys keep alive.

        Args:
            cluster_id: the peer whose offered caches to return; None: this engine.

        Raises:
            LLMException: LLM_NOT_YET_LINK, LLM_LINK_FAILED: the peer is not linked; LLM_TIMEOUT:
                the peer does not answer; LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        if cluster_id is not None:
            return self._peer_caches(as_int("cluster_id", cluster_id))
        now = time.time()
        return [
            CacheStatus(
                cache_id=entry.cache.cache_id,
                cache_desc=entry.cache.cache_desc,
                paged=bool(entry.paged),
                nbytes=entry.cache.cache_desc.nbytes,
                allocated=entry.owned,
                remote_accessible=entry.remote_accessible,
                deallocated=not has_id,
                age_s=max(0.0, now - entry.created),
            )
            for entry, has_id in self._running().registry.entries()
        ]

    def _peer_caches(self, cluster_id: int) -> list[PeerCacheStatus]:
        link = self._running().links.get(cluster_id)
        link.sync()
        return [
            PeerCacheStatus(
                cache_id=cache.cache_id,
                cache_desc=cache.desc,
                paged=cache.paged,
                writable=cache.writable,
                reachable=bool(cache.offers),
                blocks_key=None
                if cache.model_id is None
                else BlocksCacheKey(cache.cluster_id, cache.model_id),
            )
            for cache in sorted(link.caches(), key=attrgetter("cache_id"))
        ]

    def _register(
        self,
        desc: CacheDesc,
        tensors: Sequence[Any],
        keys: Sequence[CacheKey | BlocksCacheKey],
        paged: bool,
        remote_accessible: bool,
        name: str = "",
    ) -> Cache:
        operation = "register_blocks_cache" if paged else "register_cache"
        check_type("cache_desc", desc, CacheDesc)
        with self._recorded(operation, bytes=desc.nbytes) as engine, signals_deferred:
            return engine.registry.register(
                desc,
                tensors,
                paged=paged,
                keys=keys,
                remote_accessible=remote_accessible,
                name=name,
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
