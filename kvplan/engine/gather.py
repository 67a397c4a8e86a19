"""One transfer with several peers: an operation for each, and one task with one outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack, cast

from kvnative._signals import Mutex
from kvplan.engine.operation import Operation, SubmitOptions, refuse_notices
from kvplan.engine.resolve import TransferOperation
from kvplan.engine.shares import Pair, Shares, is_gather, with_lease_tables
from kvplan.execution.awaitable import AwaitableTask
from kvplan.execution.completion import run_aside
from kvplan.planning.gather import check_gather, divide
from kvplan.planning.plan import Plan
from kvplan.planning.planner import of_part
from kvplan.planning.transfer import Planned, Transfer
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.engine.operation import Prepared
    from kvplan.execution import ComputeEvent, ComputeStream, LayerTask, TransferTask
    from kvplan.links import PeerLink
    from kvplan.planning.transfer import Rows


_STOPPED = "stopped, as another source of the gather failed"


class GatherError(LLMException):
    """A failed transfer with several peers; its status is that of the first failed source.

    Attributes:
        failed: the errors of the sources by their place; `origin` and `unconfirmed` of each are of
            its own plan. Those of this error are of the first failed source.
        stopped: the errors of sources that were stopped because others failed, by place.
    """

    def __init__(
        self, message: str, failed: dict[int, LLMException], stopped: dict[int, LLMException]
    ) -> None:
        first = failed[min(failed)]
        super().__init__(
            message,
            status_code=first.status_code,
            origin=first.origin,
            unconfirmed=first.unconfirmed,
        )
        self.failed = failed
        self.stopped = stopped


class GatherNotices:
    """Final notifications to the peers of a transfer, one to each."""

    def __init__(
        self,
        engine: Engine,
        operation: str,
        notify: bytes | None,
        notify_failure: bytes | None,
        tag: str = "",
    ) -> None:
        self._new = partial(
            Operation, engine, "notify", notify=notify, notify_failure=notify_failure, tag=tag
        )
        self._operation = operation
        self._operations: dict[PeerLink, Operation] = {}  # keep the links until they end
        self._mutex = Mutex()
        self._error: LLMException | None = None
        self.any: bool = self._new().notifies

    def add(self, link: PeerLink) -> None:
        """Add the peer of a source."""
        if self.any and link not in self._operations:
            notice = self._operations[link] = self._new().__enter__()
            notice.hold(link)

    def finish(self, error: BaseException | None) -> None:
        """Send the outcome to the peers once; a concurrent call waits for the first."""
        with self._mutex:
            for link in list(self._operations):
                try:
                    self._operations.pop(link).finish(error)
                except LLMException as failure:
                    self._error = self._error or LLMException(
                        f"{self._operation}: {str(failure.args[0]).removeprefix('notify: ')}",
                        status_code=failure.status_code,
                    )
        if error is None and self._error is not None:
            raise self._error


class GatherTask(AwaitableTask):
    """The handle of a submitted transfer with several peers.

    All methods are thread-safe. As a `TransferTask`, the handle can be awaited under asyncio.

    Attributes:
        tasks: the tasks of the sources that give something, by the place of the source.
    """

    def __init__(self, operation: str, notices: GatherNotices) -> None:
        super().__init__()
        self._operation = operation
        self.notices = notices
        self.tasks: dict[int, TransferTask] = {}
        self._names: dict[int, str] = {}
        self._given_up = False  # by a timeout or `cancel`, not because a source failed
        self._num_unsettled: int | None = None  # tasks without an outcome, once they are followed
        self._mutex = Mutex()

    @property
    def done(self) -> bool:
        """Whether every source has an outcome; never blocks."""
        return all(task.done for task in self.tasks.values())

    def wait_done(self, timeout_ms: float) -> bool:
        """Wait at most `timeout_ms` for `done`, and return it. Does not raise the outcome."""
        end = perf_counter() + timeout_ms / 1000
        return all(
            task.wait_done(max(0.0, (end - perf_counter()) * 1000))
            for task in list(self.tasks.values())
        )

    def wait(self, timeout_ms: float | None = None) -> None:
        """Wait until all bytes of all sources have arrived and the peers were notified.

        If one source fails, the others are stopped: after an error nothing moves, and blocks of
        the destination may be written in part.

        Args:
            timeout_ms: milliseconds for all sources together, >= 0; None waits for ever.

        Raises:
            ValueError: timeout_ms < 0 or not a number.
            GatherError: LLM_TIMEOUT if the time has passed, otherwise the status of a failed
                source. Names each source that failed or was stopped.
            LLMException: all bytes have arrived, but a peer could not be notified.
        """
        check_timeout(timeout_ms)
        end = None if timeout_ms is None else perf_counter() + timeout_ms / 1000
        waiting = dict(self.tasks)
        settled: SimpleQueue[int] = SimpleQueue()
        errors: dict[int, LLMException] = {}
        try:
            for index, task in self.tasks.items():
                task.when_settled(partial(settled.put, index))
            while waiting:
                place, is_late = _next_settled(waiting, settled, end)
                self._given_up = self._given_up or is_late
                try:
                    waiting.pop(place).wait(0 if is_late else None)
                except LLMException as error:
                    errors[place] = error.with_traceback(None)
                    if not self._given_up:
                        self._stop(LLMException(_STOPPED))
        except BaseException:
            self.drop()
            raise
        failure: LLMException | None = self._failure(errors) if errors else None
        try:
            self.notices.finish(failure)
        except LLMException as error:
            failure = error
        self._note_settled()
        if failure is not None:
            raise failure

    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop sources that have not ended; after the return no byte is read or written."""
        self._given_up = True
        self._stop(reason)

    def explain(self) -> str:
        """Return the progress of each source as text."""
        return "\n".join(
            f"sources[{index}] {self._names[index]}\n{task.explain()}"
            for index, task in self.tasks.items()
        )

    def block_stream(self, stream: ComputeStream) -> None:
        """Let later work of `stream` wait for the copies from all sources.

        Calls `TransferTask.block_stream` of each; after an error the stream waits for some of them.

        Raises:
            NativeError, TypeError, LLMException: as `TransferTask.block_stream`.
        """
        for task in list(self.tasks.values()):
            task.block_stream(stream)

    def _follow(self) -> None:
        with self._mutex:
            if self._num_unsettled is not None:
                return
            self._num_unsettled = len(self.tasks)
        for task in list(self.tasks.values()):
            task.when_settled(partial(self._note_source, task))
        if not self.tasks:
            self._conclude()

    def _note_source(self, task: TransferTask) -> None:
        """Count an outcome; stop the other sources if this one has failed."""
        with self._mutex:
            self._num_unsettled = num_left = (self._num_unsettled or 0) - 1
        if num_left == 0:
            self._conclude()
        elif not self._given_up:
            try:
                task.wait()
            except LLMException:
                run_aside(self._stop, LLMException(_STOPPED))

    def _conclude(self) -> None:
        """Settle after the last source has ended; aside if peers are to be notified."""
        if self.notices.any:
            run_aside(self._settle)
        else:
            self._settle()

    def _settle(self) -> None:
        with suppress(LLMException):  # `wait` raises the error to its callers
            self.wait()

    def _stop(self, reason: LLMException | None) -> None:
        for task in list(self.tasks.values()):
            task.cancel(reason)

    def drop(self) -> None:
        """Stop the sources that have begun, and end their operations."""
        self.cancel()
        for task in list(self.tasks.values()):
            with suppress(LLMException):
                task.wait()
        self.notices.finish(KeyboardInterrupt())  # sends nothing to the peers

    def begin(self, index: int, name: str, submit: Callable[[], TransferTask]) -> None:
        """Submit the part of a source; after an error the others are stopped.

        Raises:
            GatherError: the part could not be submitted.
        """
        self._names[index] = name
        try:
            self.tasks[index] = submit()
        except LLMException as error:
            errors = {index: error.with_traceback(None)}
            self._stop(LLMException(_STOPPED))
            for other, task in self.tasks.items():
                try:
                    task.wait()
                except LLMException as stopped:
                    errors[other] = stopped.with_traceback(None)
            raise self._failure(errors) from None

    def _failure(self, errors: dict[int, LLMException]) -> GatherError:
        stopped = {place: error for place, error in errors.items() if _STOPPED in str(error)}
        failed = {at: error for at, error in sorted(errors.items()) if at not in stopped}
        parts = [f"sources[{at}] {self._names[at]}: {error}" for at, error in failed.items()]
        if stopped:
            names = ", ".join(f"sources[{at}]" for at in sorted(stopped))
            parts.append(f"{names} stopped for that")
        message = f"{self._operation}: {len(failed)} of {len(self._names)} sources failed: "
        return GatherError(message + "; ".join(parts), failed or stopped, stopped)


