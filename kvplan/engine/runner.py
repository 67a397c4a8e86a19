"""Base of the classes with an engine's public methods, and the hooks of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from kvplan.engine.telemetry import error_text, log_operation, status_of
from kvplan.status import LLMException, finalized
from kvplan.system.limits import check_process

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.planning.plan import Plan


class PlanEvent(NamedTuple):
    """A plan that is about to be executed.

    Attributes:
        plan: the plan.
        operation: name of the operation, such as "pull_cache".
        cache_id: the cache of this process; the source if both are of this process.
        cluster_id: id of the peer; None inside one process.
        tag: the caller's tag.
    """

    plan: Plan
    operation: str
    cache_id: int
    cluster_id: int | None
    tag: str = ""


PlanHook = Callable[[PlanEvent], object]


class OperationRunner:
    """Access to the running engine for classes with public methods."""

    _cluster_id: int
    _engine: Engine | None
    _was_finalized: bool
    # Not in the engine: there, a hook that holds this object would keep this object alive.
    _hooks: dict[object, PlanHook]

    def _running(self) -> Engine:
        """Return the engine; raise unless it is initialized."""
        engine = self._engine
        if engine is None:
            if self._was_finalized:
                raise finalized()
            raise LLMException(
                f"cluster {self._cluster_id} is not initialized; call initialize() first"
            )
        if engine.inherited:
            check_process(engine.pid, "the engine")
        return engine

    @contextmanager
    def _recorded(self, operation: str, **fields: object) -> Iterator[Engine]:
        """Count, record and log the `with` block as an operation."""
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
