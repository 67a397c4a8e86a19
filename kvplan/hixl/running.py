"""The state of a `Hixl` while it is initialized: engine, memory, connections and requests."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

from kvnative._signals import Mutex
from kvplan.addressed.connector import Connector
from kvplan.addressed.engine import AddressedEngine, Request
from kvplan.addressed.names import where_named
from kvplan.execution import Transfers
from kvplan.hixl.options import Settings
from kvplan.hixl.values import (
    NOT_CONNECTED,
    SUCCESS,
    TIMEOUT,
    AsyncConnectStatus,
    GetTransferStatusArgs,
    MemType,
    NotifyDesc,
    TransferResult,
    TransferStatus,
    status_of,
)
from kvplan.status import LLMException, unsupported
from kvplan.system.logs import LimitedLog, Log
from kvplan.types import Placement

_log = Log("kvplan.hixl")
_peer_log = LimitedLog(_log)

# States of a task: waiting, running, after success, after failure.
CONNECT_STATES: Final = (
    AsyncConnectStatus.CONNECT_PENDING,
    AsyncConnectStatus.CONNECTING,
    AsyncConnectStatus.CONNECTED,
    AsyncConnectStatus.CONNECT_FAILED,
)
DISCONNECT_STATES: Final = (
    AsyncConnectStatus.DISCONNECT_PENDING,
    AsyncConnectStatus.DISCONNECTING,
    None,
    AsyncConnectStatus.NOT_CONNECT,
)

Region = tuple[int, int, bool]
"""Registered memory: address, bytes, and True if it is local only."""


class Running(AddressedEngine):
    """The state between `initialize` and `finalize`."""

    def __init__(self, settings: Settings, transfers: Transfers | None) -> None:
        super().__init__(settings.cluster_id, settings.engine, where_named, _log, transfers)
        self.settings = settings
        self.connector = Connector(
            settings.threads, settings.capacity, f"kvplan-hixl-{settings.name}", _log
        )
        self.registered: dict[int, Region] = {}  # by handle
        self.handles: dict[Region, int] = {}  # the inverse of `registered`
        self.mutex = Mutex()  # guards `handles`, and additions to `registered`

    def status(self, number: int) -> tuple[int, TransferStatus]:
        """Return the state of a request; forget the request if it has ended."""
        request = self.requests.take(number)
        if request is None:
            return SUCCESS, TransferStatus.WAITING
        return _outcome(number, request)

    def statuses(self, args: GetTransferStatusArgs) -> list[TransferResult]:
        """Return the states of requests, oldest first; forget the requests that have ended."""
        results: list[TransferResult] = []
        for number in self.requests.numbers():
            if len(results) >= args.max_query_count:
                break
            try:
                data = self.requests.get(number).data
                _, status = self.status(number)
            except LLMException:  # another thread has just taken it
                continue
            if status is not TransferStatus.WAITING or not args.skip_waiting:
                results.append(TransferResult.of(number, data, status))
        return results

    def place_of(self, mem_type: MemType) -> Placement:
        """Return the placement of memory of this type."""
        if mem_type is MemType.MEM_HOST:
            return Placement.HOST
        if self.datadist.device is not None:
            return Placement.DEVICE
        if self.settings.device_is_host:
            return Placement.HOST
        raise unsupported(
            "this engine has no device: no library of an accelerator was found, or "
            "kvplan.accelerator=none (`kvplan info` says why). To treat MEM_DEVICE as host memory, "
            "give option kvplan.mem_device=host or set KVPLAN_MEM_DEVICE=host"
        )

    def use(self, remote_engine: str, timeout_ms: int) -> AbstractContextManager[int]:
        """Return `Connections.use` of a remote engine; with AutoConnect, connect first."""
        if self.settings.auto_connect:
            self.connect(remote_engine, timeout_ms)
        return self.connections.use(remote_engine)

    def notifies(self) -> list[NotifyDesc]:
        """Return the messages that have arrived since the last call."""
        found = []
        for message in self.connections.take_messages():
            try:
                found.append(NotifyDesc(message.name.decode(), message.body.decode()))
            except UnicodeDecodeError:
                _peer_log.warning(
                    "cluster %d has sent a notification that is not UTF-8", message.cluster_id
                )
        return found

    def async_status(
        self, remote_engine: str, states: Mapping[str, AsyncConnectStatus]
    ) -> AsyncConnectStatus:
        """Return the state of the last task; the link decides CONNECTED or NOT_CONNECT."""
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


def _outcome(number: int, request: Request) -> tuple[int, TransferStatus]:
    """Return the outcome of a request that has ended."""
    if (error := request.error(_log, number)) is None:
        return SUCCESS, TransferStatus.COMPLETED
    status = status_of(error)
    if status == TIMEOUT:
        return SUCCESS, TransferStatus.TIMEOUT
    return (NOT_CONNECTED if status == NOT_CONNECTED else SUCCESS), TransferStatus.FAILED
