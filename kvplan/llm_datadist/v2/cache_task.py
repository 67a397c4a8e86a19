"""The handle of a layer-wise transfer."""

from __future__ import annotations

from typing import Protocol

from kvplan.llm_datadist.utils.utils import check_uint32
from kvplan.status import LLMStatusCode


class AsyncTransfer(Protocol):
    """A transfer to several destinations that goes on in the background.

    Attributes:
        running_status: what a destination without outcome is told as.
    """

    running_status: LLMStatusCode

    def statuses(self, timeout_s: float | None) -> list[LLMStatusCode | None]:
        """Wait up to `timeout_s` seconds; return what became of each (None: it goes on)."""


class CacheTask:
    """What `transfer_cache_async` returns. May be used from several threads, and dropped.

    Args:
        transfer_async_task: the transfer.
    """

    def __init__(self, transfer_async_task: AsyncTransfer) -> None:
        self._transfer_async_task = transfer_async_task

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for all destinations.

        Args:
            timeout_in_millis: milliseconds; None: as long as it takes.

        Returns:
            LLM_SUCCESS if every byte of each has arrived; LLM_TIMEOUT if some go on; otherwise the
            status of the first that has failed.

        Raises:
            TypeError, ValueError: timeout_in_millis is no uint32.
        """
        results = self.get_results(timeout_in_millis)
        running = self._transfer_async_task.running_status
        if running in results:
            return running
        failures = (it for it in results if it is not LLMStatusCode.LLM_SUCCESS)
        return next(failures, LLMStatusCode.LLM_SUCCESS)

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode]:
        """Wait for all destinations, and return the status of each, in the order of the configs.

        Args:
            timeout_in_millis: milliseconds; None: as long as it takes.

        Returns:
            LLM_SUCCESS for those where every byte has arrived; LLM_TIMEOUT for those that go on,
            and for those that were stopped because sync_kv_timeout had passed.

        Raises:
            TypeError, ValueError: timeout_in_millis is no uint32.
        """
        timeout_s = None
        if timeout_in_millis is not None:
            check_uint32("timeout_in_millis", timeout_in_millis)
            timeout_s = timeout_in_millis / 1000
        transfer = self._transfer_async_task
        statuses = transfer.statuses(timeout_s)
        return [transfer.running_status if it is None else it for it in statuses]
