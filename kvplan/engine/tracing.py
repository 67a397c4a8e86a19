"""A span of OpenTelemetry for each transfer, of an engine whose options ask for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import kvplan
from kvplan.engine.telemetry import error_text, logger
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvplan.engine.operation import Operation

EXTRA: Final = "pip install 'kvplan[otel]'"


class Tracer:
    """Makes the spans of one engine, with the tracer provider that the program has set.

    A span begins with the call, as a child of the caller's current one, and ends with the outcome,
    in whichever thread that is known.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: opentelemetry-api is not installed.
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
        """The span of an operation that begins; None: the program's tracing has failed."""
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
        except Exception:  # a sampler or processor of the program's: no transfer fails for that
            logger.exception("kvplan.opentelemetry: a span could not be begun")
            return None

    def end(
        self, operation: Operation, span: Span, status: LLMStatusCode, error: BaseException | None
    ) -> None:
        """The operation has its outcome."""
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
            logger.exception("kvplan.opentelemetry: a span could not be ended")
