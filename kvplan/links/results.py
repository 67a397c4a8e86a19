"""What became of each cluster of one call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Self

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

    @classmethod
    async def of(cls, tasks: Iterable[tuple[int, Coroutine[Any, Any, object]]]) -> Self:
        """Run what is to be done with each cluster, all at once."""

        async def result(cluster_id: int, task: Coroutine[Any, Any, object]) -> LinkResult:
            try:
                await task
            except LLMException as error:
                return LinkResult(cluster_id, error.status_code, error)
            return LinkResult(cluster_id)

        return cls(await asyncio.gather(*(result(*it) for it in tasks)))

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
