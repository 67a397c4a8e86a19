"""The transfer methods of the reference's interface; each makes one `Transfer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Unpack

from kvplan.engine.shares import PEERS
from kvplan.engine.transfers import TransferOperations
from kvplan.planning.blocks import BlockPairs, pair_tables
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.planning.texts import rename
from kvplan.planning.transfer import PeerTensors, Rows, Transfer
from kvplan.status import LLMException, invalid
from kvplan.types import BlocksCacheKey, Cache, CacheIndex, CacheKey, KvCacheExtParam, Placement
from kvplan.validation import as_int, check_type, shown

if TYPE_CHECKING:
    from kvplan.engine.operation import RunOptions
    from kvplan.lease import BlockLease
    from kvplan.planning import Coalesce
    from kvplan.planning.blocks import Blocks
    from kvplan.planning.planner import Local
    from kvplan.types import AnyCacheKey


PARAMETERS: Final = {
    "src.blocks": "src_blocks", "dst.blocks": "dst_blocks",
    "src.first_token": "src_token", "dst.first_token": "dst_token",
    "src.slot": "src_batch_index", "dst.slot": "dst_batch_index",
    "src.offset": "src_offset", "dst.offset": "dst_offset", "nbytes": "size",
}  # fmt: skip
"""The parameter that each field of a transfer comes from."""

_OF_COPIES: Final = {**PARAMETERS, "src.offset": "offset", "dst.offset": "offset"}


class InterfaceOperations(TransferOperations):
    """Pulls, pushes, copies and swaps with the names and argument order of the reference.

    Each method calls `run` with a `Transfer`, takes the options of `run`, and raises its errors.
    """

    def pull_cache(
        self,
        src: CacheIndex | CacheKey | BlockLease,
        dst: Cache,
        dst_batch_index: int = 0,
        size: int = -1,
        layers: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        """Pull a slot of a remote cache into a slot of a local one.

        Args:
            src: the remote slot, or a lease of it.
            dst: the local cache.
            dst_batch_index: the local slot.
            size: bytes of a row to pull; -1: the rest of the local row.
            layers, num_tokens, coalesce, reinterpret: see `Transfer`.
            src_offset, dst_offset: first byte of the row on each side.

        Raises:
            TypeError, ValueError, LLMException: see `run`.
        """
        self._move(
            "dst",
            Transfer(
                Rows(src, None, None, 0, src_offset),
                Rows(dst, None, dst_batch_index, 0, dst_offset),
                num_tokens, _nbytes(size), layers, reinterpret, coalesce,
            ),
            PARAMETERS,
            options,
        )  # fmt: skip

    def pull_blocks(
        self,
        src: AnyCacheKey | BlockLease,
        dst: Cache,
        src_blocks: Blocks | None,
        dst_blocks: Blocks,
        layers: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        """Pull blocks of a remote paged cache, or a remote slot, into blocks of a local one.

        Args:
            src: the remote cache or slot, or a lease.
            dst: the local paged cache.
            src_blocks: remote blocks with the tokens for `dst_blocks`. None or empty: `src` names
                a slot, which is cut into blocks. None with a lease: all blocks of the lease.
            dst_blocks: local blocks.
            layers, num_tokens, coalesce, reinterpret: see `Transfer`.
            src_token, dst_token: tokens to skip at the start of each block table.

        Raises:
            TypeError, ValueError, LLMException: see `run`.
        """
        if dst_blocks is None:
            raise TypeError("dst_blocks is None; it must name blocks of dst")
        self._move(
            "dst",
            Transfer(
                Rows(src, src_blocks, None, src_token), Rows(dst, dst_blocks, None, dst_token),
                num_tokens, None, layers, reinterpret, coalesce,
            ),
            PARAMETERS,
            options,
        )  # fmt: skip

    def push_cache(
        self,
        src: Cache,
        dst: CacheIndex | BlockLease | PeerTensors,
        src_batch_index: int = 0,
        size: int = -1,
        layers: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        """Push a slot of a local cache into a slot of a remote one.

        Args:
            src: the local cache.
            dst: the remote slot, a lease of it, or addresses.
            src_batch_index: the local slot.
            size: bytes of a row to push; -1: the rest of the local row.
            layers, num_tokens, coalesce, reinterpret: see `Transfer`.
            src_offset, dst_offset: first byte of the row on each side.

        Raises:
            TypeError, ValueError, LLMException: see `run`.
        """
        self._move(
            "src",
            Transfer(
                Rows(src, None, src_batch_index, 0, src_offset),
                Rows(dst, None, None, 0, dst_offset),
                num_tokens, _nbytes(size), layers, reinterpret, coalesce,
            ),
            PARAMETERS,
            options,
        )  # fmt: skip

    def push_blocks(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey | BlockLease | PeerTensors,
        src_blocks: Blocks,
        dst_blocks: Blocks | None = None,
        layers: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        """Push blocks of a local paged cache into blocks of a remote one.

        Args:
            src: the local paged cache.
            dst: the remote paged cache, a lease of blocks, or addresses.
            src_blocks: local blocks.
            dst_blocks: remote blocks for the tokens of `src_blocks`; None: all blocks of a lease.
            layers, num_tokens, coalesce, reinterpret: see `Transfer`.
            src_token, dst_token: tokens to skip at the start of each block table.

        Raises:
            TypeError, ValueError, LLMException: see `run`.
        """
        self._move(
            "src",
            Transfer(
                Rows(src, src_blocks, None, src_token), Rows(dst, dst_blocks, None, dst_token),
                num_tokens, None, layers, reinterpret, coalesce,
            ),
            PARAMETERS,
            options,
        )  # fmt: skip

    def copy_cache(
        self,
        src: Cache,
        dst: Cache,
        src_batch_index: int = 0,
        dst_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        """Copy a slot into another, within a cache or between two, in any placement.

        Args:
            src, dst: the caches.
            src_batch_index, dst_batch_index: the slots.
            offset: first byte of the row, on both sides.
            size: bytes to copy; -1: the rest of the source row.
            coalesce, reinterpret: see `Transfer`.

        Raises:
            TypeError, ValueError, LLMException: see `run`.
        """
        self._move(
            "both",
            Transfer(
                Rows(src, None, src_batch_index, 0, offset),
                Rows(dst, None, dst_batch_index, 0, offset),
                None, _nbytes(size), ALL_LAYERS, reinterpret, coalesce,
            ),
            _OF_COPIES,
            options,
        )  # fmt: skip

    def copy_blocks(
        self,
        cache: Cache,
        blocks: Mapping[int, Sequence[int]] | BlockPairs,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        **options: Unpack[RunOptions],
    ) -> None:
        """Copy blocks of a paged cache, each to any number of other blocks of the cache.

        Args:
            cache: a cache of this engine.
            blocks: source block -> destination blocks; or pairs of source and destination block;
                or an array or tensor with these two columns.
            coalesce: see `Transfer`.

        Raises:
            TypeError, ValueError, LLMException: see `run`.
        """
        src, dst = pair_tables("blocks", blocks)
        transfer = Transfer(Rows(cache, src), Rows(cache, dst), coalesce=coalesce)
        self._move("both", transfer, _of_pairs("blocks"), options)

    def swap_blocks(
        self,
        src: Cache,
        dst: Cache,
        src_to_dst: Mapping[int, int] | BlockPairs,
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        """Copy blocks from a host cache to a device cache (in), or the other way round (out).

        Args:
            src, dst: paged caches, one of each placement.
            src_to_dst: source block -> destination block; or pairs, as in `copy_blocks`.
            coalesce, reinterpret: see `Transfer`.

        Raises:
            TypeError, ValueError: see `run`.
            LLMException: see `run`; LLM_PARAM_INVALID: also two caches of the same placement.
        """
        placements = [
            check_type(name, cache, Cache).cache_desc.placement
            for name, cache in (("src", src), ("dst", dst))
        ]
        if {*placements} != {Placement.HOST, Placement.DEVICE}:
            raise invalid(
                f"src placement={placements[0].name} and dst placement={placements[1].name}: a "
                "swap needs one HOST and one DEVICE"
            )
        read, written = pair_tables("src_to_dst", src_to_dst)
        self._move(
            "both",
            Transfer(
                Rows(src, read), Rows(dst, written), reinterpret=reinterpret, coalesce=coalesce
            ),
            _of_pairs("src_to_dst"),
            options,
        )

    def _move(
        self, local: Local, transfer: Transfer[Rows], names: Mapping[str, str], options: RunOptions
    ) -> None:
        """Run the transfer of a method, and name the method's arguments in its errors.

        Refuses src and dst in the wrong order, which would move bytes the other way.
        """
        if local != "both":
            theirs, ours = (transfer.src.cache, transfer.dst.cache)
            if local == "src":
                theirs, ours = ours, theirs
            if type(ours) is not Cache:
                check_type(local, ours, Cache)
            if not isinstance(theirs, PEERS):
                field = "src" if local == "dst" else "dst"
                raise TypeError(
                    f"{field}={shown(theirs)} must be a key of a peer's cache, a BlockLease or "
                    f"PeerTensors, not {type(theirs).__name__}"
                )
        try:
            self.run(transfer, **options)
        except (LLMException, TypeError, ValueError) as error:
            rename(error, names)
            raise


def _of_pairs(argument: str) -> dict[str, str]:
    """Map the fields that pairs of blocks fill to their names in errors."""
    return {"src.blocks": f"{argument}.sources", "dst.blocks": f"{argument}.destinations"}


def _nbytes(size: int) -> int | None:
    """Convert a size of the interface, where -1 is the rest of the row, to `Transfer.nbytes`."""
    size = size if type(size) is int else as_int("size", size)
    return None if size == -1 else size
