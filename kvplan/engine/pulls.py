"""Pulls: from a cache of a peer into one of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.engine.runner import Operation, OperationRunner, Prepared, only_moves
from kvplan.lease import BlockLease
from kvplan.planning.blocks import are_whole, read_blocks
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.planner import plan_pull_blocks, plan_pull_cache
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.types import BlocksCacheKey, CacheIndex, CacheKey

if TYPE_CHECKING:
    from kvplan.execution import ComputeEvent, TransferTask
    from kvplan.planning import Coalesce, Plan
    from kvplan.planning.blocks import Blocks
    from kvplan.types import AnyCacheKey, Cache, KvCacheExtParam


class PullOperations(OperationRunner):
    """Each operation three times: executed, only planned, and submitted.

    All layers of an operation are one plan and one submission.
    """

    def pull_cache(
        self,
        src: CacheIndex | CacheKey | BlockLease,
        dst: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        verify: bool = False,
        tag: str = "",
    ) -> None:
        """Pull a slot of a remote cache into a slot of a local one.

        A request's CacheKey is consumed by the pull that has brought the last of its tensors; a
        prefix's, and an index, never.

        Args:
            src: the remote slot, or a lease of it.
            dst: the local cache.
            batch_index: the local slot.
            size: bytes of a row to pull; -1: all of the local row, from its offset on.
            ext_param: the layers.
            src_offset, dst_offset: bytes into the row at which to begin.
            num_tokens: tokens of the row that are moved, instead of bytes; None: as `size` says.
            timeout_ms: milliseconds that the transfer may take; None: SyncKvCacheWaitTime.
            coalesce: how slices become segments.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.
            notify: sent to the peer when every byte has arrived, 1 to 4096 bytes: the call
                succeeds when its engine has it. None: nothing is sent.
            notify_failure: sent instead if the transfer fails and the link stands.
            verify: read all that has moved again, and compare it with the other side: LLM_FAILED
                names what differs. Not on devices. False: as option `kvplan.verify` says.
            tag: what logs and recordings call the transfer, such as the id of the request: at most
                128 printable characters.

        Raises:
            TypeError: an argument of another type.
            ValueError: timeout_ms is < 0 or not a number; a number outside its C type.
            LLMException: LLM_PARAM_INVALID: a slot, size, token or layer out of range, a paged
                cache, caches that cannot match, or this engine's own cluster; LLM_NOT_YET_LINK:
                no link to that cluster; LLM_LINK_FAILED: it is broken, or broke meanwhile;
                LLM_KV_CACHE_NOT_EXIST: no such cache here, or no such cache, slot or key there
                (any more), or the lease has ended; LLM_REPEAT_REQUEST: the key is being pulled;
                LLM_FEATURE_NOT_ENABLED: the link does not reach the memory; LLM_TIMEOUT: the
                time has passed; LLM_LINK_BUSY: the peer's program reads no notifications;
                LLM_FAILED: not initialized, or `verify` found other bytes;
                LLM_ENGINE_FINALIZED.
        """
        if (
            isinstance(src, CacheIndex)
            and type(size) is int
            and size == -1
            and only_moves(reinterpret, verify, timeout_ms, notify, notify_failure, tag)
            and are_whole(num_tokens, coalesce, src_offset, dst_offset)
            and self._move_now(
                "pull_cache", src, dst, (src.batch_index,), (batch_index,), ext_param
            )
        ):
            return
        with Operation(
            self._running(),
            "pull_cache",
            notify=notify,
            notify_failure=notify_failure,
            verify=verify,
            tag=tag,
        ) as operation:
            while not operation.done:
                prepared = _pull_cache(
                    operation, src, dst, batch_index, size, ext_param, src_offset, dst_offset,
                    num_tokens, coalesce, reinterpret,
                )  # fmt: skip
                self._execute(operation, prepared, timeout_ms)

    def plan_pull_cache(
        self,
        src: CacheIndex | CacheKey | BlockLease,
        dst: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
    ) -> Plan:
        """Plan `pull_cache` with the peer's own description; nothing moves, no key is claimed.

        Raises:
            TypeError, ValueError, LLMException: as `pull_cache`, before anything moves.
        """
        operation = Operation(self._running(), "pull_cache")
        return _pull_cache(
            operation, src, dst, batch_index, size, ext_param, src_offset, dst_offset, num_tokens,
            coalesce, reinterpret,
        )[0]  # fmt: skip

    def submit_pull_cache(
        self,
        src: CacheIndex | CacheKey | BlockLease,
        dst: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        verify: bool = False,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> TransferTask:
        """Begin `pull_cache` and return its task; the key is claimed until the outcome.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves
                before that work is done. None: nothing to come after.

        Raises:
            TypeError, ValueError: as `pull_cache`.
            LLMException: as `pull_cache`, before anything moves; LLM_LINK_BUSY: nobody takes
                the tasks that have ended from `completions()`. What fails later the task
                raises.
        """
        with Operation(
            self._running(),
            "pull_cache",
            notify=notify,
            notify_failure=notify_failure,
            verify=verify,
            tag=tag,
            after=after,
        ) as operation:
            prepared = _pull_cache(
                operation, src, dst, batch_index, size, ext_param, src_offset, dst_offset,
                num_tokens, coalesce, reinterpret,
            )  # fmt: skip
            return self._submit(operation, prepared)

    def pull_blocks(
        self,
        src: AnyCacheKey | BlockLease,
        dst: Cache,
        src_blocks: Blocks | None,
        dst_blocks: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        verify: bool = False,
        tag: str = "",
    ) -> None:
        """Pull into blocks of a local paged cache, from blocks of a remote one or from a slot.

        Args:
            src: the remote paged cache, or slot; or a lease, which names blocks.
            dst: the local paged cache.
            src_blocks: remote blocks, one for each of `dst_blocks`. None or empty: `src` is a slot,
                cut into chunks of one block; chunk i goes to `dst_blocks[i]`. Of a lease None: all
                that it names.
            dst_blocks: local blocks. Empty, with `src_blocks` that are too: no bytes are moved.
            ext_param: the layers.
            num_tokens: tokens of the request that are moved; None: whole blocks. It needs a layout
                on both sides (`kv_tensor_format`), as does anything that lies differently there.
            src_token, dst_token: tokens of the block tables to skip, on each side.
            timeout_ms: milliseconds that the transfer may take; None: SyncKvCacheWaitTime.
            coalesce: how slices become segments.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.
            notify: sent to the peer when every byte has arrived, 1 to 4096 bytes: the call
                succeeds when its engine has it. None: nothing is sent.
            notify_failure: sent instead if the transfer fails and the link stands.
            verify: read all that has moved again, and compare it with the other side: LLM_FAILED
                names what differs. Not on devices. False: as option `kvplan.verify` says.
            tag: what logs and recordings call the transfer, such as the id of the request: at most
                128 printable characters.

        Raises:
            TypeError: an argument of another type.
            ValueError: timeout_ms is < 0 or not a number; a number outside its C type.
            LLMException: LLM_PARAM_INVALID: a block, token or layer out of range, block tables
                of unequal length, a local block named twice, a contiguous local cache, caches
                that cannot match, or this engine's own cluster; LLM_NOT_YET_LINK: no link to
                that cluster; LLM_LINK_FAILED: it is broken, or broke meanwhile;
                LLM_KV_CACHE_NOT_EXIST: no such cache here, or no such cache or key there (any
                more), or the lease has ended; LLM_REPEAT_REQUEST: the key is being pulled;
                LLM_FEATURE_NOT_ENABLED: the link does not reach the memory; LLM_TIMEOUT: the
                time has passed; LLM_LINK_BUSY: the peer's program reads no notifications;
                LLM_FAILED: not initialized, or `verify` found other bytes;
                LLM_ENGINE_FINALIZED.
        """
        if (
            src_blocks is not None
            and are_whole(num_tokens, coalesce, src_token, dst_token)
            and only_moves(reinterpret, verify, timeout_ms, notify, notify_failure, tag)
            and self._move_now("pull_blocks", src, dst, src_blocks, dst_blocks, ext_param)
        ):
            return
        with Operation(
            self._running(),
            "pull_blocks",
            speculative=True,
            notify=notify,
            notify_failure=notify_failure,
            verify=verify,
            tag=tag,
        ) as operation:
            while not operation.done:
                prepared = _pull_blocks(
                    operation, src, dst, src_blocks, dst_blocks, num_tokens, src_token, dst_token,
                    ext_param, coalesce, reinterpret,
                )  # fmt: skip
                self._execute(operation, prepared, timeout_ms)

    def plan_pull_blocks(
        self,
        src: AnyCacheKey | BlockLease,
        dst: Cache,
        src_blocks: Blocks | None,
        dst_blocks: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
    ) -> Plan:
        """Plan `pull_blocks` with the peer's own description; nothing moves, no key is claimed.

        Raises:
            TypeError, ValueError, LLMException: as `pull_blocks`, before anything moves.
        """
        operation = Operation(self._running(), "pull_blocks")
        return _pull_blocks(
            operation, src, dst, src_blocks, dst_blocks, num_tokens, src_token, dst_token,
            ext_param, coalesce, reinterpret,
        )[0]  # fmt: skip

    def submit_pull_blocks(
        self,
        src: AnyCacheKey | BlockLease,
        dst: Cache,
        src_blocks: Blocks | None,
        dst_blocks: Blocks,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        verify: bool = False,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> TransferTask:
        """Begin `pull_blocks` and return its task; the key is claimed until the outcome.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves
                before that work is done. None: nothing to come after.

        Raises:
            TypeError, ValueError: as `pull_blocks`.
            LLMException: as `pull_blocks`, before anything moves; LLM_LINK_BUSY: nobody takes
                the tasks that have ended from `completions()`. What fails later the task
                raises.
        """
        with Operation(
            self._running(),
            "pull_blocks",
            notify=notify,
            notify_failure=notify_failure,
            verify=verify,
            tag=tag,
            after=after,
        ) as operation:
            prepared = _pull_blocks(
                operation, src, dst, src_blocks, dst_blocks, num_tokens, src_token, dst_token,
                ext_param, coalesce, reinterpret,
            )  # fmt: skip
            return self._submit(operation, prepared)


def _pull_cache(
    operation: Operation,
    src: CacheIndex | CacheKey | BlockLease,
    dst: Cache,
    batch_index: int,
    size: int,
    ext_param: KvCacheExtParam,
    src_offset: int,
    dst_offset: int,
    num_tokens: int | None,
    coalesce: Coalesce | bool,
    reinterpret: bool,
) -> Prepared:
    """A remote slot into a local one."""
    target, ours = operation.own("dst", dst, paged=False)
    source, slot, theirs = operation.peer(
        "src", src, (CacheIndex, CacheKey, BlockLease), paged=False, writable=False
    )
    whole = type(size) is int and size == -1
    if operation.moves and whole and are_whole(num_tokens, coalesce, src_offset, dst_offset):
        bound = operation.engine.transfers.rows.bind(
            "pull_cache", "C2C", source, target, theirs, ours, (slot,), (batch_index,), ext_param
        )
        if bound is not None:
            return bound[0], theirs, ours, bound[1]
    plan = plan_pull_cache(
        source,
        target,
        src_batch_index=slot,
        dst_batch_index=batch_index,
        size=size,
        src_offset=src_offset,
        dst_offset=dst_offset,
        num_tokens=num_tokens,
        ext_param=ext_param,
        coalesce=coalesce,
        reinterpret=reinterpret or operation.engine.reinterpret,
    )
    return plan, theirs, ours, None


def _pull_blocks(
    operation: Operation,
    src: AnyCacheKey | BlockLease,
    dst: Cache,
    src_blocks: Blocks | None,
    dst_blocks: Blocks,
    num_tokens: int | None,
    src_token: int,
    dst_token: int,
    ext_param: KvCacheExtParam,
    coalesce: Coalesce | bool,
    reinterpret: bool,
) -> Prepared:
    """Remote blocks, or without `src_blocks` a remote slot, into local blocks."""
    target, ours = operation.own("dst", dst, paged=True)
    if type(src) is BlockLease and src.paged:
        src_blocks, num_tokens = src.request("src_blocks", src_blocks, num_tokens, src_token)
    kinds = (CacheIndex, CacheKey, BlocksCacheKey, BlockLease)
    paged = read_blocks(src_blocks, dst_blocks)
    source, slot, theirs = operation.peer(
        "src", src, kinds, paged=paged, writable=False, table="src_blocks"
    )
    is_whole = are_whole(num_tokens, coalesce, src_token, dst_token)
    if operation.moves and source.paged and is_whole and src_blocks is not None:
        bound = operation.engine.transfers.rows.bind(
            "pull_blocks", "B2B", source, target, theirs, ours, src_blocks, dst_blocks, ext_param
        )
        if bound is not None:
            return bound[0], theirs, ours, bound[1]
    plan = plan_pull_blocks(
        source,
        target,
        src_blocks,
        dst_blocks,
        src_batch_index=None if source.paged else slot,
        num_tokens=num_tokens,
        src_token=src_token,
        dst_token=dst_token,
        ext_param=ext_param,
        coalesce=coalesce,
        reinterpret=reinterpret or operation.engine.reinterpret,
    )
    return plan, theirs, ours, None
