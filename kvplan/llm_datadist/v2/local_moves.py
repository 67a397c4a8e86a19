"""Moves between caches of this process as the original has them: copy and swap."""

from __future__ import annotations

from kvplan.llm_datadist.conversion import cache_of
from kvplan.llm_datadist.utils.utils import (
    check_dict,
    check_isinstance,
    check_uint32,
    check_uint64,
)
from kvplan.llm_datadist.v2.block_tables import copies_of, last_wins
from kvplan.llm_datadist.v2.cache_book import CacheBook
from kvplan.llm_datadist.v2.llm_types import Cache
from kvplan.llm_datadist.v2.move_checks import check_alike, check_kind, check_size


class LocalMoves(CacheBook):
    """The part of `CacheManager` that moves bytes inside of this process; see there."""

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
            dst, src: the caches; mind the order.
            dst_batch_index, src_batch_index: the slots.
            offset: bytes into the row at which to begin, on both sides.
            size: bytes to copy; -1: the rest of the source row.
            req_id: whose it is; only checked.
        """
        check_isinstance("dst", dst, Cache, allow_none=False)
        check_isinstance("src", src, Cache, allow_none=False)
        check_uint32("dst_batch_index", dst_batch_index)
        check_uint32("src_batch_index", src_batch_index)
        check_uint64("offset", offset)
        check_size(size)
        check_kind("src", src, is_blocks=False)
        check_kind("dst", dst, is_blocks=False)
        if req_id is not None:
            check_uint64("req_id", req_id)
        self._engine.copy_cache(
            cache_of(src),
            cache_of(dst),
            int(src_batch_index),
            int(dst_batch_index),
            int(offset),
            int(size),
        )

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks of a paged cache, each to any number of others of it.

        Args:
            cache: the cache.
            copy_block_info: source block -> the blocks that it is copied to; empty: nothing.
        """
        check_isinstance("cache", cache, Cache, allow_none=False)
        check_isinstance("copy_block_info", copy_block_info, dict, allow_none=False)
        check_dict("copy_block_info", copy_block_info, int, list, int)
        check_kind("cache", cache, is_blocks=True)
        self._engine.copy_blocks(cache_of(cache), copies_of(copy_block_info))

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks from a host cache to a device cache (in), or the other way round (out).

        Args:
            src_cache, dst_cache: paged caches, one of each placement, with equal blocks.
            src_to_dst: source block -> destination block; empty: nothing.
        """
        check_isinstance("src_cache", src_cache, Cache, allow_none=False)
        check_isinstance("dst_cache", dst_cache, Cache, allow_none=False)
        check_kind("src_cache", src_cache, is_blocks=True)
        check_kind("dst_cache", dst_cache, is_blocks=True)
        check_isinstance("src_to_dst", src_to_dst, dict, allow_none=False)
        check_dict("src_to_dst", src_to_dst, int, int)
        check_alike("src_cache", src_cache, "dst_cache", dst_cache)
        pairs = zip(*last_wins(list(src_to_dst), list(src_to_dst.values())), strict=True)
        engine = self._engine
        if src_to_dst:
            engine.swap_blocks(
                cache_of(src_cache), cache_of(dst_cache), {int(s): int(d) for s, d in pairs}
            )
