"""How a call is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvplan.llm_datadist import LLMException, LLMStatusCode


def refused(call: Callable[[], object], status: LLMStatusCode) -> LLMException:
    """Call, and return the LLMException of this status that comes of it."""
    with pytest.raises(LLMException) as caught:
        call()
    assert caught.value.status_code == status, caught.value
    return caught.value


def invalid(call: Callable[[], object]) -> LLMException:
    """As `refused`, for LLM_PARAM_INVALID."""
    return refused(call, LLMStatusCode.LLM_PARAM_INVALID)
