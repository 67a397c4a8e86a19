"""What became of each cluster of one call."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.status import LLMException, LLMStatusCode


@dataclass(frozen=True, slots=True)
class LinkResult:
    """What became of one cluster.

    Attributes:
        cluster_id: the peer's.
        status: LLM_SUCCESS, or that of `error`.
        error: why not: who, in which phase, and what the system said.
    """

    cluster_id: int
    status: LLMStatusCode = LLMStatusCode.LLM_SUCCESS
    error: LLMException | None = None


class LinkResults(list[LinkResult]):
    """One result for each cluster, in the order of the call."""

    @property
    def status(self) -> LLMStatusCode:
        """LLM_SUCCESS if all succeeded, otherwise the first failure's."""
        return next((it.status for it in self if it.error is not None), LLMStatusCode.LLM_SUCCESS)

    def raise_for_status(self) -> None:
        """Raise the first failure, if there is one.

        Raises:
            LLMException: as `LinkResult.error` says.
        """
        for it in self:
            if it.error is not None:
                raise it.error
