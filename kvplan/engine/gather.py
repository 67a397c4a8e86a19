"""One transfer of several operations, mostly one for each peer, with one outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

from kvnative._signals import Mutex
from kvplan.engine.operation import Operation, RunOptions, refuse_notices
from kvplan.engine.resolve import TransferOperation
from kvplan.engine.shares import Pair, Shares, is_gather
from kvplan.execution.gather_task import GatherError, GatherTask
from kvplan.planning.gather import check_gather, divide
from kvplan.planning.plan import Plan
from kvplan.planning.planner import of_part
from kvplan.planning.transfer import Planned, Rows, Transfer, with_leases
from kvplan.status import LLMException, LLMStatusCode, message_of, without_frames

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.engine.operation import Prepared
    from kvplan.links import PeerLink


class GatherNotices:
    """Final notifications to the peers of a transfer, one to each."""

    def __init__(self, engine: Engine, operation: str, options: dict[str, Any]) -> None:
        """Take the notifications out of `options`."""
        notices = {name: options.pop(name, None) for name in ("notify", "notify_failure")}
        self.any: bool = any(notices.values())
        self._new = partial(Operation, engine, "notify", tag=options.get("tag", ""), **notices)
        self._operation = operation
        self._operations: dict[PeerLink, Operation] = {}  # each keeps its link until it ends
        self._mutex = Mutex()
        self._error: LLMException | None = None  # of a notification, or `_interrupted`
        self._interrupted: LLMException | None = None

    def add(self, operations: Sequence[TransferOperation]) -> None:
        """Add the linked peers of operations; raise if an operation's link refuses the notice."""
        for operation in operations if self.any else ():
            cluster_id = cast("Any", operation.peer_key()).cluster_id
            link = operation.link or operation.engine.links.peers.get(cluster_id)
            if link is None or link in self._operations:
                continue
            notice = self._new(timeout_ms=operation.left_ms())
            try:
                notice.hold(link)
                self._operations[link] = notice.__enter__()
            except LLMException:
                if operation.link is not None:
                    raise
                # Otherwise the link has ended: `find_peer` raises why.

    def finish(self, error: BaseException | None) -> None:
        """Send the outcome to the peers once; a concurrent call waits for the first.

        After an interrupt the outcome is a failure, which the next call sends to the other peers.
        """
        with self._mutex:
            try:
                for link, operation in list(self._operations.items()):
                    try:
                        operation.finish(error or self._interrupted)
                    except LLMException as failure:
                        self._error = self._error or LLMException(
                            f"{self._operation}: {message_of(failure).removeprefix('notify: ')}",
                            status_code=failure.status_code,
                        )
                    del self._operations[link]
            except BaseException:
                text = f"{self._operation}: interrupted after the last byte"
                self._error = self._interrupted = LLMException(text)
                raise
        if error is None and self._error is not None:
            raise without_frames(self._error)


class Several:
    """The operations of one transfer, one for each list of pairs in its `Shares`."""

    def __init__(
        self,
        engine: Engine,
        transfers: Mapping[str, Transfer | Planned],
        shares: Shares,
        *,
        by_layer: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        self.engine, self.name, self.by_layer = engine, shares.name, by_layer
        self._transfers = transfers
        if shares.is_copy:
            refuse_notices(options)
        self.notices = GatherNotices(engine, self.name, cast("dict[str, Any]", options))
        # One gate, so that all operations wait for the same point.
        after = options.pop("after", None)
        gate = None if after is None else engine.gate("after", after)
        self.operations: list[TransferOperation] = []
        for pairs in shares.pairs:
            operation = TransferOperation(engine, pairs, self.name, by_layer=by_layer, **options)
            operation.after, operation.is_reported = gate, False
            self.operations.append(operation)

    def limited(self) -> float | None:
        """Return the remaining time of a call that waits; see `Operation.limited`."""
        first, *_ = [operation.limited() for operation in self.operations]
        return first

    def plan(self) -> Plan:
        """Plan all parts; nothing moves."""
        return Plan.made(*(part for operation in self._find() for part in operation.plan_parts()))

    def begin(self, task: GatherTask, submit: Callable[[TransferOperation, Prepared], Any]) -> None:
        """Submit all operations; after an error `task` has those that have begun."""
        try:
            with ExitStack() as stack:
                for operation in self.operations:
                    stack.enter_context(operation)
                begun = self._use_known()
                if begun is None:
                    begun = []
                    for operation in self._find():
                        with self._failing(operation):
                            begun.append((operation, operation.bind()))
                for operation, prepared in begun:
                    index, name = self.operations.index(operation), _text(operation, prepared[0])
                    task.begin(index, name, submit, operation, prepared)
        except BaseException as error:
            task.cancel()  # before the peers learn of it
            self.notices.finish(error)
            raise

    def _use_known(self) -> list[tuple[TransferOperation, Prepared]] | None:
        """Prepare all operations from known pairs; None: a pair is not known."""
        known = []
        for operation in self.operations:
            prepared = operation.use_known()
            if prepared is None:
                return None
            known.append((operation, prepared))
        self.notices.add(self.operations)
        return known

    def _find(self) -> list[TransferOperation]:
        """Find all caches, and return the operations that move something."""
        first = self.operations[0]
        for operation in self.operations:
            operation.find_own()
        self.notices.add(self.operations)
        for operation in self.operations:
            with self._failing(operation):
                operation.find_peer()
            if operation.cache_id < 0:
                operation.cache_id = first.cache_id
        self.notices.add(self.operations)  # of links that were not up before
        for name, transfer in self._transfers.items():
            if is_gather(transfer):
                self._divide(name, cast(Transfer, transfer))
        return [operation for operation in self.operations if operation.drop_unused()]

    def _divide(self, name: str, transfer: Transfer) -> None:
        """Give each operation of a gather the share that it takes from its source."""
        places = sorted(
            (pair.source or 0, index, at)
            for index, operation in enumerate(self.operations)
            for at, pair in enumerate(operation.pairs)
            if pair.name == name
        )
        found = [self.operations[index].found[at] for _, index, at in places]
        try:
            whole = with_leases(transfer, self.operations[0].engine.links.latest)
            check_gather(whole)
            taken, whole = divide(whole, [source.side for source, _ in found], found[0][1].side)
        except (LLMException, TypeError) as error:
            raise of_part(name, error) from None
        for (source, index, at), share in zip(places, taken, strict=True):
            rows = cast("Sequence[Rows]", whole.src)[source]
            self.operations[index].pairs[at] = Pair(name, whole, rows, whole.dst, source, share)

    @contextmanager
    def _failing(self, operation: TransferOperation) -> Iterator[None]:
        """Name the peer in errors, except LLM_PARAM_INVALID, which names the argument."""
        try:
            yield
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_PARAM_INVALID:
                raise
            index = self.operations.index(operation)
            failed = {index: error.with_traceback(None)}
            text = f"{self.name}: sources[{index}] {operation.peer_key()}: {error}"
            raise GatherError(text, failed, {}) from None


def _text(operation: TransferOperation, plan: Plan) -> str:
    """Return the name of a source in errors: its key and its shards."""
    shards = [f"{part.name}: {part.src.shard or 'whole'}" for part in plan.parts]
    return f"{operation.peer_key()} ({', '.join(shards).removeprefix(': ')})"
