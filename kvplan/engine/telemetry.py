"""Telemetry of an engine: counters, log lines, spans of OpenTelemetry, and its state as values."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypedDict

import kvplan
from kvnative._tally import Histogram
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system.logs import Log

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvplan.engine.engine import Engine
    from kvplan.engine.operation import Operation


logger = Log("kvplan")
# Without a logging configuration nothing is printed: the program gets exceptions.
logger.logger.addHandler(logging.NullHandler())

BUCKETS = tuple(step * 10.0**power for power in range(-5, 1) for step in (1, 2, 5))
"""Upper bounds of the histograms, in seconds: 10 us to 5 s."""


class Seconds(TypedDict):
    """A histogram: `buckets` maps an upper bound in seconds to the cumulative count."""

    count: int
    sum: float
    buckets: dict[float, int]


class OperationMetrics(TypedDict):
    """Calls of one operation by status; `nbytes` counts the successful ones."""

    statuses: dict[str, int]
    nbytes: int
    seconds: Seconds


class EngineMetrics(TypedDict):
    """Counters of an engine; see `LlmDataDist.metrics`."""

    cluster_id: int
    in_flight: int
    links: dict[str, int]
    cache_bytes: dict[str, int]
    operations: dict[str, OperationMetrics]


class Metrics:
    """Counters of one engine; thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[LLMStatusCode, Histogram]] = {}

    def record(self, operation: str, status: LLMStatusCode, nbytes: int, seconds: float) -> None:
        """Count one call; `nbytes` is 0 if it failed."""
        try:
            histogram = self._rows[operation][status]
        except KeyError:
            first = Histogram(BUCKETS)
            histogram = self._rows.setdefault(operation, {status: first}).setdefault(status, first)
        histogram.add(seconds, nbytes)

    def snapshot(self) -> dict[str, OperationMetrics]:
        """Return the counters by operation."""
        return {operation: _row(dict(row)) for operation, row in list(self._rows.items())}


def _row(histograms: dict[LLMStatusCode, Histogram]) -> OperationMetrics:
    found = {status.name: histogram.snapshot() for status, histogram in histograms.items()}
    counts = [
        sum(column) for column in zip(*(histogram[2] for histogram in found.values()), strict=True)
    ]
    buckets = dict(zip((*BUCKETS, math.inf), accumulate(counts), strict=True))
    total = sum(snapshot[1] for snapshot in found.values())
    return {
        "statuses": {name: sum(histogram[2]) for name, histogram in found.items()},
        "nbytes": sum(histogram[0] for histogram in found.values()),
        "seconds": {"count": buckets[math.inf], "sum": total, "buckets": buckets},
    }


def status_of(error: BaseException | None) -> LLMStatusCode:
    """Return the status of the outcome of a call."""
    if error is None:
        return LLMStatusCode.LLM_SUCCESS
    if isinstance(error, LLMException):
        try:
            return LLMStatusCode(error.status_code)
        except ValueError:  # a status of the program, of any type
            return LLMStatusCode.LLM_FAILED
    if isinstance(error, TypeError | ValueError):
        return LLMStatusCode.LLM_PARAM_INVALID
    return LLMStatusCode.LLM_FAILED


def log_operation(
    operation: str,
    seconds: float,
    error: BaseException | None = None,
    **fields: object,
) -> None:
    """Log the outcome of an operation as `key=value` on logger `kvplan`, without fields of None."""
    status = status_of(error)
    level = logging.WARNING if status.is_failure else logging.INFO
    if not logger.isEnabledFor(level):
        return
    shown = {
        "operation": operation,
        **fields,
        "us": f"{seconds * 1e6:.1f}",
        "status": status.name,
        "error": _reason(error),
    }
    pairs = (f"{key}={_quoted(value)}" for key, value in shown.items() if value is not None)
    logger.log(level, "%s", " ".join(pairs))


def error_text(error: BaseException) -> str:
    """Return the text of a failure for recordings."""
    if isinstance(error, LLMException) and error.args:
        text = str(error.args[0])
    else:
        text = repr(error)
    return text.encode(errors="backslashreplace").decode()


def _reason(error: BaseException | None) -> object:
    if isinstance(error, LLMException) and error.args:
        return error.args[0]
    return error and repr(error)


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text)


EXTRA: Final = "pip install 'kvplan[otel]'"


