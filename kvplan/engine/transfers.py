"""The four verbs of transfers: plan, run, submit and layered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, Unpack, cast, overload

from kvplan.control.messages import MAX_NOTIFICATION_NBYTES
from kvplan.engine.gather import GatherTask, LayerGatherTask, Several, check_timeout
from kvplan.engine.operation import MAX_TAG, RunOptions, SubmitOptions, TransferOptions
from kvplan.engine.pairs import Request, find_request, move_now
from kvplan.engine.ranges import AddressRanges, RangeOperation, unconfirmed_text
from kvplan.engine.resolve import TransferOperation
from kvplan.engine.runner import OperationRunner, PlanEvent
from kvplan.engine.shares import Pair, check_plan, shares_of
from kvplan.execution.memory import revocation
from kvplan.planning.planner import check_transfers
from kvplan.planning.transfer import AnyRequest, Planned, Rows, Transfer
from kvplan.status import LLMException, LLMStatusCode
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.engine.operation import Operation, Prepared
    from kvplan.execution import LayerTask, TransferTask
    from kvplan.planning.plan import Plan

Movable: TypeAlias = "AnyRequest | AddressRanges"
_OPTIONS: Final = RunOptions.__annotations__.keys()
_LONG_MS: Final = 1 << 63
AnyLayerTask: TypeAlias = "LayerTask | LayerGatherTask"
_Task = TypeVar("_Task", bound=GatherTask)
_Single: TypeAlias = "Transfer[Rows] | Planned"
_Grouped: TypeAlias = "Transfer[Sequence[Rows]] | Mapping[str, Transfer | Planned]"


class TransferOperations(OperationRunner):
    """The four methods that every transfer of an engine goes through.

    A transfer is one of:

    - a `Transfer`: rows of one cache to rows of another. With a sequence of `Rows` as source it is
      a gather: parts of the model's cache from several peers.
    - `Planned`: a plan that was made before, with the two caches.
    - a mapping of names to `Transfer` or `Planned`: caches of one request, such as MLA's latent and
      its indexer, or layers with and without a sliding window. Several peers may have them.
    - `AddressRanges`: registered memory by addresses.

    A transfer has one deadline, one outcome, and one notification to each peer.
    """

    def plan(self, transfer: Movable, *, by_layer: bool = False) -> Plan:
        """Plan a transfer with the peers' own descriptions; no byte moves, and no key is claimed.

        Args:
            transfer: the transfer.
            by_layer: whether each layer moves by itself, as `layered` moves it.

        Raises:
            TypeError, ValueError, LLMException: as `run`, before anything moves.
        """
        engine = self._running()
        operation = _operation(engine, transfer, by_layer=by_layer)
        if isinstance(operation, Several):
            return operation.plan()
        return operation.prepare()[0]

    def run(self, transfer: Movable, **options: Unpack[RunOptions]) -> None:
        """Move a transfer; after the return every byte has arrived.

        The calling thread copies too. A `CacheKey` of a request is consumed by the pull of its
        last tensor; a key of a prefix, and every other name, is never consumed.

        Args:
            transfer: the transfer.
            options: `timeout_ms`, `notify`, `notify_failure`, `verify`, `tag` and `after`; see
                `RunOptions`.

        Raises:
            TypeError: an argument or option of another type, or one that does not exist.
            ValueError: timeout_ms is < 0 or not a number; a number outside its C type.
            LLMException: LLM_PARAM_INVALID: as `kvplan.plan`, this engine's own cluster, a cache
                that is not writable there, or an option that the transfer cannot have;
                LLM_NOT_YET_LINK: no link to that cluster; LLM_LINK_FAILED: the link is broken, or
                broke meanwhile; LLM_KV_CACHE_NOT_EXIST: a cache or address does not exist here or
                there, or a lease has ended; LLM_REPEAT_REQUEST: another pull has claimed the key;
                LLM_FEATURE_NOT_ENABLED: memory that the link does not reach, or host and device
                memory in one transfer; LLM_TIMEOUT: the time has passed; LLM_LINK_BUSY: the peer's
                program does not read its notifications; LLM_FAILED: not initialized, or `verify`
                has found unequal bytes; LLM_ENGINE_FINALIZED.
            GatherError: a transfer with several peers failed; names each peer that failed.
        """
        started = perf_counter()
        engine = self._engine
        if engine is None or engine.inherited:
            engine = self._running()
        request = find_request(engine, transfer)
        if (
            request is not None
            and not self._hooks
            and (not options or _is_simple(options))
            and move_now(engine, request, started, options.get("tag", ""), options.get("notify"))
        ):
            return
        timeout_ms = options.pop("timeout_ms", None)
        if timeout_ms is not None:
            check_timeout(timeout_ms)
        others = cast(SubmitOptions, options)
        if others.get("after") is not None:
            task = self.submit(transfer, **others)
            task.wait(engine.wait_ms if timeout_ms is None else timeout_ms)
            return
        operation = _operation(engine, transfer, request, speculative=True, **others)
        if isinstance(operation, Several):
            self._run_several(operation, timeout_ms)
            return
        with operation:
            try:
                while not operation.done:
                    self._execute(operation, operation.prepare(), timeout_ms)
            except LLMException as error:
                if not (more := unconfirmed_text(operation.plan, error)):
                    raise
                raise LLMException(
                    f"{error.args[0]}{more}",
                    status_code=error.status_code,
                    origin=error.origin,
                    unconfirmed=error.unconfirmed,
                ) from None

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
            A `GatherTask` for a transfer with several peers, otherwise a `TransferTask`.

        Raises:
            TypeError, ValueError, GatherError: as `run`.
            LLMException: as `run`, before anything moves; LLM_LINK_BUSY: too many ended tasks wait
                in `completions()`. The task raises later errors.
        """
        if options:
            _refuse_timeout(cast("dict[str, Any]", options))
        engine = self._engine
        if engine is None or engine.inherited:
            engine = self._running()
        operation = _operation(engine, transfer, find_request(engine, transfer), **options)
        if isinstance(operation, Several):
            task = GatherTask(operation.name, operation.notices)
            return self._begin(operation, task, self._submit)
        with operation:
            if isinstance(operation, RangeOperation):
                return operation.submit(partial(self._submit, operation))
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
            arrived. Layers are counted as in the source; if several caches or peers are pulled
            from, each of which counts its own, as in the destination.
            Until its end it keeps its link: `unlink_clusters` waits, then reports LLM_LINK_BUSY.

        Raises:
            TypeError, ValueError: as `run`; also for `after`, as `ready(layer, event)` takes an
                event for each layer.
            LLMException: as `submit`; LLM_PARAM_INVALID: also if neither the transfer nor the cache
                says how many tensors a layer has.
        """
        if options:
            _refuse_timeout(cast("dict[str, Any]", options))
        if cast("dict[str, Any]", options).pop("after", None) is not None:
            raise TypeError(
                "after is not an option of layered; ready(layer, event) takes one for each layer"
            )
        if isinstance(transfer, AddressRanges):
            raise TypeError("layered takes a Transfer; AddressRanges have no layers")
        engine = self._engine
        if engine is None or engine.inherited:
            engine = self._running()
        request = find_request(engine, transfer, by_layer=True)
        operation = _operation(engine, transfer, request, by_layer=True, **options)
        if isinstance(operation, Several):
            task = LayerGatherTask(operation.name, operation.notices)
            return self._begin(operation, task, self._layer)
        with operation:
            return self._layer(operation, operation.prepare())

    def _execute(self, operation: Operation, prepared: Prepared, timeout_ms: float | None) -> None:
        """Execute a prepared transfer; unless `operation.done`, it must be prepared again."""
        plan, src, dst, descriptors = prepared
        operation.plan = plan
        if operation.engine.reinterpret or self._hooks:
            self._show(operation, plan)
        if timeout_ms is None and operation.link is not None:
            timeout_ms = operation.engine.wait_ms
        left_ms = timeout_ms
        if timeout_ms is not None:  # `operation.left_ms`, without a call of Python
            left_ms = max(0.0, timeout_ms - (perf_counter() - operation.started) * 1000)
        if operation.verify_every:
            operation.begin_to_move(src, dst)
        try:
            operation.engine.transfers.execute(plan, src, dst, left_ms, descriptors)
        except LLMException as error:
            missing = error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            is_stale = operation.speculated and not revocation((src, dst))
            if not missing or not (is_stale or operation.has_moved()):
                raise
            operation.disable_speculation()  # the key may name another cache now
        else:
            if operation.verify_every:
                operation.verify(operation.left_ms(timeout_ms))
            operation.done = True
            if operation.notifies:
                operation.send_notification(operation.left_ms(timeout_ms))

    def _submit(self, operation: Operation, prepared: Prepared) -> TransferTask:
        """Submit a prepared transfer; `operation` ends with the task."""
        plan, src, dst, descriptors = prepared
        operation.plan = plan
        if operation.engine.reinterpret or self._hooks:
            self._show(operation, plan)
        engine = operation.engine
        report = None if operation.is_part else engine.completion.completions
        if report is not None:
            report.check_room()
        if operation.verify_every:
            operation.begin_to_move(src, dst)
        on_outcome = operation.finish if operation.follows_up else operation.end
        stream_of = None if engine.device is None else engine.device.stream
        task = engine.transfers.submit(
            plan, src, dst, on_outcome, descriptors, operation.after, stream_of
        )
        try:
            operation.submitted = True
            engine.completion.track(task, report, aside=operation.follows_up)
        except BaseException:  # an interrupt: the caller has no task to cancel
            task.cancel()
            raise
        return task

    def _layer(self, operation: Operation, prepared: Prepared) -> LayerTask:
        """Submit a prepared transfer whose layers move at `LayerTask.ready`."""
        plan, src, dst, descriptors = prepared
        operation.plan = plan
        if operation.engine.reinterpret or self._hooks:
            self._show(operation, plan)
        engine = operation.engine
        report = None if operation.is_part else engine.completion.completions
        if report is not None:
            report.check_room()
        if operation.verify_every:
            operation.begin_to_move(src, dst)
        on_last = partial(engine.completion.track, report=report, aside=operation.follows_up)
        on_outcome = operation.finish if operation.follows_up else operation.end
        gate_of = None if engine.device is None else engine.device.gate
        task = engine.transfers.layered(plan, src, dst, on_outcome, on_last, descriptors, gate_of)
        operation.submitted = True
        engine.completion.watch(task)
        return task

    def _show(self, operation: Operation, plan: Plan) -> None:
        """Show the plan to the hooks before its execution, and warn if it reinterprets bytes."""
        if operation.engine.reinterpret and plan.reinterpret:
            for part in plan.parts:
                if part.reinterpret:
                    operation.engine.warn_reinterpret(operation, part)
        event = PlanEvent(
            plan, operation.name, operation.cache_id, operation.cluster_id, operation.tag
        )
        for hook in list(self._hooks.values()):
            hook(event)

    def _run_several(self, several: Several, timeout_ms: float | None) -> None:
        task = GatherTask(several.name, several.notices)
        try:
            several.begin(task, self._submit)
            task.wait(several.engine.wait_ms if timeout_ms is None else timeout_ms)
        except BaseException:  # also an interrupt between the two
            task.drop()
            raise

    def _begin(
        self, several: Several, task: _Task, submit: Callable[[Operation, Prepared], Any]
    ) -> _Task:
        """Begin all operations, and report their task as one."""
        completion = several.engine.completion
        try:
            report = completion.completions
            if report is not None:
                report.check_room()
            several.begin(task, submit)
            if report is not None or task.notices.any:
                completion.track(task, report, aside=task.notices.any)
        except BaseException:
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
    **options: Unpack[SubmitOptions],
) -> TransferOperation | RangeOperation | Several:
    """Return the operation of a transfer, or several operations for several peers."""
    if not options.keys() <= _OPTIONS:
        unknown = min(options.keys() - _OPTIONS)
        raise TypeError(f"{unknown} is not an option of a transfer; options are {sorted(_OPTIONS)}")
    if isinstance(transfer, AddressRanges):
        return RangeOperation(engine, transfer, speculative=speculative, **options)
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


def _is_simple(options: RunOptions) -> bool:
    """Return whether options are valid, and only a tag, notifications and a timeout."""
    for name, value in options.items():
        if name == "tag":
            if type(value) is not str or len(value) > MAX_TAG or not value.isprintable():
                return False
        elif value is None:
            continue
        elif name in ("notify", "notify_failure"):
            if type(value) is not bytes or not 1 <= len(value) <= MAX_NOTIFICATION_NBYTES:
                return False
        elif (
            name != "timeout_ms"
            or type(value) not in (int, float)
            or not 0 <= cast(float, value) < _LONG_MS
        ):
            return False
    return True


def _refuse_timeout(options: dict[str, Any]) -> None:
    """Refuse a timeout; a task takes one in `wait`."""
    if options.pop("timeout_ms", None) is not None:
        raise TypeError("timeout_ms is an option of run; a task takes it in wait(timeout_ms)")
