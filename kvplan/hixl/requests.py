"""Asynchronous transfers: requests whose end the program has not asked for yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvnative._signals import Mutex
from kvplan.engine.ranges import AddressRanges, unconfirmed_text
from kvplan.execution import TransferTask
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

_log = Log("kvplan.hixl")

MAX_REQUESTS: Final = 1 << 16
"""Maximum number of open requests."""


@dataclass(frozen=True, eq=False, slots=True)
class _Request:
    task: TransferTask
    ranges: AddressRanges
    remote_engine: str
    op: TransferOp
    user_data: Any


class Requests:
    """The open requests of one `Hixl`. Any thread may call the methods."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._last = 0
        self._requests: dict[int, _Request] = {}  # in the order in which they were submitted

    def check_room(self) -> None:
        """Raise LLM_LINK_BUSY if too many requests are open."""
        if len(self._requests) >= MAX_REQUESTS:
            raise LLMException(
                f"{MAX_REQUESTS} requests are open; call get_transfer_status to end some",
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
        """Add a submitted request, and return its number."""
        with self._mutex:
            self._last += 1
            self._requests[self._last] = _Request(task, ranges, remote_engine, op, user_data)
            return self._last

    def status(self, number: int) -> tuple[int, TransferStatus]:
        """Return the state of a request; forget the request if it has ended."""
        with self._mutex:
            request = self._requests.get(number)
            if request is None:
                raise invalid(f"req_id={number} is unknown, or its end was already returned")
            if not request.task.done:
                return SUCCESS, TransferStatus.WAITING
            del self._requests[number]
        return _outcome(number, request)

    def all(self, args: GetTransferStatusArgs) -> list[TransferResult]:
        """Return the states of requests, oldest first; forget the requests that have ended."""
        results: list[TransferResult] = []
        with self._mutex:
            for number, request in list(self._requests.items()):
                if len(results) >= args.max_query_count:
                    break
                if not request.task.done:
                    if not args.skip_waiting:
                        waiting = TransferStatus.WAITING
                        results.append(TransferResult.of(number, request.user_data, waiting))
                    continue
                del self._requests[number]
                _, status = _outcome(number, request)
                results.append(TransferResult.of(number, request.user_data, status))
        return results

    def stop_peer(self, cluster_id: int, reason: str) -> None:
        """Stop the requests with a peer, under all of its names."""
        with self._mutex:
            requests = list(self._requests.values())
        for request in requests:
            if request.ranges.cluster_id == cluster_id:
                request.task.cancel(LLMException(reason))


def _outcome(number: int, request: _Request) -> tuple[int, TransferStatus]:
    """Return the outcome of a request that has ended, and log the reason of a failure."""
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
        return (NOT_CONNECTED if status == NOT_CONNECTED else SUCCESS), TransferStatus.FAILED
    return SUCCESS, TransferStatus.COMPLETED
