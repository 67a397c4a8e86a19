"""Transfers of several groups between this process and a peer: one plan and one submission."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.device.memory import DeviceMemory
from kvplan.engine.runner import Operation, OperationRunner
from kvplan.execution.memory import HostMemory
from kvplan.lease import BlockLease
from kvplan.planning.blocks import is_empty
from kvplan.planning.groups import GroupPlan, check_group_name, plan_groups
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.planner import plan_pull_blocks, plan_push_blocks
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import BlocksCacheKey, Cache, CacheIndex, KvCacheExtParam
from kvplan.validation import check_mapping, check_type, mismatch, shown

if TYPE_CHECKING:
    from kvplan.execution import ComputeEvent, TensorMemory, TransferTask
    from kvplan.links import PeerLink
    from kvplan.links.peer_table import PeerCache
    from kvplan.planning import Coalesce, Plan, Side
    from kvplan.planning.blocks import Blocks

_KINDS = (CacheIndex, BlocksCacheKey, BlockLease)


@dataclass(frozen=True)
class Group:
    """What one transfer moves between one pair of paged caches, beside other groups.

    Args:
        src, dst: of a pull the remote cache and the local one, of a push the other way round. In
            place of a remote one a lease.
        src_blocks, dst_blocks: the blocks of the request there; of a lease None: all of its.
        num_tokens: tokens that are moved; None: whole blocks.
        src_token, dst_token: tokens of the block tables to skip, on each side.
        ext_param: the layers, as they are counted in this pair of caches.
    """

    src: Cache | CacheIndex | BlocksCacheKey | BlockLease
    dst: Cache | CacheIndex | BlocksCacheKey | BlockLease
    src_blocks: Blocks | None
    dst_blocks: Blocks | None
    num_tokens: int | None = None
    src_token: int = 0
    dst_token: int = 0
    ext_param: KvCacheExtParam = ALL_LAYERS


class GroupOperations(OperationRunner):
    """Pulls and pushes of a request that lies in several caches: executed, planned, submitted.

    For MLA and its indexer, quantized values and their scales, layers with and without a sliding
    window, states of Mamba. All groups are one plan, one submission, one deadline and one outcome.

    Each takes the groups by name, which is what plans and errors call them: at most 64 printable
    characters. All are of one peer, and on each side all are in host memory, or all on the device.
    """

    def pull_groups(
        self,
        groups: Mapping[str, Group],
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        tag: str = "",
    ) -> None:
        """Pull blocks of several remote paged caches into blocks of local ones.

        Args:
            groups: what to move, by name.
            timeout_ms: milliseconds that the transfer may take; None: SyncKvCacheWaitTime.
            coalesce: how slices become segments.
            reinterpret: copy bytes as they are, whatever two caches say that they mean.
            notify: sent to the peer when every byte has arrived, 1 to 4096 bytes: the call
                succeeds when its engine has it. None: nothing is sent.
            notify_failure: sent instead if the transfer fails and the link stands.
            tag: what logs and recordings call the transfer, such as the id of the request: at most
                128 printable characters.

        Raises:
            TypeError: an argument of another type.
            ValueError: timeout_ms is < 0 or not a number; a number outside its C type.
            LLMException: of a group its name is said. LLM_PARAM_INVALID: no group, or a bad
                name of one; a block, token or layer out of range, block tables of unequal
                length, a contiguous cache, groups of several peers, groups that write the same
                byte, caches that cannot match, or this engine's own cluster;
                LLM_FEATURE_NOT_ENABLED: groups in host memory and on the device, or memory that
                the link does not reach; LLM_NOT_YET_LINK: no link to that cluster;
                LLM_LINK_FAILED: it is broken, or broke meanwhile; LLM_KV_CACHE_NOT_EXIST: no
                such cache here, or there (any more), or a lease has ended; LLM_TIMEOUT: the
                time has passed; LLM_LINK_BUSY: the peer's program reads no notifications;
                LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        with GroupOperation(
            self._running(),
            "pull_groups",
            speculative=True,
            notify=notify,
            notify_failure=notify_failure,
            tag=tag,
        ) as operation:
            while not operation.done:
                prepared = operation.prepare(groups, plan_pull_blocks, coalesce, reinterpret)
                self._execute(operation, prepared, timeout_ms)

    def plan_pull_groups(
        self,
        groups: Mapping[str, Group],
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
    ) -> GroupPlan:
        """Plan `pull_groups` with the peer's own descriptions; nothing moves.

        Raises:
            TypeError, ValueError, LLMException: as `pull_groups`, before anything moves.
        """
        operation = GroupOperation(self._running(), "pull_groups")
        return operation.prepare(groups, plan_pull_blocks, coalesce, reinterpret)[0]

    def submit_pull_groups(
        self,
        groups: Mapping[str, Group],
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> TransferTask:
        """Begin `pull_groups` and return its task.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves
                before that work is done. None: nothing to come after.

        Raises:
            TypeError, ValueError: as `pull_groups`.
            LLMException: as `pull_groups`, before anything moves; LLM_LINK_BUSY: nobody takes
                the tasks that have ended from `completions()`. What fails later the task
                raises.
        """
        with GroupOperation(
            self._running(),
            "pull_groups",
            notify=notify,
            notify_failure=notify_failure,
            tag=tag,
            after=after,
        ) as operation:
            prepared = operation.prepare(groups, plan_pull_blocks, coalesce, reinterpret)
            return self._submit(operation, prepared)

    def push_groups(
        self,
        groups: Mapping[str, Group],
        *,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        tag: str = "",
    ) -> None:
        """Push blocks of several local paged caches into blocks of remote ones.

        Arguments as of `pull_groups`.

        Raises:
            TypeError: an argument of another type.
            ValueError: timeout_ms is < 0 or not a number; a number outside its C type.
            LLMException: of a group its name is said. LLM_PARAM_INVALID: no group, or a bad
                name of one; a block, token or layer out of range, block tables of unequal
                length, a contiguous cache, groups of several peers, groups that write the same
                byte, a cache that is not writable there, caches that cannot match, or this
                engine's own cluster; LLM_FEATURE_NOT_ENABLED: groups in host memory and on the
                device, or memory that the link does not reach; LLM_NOT_YET_LINK: no link to
                that cluster; LLM_LINK_FAILED: it is broken, or broke meanwhile;
                LLM_KV_CACHE_NOT_EXIST: no such cache here, or there (any more), or a lease has
                ended; LLM_TIMEOUT: the time has passed; LLM_LINK_BUSY: the peer's program reads
                no notifications; LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        with GroupOperation(
            self._running(),
            "push_groups",
            speculative=True,
            notify=notify,
            notify_failure=notify_failure,
            tag=tag,
        ) as operation:
            while not operation.done:
                prepared = operation.prepare(groups, plan_push_blocks, coalesce, reinterpret)
                self._execute(operation, prepared, timeout_ms)

    def plan_push_groups(
        self,
        groups: Mapping[str, Group],
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
    ) -> GroupPlan:
        """Plan `push_groups` with the peer's own descriptions; nothing moves.

        Raises:
            TypeError, ValueError, LLMException: as `push_groups`, before anything moves.
        """
        operation = GroupOperation(self._running(), "push_groups")
        return operation.prepare(groups, plan_push_blocks, coalesce, reinterpret)[0]

    def submit_push_groups(
        self,
        groups: Mapping[str, Group],
        *,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        reinterpret: bool = False,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> TransferTask:
        """Begin `push_groups` and return its task.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte moves
                before that work is done. None: nothing to come after.

        Raises:
            TypeError, ValueError: as `push_groups`.
            LLMException: as `push_groups`, before anything moves; LLM_LINK_BUSY: nobody takes
                the tasks that have ended from `completions()`. What fails later the task
                raises.
        """
        with GroupOperation(
            self._running(),
            "push_groups",
            notify=notify,
            notify_failure=notify_failure,
            tag=tag,
            after=after,
        ) as operation:
            prepared = operation.prepare(groups, plan_push_blocks, coalesce, reinterpret)
            return self._submit(operation, prepared)


class GroupOperation(Operation):
    """An operation between several caches of this process and of one peer."""

    __slots__ = ()

    def prepare(
        self,
        groups: Mapping[str, Group],
        plan: Callable[..., Plan],
        coalesce: Coalesce | bool,
        reinterpret: bool,
    ) -> tuple[GroupPlan, TensorMemory, TensorMemory, None]:
        """Find the caches of a pull or push, and plan each group."""
        check_groups(groups, Group)
        pulls = plan is plan_pull_blocks
        ours, theirs = ("dst", "src") if pulls else ("src", "dst")
        here, memory = self.own_caches(ours, groups)
        link, caches = self.peer_caches(
            {f"groups[{shown(it)}].{theirs}": getattr(groups[it], theirs) for it in groups},
            writable=not pulls,
        )
        there = [link.side(it) for it in caches]
        leases: list[BlockLease] = []
        plans = {}
        for (name, group), own, peer in zip(groups.items(), here, there, strict=True):
            with named(name):
                src_blocks, dst_blocks = group.src_blocks, group.dst_blocks
                num_tokens = group.num_tokens
                if isinstance(lease := getattr(group, theirs), BlockLease):
                    leases.append(lease)
                    if pulls:
                        src_blocks, num_tokens = lease.request(
                            "src_blocks", src_blocks, num_tokens, group.src_token
                        )
                    else:
                        dst_blocks, num_tokens = lease.request(
                            "dst_blocks", dst_blocks, num_tokens, group.dst_token
                        )
                if src_blocks is None or (is_empty(src_blocks) and not is_empty(dst_blocks)):
                    raise invalid(f"src_blocks={src_blocks} must name blocks")
                plans[name] = plan(
                    peer if pulls else own,
                    own if pulls else peer,
                    src_blocks,
                    dst_blocks,
                    num_tokens=num_tokens,
                    src_token=group.src_token,
                    dst_token=group.dst_token,
                    ext_param=group.ext_param,
                    coalesce=coalesce,
                    reinterpret=reinterpret or self.engine.reinterpret,
                )
        self.leases = tuple([it.lease_id for it in leases])
        peer_memory = link.leased_memory(caches, leases, writable=not pulls)
        if pulls:
            return plan_groups(plans), peer_memory, memory, None
        return plan_groups(plans), memory, peer_memory, None

    def own_caches(self, field: str, groups: Mapping[str, Any]) -> tuple[list[Side], TensorMemory]:
        """The caches of this process that a field of the groups names, and the memory of all."""
        sides, memories = [], []
        for name, group in groups.items():
            argument = f"groups[{shown(name)}].{field}"
            own, memory = self.own(argument, getattr(group, field), paged=True)
            sides.append(own)
            memories.append(memory)
        return sides, joined(memories)

    def peer_caches(
        self, keys: Mapping[str, CacheIndex | BlocksCacheKey | BlockLease], *, writable: bool
    ) -> tuple[PeerLink, list[PeerCache]]:
        """The caches of a peer that arguments name."""
        for argument, key in keys.items():
            if not isinstance(key, _KINDS):
                raise TypeError(f"{argument}={shown(key)} must be {mismatch(key, *_KINDS)}")
        (first, key), *others = keys.items()
        link = self._linked(first, key)
        for argument, other in others:
            if other.cluster_id != key.cluster_id:
                raise invalid(
                    f"{argument} is of cluster {other.cluster_id} and {first} of cluster "
                    f"{key.cluster_id}; one transfer is with one peer"
                )
        caches = []
        for argument, key in keys.items():
            speculative = self._speculative and isinstance(key, BlocksCacheKey)
            if isinstance(key, BlockLease):
                cache = link.leased(key, writable=writable)
            else:
                cache = link.cache(key, writable=writable, speculative=speculative)
            self.speculated = self.speculated or speculative
            if not link.side(cache).paged:
                self._refuse_kind(argument, str(key), paged=True, table="")
            if isinstance(key, CacheIndex) and key.batch_index:
                raise invalid(f"{argument}={key} names a slot, and a paged cache has none")
            caches.append(cache)
        return link, caches


def check_groups(groups: Any, kind: type) -> None:
    """Refuse what is no mapping of names to groups of this kind."""
    check_mapping("groups", groups)
    if not groups:
        raise invalid("groups is empty; a transfer has at least one")
    for name, group in groups.items():
        check_group_name(name)
        check_type(f"groups[{shown(name)}]", group, kind)


@contextmanager
def named(group: str) -> Iterator[None]:
    """Say of which group something is refused; of one without a name nothing."""
    try:
        yield
    except LLMException as error:
        if not group:
            raise
        text = f"group {group}: {error.args[0]}"
        raise LLMException(text, status_code=error.status_code) from None
    except TypeError as error:
        if not group:
            raise
        raise TypeError(f"group {group}: {error.args[0]}") from None


def joined(memories: Sequence[TensorMemory]) -> TensorMemory:
    """The memory of several caches of this process, one after another."""
    if len(memories) == 1:
        return memories[0]
    addresses = np.concatenate([it.addresses for it in memories])
    nbytes = np.concatenate([it.nbytes for it in memories])
    writable = all(it.writable for it in memories)
    if len(on_host := tuple(it for it in memories if isinstance(it, HostMemory))) == len(memories):
        owner = on_host if all(it.held for it in on_host) else None
        return HostMemory(addresses, nbytes, writable=writable, owner=owner, parts=on_host)
    on_device = tuple(it for it in memories if isinstance(it, DeviceMemory))
    if len(on_device) < len(memories) or len({id(it.device) for it in on_device}) > 1:
        raise LLMException(
            "groups: caches of this process are in host memory and on the device, and one transfer "
            "has one way; move them in two",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    return DeviceMemory(
        on_device[0].device,
        addresses,
        nbytes,
        writable=writable,
        owner=on_device if all(it.held for it in on_device) else None,
        parts=on_device,
        watches=tuple(watch for it in on_device for watch in it.watches),
    )
