"""The state of a `Hixl` between `initialize` and `finalize`: its engine, memory and connections."""

from __future__ import annotations

from collections.abc import Mapping

from kvnative._signals import Mutex
from kvplan.engine.datadist import LlmDataDist
from kvplan.execution import Transfers
from kvplan.hixl.connections import AsyncConnector, Connections
from kvplan.hixl.options import Settings
from kvplan.hixl.requests import Requests
from kvplan.hixl.values import AsyncConnectStatus, MemType
from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import LlmRole, Placement

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
