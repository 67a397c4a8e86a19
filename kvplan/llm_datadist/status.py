"""Status codes, their exception, and the functions that raise it."""

from __future__ import annotations

from kvplan.llm_datadist.utils import log
from kvplan.status import LLMException, LLMStatusCode

__all__ = [
    "LLMException",
    "LLMStatusCode",
    "Status",
    "code_2_status",
    "handle_llm_status",
    "raise_if_false",
    "raise_if_true",
]

_code_2_status = {int(code): code for code in LLMStatusCode if code >= 0}


class Status:
    """The outcome of an operation.

    Args:
        status: its code.
    """

    def __init__(self, status: LLMStatusCode) -> None:
        self._status_code = status

    @property
    def status_code(self) -> LLMStatusCode:
        """The code of the outcome."""
        return self._status_code

    def is_ok(self) -> bool:
        """Return True if the code is LLM_SUCCESS."""
        return self._status_code == LLMStatusCode.LLM_SUCCESS


def code_2_status(status: int) -> LLMStatusCode:
    """Return the status with the number `status`; LLM_FAILED for an unknown number."""
    return _code_2_status.get(status, LLMStatusCode.LLM_FAILED)


def handle_llm_status(status: int, func_name: str, other_info: object) -> None:
    """Raise the status that `func_name` returned, unless it is LLM_SUCCESS.

    Raises:
        LLMException: has this status, and `other_info` in its message.
    """
    code = code_2_status(status)
    if code is not LLMStatusCode.LLM_SUCCESS:
        raise LLMException(f"{func_name}: {code}, {other_info}", status_code=code)


def raise_if_false(
    pred: object,
    fmt: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Raise if `pred` is false.

    Args:
        pred: the condition.
        fmt: the message; with further arguments a format string.
        *args: arguments for `fmt`.
        status_code: status of the exception.
        **kwargs: more arguments for `fmt`.

    Raises:
        LLMException: has `status_code`.
    """
    if not pred:
        # Without arguments, braces in the text are data.
        message = fmt.format(*args, **kwargs) if args or kwargs else fmt
        log.error("%s", message)
        raise LLMException(message, status_code=status_code)


def raise_if_true(
    pred: object,
    fmt: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Raise if `pred` is true; arguments as for `raise_if_false`.

    Raises:
        LLMException: has `status_code`.
    """
    raise_if_false(not pred, fmt, *args, status_code=status_code, **kwargs)
