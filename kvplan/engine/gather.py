"""One request from several peers at once: one task, one deadline, one outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvplan.engine.gather_task import GatherError, GatherNotices, GatherTask, check_timeout
from kvplan.engine.groups import GroupOperation, check_groups, joined, named
from kvplan.engine.runner import OperationRunner
from kvplan.lease import BlockLease
from kvplan.planning.blocks import RequestBlocks, check_table
from kvplan.planning.gather import plan_gather
from kvplan.planning.groups import GroupPlan, plan_groups
from kvplan.planning.segments import DEFAULT_COALESCE
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import BlocksCacheKey, CacheIndex
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.engine.runner import AnyPrepared
    from kvplan.execution import ComputeEvent, TensorMemory
    from kvplan.links import PeerLink
    from kvplan.links.peer_table import PeerCache
    from kvplan.planning import Coalesce, Plan, Side
    from kvplan.planning.blocks import Blocks
    from kvplan.types import Cache


@dataclass(frozen=True)
class GatherGroup:
    """What a gather pulls into one local paged cache, beside other groups.

    Args:
        sources: for each peer its paged cache, whose shard says which layers and heads it has, or
            a lease of it; None: that peer has nothing of this group.
        dst: the local paged cache.
        src_blocks: for each of `sources`, the blocks of the request there; of a lease None: all of
            its.
        dst_blocks: local blocks.
        num_tokens: tokens of the request that are moved; None: whole blocks.
        src_token, dst_token: tokens of the block tables to skip, on each side.
    """

    sources: Sequence[CacheIndex | BlocksCacheKey | BlockLease | None]
    dst: Cache
    src_blocks: Sequence[Blocks | None]
    dst_blocks: Blocks
    num_tokens: int | None = None
    src_token: int = 0
    dst_token: int = 0


class GatherOperations(OperationRunner):
    """Pulls of one request from several peers, of which each has a part of the model's cache."""

    def gather_blocks(
        self,
        sources: Sequence[CacheIndex | BlocksCacheKey | BlockLease],
        dst: Cache,
        src_blocks: Sequence[Blocks | None],
        dst_blocks: Blocks,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        rank: int | None = None,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        tag: str = "",
    ) -> None:
        """Pull one request into blocks of a local paged cache, from several peers at once.

        Each byte comes from exactly one source; which, `plan_gather` says. All of it has arrived on
        return, or an error names the sources that failed. Metrics, logs and `on_plan` have an
        operation for each source.

        Args:
            sources: remote paged caches, or leases of them; their shards say which layers and heads
                they have.
            dst: the local paged cache.
            src_blocks: for each source, the blocks of the request there; of a lease None: all of
                its.
            dst_blocks: local blocks.
            num_tokens: tokens of the request that are moved; None: whole blocks.
            src_token, dst_token: tokens of the block tables to skip, on each side.
            rank: of this engine among those that pull the same, to spread replicas; see
                `plan_gather`.
            timeout_ms: milliseconds that all may take together; None: SyncKvCacheWaitTime.
            coalesce: how slices become segments.
            notify: sent to the peer of each source, once, when every byte from all of them has
                arrived, 1 to 4096 bytes: the call succeeds when their engines have it.
            notify_failure: sent to them instead if the gather fails, as far as their links stand.
            tag: what logs and recordings call the transfer, such as the id of the request: at most
                128 printable characters.

        Raises:
            TypeError: an argument of another type.
            ValueError: as `GatherTask.wait`.
            LLMException: as `pull_blocks` and `plan_gather`, before a byte has moved; every byte
                has arrived, and a peer could not be notified.
            GatherError: as `GatherTask.wait`; or a source was lost when others had begun.
        """
        group = GatherGroup(sources, dst, src_blocks, dst_blocks, num_tokens, src_token, dst_token)
        self._gather({"": group}, rank, coalesce, timeout_ms, notify, notify_failure, tag)

    def plan_gather_blocks(
        self,
        sources: Sequence[CacheIndex | BlocksCacheKey | BlockLease],
        dst: Cache,
        src_blocks: Sequence[Blocks | None],
        dst_blocks: Blocks,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        rank: int | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> list[Plan | None]:
        """Plan `gather_blocks` with the peers' own descriptions; nothing moves.

        Raises:
            TypeError, LLMException: as `pull_blocks` and `plan_gather`.
        """
        group = GatherGroup(sources, dst, src_blocks, dst_blocks, num_tokens, src_token, dst_token)
        return [
            None if it is None else it[""]
            for it in _Sources(self._running(), {"": group}).plans(rank, coalesce)
        ]

    def submit_gather_blocks(
        self,
        sources: Sequence[CacheIndex | BlocksCacheKey | BlockLease],
        dst: Cache,
        src_blocks: Sequence[Blocks | None],
        dst_blocks: Blocks,
        *,
        num_tokens: int | None = None,
        src_token: int = 0,
        dst_token: int = 0,
        rank: int | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> GatherTask:
        """Begin `gather_blocks` and return its task; nothing moves if one of the sources cannot.

        Args:
            after: an event or a stream of the model's compute, see `ComputeEvent`: no byte from any
                source moves before that work is done. None: nothing to come after.

        Raises:
            TypeError: an argument of another type.
            LLMException: as `pull_blocks` and `plan_gather`, before a byte has moved;
                LLM_LINK_BUSY: nobody takes the tasks that have ended from `completions()`.
            GatherError: a source was lost when others had begun.
        """
        group = GatherGroup(sources, dst, src_blocks, dst_blocks, num_tokens, src_token, dst_token)
        return self._submit_gather({"": group}, rank, coalesce, notify, notify_failure, tag, after)

    def gather_groups(
        self,
        groups: Mapping[str, GatherGroup],
        *,
        rank: int | None = None,
        timeout_ms: float | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        tag: str = "",
    ) -> None:
        """Pull one request that lies in several caches, from several peers at once.

        From each peer all groups are one plan and one submission; otherwise as `gather_blocks`.

        Args:
            groups: what to pull, by name; the peers in the same order in each.
            rank, timeout_ms, coalesce, notify, notify_failure, tag: as of `gather_blocks`.

        Raises:
            TypeError, ValueError, LLMException, GatherError: as `gather_blocks`;
                LLM_PARAM_INVALID: groups with other peers than the first one has.
        """
        check_groups(groups, GatherGroup)
        self._gather(groups, rank, coalesce, timeout_ms, notify, notify_failure, tag)

    def plan_gather_groups(
        self,
        groups: Mapping[str, GatherGroup],
        *,
        rank: int | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
    ) -> list[GroupPlan | None]:
        """Plan `gather_groups` with the peers' own descriptions; nothing moves.

        Raises:
            TypeError, LLMException: as `plan_gather_blocks`, and `gather_groups`.
        """
        check_groups(groups, GatherGroup)
        return [
            None if it is None else plan_groups(it)
            for it in _Sources(self._running(), groups).plans(rank, coalesce)
        ]

    def submit_gather_groups(
        self,
        groups: Mapping[str, GatherGroup],
        *,
        rank: int | None = None,
        coalesce: Coalesce | bool = DEFAULT_COALESCE,
        notify: bytes | None = None,
        notify_failure: bytes | None = None,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> GatherTask:
        """Begin `gather_groups` and return its task; nothing moves if a source cannot.

        Args:
            after: as of `submit_gather_blocks`.

        Raises:
            TypeError, LLMException, GatherError: as `submit_gather_blocks`, and
                `gather_groups`.
        """
        check_groups(groups, GatherGroup)
        return self._submit_gather(groups, rank, coalesce, notify, notify_failure, tag, after)

    def _gather(
        self,
        groups: Mapping[str, GatherGroup],
        rank: int | None,
        coalesce: Coalesce | bool,
        timeout_ms: float | None,
        notify: bytes | None,
        notify_failure: bytes | None,
        tag: str,
    ) -> None:
        check_timeout(timeout_ms)
        engine, name = self._running(), _name_of(groups)
        task = GatherTask(name, GatherNotices(engine, name, notify, notify_failure, tag))
        try:
            self._begin(task, groups, rank, coalesce, tag)
            task.wait(engine.wait_ms if timeout_ms is None else timeout_ms)
        except BaseException:  # an interrupt between the two, say
            task.drop()
            raise

    def _submit_gather(
        self,
        groups: Mapping[str, GatherGroup],
        rank: int | None,
        coalesce: Coalesce | bool,
        notify: bytes | None,
        notify_failure: bytes | None,
        tag: str,
        after: ComputeEvent | None,
    ) -> GatherTask:
        engine, name = self._running(), _name_of(groups)
        task = GatherTask(name, GatherNotices(engine, name, notify, notify_failure, tag))
        try:
            report = engine.completion.report()
            self._begin(task, groups, rank, coalesce, tag, after)
            if report is not None or task.notices.any:
                engine.completion.track(task, report, aside=task.notices.any)
        except BaseException:
            task.drop()
            raise
        return task

    def _begin(
        self,
        task: GatherTask,
        groups: Mapping[str, GatherGroup],
        rank: int | None,
        coalesce: Coalesce | bool,
        tag: str,
        after: ComputeEvent | None = None,
    ) -> None:
        """Submit the pulls of a gather; if it raises, `task` has those that have begun."""
        sources = _Sources(self._running(), groups, task.notices, tag, after)
        try:
            with ExitStack() as stack:
                for operation in sources.operations:
                    stack.enter_context(operation)
                found = [
                    (index, sources.name(index, plans), sources.prepared(index, plans))
                    for index, plans in enumerate(sources.plans(rank, coalesce))
                    if plans is not None
                ]
                for index, name, prepared in found:
                    task.begin(
                        index, name, partial(self._submit, sources.operations[index], prepared)
                    )
        except BaseException as error:
            task.notices.finish(error)
            raise


class _Sources:
    """The sources of a gather: an operation for each, and what they have of each group."""

    def __init__(
        self,
        engine: Engine,
        groups: Mapping[str, GatherGroup],
        notices: GatherNotices | None = None,
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> None:
        self._groups = groups
        self._notices = notices
        numbers = {name: _num_sources(name, group) for name, group in groups.items()}
        if len(set(numbers.values())) > 1:
            raise invalid(
                f"groups have sources of unequal number, {numbers}; each names the same peers, in "
                "one order, with None for one that has nothing of the group"
            )
        number = next(iter(numbers.values()))
        self.operations = [GroupOperation(engine, _name_of(groups), tag=tag) for _ in range(number)]
        if after is not None:
            gate = engine.gate("after", after)  # once: all of them come after the same point
            for operation in self.operations:
                operation.after = gate
        self._found: list[dict[str, tuple[Side, PeerCache]]] = []
        self._links: list[PeerLink] = []
        self._own: dict[str, tuple[Side, TensorMemory]] = {}

    def plans(self, rank: int | None, coalesce: Coalesce | bool) -> list[dict[str, Plan] | None]:
        """Find all caches; the plans of each source by group, None if nothing is taken from it."""
        first = self.operations[0]
        for name, group in self._groups.items():
            self._own[name] = first.own(_argument(name, "dst"), group.dst, paged=True)
        for index, operation in enumerate(self.operations):
            operation.cache_id = first.cache_id
            self._find(index, operation)
        plans: list[dict[str, Plan]] = [{} for _ in self.operations]
        for name, group in self._groups.items():
            having = [index for index, found in enumerate(self._found) if name in found]
            with named(name):
                made = plan_gather(
                    [self._found[index][name][0] for index in having],
                    self._own[name][0],
                    [_table(name, group, index) for index in having],
                    group.dst_blocks,
                    num_tokens=_num_tokens(name, group),
                    src_token=group.src_token,
                    dst_token=group.dst_token,
                    rank=rank,
                    coalesce=coalesce,
                )
            for index, plan in zip(having, made, strict=True):
                if plan is not None:
                    plans[index][name] = plan
        return [it or None for it in plans]

    def prepared(self, index: int, plans: dict[str, Plan]) -> AnyPrepared:
        """What is pulled from a source, and the memory of both sides."""
        caches = [self._found[index][name][1] for name in plans]
        keys = [self._groups[name].sources[index] for name in plans]
        leases = [it for it in keys if isinstance(it, BlockLease)]
        self.operations[index].leases = tuple(it.lease_id for it in leases)
        with self._failing(index):
            theirs = self._links[index].leased_memory(caches, leases, writable=False)
        ours = joined([self._own[name][1] for name in plans])
        return plans.get("") or plan_groups(plans), theirs, ours, None

    def name(self, index: int, plans: dict[str, Plan]) -> str:
        """What errors call a source."""
        parts = [f"{name}: {plan.src.shard or 'whole'}" for name, plan in plans.items()]
        keys = [self._groups[name].sources[index] for name in plans]
        return f"{keys[0]} ({', '.join(parts).removeprefix(': ')})"

    @contextmanager
    def _failing(self, index: int) -> Iterator[None]:
        """Say of which source a peer's failure is; what the caller has wrong says it itself."""
        try:
            yield
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_PARAM_INVALID:
                raise
            failed = {index: error.with_traceback(None)}
            key = next(it for group in self._groups.values() if (it := group.sources[index]))
            text = f"{self.operations[index].name}: sources[{index}] {key}: {error}"
            raise GatherError(text, failed, {}) from None

    def _find(self, index: int, operation: GroupOperation) -> None:
        """The caches of one peer, by group."""
        field = f"sources[{index}]"
        keys: dict[str, Any] = {
            name: key
            for name, group in self._groups.items()
            if (key := group.sources[index]) is not None
        }
        if not keys:
            raise invalid(f"{field} is None in all groups; leave it out")
        arguments = {_argument(name, field): key for name, key in keys.items()}
        with self._failing(index):
            try:
                link, caches = operation.peer_caches(arguments, writable=False)
            finally:
                if self._notices is not None and operation.link is not None:
                    self._notices.add(operation.link)
        self._links.append(link)
        self._found.append(
            {name: (link.side(it), it) for name, it in zip(keys, caches, strict=True)}
        )


def _name_of(groups: Mapping[str, GatherGroup]) -> str:
    return "gather_blocks" if "" in groups else "gather_groups"


def _argument(group: str, field: str) -> str:
    """What a field of a group is called: as the caller gave it."""
    return f"groups[{shown(group)}].{field}" if group else field


def _table(name: str, group: GatherGroup, index: int) -> Blocks:
    argument, table = _argument(name, f"src_blocks[{index}]"), group.src_blocks[index]
    if isinstance(lease := group.sources[index], BlockLease):
        if table is None and _num_tokens(name, group) is not None:
            return RequestBlocks(lease.blocks)
        return lease.named(argument, table)
    if table is None:
        raise invalid(f"{argument} is None; it must name blocks")
    check_table(argument, table)
    return table


def _num_tokens(name: str, group: GatherGroup) -> int | None:
    """Tokens of the request: as given, or as leases of all its blocks say."""
    argument, given = _argument(name, "num_tokens"), group.num_tokens
    said = {
        it.num_tokens(argument, given, group.src_token)
        for it, table in zip(group.sources, group.src_blocks, strict=True)
        if isinstance(it, BlockLease) and it.tokens is not None and table is None
    }
    if len(said) > 1:
        raise invalid(
            f"{argument}=None, and the leases are of requests of unequal length: "
            f"{sorted(filter(None, said))} tokens"
        )
    return said.pop() if said else given


def _num_sources(name: str, group: GatherGroup) -> int:
    given: Any
    for field, given in (("sources", group.sources), ("src_blocks", group.src_blocks)):
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise TypeError(
                f"{_argument(name, field)} must be a sequence with one for each source, not "
                f"{type(given).__name__}"
            )
    if not group.sources or len(group.sources) != len(group.src_blocks):
        raise invalid(
            f"{_argument(name, 'sources')} has {len(group.sources)} caches and "
            f"{_argument(name, 'src_blocks')} {len(group.src_blocks)} block tables; at least one "
            "is needed, and as many of both"
        )
    return len(group.sources)
