"""What an engine has done: counted by operation, and logged, one line an operation."""

from __future__ import annotations

import json
import logging
import math
from itertools import accumulate
from typing import TypedDict

from kvnative._tally import Histogram
from kvplan.status import LLMException, LLMStatusCode
from kvplan.system.logs import Log

logger = Log("kvplan")
# A program that set no logging up is not spoken to: it gets exceptions.
logger.logger.addHandler(logging.NullHandler())

BUCKETS = tuple(step * 10.0**power for power in range(-5, 1) for step in (1, 2, 5))
"""Upper bounds of the histograms, in seconds: 10 us to 5 s."""


class Seconds(TypedDict):
    """A histogram: `buckets` counts what took up to so many seconds, smaller ones included."""

    count: int
    sum: float
    buckets: dict[float, int]


class OperationMetrics(TypedDict):
    """What became of the calls of one operation; `nbytes` is what the successful ones moved."""

    statuses: dict[str, int]
    nbytes: int
    seconds: Seconds


class EngineMetrics(TypedDict):
    """What an engine has done and has; see `LlmDataDist.metrics`."""

    cluster_id: int
    in_flight: int
    links: dict[str, int]
    cache_bytes: dict[str, int]
    operations: dict[str, OperationMetrics]


class Metrics:
    """Counters of one engine; any thread may record."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[LLMStatusCode, Histogram]] = {}

    def record(self, operation: str, status: LLMStatusCode, nbytes: int, seconds: float) -> None:
        """Count one call.

        Args:
            nbytes: bytes that it moved; 0 if it failed.
            seconds: how long it took.
        """
        try:
            histogram = self._rows[operation][status]
        except KeyError:
            first = Histogram(BUCKETS)
            histogram = self._rows.setdefault(operation, {status: first}).setdefault(status, first)
        histogram.add(seconds, nbytes)

    def snapshot(self) -> dict[str, OperationMetrics]:
        """Return what was counted, by operation."""
        return {operation: _row(dict(row)) for operation, row in list(self._rows.items())}


def _row(histograms: dict[LLMStatusCode, Histogram]) -> OperationMetrics:
    found = {status.name: it.snapshot() for status, it in histograms.items()}
    counts = [sum(column) for column in zip(*(it[2] for it in found.values()), strict=True)]
    buckets = dict(zip((*BUCKETS, math.inf), accumulate(counts), strict=True))
    total = sum(it[1] for it in found.values())
    return {
        "statuses": {name: sum(it[2]) for name, it in found.items()},
        "nbytes": sum(it[0] for it in found.values()),
        "seconds": {"count": buckets[math.inf], "sum": total, "buckets": buckets},
    }


def status_of(error: BaseException | None) -> LLMStatusCode:
    """The status that stands for how a call ended."""
    if error is None:
        return LLMStatusCode.LLM_SUCCESS
    if isinstance(error, LLMException):
        try:
            return LLMStatusCode(error.status_code)
        except ValueError:  # a program's own, of any type
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
    """Log how an operation went, as `key=value` on logger `kvplan`; fields of None are left out.

    Args:
        seconds: how long it took.
        error: what it failed with; None: it did not.
    """
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
    """What is recorded of a failure."""
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