class LayerGatherTask(GatherTask):
    """The handle of a transfer of several caches or peers that moves layer by layer.

    Each pair of caches has a `LayerTask` in `tasks`. Layer numbers are those of the caches of this
    process: of the source, or for a pull of the destination.
    """

    tasks: dict[int, LayerTask]  # type: ignore[assignment]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have to be ready, in ascending order."""
        return tuple(sorted({layer for task in self.tasks.values() for layer in _own_layers(task)}))

    def ready(self, layer: int, event: ComputeEvent | None = None) -> None:
        """Submit a layer that holds its final values; see `LayerTask.ready`.

        Raises:
            TypeError: layer is not an integer, or event is not an event.
            LLMException: as `LayerTask.ready`.
        """
        having = [task for task in self.tasks.values() if layer in _own_layers(task)]
        if not having:
            raise invalid(f"layer={shown(layer)} is not one of the layers {self.layers}")
        for task in having:
            task.ready(task.layers[_own_layers(task).index(layer)], event)


def _own_layers(task: LayerTask) -> range:
    """Return the layers of a plan by the numbers of this process."""
    part = task.plan.part
    return part.dst_layers if part.local == "dst" else part.src_layers


def _next_settled(
    waiting: dict[int, TransferTask], settled: SimpleQueue[int], end: float | None
) -> tuple[int, bool]:
    """Return the place of a settled source and False; at `end` an unsettled one and True."""
    place = -1
    while place not in waiting:  # was handled when its time had passed
        left_s = None if end is None else max(0.0, end - perf_counter())
        if len(waiting) == 1:  # this thread helps
            ((place, last),) = waiting.items()
            return place, not last.wait_done(inf if left_s is None else left_s * 1000)
        try:
            place = settled.get(timeout=left_s)
        except Empty:
            return min(waiting), True
    return place, False


