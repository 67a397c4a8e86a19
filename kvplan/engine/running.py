"""How an operation runs: executed, submitted, or only planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from kvplan.engine.call import Call
from kvplan.engine.log import log_operation, status_of
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine, PlanHook
    from kvplan.engine.operations import Operation, P, Prepared
    from kvplan.execution import LayerTask, TransferTask
    from kvplan.planning import Plan


class Running(ABC):
    """What the public operations are made with."""

    # Not the engine's: a hook may hold this object, which would then never be dropped.
    _hooks: dict[object, PlanHook]

    @abstractmethod
    def _running(self) -> Engine:
        """The engine, if it is initialized.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child; LLM_ENGINE_FINALIZED.
        """

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
            engine.metrics.record(operation, status_of(failure), 0, seconds)
            log_operation(operation, seconds, failure, cluster=engine.cluster_id, **fields)

    def _execute(
        self,
        operation: Operation[P],
        timeout_ms: float | None,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        engine = self._running()
        call = Call(engine, operation.__name__, moves=True, may_guess=True)
        started = perf_counter()
        try:
            plan, src, dst = self._prepare(call, operation, *args, **kwargs)
            if timeout_ms is None and call.link is not None:
                timeout_ms = engine.wait_ms
            try:
                engine.transfers.execute(plan, src, dst, timeout_ms)
            except LLMException as error:
                if (
                    not call.guessed
                    or error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
                ):
                    raise
                # The key may be another cache's by now.
                call.guess_no_more()
                plan, src, dst = self._prepare(call, operation, *args, **kwargs)
                if timeout_ms is not None:
                    timeout_ms = max(0.0, timeout_ms - (perf_counter() - started) * 1000)
                engine.transfers.execute(plan, src, dst, timeout_ms)
        except BaseException as error:
            call.end(error)
            raise
        call.end(None)

    def _submit(self, operation: Operation[P], *args: P.args, **kwargs: P.kwargs) -> TransferTask:
        engine = self._running()
        call = Call(engine, operation.__name__, moves=True)
        try:
            plan, src, dst = self._prepare(call, operation, *args, **kwargs)
            task = engine.transfers.submit(plan, src, dst, call.end)
        except BaseException as error:
            call.end(error)
            raise
        engine.outcomes.expect(task)
        return task

    def _stage(self, operation: Operation[P], *args: P.args, **kwargs: P.kwargs) -> LayerTask:
        engine = self._running()
        call = Call(engine, operation.__name__, moves=True)
        try:
            plan, src, dst = self._prepare(call, operation, *args, **kwargs)
            task = engine.transfers.stage(plan, src, dst, call.end, engine.outcomes.expect)
        except BaseException as error:
            call.end(error)
            raise
        engine.outcomes.watch(task)
        return task

    def _prepare(
        self, call: Call, operation: Operation[P], *args: P.args, **kwargs: P.kwargs
    ) -> Prepared:
        """Plan, and let the hooks see the plan that is about to be executed."""
        prepared = operation(call, *args, **kwargs)
        call.plan = prepared[0]
        if self._hooks:
            call.show(self._hooks)
        return prepared

    def _plan(self, operation: Operation[P], *args: P.args, **kwargs: P.kwargs) -> Plan:
        call = Call(self._running(), operation.__name__, moves=False)
        return operation(call, *args, **kwargs)[0]
