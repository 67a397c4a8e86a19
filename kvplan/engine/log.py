"""One line an operation, as `key=value`, on the logger `kvplan`."""

from __future__ import annotations

import json
import logging
from typing import Final

from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode

logger = Log("kvplan")
# A program that set no logging up is not spoken to: it gets exceptions.
logger.logger.addHandler(logging.NullHandler())

_STATUSES: Final = frozenset(LLMStatusCode)


def status_of(error: BaseException | None) -> LLMStatusCode:
    """The status that stands for how a call ended."""
    if error is None:
        return LLMStatusCode.LLM_SUCCESS
    if isinstance(error, LLMException):
        known = error.status_code in _STATUSES
        return LLMStatusCode(error.status_code) if known else LLMStatusCode.LLM_FAILED
    if isinstance(error, TypeError | ValueError):
        return LLMStatusCode.LLM_PARAM_INVALID
    return LLMStatusCode.LLM_FAILED


def level_of(error: BaseException | None) -> int:
    """INFO, or WARNING for what failed."""
    return logging.INFO if error is None else logging.WARNING


def log_operation(
    operation: str,
    seconds: float,
    error: BaseException | None = None,
    **fields: object,
) -> None:
    """Log how an operation went; fields of None are left out.

    Args:
        seconds: how long it took.
        error: what it failed with; None: it did not.
    """
    level = level_of(error)
    if not logger.isEnabledFor(level):
        return
    shown = {
        "operation": operation,
        **fields,
        "us": f"{seconds * 1e6:.1f}",
        "status": status_of(error).name,
        "error": _reason(error),
    }
    pairs = (f"{key}={_quoted(value)}" for key, value in shown.items() if value is not None)
    logger.log(level, "%s", " ".join(pairs))


def _reason(error: BaseException | None) -> object:
    if isinstance(error, LLMException) and error.args:
        return error.args[0]
    return error and repr(error)


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text)