def check_timeout(timeout_ms: float | None) -> None:
    """Refuse a negative timeout, or one that is not a number."""
    if timeout_ms is not None and not timeout_ms >= 0:
        raise ValueError(f"timeout_ms={timeout_ms} must be >= 0 or None")


class Several:
    """The operations of one transfer: one for each peer, or by layers for each pair of caches.

    Attributes:
        engine: runs the operations.
        name: name in logs, metrics and recordings.
        notices: final notifications to the peers.
        operations: one for each peer, in the order of the transfer.
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
        # Taken once: all operations wait for the same point.
        after = options.pop("after", None)
        gate = None if after is None else engine.gate("after", after)
        self.operations: list[TransferOperation] = []
        for pairs in shares.pairs:
            operation = TransferOperation(engine, pairs, self.name, by_layer=by_layer, **options)
            operation.after, operation.is_part = gate, True
            self.operations.append(operation)

    def plan(self) -> Plan:
        """Plan all parts; nothing moves."""
        return Plan.made(*(part for operation in self._found() for part in operation.planned()))

    def begin(self, task: GatherTask, submit: Callable[[Operation, Prepared], Any]) -> None:
        """Submit all operations; after an error `task` has those that have begun."""
        try:
            with ExitStack() as stack:
                for operation in self.operations:
                    stack.enter_context(operation)
                begun = self._known()
                if begun is None:
                    begun = []
                    for operation in self._found():
                        with self._failing(operation):
                            begun.append((operation, operation.bound()))
                for operation, prepared in begun:
                    index = self.operations.index(operation)
                    name = _text(operation, prepared[0])
                    task.begin(index, name, partial(submit, operation, prepared))
        except BaseException as error:
            self.notices.finish(error)
            raise

    def _known(self) -> list[tuple[TransferOperation, Prepared]] | None:
        """Return what each operation executes if all are between known caches."""
        known = []
        for operation in self.operations:
            prepared = operation.known()
            if operation.link is not None:
                self.notices.add(operation.link)
            if prepared is None:
                return None
            known.append((operation, prepared))
        return known

    def _found(self) -> list[TransferOperation]:
        """Find all caches, and return the operations that move something."""
        first = self.operations[0]
        for operation in self.operations:
            operation.find_own()
        for operation in self.operations:
            with self._failing(operation):
                try:
                    operation.find_peer()
                finally:
                    if operation.link is not None and operation.moves:
                        self.notices.add(operation.link)
            if operation.cache_id < 0:
                operation.cache_id = first.cache_id
        for name, transfer in self._transfers.items():
            if is_gather(transfer):
                self._divide(name, cast(Transfer, transfer))
        return [operation for operation in self.operations if operation.drop_unused()]

    def _divide(self, name: str, transfer: Transfer) -> None:
        """Let each operation know what it takes from its source of a gather."""
        places = sorted(
            (pair.source or 0, index, at)
            for index, operation in enumerate(self.operations)
            for at, pair in enumerate(operation.pairs)
            if pair.name == name
        )
        found = [self.operations[index].found[at] for _, index, at in places]
        try:
            whole = with_lease_tables(transfer, self.operations[0].engine.links.peers)
            check_gather(whole)
            taken, whole = divide(whole, [source.side for source, _ in found], found[0][1].side)
        except (LLMException, TypeError) as error:
            raise of_part(name, error) from None
        for (source, index, at), share in zip(places, taken, strict=True):
            rows = cast("Sequence[Rows]", whole.src)[source]
            self.operations[index].pairs[at] = Pair(name, whole, rows, whole.dst, source, share)

    @contextmanager
    def _failing(self, operation: TransferOperation) -> Iterator[None]:
        """Add the peer to an error, except to wrong arguments, which name it already."""
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
