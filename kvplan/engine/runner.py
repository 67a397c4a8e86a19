"""How the public operations of an engine run: executed, submitted, or layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from kvplan.engine.registry import finalized
from kvplan.engine.telemetry import error_text, log_operation, status_of
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.planning.plan import Plan


class PlanEvent(NamedTuple):
    """A plan that is about to be executed.

    Attributes:
        plan: the plan.
        operation: the call, such as "pull_cache".
        cache_id: of the cache of this process that takes part; the source, where both do.
        cluster_id: of the peer; None inside one process.
        tag: as the caller gave it.
    """

    plan: Plan
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
        """The engine, if it is initialized."""
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
