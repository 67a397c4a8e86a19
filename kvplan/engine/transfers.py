"""The four verbs of transfers: plan, run, submit and layered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, cast, overload

from kvplan.engine.gather import Several
from kvplan.engine.operation import (
    ALL_OPTIONS,
    OF_LAYERED,
    OF_SUBMIT,
    RunOptions,
    SubmitOptions,
    TransferOptions,
    checked,
)
from kvplan.engine.pairs import Request, find_request, move_now
from kvplan.engine.ranges import AddressRanges, RangeOperation, move_ranges_now
from kvplan.engine.resolve import TransferOperation
from kvplan.engine.runner import OperationRunner, PlanEvent
from kvplan.engine.shares import Pair, shares_of
from kvplan.execution import LayerGatherTask
from kvplan.execution.gather_task import GatherTask
from kvplan.execution.memory import revocation
from kvplan.planning.planned import check_plan
from kvplan.planning.planner import check_transfers
from kvplan.planning.transfer import AnyRequest, Planned, Rows, Transfer
from kvplan.status import LLMException
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.engine.operation import Operation, Prepared
    from kvplan.execution import LayerTask, TensorMemory, TransferTask
    from kvplan.planning.plan import Plan

Movable: TypeAlias = "AnyRequest | AddressRanges"
AnyLayerTask: TypeAlias = "LayerTask | LayerGatherTask"
_Operation: TypeAlias = TransferOperation | RangeOperation
_Single: TypeAlias = "Transfer[Rows] | Planned"
_Grouped: TypeAlias = "Transfer[Sequence[Rows]] | Mapping[str, Transfer | Planned]"


class TransferOperations(OperationRunner):
    """The four methods that every transfer of an engine goes through.

    A transfer is one of:

    - a `Transfer`: rows of one cache to rows of another. With a sequence of `Rows` as source it is
      a gather: parts of the model's cache from several peers.
    - `Planned`: a plan that was made earlier, with the two caches.
    - a mapping of names to `Transfer` or `Planned`: caches of one request, such as MLA's latent and
      its indexer, or layers with and without a sliding window. Several peers may have them.
    - `AddressRanges`: memory of caches by addresses.

    A transfer has one deadline, one outcome, and one notification to each peer.
    """

    def plan(self, transfer: Movable, *, by_layer: bool = False) -> Plan:
        """Plan a transfer with the peers' own descriptions; no byte moves, and no key is claimed.

        Args:
            transfer: the transfer.
            by_layer: True: plan each layer by itself, as `layered` moves it.

        Raises:
            TypeError, ValueError, LLMException: see `run`.
        """
        engine = self._running()
        operation = _operation(engine, transfer, by_layer=check_type("by_layer", by_layer, bool))
        return operation.plan() if isinstance(operation, Several) else operation.prepare()[0]

    def run(self, transfer: Movable, **options: Unpack[RunOptions]) -> None:
        """Execute a transfer; after this call every byte has arrived.

        The calling thread copies too. The pull of the last tensor consumes a request's `CacheKey`
        of an allocated cache; no other name is consumed.

        Args:
            transfer: the transfer.
            options: `timeout_ms`, `notify`, `notify_failure`, `verify`, `tag` and `after`; see
                `RunOptions`.

        Raises:
            TypeError: an argument or option of the wrong type, or one that does not exist.
            ValueError: timeout_ms is < 0 or NaN; a number outside its C type.
            LLMException: LLM_PARAM_INVALID: see `kvplan.plan`; this engine's own cluster, a cache
                that is not writable there, or an option that the transfer cannot have;
                LLM_NOT_YET_LINK: no link to that cluster; LLM_LINK_FAILED: the link is broken, or
                broke meanwhile; LLM_KV_CACHE_NOT_EXIST: a cache or address does not exist here or
                there, or a lease has ended; LLM_REPEAT_REQUEST: another engine pulls by the key,
                which pulls consume; LLM_FEATURE_NOT_ENABLED: memory that the link does not reach,
                or host and device memory in one transfer; LLM_TIMEOUT: the time has passed;
                LLM_LINK_BUSY: the peer's program does not read its notifications; LLM_FAILED: not
                initialized, or `verify` has found unequal bytes; LLM_ENGINE_FINALIZED.
            GatherError: a gather, or a transfer with several peers; names each failed source.
        """
        started = perf_counter()
        engine = self._engine
        if engine is None or engine.inherited:
            engine = self._running()
        given = checked(options, ALL_OPTIONS) if options else {}
        request = find_request(engine, transfer)
        if not self._hooks and not given.get("verify") and "after" not in given:
            if request is not None:
                if move_now(engine, request, started, given):
                    return
            elif type(transfer) is AddressRanges and move_ranges_now(
                engine, transfer, started, given
            ):
                return
        operation = _operation(engine, transfer, request, speculative="after" not in given, **given)
        if isinstance(operation, Several):
            self._begin(operation, waits=True)
            return
        with operation:
            if "after" in given:
                operation.is_reported = False
                task = self._submit(operation, operation.prepare())
                task.settles_aside = False  # the operation limits its last steps itself
                try:
                    task.wait(operation.limited())
                except BaseException:  # even an interrupt: the caller has no task to cancel
                    task.cancel()
                    raise
                return
            while not operation.done:
                self._execute(operation, operation.prepare())

    @overload
    def submit(
        self, transfer: _Single | AddressRanges, **options: Unpack[SubmitOptions]
    ) -> TransferTask: ...

    @overload
    def submit(
        self, transfer: Transfer[Sequence[Rows]], **options: Unpack[SubmitOptions]
    ) -> GatherTask: ...

    @overload
    def submit(
        self, transfer: Movable, **options: Unpack[SubmitOptions]
    ) -> TransferTask | GatherTask: ...

    def submit(
        self, transfer: Movable, **options: Unpack[SubmitOptions]
    ) -> TransferTask | GatherTask:
        """Begin a transfer and return its task; a key is claimed until the outcome.

        Args:
            transfer: the transfer.
            options: `notify`, `notify_failure`, `verify`, `tag` and `after`; see `SubmitOptions`.

        Returns:
            A `GatherTask` for a gather or several peers, otherwise a `TransferTask`.

        Raises:
            TypeError, ValueError, GatherError: see `run`.
            LLMException: see `run`, before anything moves; LLM_LINK_BUSY: too many ended tasks wait
                in `completions()`. The task raises later errors.
        """
        engine = self._engine
        if engine is None or engine.inherited:
            engine = self._running()
        given = checked(options, OF_SUBMIT) if options else {}
        operation = _operation(engine, transfer, find_request(engine, transfer), **given)
        if isinstance(operation, Several):
            return self._begin(operation)
        with operation:
            return self._submit(operation, operation.prepare())

    @overload
    def layered(self, transfer: _Single, **options: Unpack[TransferOptions]) -> LayerTask: ...

    @overload
    def layered(
        self, transfer: _Grouped, **options: Unpack[TransferOptions]
    ) -> LayerGatherTask: ...

    @overload
    def layered(self, transfer: AnyRequest, **options: Unpack[TransferOptions]) -> AnyLayerTask: ...

    def layered(self, transfer: AnyRequest, **options: Unpack[TransferOptions]) -> AnyLayerTask:
        """Begin a transfer whose layers move when the program says that they are ready.

        Args:
            transfer: the transfer.
            options: `notify`, `notify_failure`, `verify` and `tag`; see `TransferOptions`.

        Returns:
            The task: `ready(layer)` submits one of `task.layers`, `wait()` ends when all have
            arrived. Layers are counted as in the source; in a pull from several caches or peers, as
            in the destination. Until its end the task keeps its link: `unlink_clusters` waits, then
            reports LLM_LINK_BUSY.

        Raises:
            TypeError, ValueError: see `run`; also for `after`, because `ready(layer, event)` takes
                an event for each layer.
            LLMException: see `submit`; LLM_PARAM_INVALID: also if neither the transfer nor the
                cache says how many tensors a layer has.
        """
        engine = self._engine
        if engine is None or engine.inherited:
            engine = self._running()
        given = checked(options, OF_LAYERED) if options else {}
        request = find_request(engine, transfer, by_layer=True)
        operation = _operation(engine, transfer, request, by_layer=True, **given)
        if isinstance(operation, Several):
            return cast(LayerGatherTask, self._begin(operation))
        with operation:
            return cast("LayerTask", self._submit(operation, operation.prepare()))

    def _execute(self, operation: Operation, prepared: Prepared) -> None:
        """Execute a prepared transfer; the caller prepares it again until `operation.done`."""
        plan, src, dst, descriptors = prepared
        engine, operation.plan = operation.engine, plan
        if engine.reinterpret or self._hooks or operation.verify_every:
            self._look(operation, plan, src, dst)
        left_ms = operation.timeout_ms  # as `operation.limited`, without a Python call
        if left_ms is None and operation.link is not None:
            left_ms = operation.timeout_ms = engine.wait_ms
        if left_ms is not None:
            left_ms = max(0.0, left_ms - (perf_counter() - operation.started) * 1000)
        try:
            engine.transfers.execute(plan, src, dst, left_ms, descriptors)
        except LLMException as error:
            if revocation((src, dst)) or not operation.asks_again(error):
                raise
            return
        if operation.verify_every:
            operation.verify()
        operation.done = True
        if operation.notifies:
            operation.send_notification()

    def _submit(self, operation: _Operation, prepared: Prepared) -> TransferTask:
        """Submit a prepared transfer; `operation` ends with the task."""
        plan, src, dst, descriptors = prepared
        engine, operation.plan = operation.engine, plan
        if engine.reinterpret or self._hooks or operation.verify_every:
            self._look(operation, plan, src, dst)
        report = engine.completion.completions if operation.is_reported else None
        if report is not None:
            report.check_room()
        aside = operation.follows_up or operation.claim is not None  # the peer must answer
        track = partial(engine.completion.track, report=report, aside=aside)
        on_outcome = operation.finish if operation.follows_up else operation.end
        transfers, device = engine.transfers, engine.device
        if operation.by_layer:
            gate_of = None if device is None else device.gate
            layers = transfers.layered(plan, src, dst, on_outcome, track, descriptors, gate_of)
            operation.submitted, layers.settles_aside = True, aside
            engine.completion.watch(layers)
            return layers
        stream_of = None if device is None else device.stream
        try:
            task = transfers.submit(
                plan, src, dst, on_outcome, descriptors, operation.after, stream_of,
                None if operation.timeout_ms is None else operation.left_ms(),
            )  # fmt: skip
        except LLMException as error:
            if not operation.asks_again(error):
                raise
            return self._submit(operation, operation.prepare())
        try:
            operation.submitted, task.settles_aside = True, aside
            track(task)
        except BaseException:  # an interrupt: the caller has no task to cancel
            task.cancel()
            raise
        return task

    def _look(self, operation: Operation, plan: Plan, src: TensorMemory, dst: TensorMemory) -> None:
        """Warn of reinterpreted bytes, call the hooks, and remember what is to be verified."""
        for part in plan.parts if operation.engine.reinterpret else ():
            if part.reinterpret:
                operation.engine.warn_reinterpret(operation.name, part)
        event = PlanEvent(
            plan, operation.name, operation.cache_id, operation.cluster_id, operation.tag
        )
        for hook in list(self._hooks.values()):
            hook(event)
        if operation.verify_every:
            operation.begin_to_move(src, dst)

    def _begin(self, several: Several, *, waits: bool = False) -> GatherTask:
        """Submit all operations as one task; then wait for the task, or report its end."""
        notices = several.notices
        kind = LayerGatherTask if several.by_layer else GatherTask
        task = kind(several.name, notices.finish if notices.any else None)
        completion = several.engine.completion
        report = None if waits else completion.completions
        task.settles_aside = not waits and (notices.any or several.operations[0].follows_up)
        try:
            if report is not None:
                report.check_room()
            several.begin(task, self._submit)
            if waits:
                task.wait(several.limited())
            elif report is not None or notices.any:
                task.settle_by(partial(completion.track, report=report, aside=notices.any))
        except BaseException:  # even an interrupt: the caller has no task to cancel
            try:
                task.cancel()
            finally:  # despite a second interrupt
                task.drop()
            raise
        return task


def _operation(
    engine: Engine,
    transfer: object,
    request: Request | None = None,
    *,
    by_layer: bool = False,
    speculative: bool = False,
    **options: Any,
) -> _Operation | Several:
    """Return the operation of a transfer, or `Several`. `options` come from `checked`."""
    if isinstance(transfer, AddressRanges):
        if by_layer:
            raise TypeError("AddressRanges have no layers; layers move by a Transfer")
        return RangeOperation(engine, transfer, **options)
    name, transfers = "", cast("Mapping[str, Transfer | Planned]", {"": transfer})
    if isinstance(transfer, Transfer) and isinstance(transfer.src, Rows):
        pairs = [Pair("", transfer, transfer.src, transfer.dst)]
    elif isinstance(transfer, Planned):
        name = check_plan(transfer.plan).operation
        pairs = [Pair("", transfer, Rows(transfer.src), Rows(transfer.dst))]
    else:
        if isinstance(transfer, Mapping):
            check_transfers(transfer, (Transfer, Planned))
            transfers = transfer
        elif not isinstance(transfer, Transfer):
            raise TypeError(
                f"transfer={shown(transfer)} must be Transfer, Planned, a mapping of names to "
                "these, or AddressRanges"
            )
        shares = shares_of(transfers, by_layer=by_layer)
        if len(shares.pairs) > 1 or shares.is_gather or by_layer:
            return Several(engine, transfers, shares, by_layer=by_layer, **options)
        name, pairs = shares.name, shares.pairs[0]
    return TransferOperation(
        engine, pairs, name, request, by_layer=by_layer, speculative=speculative, **options
    )
