"""The state of a `Hixl` while it is initialized: engine, memory, connections and requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvnative._signals import Mutex
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.ranges import AddressRanges
from kvplan.execution import Transfers, TransferTask
from kvplan.hixl.connections import AsyncConnector, Connections
from kvplan.hixl.options import Settings
from kvplan.hixl.values import (
    NOT_CONNECTED,
    SUCCESS,
    TIMEOUT,
    AsyncConnectStatus,
    GetTransferStatusArgs,
    MemType,
    TransferOp,
    TransferResult,
    TransferStatus,
    status_of,
)
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.logs import Log
from kvplan.types import LlmRole, Placement

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
            "request %d, %s of %s: %s",
            number,
            request.op.name,
            request.remote_engine,
            error,
        )
        if status == TIMEOUT:
            return SUCCESS, TransferStatus.TIMEOUT
        return (NOT_CONNECTED if status == NOT_CONNECTED else SUCCESS), TransferStatus.FAILED
    return SUCCESS, TransferStatus.COMPLETED


Region = tuple[int, int, bool]
"""Registered memory: address, bytes, and True if it is local only."""


class Running:
    """The state between `initialize` and `finalize`."""

    def __init__(self, settings: Settings, transfers: Transfers | None) -> None:
        self.settings = settings
        self.datadist = LlmDataDist(settings.cluster_id, LlmRole.MIX, transfers=transfers)
        self.datadist.initialize(settings.engine)
        self.connections = Connections(self.datadist)
        self.connector = AsyncConnector(
            settings.threads, settings.capacity, f"kvplan-hixl-{settings.name}"
        )
        self.requests = Requests()
        self.registered: dict[int, Region] = {}  # by handle
        self.handles: dict[Region, int] = {}  # the inverse of `registered`
        self.mutex = Mutex()  # of `registered` and `handles`

    def place_of(self, mem_type: MemType) -> Placement:
        """Return the placement of memory of this type."""
        if mem_type is MemType.MEM_HOST:
            return Placement.HOST
        if self.datadist.device is not None:
            return Placement.DEVICE
        if self.settings.device_is_host:
            return Placement.HOST
        raise LLMException(
            "this engine has no device: no library of an accelerator was found, or "
            "kvplan.accelerator=none (`kvplan info` says why). To treat MEM_DEVICE as host memory, "
            "give option kvplan.mem_device=host or set KVPLAN_MEM_DEVICE=host",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )

    def cluster_of(self, remote_engine: str, timeout_ms: int) -> int:
        """Return the cluster of a remote engine; with AutoConnect, connect first."""
        connections = self.connections
        if self.settings.auto_connect and not connections.is_linked(remote_engine):
            try:
                connections.connect(remote_engine, timeout_ms)
            except LLMException as error:
                if error.status_code is not LLMStatusCode.LLM_ALREADY_LINK:  # by another thread
                    raise
        return connections.cluster_of(remote_engine)

    def async_status(
        self, remote_engine: str, states: Mapping[str, AsyncConnectStatus]
    ) -> AsyncConnectStatus:
        """Return the state of the last task, corrected by the state of the connection."""
        state = states.get(remote_engine, AsyncConnectStatus.NOT_CONNECT)
        settled = (AsyncConnectStatus.CONNECTED, AsyncConnectStatus.NOT_CONNECT)
        if state in settled:
            return settled[not self.connections.is_linked(remote_engine)]
        return state

    def close(self) -> None:
        """End tasks, transfers and links."""
        self.connector.stop()
        self.datadist.finalize()
        self.connector.join()
