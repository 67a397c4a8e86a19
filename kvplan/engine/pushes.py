"""Pushes: from a cache of this process into one of a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.engine.runner import Operation, OperationRunner, Prepared, only_moves
from kvplan.lease import BlockLease
from kvplan.planning.blocks import are_whole, is_empty
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.planner import plan_push_blocks, plan_push_cache
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.status import invalid
from kvplan.types import BlocksCacheKey, CacheIndex
from kvplan.validation import check_type

if TYPE_CHECKING:
    from kvplan.execution import ComputeEvent, TransferTask
    from kvplan.planning import Coalesce, Plan
    from kvplan.planning.blocks import Blocks
    from kvplan.types import Cache, KvCacheExtParam


class PushOperations(OperationRunner):
    """Each operation three times: executed, only planned, and submitted.

    All layers of an operation are one plan and one submission.
    """

    def push_cache(
        self,
        src: Cache,
        dst: CacheIndex | BlockLease,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        verify: bool = False,
        tag: str = "",
    ) -> None:
        """Push a slot of a local cache into a slot of a remote one.

        Args:
            src: the local cache.
            dst: the remote slot, or a lease of it.
            src_batch_index: the local slot.
            size: -1: the whole row; nothing else, as in the reference.
            ext_param: the layers.
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
            LLMException: LLM_PARAM_INVALID: a slot, token or layer out of range, a size other
                than -1, a paged cache, a cache that is not writable there, caches that cannot
                match, or this engine's own cluster; LLM_NOT_YET_LINK: no link to that cluster;
                LLM_LINK_FAILED: it is broken, or broke meanwhile; LLM_KV_CACHE_NOT_EXIST: no
                such cache here, or no such cache or slot there (any more), or the lease has
                ended; LLM_FEATURE_NOT_ENABLED: the link does not reach the memory; LLM_TIMEOUT:
                the time has passed; LLM_LINK_BUSY: the peer's program reads no notifications;
                LLM_FAILED: not initialized, or `verify` found other bytes;
                LLM_ENGINE_FINALIZED.
        """
        if (
            isinstance(dst, CacheIndex)
            and type(size) is int
            and size == -1
            and are_whole(num_tokens, coalesce)
            and only_moves(reinterpret, verify, timeout_ms, notify, notify_failure, tag)
            and self._move_now(
                "push_cache", dst, src, (src_batch_index,), (dst.batch_index,), ext_param
            )
        ):
            return
        with Operation(
            self._running(),
            "push_cache",
            notify=notify,
            notify_failure=notify_failure,
            verify=verify,
            tag=tag,
        ) as operation:
            while not operation.done:
                prepared = _push_cache(
                    operation, src, dst, src_batch_index, size, num_tokens, ext_param, coalesce,
                    reinterpret,
                )  # fmt: skip
                self._execute(operation, prepared, timeout_ms)

    def plan_push_cache(
        self,
        src: Cache,
        dst: CacheIndex | BlockLease,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
    ) -> Plan:
        """Plan `push_cache` with the peer's own description; nothing moves.

        Raises:
            TypeError, ValueError, LLMException: as `push_cache`, before anything moves.
        """
        operation = Operation(self._running(), "push_cache")
        return _push_cache(
            operation, src, dst, src_batch_index, size, num_tokens, ext_param, coalesce, reinterpret
        )[0]

    def submit_push_cache(
        self,
        src: Cache,
        dst: CacheIndex | BlockLease,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        verify: bool = False,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> TransferTask:
        """Begin `push_cache` and return its task.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves
                before that work is done. None: nothing to come after.

        Raises:
            TypeError, ValueError: as `push_cache`.
            LLMException: as `push_cache`, before anything moves; LLM_LINK_BUSY: nobody takes
                the tasks that have ended from `completions()`. What fails later the task
                raises.
        """
        with Operation(
            self._running(),
            "push_cache",
            notify=notify,
            notify_failure=notify_failure,
            verify=verify,
            tag=tag,
            after=after,
        ) as operation:
            prepared = _push_cache(
                operation, src, dst, src_batch_index, size, num_tokens, ext_param, coalesce,
                reinterpret,
            )  # fmt: skip
            return self._submit(operation, prepared)

    def push_blocks(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey | BlockLease,
        src_blocks: Blocks,
        dst_blocks: Blocks | None = None,
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
        """Push blocks of a local paged cache into blocks of a remote one.

        Args:
            src: the local paged cache.
            dst: the remote paged cache; or a lease, which names blocks.
            src_blocks: local blocks.
            dst_blocks: remote blocks, one for each of `src_blocks`. Of a lease None: all
                that it names.
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
                of unequal length, a remote block named twice, a contiguous cache, a cache that
                is not writable there, caches that cannot match, or this engine's own cluster;
                LLM_NOT_YET_LINK: no link to that cluster; LLM_LINK_FAILED: it is broken, or
                broke meanwhile; LLM_KV_CACHE_NOT_EXIST: no such cache here, or no such cache
                there (any more), or the lease has ended; LLM_FEATURE_NOT_ENABLED: the link does
                not reach the memory; LLM_TIMEOUT: the time has passed; LLM_LINK_BUSY: the
                peer's program reads no notifications; LLM_FAILED: not initialized, or `verify`
                found other bytes; LLM_ENGINE_FINALIZED.
        """
        if (
            dst_blocks is not None
            and are_whole(num_tokens, coalesce, src_token, dst_token)
            and only_moves(reinterpret, verify, timeout_ms, notify, notify_failure, tag)
            and self._move_now("push_blocks", dst, src, src_blocks, dst_blocks, ext_param)
        ):
            return
        with Operation(
            self._running(),
            "push_blocks",
            speculative=True,
            notify=notify,
            notify_failure=notify_failure,
            verify=verify,
            tag=tag,
        ) as operation:
            while not operation.done:
                prepared = _push_blocks(
                    operation, src, dst, src_blocks, dst_blocks, num_tokens, src_token, dst_token,
                    ext_param, coalesce, reinterpret,
                )  # fmt: skip
                self._execute(operation, prepared, timeout_ms)

    def plan_push_blocks(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey | BlockLease,
        src_blocks: Blocks,
        dst_blocks: Blocks | None = None,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
    ) -> Plan:
        """Plan `push_blocks` with the peer's own description; nothing moves.

        Raises:
            TypeError, ValueError, LLMException: as `push_blocks`, before anything moves.
        """
        operation = Operation(self._running(), "push_blocks")
        return _push_blocks(
            operation, src, dst, src_blocks, dst_blocks, num_tokens, src_token, dst_token,
            ext_param, coalesce, reinterpret,
        )[0]  # fmt: skip

    def submit_push_blocks(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey | BlockLease,
        src_blocks: Blocks,
        dst_blocks: Blocks | None = None,
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
        """Begin `push_blocks` and return its task.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves
                before that work is done. None: nothing to come after.

        Raises:
            TypeError, ValueError: as `push_blocks`.
            LLMException: as `push_blocks`, before anything moves; LLM_LINK_BUSY: nobody takes
                the tasks that have ended from `completions()`. What fails later the task
                raises.
        """
        with Operation(
            self._running(),
            "push_blocks",
            notify=notify,
            notify_failure=notify_failure,
            verify=verify,
            tag=tag,
            after=after,
        ) as operation:
            prepared = _push_blocks(
                operation, src, dst, src_blocks, dst_blocks, num_tokens, src_token, dst_token,
                ext_param, coalesce, reinterpret,
            )  # fmt: skip
            return self._submit(operation, prepared)


def _push_cache(
    operation: Operation,
    src: Cache,
    dst: CacheIndex | BlockLease,
    src_batch_index: int,
    size: int,
    num_tokens: int | None,
    ext_param: KvCacheExtParam,
    coalesce: Coalesce | bool,
    reinterpret: bool,
) -> Prepared:
    """A local slot into a remote one."""
    if type(size) is not int or size != -1:
        check_type("size", size, int)
        raise invalid(f"size={size} must be -1: a push moves the whole row")
    source, ours = operation.own("src", src, paged=False)
    target, slot, theirs = operation.peer(
        "dst", dst, (CacheIndex, BlockLease), paged=False, writable=True
    )
    if operation.moves and are_whole(num_tokens, coalesce):
        bound = operation.engine.transfers.rows.bind(
            "push_cache", "C2C", source, target, ours, theirs, (src_batch_index,), (slot,),
            ext_param,
        )  # fmt: skip
        if bound is not None:
            return bound[0], ours, theirs, bound[1]
    plan = plan_push_cache(
        source,
        target,
        src_batch_index=src_batch_index,
        dst_batch_index=slot,
        num_tokens=num_tokens,
        ext_param=ext_param,
        coalesce=coalesce,
        reinterpret=reinterpret or operation.engine.reinterpret,
    )
    return plan, ours, theirs, None


def _push_blocks(
    operation: Operation,
    src: Cache,
    dst: CacheIndex | BlocksCacheKey | BlockLease,
    src_blocks: Blocks | None,
    dst_blocks: Blocks | None,
    num_tokens: int | None,
    src_token: int,
    dst_token: int,
    ext_param: KvCacheExtParam,
    coalesce: Coalesce | bool,
    reinterpret: bool,
) -> Prepared:
    """Local blocks into remote ones."""
    if src_blocks is None or (is_empty(src_blocks) and not is_empty(dst_blocks)):
        raise invalid(f"src_blocks={src_blocks} must name a block for each of dst_blocks")
    if type(dst) is BlockLease:
        dst_blocks, num_tokens = dst.request("dst_blocks", dst_blocks, num_tokens, dst_token)
    elif dst_blocks is None:
        raise TypeError("dst_blocks is None; it must name a block for each of src_blocks")
    source, ours = operation.own("src", src, paged=True)
    kinds = (CacheIndex, BlocksCacheKey, BlockLease)
    target, _, theirs = operation.peer("dst", dst, kinds, paged=True, writable=True)
    if operation.moves and are_whole(num_tokens, coalesce, src_token, dst_token):
        bound = operation.engine.transfers.rows.bind(
            "push_blocks", "B2B", source, target, ours, theirs, src_blocks, dst_blocks, ext_param
        )
        if bound is not None:
            return bound[0], ours, theirs, bound[1]
    plan = plan_push_blocks(
        source,
        target,
        src_blocks,
        dst_blocks,
        num_tokens=num_tokens,
        src_token=src_token,
        dst_token=dst_token,
        ext_param=ext_param,
        coalesce=coalesce,
        reinterpret=reinterpret or operation.engine.reinterpret,
    )
    return plan, ours, theirs, None