class Tracer:
    """The spans of one engine, by the tracer provider of the program.

    A span begins with the call, as a child of the caller's current span. It ends with the outcome,
    which may be in another thread.
    """

    def __init__(self, cluster_id: int) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise LLMException(
                f"kvplan.opentelemetry=1 needs the package opentelemetry-api ({EXTRA}): {error}",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            ) from None
        self._trace = trace
        self._cluster_id = cluster_id
        self._tracer = trace.get_tracer("kvplan", kvplan.__version__)

    def begin(self, operation: Operation) -> Span | None:
        """Begin the span of an operation; None: the tracing of the program has failed."""
        attributes: dict[str, str | int] = {
            "kvplan.operation": operation.name,
            "kvplan.cluster": self._cluster_id,
        }
        if operation.tag:
            attributes["kvplan.tag"] = operation.tag
        try:
            kind = self._trace.SpanKind.CLIENT
            return self._tracer.start_span(
                f"kvplan.{operation.name}", kind=kind, attributes=attributes
            )
        except Exception:  # of a sampler or processor of the program; the transfer goes on
            logger.exception("kvplan.opentelemetry: could not begin a span")
            return None

    def end(
        self, operation: Operation, span: Span, status: LLMStatusCode, error: BaseException | None
    ) -> None:
        """End the span of an operation with its outcome."""
        plan = operation.plan
        attributes: dict[str, str | int] = {"kvplan.status": status.name}
        if operation.cluster_id is not None:
            attributes["kvplan.peer"] = operation.cluster_id
        if operation.cache_id >= 0:
            attributes["kvplan.cache"] = operation.cache_id
        if plan is not None:
            attributes["kvplan.bytes"] = plan.nbytes if error is None else 0
            attributes["kvplan.descriptors"] = plan.num_descriptors
        try:
            if error is not None and status.is_failure:
                span.set_status(self._trace.StatusCode.ERROR, error_text(error))
            span.set_attributes(attributes)
            span.end()
        except Exception:
            logger.exception("kvplan.opentelemetry: could not end a span")


_MAX_LISTED: Final = 100
"""Transfers in flight that `describe` lists, the oldest first."""


def metrics_of(cluster_id: int, metrics: Metrics, engine: Engine | None) -> EngineMetrics:
    """Return the counters of an engine; see `LlmDataDist.metrics`."""
    cache_bytes: Counter[str] = Counter()
    links: Counter[str] = Counter()
    if engine is not None:
        engine.check_process()
        links.update(link.state.name for link in engine.links.status())
        for entry, _ in engine.registry.entries():
            cache_bytes[entry.cache.cache_desc.placement.name] += entry.cache.cache_desc.nbytes
    return {
        "cluster_id": cluster_id,
        "in_flight": 0 if engine is None else len(engine.in_flight),
        "links": dict(links),
        "cache_bytes": dict(cache_bytes),
        "operations": metrics.snapshot(),
    }


def describe(engine: Engine) -> dict[str, Any]:
    """Return the state of an engine as JSON values, for `kvplan top`."""
    from kvplan import __version__  # here, as kvplan imports this room

    operations = metrics_of(engine.cluster_id, engine.metrics, engine)["operations"]
    return {
        "kvplan": __version__,
        "pid": os.getpid(),
        "command": sys.argv,
        "cluster_id": engine.cluster_id,
        "role": engine.role.name,
        "listen_address": engine.listen_address,
        "transports": list(engine.transport_names),
        "seconds": time.monotonic(),
        "operations": {
            name: {
                "statuses": row["statuses"],
                "nbytes": row["nbytes"],
                "count": row["seconds"]["count"],
                "seconds": row["seconds"]["sum"],
                "buckets": [
                    [None if math.isinf(bound) else bound, count]
                    for bound, count in row["seconds"]["buckets"].items()
                ],
            }
            for name, row in operations.items()
        },
        "links": [
            asdict(link) | {"role": link.role and link.role.name, "state": link.state.name}
            for link in engine.links.status()
        ],
        "caches": [
            {
                "cache_id": entry.cache.cache_id,
                "nbytes": entry.cache.cache_desc.nbytes,
                "num_tensors": entry.cache.cache_desc.num_tensors,
                "placement": entry.cache.cache_desc.placement.name,
                "allocated": is_allocated,
            }
            for entry, is_allocated in engine.registry.entries()
        ],
        "pages": {
            "option": engine.options.pages,
            "prefault": engine.options.prefault,
            "numa_node": engine.options.numa_node,
            "populate": engine.options.populate,
            "mapped_arenas": len(mapped := engine.links.mapped()),
            "mapped_bytes": sum(arena.nbytes for _, arena in mapped),
        },
        "leases": len(engine.leases.live()),
        "in_flight": _in_flight(engine),
    }


def _in_flight(engine: Engine) -> list[dict[str, Any]]:
    now = perf_counter()
    found = sorted(engine.in_flight.operations(), key=lambda operation: operation.started)
    rows = []
    for operation in found[:_MAX_LISTED]:
        plan = operation.plan
        rows.append(
            {
                "operation": operation.name,
                "tag": operation.tag,
                "peer": operation.cluster_id,
                "cache_id": None if operation.cache_id < 0 else operation.cache_id,
                "nbytes": None if plan is None else plan.nbytes,
                "age_s": now - operation.started,
            }
        )
    return rows
