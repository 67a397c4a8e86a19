"""How the public operations of an engine run: executed, submitted, or layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from kvplan.engine.operation import Operation, Prepared
from kvplan.engine.registry import finalized
from kvplan.engine.telemetry import error_text, log_operation, status_of
from kvplan.execution.memory import revocation
from kvplan.planning.groups import GroupPlan
from kvplan.planning.plan import Plan
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.execution import LayerTask, TransferTask
    from kvplan.planning.groups import AnyPlan


class PlanEvent(NamedTuple):
    """A plan that is about to be executed.

    Attributes:
        plan: the plan; of an operation on groups a `GroupPlan`.
        operation: the call, such as "pull_cache".
        cache_id: of the cache of this process that takes part; the source, where both do.
        cluster_id: of the peer; None inside one process.
        tag: as the caller gave it.
    """

    plan: AnyPlan
    operation: str
    cache_id: int
    cluster_id: int | None
    tag: str = ""


PlanHook = Callable[[PlanEvent], object]


class OperationRunner:
    """What the public operations are made with."""

    _cluster_id: int
    _engine: Engine | None
    _was_finalized: bool
    # Not the engine's, nor an operation's: a hook may hold this object, which would then never be
    # dropped.
    _hooks: dict[object, PlanHook]

    def _running(self) -> Engine:
        """The engine, if it is initialized.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child; LLM_ENGINE_FINALIZED.
        """
        engine = self._engine
        if engine is None:
            if self._was_finalized:
                raise finalized()
            raise LLMException(
                f"cluster {self._cluster_id} is not initialized; call initialize() first"
            )
        if engine.inherited:
            engine.check_process()
        return engine

    @contextmanager
    def _recorded(self, operation: str, **fields: object) -> Iterator[Engine]:
        """Count and log what happens inside, if there is an engine for it."""
        engine = self._running()
        started = perf_counter()
        failure: BaseException | None = None
        try:
            yield engine
        except BaseException as error:
            failure = error
            raise
        finally:
            seconds = perf_counter() - started
            status = status_of(failure)
            engine.metrics.record(operation, status, 0, seconds)
            if engine.recorder is not None:
                reason = "" if failure is None else error_text(failure)
                engine.recorder.event(operation, status, seconds, reason, fields)
            log_operation(operation, seconds, failure, cluster=engine.cluster_id, **fields)

    def _execute(self, operation: Operation, prepared: Prepared, timeout_ms: float | None) -> None:
        """Move what was prepared: it is done then, or `operation` is to be prepared again."""
        plan, src, dst, descriptors = prepared
        operation.plan = plan
        if plan.reinterpret or self._hooks:
            self._show(operation, plan)
        if timeout_ms is None and operation.link is not None:
            timeout_ms = operation.engine.wait_ms
        if operation.retried and timeout_ms is not None:
            timeout_ms = max(0.0, timeout_ms - (perf_counter() - operation.started) * 1000)
        if operation.verify_every:
            operation.begin_to_move(src, dst)
        try:
            operation.engine.transfers.execute(plan, src, dst, timeout_ms, descriptors)
        except LLMException as error:
            missing = error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            if not (operation.speculated and missing) or revocation((src, dst)):
                raise
            operation.disable_speculation()  # the key may be another cache's by now
        else:
            if operation.verify_every:
                operation.verify(timeout_ms)
            operation.done = True
            if operation.notifies:
                operation.send_notification()

    def _submit(self, operation: Operation, prepared: Prepared) -> TransferTask:
        """Begin to move what was prepared; `operation` ends with the task."""
        plan, src, dst, descriptors = prepared
        operation.plan = plan
        if plan.reinterpret or self._hooks:
            self._show(operation, plan)
        engine = operation.engine
        report = None if operation.is_part else engine.completion.report()
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
        except BaseException:  # an interrupt: nobody else could stop it
            task.cancel()
            raise
        return task

    def _layer(self, operation: Operation, prepared: Prepared) -> LayerTask:
        """As `_submit`, and each layer moves when `LayerTask.ready` is called for it."""
        plan, src, dst, descriptors = prepared
        assert isinstance(plan, Plan)  # layers of several caches are an operation each
        operation.plan = plan
        if plan.reinterpret or self._hooks:
            self._show(operation, plan)
        engine = operation.engine
        report = None if operation.is_part else engine.completion.report()
        if operation.verify_every:
            operation.begin_to_move(src, dst)
        on_last = partial(engine.completion.track, report=report, aside=operation.follows_up)
        on_outcome = operation.finish if operation.follows_up else operation.end
        gate_of = None if engine.device is None else engine.device.gate
        task = engine.transfers.layered(plan, src, dst, on_outcome, on_last, descriptors, gate_of)
        operation.submitted = True
        engine.completion.watch(task)
        return task

    def _show(self, operation: Operation, plan: AnyPlan) -> None:
        """Let the hooks see the plan that is about to be executed; warn if it reinterprets."""
        if plan.reinterpret and operation.engine.reinterpret:
            plans = plan.groups.values() if isinstance(plan, GroupPlan) else [plan]
            for it in plans:
                if it.reinterpret:
                    operation.engine.warn_reinterpret(operation, it)
        event = PlanEvent(
            plan, operation.name, operation.cache_id, operation.cluster_id, operation.tag
        )
        for hook in list(self._hooks.values()):
            hook(event)
