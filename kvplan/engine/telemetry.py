"""Operations of an engine: in flight, counted, logged, and traced with OpenTelemetry."""

from __future__ import annotations

import json
import logging
import math
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypedDict
from weakref import ref

import kvplan
from kvnative._signals import Condition
from kvnative._tally import Histogram
from kvplan.status import LLMException, LLMStatusCode, finalized, unsupported
from kvplan.system.logs import Log

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvplan.recording.writer import Ended


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
    """Calls of one operation by status; `nbytes` counts only successful calls."""

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
        except ValueError:  # the program may raise any status
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
    """Log the outcome of an operation as `key=value` on logger `kvplan`; omit None fields."""
    status = status_of(error)
    level = logging.WARNING if status.is_failure else logging.INFO
    if not logger.isEnabledFor(level):
        return
    shown = {
        "operation": operation,
        **fields,
        "us": f"{seconds * 1e6:.1f}",
        "status": status.name,
        "error": None if error is None else error_text(error),
    }
    pairs = (f"{key}={_quoted(value)}" for key, value in shown.items() if value is not None)
    logger.log(level, "%s", " ".join(pairs))


def error_text(error: BaseException) -> str:
    """Return the text of a failure for logs and recordings."""
    text = str(error.args[0]) if isinstance(error, LLMException) and error.args else repr(error)
    return text.encode(errors="backslashreplace").decode()


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text)


EXTRA: Final = "pip install 'kvplan[otel]'"


class Tracer:
    """The spans of one engine, made by the program's tracer provider.

    A span begins with the call, as a child of the caller's current span. It ends with the outcome,
    which may be in another thread.
    """

    def __init__(self, cluster_id: int) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise unsupported(
                f"kvplan.opentelemetry=1 needs the package opentelemetry-api ({EXTRA}): {error}"
            ) from None
        self._trace = trace
        self._cluster_id = cluster_id
        self._tracer = trace.get_tracer("kvplan", kvplan.__version__)

    def begin(self, operation: Ended) -> Span | None:
        """Begin the span of an operation; None: the program's tracing has failed."""
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
        except Exception:  # in the program's sampler or processor; the transfer goes on
            logger.exception("kvplan.opentelemetry: could not begin a span")
            return None

    def end(
        self, operation: Ended, span: Span, status: LLMStatusCode, error: BaseException | None
    ) -> None:
        """End the span of an operation with its outcome."""
        plan = operation.plan
        attributes: dict[str, str | int] = {"kvplan.status": status.name}
        if operation.link is not None:
            attributes["kvplan.peer"] = operation.link.cluster_id
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


class InFlight:
    """The operations of an engine in flight, from the start of their `with` to their outcome.

    Without a lock: an operation is added before it reads `closed`, and `close` sets `closed` before
    it looks for operations. References are weak: an interrupt may drop an operation at any step.

    Attributes:
        closed: True once `close` was called.
    """

    def __init__(self) -> None:
        self._operations: set[ref[Ended]] = set()
        self.closed: bool = False
        self._changed = Condition()

    def __len__(self) -> int:
        return len(self._operations)

    def operations(self) -> list[Ended]:
        """Return the operations that are in flight."""
        return [found for held in list(self._operations) if (found := held()) is not None]

    def add(self, operation: Ended) -> None:
        """Add an operation that begins, until `remove`.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED: `close` was called.
        """
        self._operations.add(ref(operation, self._operations.discard))
        if self.closed:
            self.remove(operation)
            raise finalized()

    def remove(self, operation: Ended) -> None:
        """Remove an operation that no longer uses the engine; idempotent."""
        self._operations.discard(ref(operation))
        if self.closed:
            with self._changed:
                self._changed.notify_all()

    def close(self) -> bool:
        """Refuse further operations; return False if they were refused already."""
        with self._changed:
            if self.closed:
                return False
            self.closed = True
            return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until no operation is in flight; return False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._operations, timeout_s)
