"""One transfer with several peers: an operation for each, one outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

from kvplan.engine.gather_task import GatherError, GatherNotices, GatherTask
from kvplan.engine.operation import SubmitOptions
from kvplan.engine.resolve import TransferOperation, refuse_notices
from kvplan.engine.shares import Shares, is_gather, named, with_lease_tables
from kvplan.planning.gather import plan_gather
from kvplan.planning.part import Part
from kvplan.planning.plan import Plan
from kvplan.planning.transfer import Planned, Transfer
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.engine.operation import Operation, Prepared


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
        self.operations: list[TransferOperation] = []
        for pairs in shares.pairs:
            operation = TransferOperation(engine, pairs, self.name, by_layer=by_layer, **options)
            operation.after, operation.is_part = gate, True
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
                            operation = self.operations[index]
                            src, dst = operation.memories(
                                [operation.found[place] for place in sorted(parts)]
                            )
                        made = Plan.made(*(parts[place] for place in sorted(parts)))
                        found.append((index, self._text(index, parts), (made, src, dst, None)))
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
            having = [
                (index, at, pair)
                for index, operation in enumerate(self.operations)
                for at, pair in enumerate(operation.pairs)
                if pair.name == name
            ]
            if not is_gather(transfer):
                ((index, at, _),) = having
                parts[index][at] = self.operations[index].plan_part(at)
                continue
            having.sort(key=lambda it: it[2].source or 0)
            found = [self.operations[index].found[at] for index, at, _ in having]
            with named(name):
                made = plan_gather(
                    with_lease_tables(cast(Transfer, transfer)),
                    [source.side for source, _ in found],
                    found[0][1].side,
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
        key = operation.peer_key(min(parts))
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
            key = operation.peer_key(0)
            text = f"{self.name}: sources[{index}] {key}: {error}"
            raise GatherError(text, failed, {}) from None
