"""Transfers in flight: requests that were submitted and not asked for yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvnative._signals import Mutex
from kvplan.engine.ranges import unconfirmed_text
from kvplan.hixl.values import (
    NOT_CONNECTED,
    SUCCESS,
    TIMEOUT,
    GetTransferStatusArgs,
    TransferOp,
    TransferResult,
    TransferStatus,
    status_of,
)
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.logs import Log

if TYPE_CHECKING:
    from kvplan.engine.ranges import AddressRanges
    from kvplan.execution import TransferTask

_log = Log("kvplan.hixl")

MAX_REQUESTS: Final = 1 << 16
"""Requests that may wait to be asked for."""


@dataclass(frozen=True, eq=False, slots=True)
class _Request:
    task: TransferTask
    ranges: AddressRanges
    remote_engine: str
    op: TransferOp
    user_data: Any


class Requests:
    """What is in flight over one `Hixl`; may be used from several threads."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._last = 0
        self._requests: dict[int, _Request] = {}  # in the order in which they were submitted

    def check_room(self) -> None:
        """Refuse another request: LLM_LINK_BUSY: too many were not asked for."""
        if len(self._requests) >= MAX_REQUESTS:
            raise LLMException(
                f"{MAX_REQUESTS} requests wait to be asked for by get_transfer_status",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )

    def add(
        self,
        task: TransferTask,
        ranges: AddressRanges,
        remote_engine: str,
        op: TransferOp,
        user_data: Any,
    ) -> int:
        """Return the number of a request that was submitted."""
        with self._mutex:
            self._last += 1
            self._requests[self._last] = _Request(task, ranges, remote_engine, op, user_data)
            return self._last

    def status(self, number: int) -> tuple[int, TransferStatus]:
        """How far a request is; one that has ended is forgotten."""
        with self._mutex:
            request = self._requests.get(number)
            if request is None:
                raise invalid(f"req_id={number} is not a request, or its end was told before")
            if not request.task.done:
                return SUCCESS, TransferStatus.WAITING
            del self._requests[number]
        return _outcome(number, request)

    def all(self, args: GetTransferStatusArgs) -> list[TransferResult]:
        """How far the requests are, those submitted first; those that have ended are forgotten."""
        told: list[TransferResult] = []
        with self._mutex:
            for number, request in list(self._requests.items()):
                if len(told) >= args.max_query_count:
                    break
                if not request.task.done:
                    if not args.skip_waiting:
                        waiting = TransferStatus.WAITING
                        told.append(TransferResult.of(number, request.user_data, waiting))
                    continue
                del self._requests[number]
                _, status = _outcome(number, request)
                told.append(TransferResult.of(number, request.user_data, status))
        return told

    def stop_peer(self, cluster_id: int, reason: str) -> None:
        """Stop the requests with a peer, by whatever name it was called."""
        for request in self._now():
            if request.ranges.cluster_id == cluster_id:
                request.task.cancel(LLMException(reason))

    def _now(self) -> list[_Request]:
        with self._mutex:
            return list(self._requests.values())


def _outcome(number: int, request: _Request) -> tuple[int, TransferStatus]:
    """How a request has ended; why it failed is logged."""
    try:
        request.task.wait()
    except LLMException as error:
        status = status_of(error)
        _log.warning(
            "request %d, %s of %s: %s%s",
            number,
            request.op.name,
            request.remote_engine,
            error,
            unconfirmed_text(request.task.plan, error),
        )
        if status == TIMEOUT:
            return SUCCESS, TransferStatus.TIMEOUT
        lost = status == NOT_CONNECTED
        return (NOT_CONNECTED if lost else SUCCESS), TransferStatus.FAILED
    return SUCCESS, TransferStatus.COMPLETED
