"""Calls that raise, as calls that return the number of a status."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from kvplan.llm_datadist.utils import log
from kvplan.status import LLMException, LLMStatusCode

_P = ParamSpec("_P")
_T = TypeVar("_T")

_SUCCESS = int(LLMStatusCode.LLM_SUCCESS)


def as_status(call: Callable[_P, None]) -> Callable[_P, int]:
    """Return what returns the status that `call` raises."""

    @wraps(call)
    def returning(*args: _P.args, **kwargs: _P.kwargs) -> int:
        try:
            call(*args, **kwargs)
        except LLMException as error:
            log.error("%s: %s", call.__name__, error)
            return int(error.status_code)
        return _SUCCESS

    return returning


def as_pair(nothing: _T) -> Callable[[Callable[_P, _T]], Callable[_P, tuple[int, _T]]]:
    """Return what returns the status that a call raises, and its result or `nothing`."""

    def decorated(call: Callable[_P, _T]) -> Callable[_P, tuple[int, _T]]:
        @wraps(call)
        def returning(*args: _P.args, **kwargs: _P.kwargs) -> tuple[int, _T]:
            try:
                return _SUCCESS, call(*args, **kwargs)
            except LLMException as error:
                log.error("%s: %s", call.__name__, error)
                return int(error.status_code), nothing

        return returning

    return decorated
