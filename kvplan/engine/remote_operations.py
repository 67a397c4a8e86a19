"""Operations between a cache of this process and one of a peer: pull and push."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.engine import operations
from kvplan.engine.running import Running
from kvplan.planning.planner import ALL_LAYERS, DEFAULT_COALESCE

if TYPE_CHECKING:
    from kvplan.execution import TransferTask
    from kvplan.planning import Coalesce, Plan
    from kvplan.planning.selection import Blocks
    from kvplan.types import (
        AnyCacheKey,
        BlocksCacheKey,
        Cache,
        CacheIndex,
        CacheKey,
        KvCacheExtParam,
    )


class RemoteOperations(Running):
    """Each operation three times: executed, only planned, and submitted.

    All layers of an operation are one plan and one submission. Each may raise the following.

    Raises:
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID: a slot, block, size or layer out of range, a cache of the
            wrong kind, or this engine's own cluster; LLM_NOT_YET_LINK: no link to that cluster;
            LLM_LINK_FAILED: it is broken, or broke meanwhile; LLM_KV_CACHE_NOT_EXIST: no such cache
            here, or no such cache, slot or key there (any more); LLM_REPEAT_REQUEST: the key is
            being pulled; LLM_TIMEOUT: the time has passed; LLM_FAILED: not initialized;
            LLM_ENGINE_FINALIZED.
    """

    def pull_cache(
        self,
        src: CacheIndex | CacheKey,
        dst: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> None:
        """Pull a slot of a remote cache into a slot of a local one.

        A request's CacheKey is consumed by the pull that has brought the last of its tensors; a
        prefix's, and an index, never.

        Args:
            src: the remote slot.
            dst: the local cache; only its id matters, if it has one.
            batch_index: the local slot.
            size: bytes of a row to pull; -1: all of the local row, from its offset on.
            ext_param: the layers.
            src_offset, dst_offset: bytes into the row at which to begin.
            timeout_ms: milliseconds that the transfer may take; None: SyncKvCacheWaitTime.
            coalesce: how slices become segments.
        """
        self._execute(
            operations.pull_cache,
            timeout_ms,
            src,
            dst,
            batch_index,
            size,
            ext_param,
            src_offset,
            dst_offset,
            coalesce,
        )

    def plan_pull_cache(
        self,
        src: CacheIndex | CacheKey,
        dst: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> Plan:
        """Plan `pull_cache` with the peer's own description; nothing moves, no key is claimed."""
        return self._plan(
            operations.pull_cache,
            src,
            dst,
            batch_index,
            size,
            ext_param,
            src_offset,
            dst_offset,
            coalesce,
        )

    def submit_pull_cache(
        self,
        src: CacheIndex | CacheKey,
        dst: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> TransferTask:
        """Begin `pull_cache` and return its task; the key is claimed until the outcome."""
        return self._submit(
            operations.pull_cache,
            src,
            dst,
            batch_index,
            size,
            ext_param,
            src_offset,
            dst_offset,
            coalesce,
        )

    def pull_blocks(
        self,
        src: AnyCacheKey,
        dst: Cache,
        src_blocks: Blocks | None,
        dst_blocks: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> None:
        """Pull into blocks of a local paged cache, from blocks of a remote one or from a slot.

        Args:
            src: the remote paged cache, or slot.
            dst: the local paged cache; only its id matters, if it has one.
            src_blocks: remote blocks, one for each of `dst_blocks`. None or empty: `src` is a slot,
                cut into chunks of one block; chunk i goes to `dst_blocks[i]`.
            dst_blocks: local blocks.
            ext_param: the layers.
            timeout_ms: milliseconds that the transfer may take; None: SyncKvCacheWaitTime.
            coalesce: how slices become segments.
        """
        self._execute(
            operations.pull_blocks,
            timeout_ms,
            src,
            dst,
            src_blocks,
            dst_blocks,
            ext_param,
            coalesce,
        )

    def plan_pull_blocks(
        self,
        src: AnyCacheKey,
        dst: Cache,
        src_blocks: Blocks | None,
        dst_blocks: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> Plan:
        """Plan `pull_blocks` with the peer's own description; nothing moves, no key is claimed."""
        return self._plan(
            operations.pull_blocks, src, dst, src_blocks, dst_blocks, ext_param, coalesce
        )

    def submit_pull_blocks(
        self,
        src: AnyCacheKey,
        dst: Cache,
        src_blocks: Blocks | None,
        dst_blocks: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> TransferTask:
        """Begin `pull_blocks` and return its task; the key is claimed until the outcome."""
        return self._submit(
            operations.pull_blocks, src, dst, src_blocks, dst_blocks, ext_param, coalesce
        )

    def push_cache(
        self,
        src: Cache,
        dst: CacheIndex,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> None:
        """Push a slot of a local cache into a slot of a remote one.

        Args:
            src: the local cache; only its id matters, if it has one.
            dst: the remote slot.
            src_batch_index: the local slot.
            size: -1: the whole row; nothing else, as in the reference.
            ext_param: the layers.
            timeout_ms: milliseconds that the transfer may take; None: SyncKvCacheWaitTime.
            coalesce: how slices become segments.
        """
        self._execute(
            operations.push_cache, timeout_ms, src, dst, src_batch_index, size, ext_param, coalesce
        )

    def plan_push_cache(
        self,
        src: Cache,
        dst: CacheIndex,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> Plan:
        """Plan `push_cache` with the peer's own description; nothing moves."""
        return self._plan(
            operations.push_cache, src, dst, src_batch_index, size, ext_param, coalesce
        )

    def submit_push_cache(
        self,
        src: Cache,
        dst: CacheIndex,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> TransferTask:
        """Begin `push_cache` and return its task."""
        return self._submit(
            operations.push_cache, src, dst, src_batch_index, size, ext_param, coalesce
        )

    def push_blocks(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> None:
        """Push blocks of a local paged cache into blocks of a remote one.

        Args:
            src: the local paged cache; only its id matters, if it has one.
            dst: the remote paged cache.
            src_blocks: local blocks.
            dst_blocks: remote blocks, one for each of `src_blocks`.
            ext_param: the layers.
            timeout_ms: milliseconds that the transfer may take; None: SyncKvCacheWaitTime.
            coalesce: how slices become segments.
        """
        self._execute(
            operations.push_blocks,
            timeout_ms,
            src,
            dst,
            src_blocks,
            dst_blocks,
            ext_param,
            coalesce,
        )

    def plan_push_blocks(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> Plan:
        """Plan `push_blocks` with the peer's own description; nothing moves."""
        return self._plan(
            operations.push_blocks, src, dst, src_blocks, dst_blocks, ext_param, coalesce
        )

    def submit_push_blocks(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> TransferTask:
        """Begin `push_blocks` and return its task."""
        return self._submit(
            operations.push_blocks, src, dst, src_blocks, dst_blocks, ext_param, coalesce
        )
