"""The LLMDataDist that this process has initialized, whoever asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.llm_datadist.v2.engine_options import REMOTE_ACCESS
from kvplan.llm_datadist.v2.llm_datadist import LLMDataDist
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist


def datadist(otherwise: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID) -> LLMDataDist:
    """Return it.

    Raises:
        LLMException: of status `otherwise`: there is none.
    """
    if (found := LLMDataDist.llm_engine_instance) is None:
        raise LLMException("no LLMDataDist is initialized", status_code=otherwise)
    return found


def engine(otherwise: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID) -> LlmDataDist:
    """Return its engine; errors as for `datadist`."""
    return datadist(otherwise)._running()


def is_remote_mode() -> bool:
    """Whether its peers reach caches by themselves; errors as for `datadist`."""
    return datadist()._engine_options.get(REMOTE_ACCESS) == "1"
