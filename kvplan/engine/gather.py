"""One transfer with several peers: an operation for each, one outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

from kvplan.engine.gather_task import GatherError, GatherNotices, GatherTask
from kvplan.engine.groups import GroupOperation, Pair, named
from kvplan.engine.operation import SubmitOptions
from kvplan.engine.planned import check_plan
from kvplan.engine.resolve import local_of, refuse_notices
from kvplan.lease import BlockLease
from kvplan.planning.blocks import RequestBlocks, check_table
from kvplan.planning.gather import plan_gather
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.planner import VERBS, check_sources
from kvplan.planning.transfer import Planned, Rows, Transfer
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.engine.operation import Operation, Prepared
    from kvplan.planning.blocks import Blocks


class Shares(NamedTuple):
    """What a transfer of several caches moves between this process and each peer.

    Attributes:
        name: of the operation.
        is_gather: whether one of the transfers has a sequence of sources.
        is_copy: whether all caches are of this process.
        pairs: of each peer, in the order in which the transfer names the peers; layer by layer of
            each pair of caches.
    """

    name: str
    is_gather: bool
    is_copy: bool
    pairs: list[list[Pair]]


def shares_of(transfers: Mapping[str, Transfer | Planned], *, by_layer: bool) -> Shares:
    """Share a transfer out to its peers."""
    peers: dict[object, list[Pair]] = {}
    directions: dict[str, str] = {}
    for name, transfer in transfers.items():
        with named(name):
            single = not _has_sources(transfer)
            sources, dst = _rows_of(transfer)
            known: dict[int | None, int] = {}
            for index, rows in enumerate(sources):
                local = local_of(rows, dst)
                if not single and local != "dst":
                    raise invalid(f"src[{index}]={shown(rows.cache)} of a gather must be a peer's")
                directions[local] = name
                key = rows.cache if local == "dst" else dst.cache
                cluster = None if local == "both" else cast(BlockLease, key).cluster_id
                nth = known[cluster] = known.get(cluster, -1) + 1  # caches of one peer
                pair = Pair(name, transfer, rows, dst, None if single else index)
                peer: object = (cluster, nth, name) if by_layer else (cluster, nth)
                peers.setdefault(peer, []).append(pair)
    if len(directions) > 1:
        raise invalid(f"transfer: {directions} are of several directions; one has one")
    is_gather = any(map(_has_sources, transfers.values()))
    verb = VERBS[next(iter(directions))]
    operation = f"{verb}_layers" if by_layer else f"{verb}_groups"
    if is_gather and not by_layer:
        operation = "gather_blocks" if "" in transfers else "gather_groups"
    return Shares(operation, is_gather, "both" in directions, [*peers.values()])


class Several:
    """The operations of one transfer: one for each peer, or by layers for each pair of caches.

    Attributes:
        engine: as given.
        name: of the operation.
        notices: what the peers are sent at the end.
        operations: of the peers, in the order in which the transfer names them.
    """

    def __init__(
        self,
        engine: Engine,
        transfers: Mapping[str, Transfer | Planned],
        shares: Shares,
        *,
        by_layer: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> None:
        self.engine = engine
        self._transfers = transfers
        self.name: str = shares.name
        if shares.is_copy:
            refuse_notices(options)
        self.notices = GatherNotices(
            engine, self.name, options.pop("notify", None), options.pop("notify_failure", None),
            options.get("tag", ""),
        )  # fmt: skip
        # Once: all of them come after the same point.
        after = options.pop("after", None)
        gate = None if after is None else engine.gate("after", after)
        self.operations: list[GroupOperation] = []
        for pairs in shares.pairs:
            operation = GroupOperation(
                engine, self.name, pairs, by_layer=by_layer, is_part=True, **options
            )
            operation.after = gate
            self.operations.append(operation)

    def plan(self) -> Plan:
        """Plan all parts; nothing moves."""
        return Plan.made(*(part for parts in self._parts() for part in parts.values()))

    def begin(self, task: GatherTask, submit: Callable[[Operation, Prepared], Any]) -> None:
        """Submit what moves; if it raises, `task` has those that have begun."""
        try:
            with ExitStack() as stack:
                for operation in self.operations:
                    stack.enter_context(operation)
                found = []
                for index, parts in enumerate(self._parts()):
                    if parts:
                        with self._failing(index):
                            prepared = self.operations[index].prepared(parts)
                        found.append((index, self._text(index, parts), prepared))
                for index, name, prepared in found:
                    task.begin(index, name, partial(submit, self.operations[index], prepared))
        except BaseException as error:
            self.notices.finish(error)
            raise

    def _parts(self) -> list[dict[int, Part]]:
        """Find all caches; what each operation moves, by the place of its pair."""
        first = self.operations[0]
        for operation in self.operations:
            operation.find_own()
        for index, operation in enumerate(self.operations):
            with self._failing(index):
                try:
                    operation.find_peer()
                finally:
                    if operation.link is not None and operation.moves:
                        self.notices.add(operation.link)
            if operation.cache_id < 0:
                operation.cache_id = first.cache_id
        parts: list[dict[int, Part]] = [{} for _ in self.operations]
        for name, transfer in self._transfers.items():
            with named(name):
                having = [
                    (index, at, pair)
                    for index, operation in enumerate(self.operations)
                    for at, pair in enumerate(operation.pairs)
                    if pair.name == name
                ]
                if not _has_sources(transfer):
                    ((index, at, _),) = having
                    parts[index][at] = self.operations[index].plan_part(at)
                    continue
                having.sort(key=lambda it: it[2].source or 0)
                sides = [self.operations[index].sides[at] for index, at, _ in having]
                made = plan_gather(
                    _with_tables(cast(Transfer, transfer)),
                    [source for source, _ in sides],
                    sides[0][1],
                    by_layer=first.by_layer,
                )
            for (index, at, pair), part in zip(having, made, strict=True):
                if part is not None:
                    parts[index][at] = part.labelled(name, pair.source)
        return parts

    def _text(self, index: int, parts: dict[int, Part]) -> str:
        """What errors call that which a peer gives."""
        shards = [f"{it.name}: {it.src.shard or 'whole'}" for it in parts.values()]
        operation = self.operations[index]
        key = operation.peer_key(operation.pairs[min(parts)])
        return f"{key} ({', '.join(shards).removeprefix(': ')})"

    @contextmanager
    def _failing(self, index: int) -> Iterator[None]:
        """Say of which peer a failure is; what the caller has wrong says it itself."""
        try:
            yield
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_PARAM_INVALID:
                raise
            failed = {index: error.with_traceback(None)}
            operation = self.operations[index]
            key = operation.peer_key(operation.pairs[0])
            text = f"{self.name}: sources[{index}] {key}: {error}"
            raise GatherError(text, failed, {}) from None


def _has_sources(transfer: Transfer | Planned) -> bool:
    """Whether a transfer is a gather, from a sequence of sources."""
    return isinstance(transfer, Transfer) and not isinstance(transfer.src, Rows)


def _rows_of(transfer: Transfer | Planned) -> tuple[Sequence[Rows], Rows]:
    """Return the sources and the destination; of a plan, its caches without tables."""
    if isinstance(transfer, Planned):
        check_plan(transfer.plan)
        return [Rows(transfer.src)], Rows(transfer.dst)
    if isinstance(transfer.src, Rows):
        return [transfer.src], transfer.dst
    check_sources(transfer.src)
    return transfer.src, transfer.dst


def _with_tables(transfer: Transfer) -> Transfer:
    """Return a gather with the block tables and tokens that its leases say."""
    sources = cast("list[Rows]", transfer.src)
    num_tokens = _num_tokens(transfer)
    rows = [
        Rows(it.cache, _table(index, it, num_tokens), it.slot, it.first_token)
        for index, it in enumerate(sources)
    ]
    return Transfer(
        rows, transfer.dst, num_tokens, transfer.nbytes, transfer.layers, transfer.reinterpret,
        transfer.coalesce, transfer.rank,
    )  # fmt: skip


def _table(index: int, rows: Rows, num_tokens: int | None) -> Blocks:
    argument, table = f"src_blocks[{index}]", rows.blocks
    if isinstance(lease := rows.cache, BlockLease):
        if table is None and num_tokens is not None:
            return RequestBlocks(lease.blocks)
        return lease.named(argument, table)
    if table is None:
        raise invalid(f"{argument} is None; it must name blocks")
    check_table(argument, table)
    return table


def _num_tokens(transfer: Transfer) -> int | None:
    """Tokens of the request: as given, or as leases of all its blocks say."""
    said = {
        rows.cache.num_tokens("num_tokens", transfer.num_tokens, rows.first_token)
        for rows in cast("list[Rows]", transfer.src)
        if isinstance(rows.cache, BlockLease)
        and rows.cache.tokens is not None
        and rows.blocks is None
    }
    if len(said) > 1:
        raise invalid(
            f"num_tokens=None, and the leases are of requests of unequal length: "
            f"{sorted(filter(None, said))} tokens"
        )
    return said.pop() if said else transfer.num_tokens
