"""What lives between `initialize` and `finalize`, made and released as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from threading import RLock
from typing import TYPE_CHECKING

from kvplan.control.endpoint import Endpoint
from kvplan.control.server import warn_of_strangers
from kvplan.device.choice import open_accelerator
from kvplan.engine.outcomes import Outcomes
from kvplan.engine.registry import CacheRegistry
from kvplan.engine.release import stopped
from kvplan.engine.remapping import checked_ranges, remapped
from kvplan.engine.runner import InFlight
from kvplan.execution import default_transfers
from kvplan.links import Links, LinkState
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.choice import TransportOptions, make_transports

if TYPE_CHECKING:
    from kvplan.engine.metrics import Metrics
    from kvplan.engine.options import Options
    from kvplan.execution import Transfers
    from kvplan.types import LlmRole

_STOPPED_S = 1.0  # by then a transfer that was told to stop has stopped


class Engine:
    """Transports, caches, links and the transfers in flight of one engine.

    Raises:
        LLMException: what could not be had; everything else is released again.
    """

    def __init__(
        self,
        cluster_id: int,
        role: LlmRole,
        options: Options,
        transfers: Transfers | None,
        metrics: Metrics,
    ) -> None:
        self.pid = os.getpid()
        self.cluster_id = cluster_id
        self.role = role
        self.options = options
        self.transfers = (transfers or default_transfers()).share()
        self.metrics = metrics
        self.wait_ms: float = options.sync_kv_cache_wait_time
        self.outcomes = Outcomes(f"kvplan-outcomes-{cluster_id}")
        self._listen_at = ""
        self.in_flight = InFlight()
        self._remapping = RLock()
        with ExitStack() as held:
            self.device = open_accelerator(options.accelerator, options.device_id)
            if self.device is not None:
                held.callback(self.device.close)
            reach = TransportOptions(
                permit_any_peer=options.permit_any_peer,
                device=self.device,
                local_comm_res=options.local_comm_res,
                rdma_traffic_class=options.rdma_traffic_class,
                rdma_service_level=options.rdma_service_level,
                staging_nbytes=options.staging_nbytes,
                ucx_devices=options.ucx_devices,
                ucx_settings=options.ucx_settings,
                tcp_connections=options.tcp_connections,
                tcp_encrypt=options.encrypt,
                tcp_congestion=options.tcp_congestion,
                label=f"kvplan-{cluster_id}",
            )
            transports, missing = make_transports(options.transport, reach)
            for transport in transports:
                held.callback(transport.close)
            self.registry = CacheRegistry(transports, options, self._announce, self.device)
            held.callback(self.registry.close)
            self.links = Links(
                cluster_id, lambda: self.role, options, self.registry, transports, missing
            )
            held.callback(self.links.close)
            self.links.start()
            self.listen(options.listen_ip_info, stacklevel=3)  # who initializes
            self._held = held.pop_all()

    def _announce(self) -> None:
        self.links.tables_changed()

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child of the process that the engine belongs to."""
        return os.getpid() != self.pid

    def check_process(self) -> None:
        """Raise LLMException (LLM_FAILED) in a forked child."""
        if os.getpid() != self.pid:
            raise LLMException(
                f"cluster {self.cluster_id} was initialized by process {self.pid}; this is its "
                f"forked child {os.getpid()}, which needs an engine of its own"
            )

    @property
    def listen_address(self) -> str | None:
        """Where it listens, with the real port; None: nowhere."""
        endpoint = self.links.endpoint
        return None if endpoint is None else str(endpoint)

    def listen(self, address: str, stacklevel: int) -> None:
        """Listen at `address` ("ip:port", port 0: any) and nowhere else; empty: nowhere.

        Where it listens there already, nothing changes. Warns if strangers could link.

        Args:
            address: where.
            stacklevel: whom the warning is for: 1 is the caller of this method.

        Raises:
            LLMException: LLM_PARAM_INVALID: no such address; LLM_FAILED: it cannot be had. Nothing
                changes then.
        """
        here = self.listen_address
        if here is not None and address in (here, self._listen_at):
            return
        if address:
            endpoint = Endpoint.parse(address)
            if self.options.cluster_key_file is None:
                warn_of_strangers(endpoint, stacklevel + 1)
            self.links.listen(endpoint)
        else:
            self.links.stop_listening()
        self._listen_at = address

    def remap(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `remap_registered_memory`."""
        given = checked_ranges(ranges)
        if not any(it.state is LinkState.LINKED for it in self.links.status()):
            raise LLMException(
                f"cluster {self.cluster_id} has no link that stands",
                status_code=LLMStatusCode.LLM_NOT_YET_LINK,
            )
        with self._remapping:  # of two at once the second must not be lost
            entries = [it for it, _ in self.registry.entries()]
            self.registry.renew(remapped(entries, given))
        self.links.tell_all(self.wait_ms / 1000)

    def close(self) -> None:
        """Wait for the transfers in flight as long as a pull may take, stop them, release all.

        Idempotent. In a forked child nothing happens: all of it is the parent's.
        """
        if self.inherited:
            return
        if not self.in_flight.close():
            return
        with self._held as held:  # whatever goes wrong here, an interrupt say: from the last on
            held.callback(self.outcomes.close, _STOPPED_S)
            held.callback(self.in_flight.wait, _STOPPED_S)
            # Also what a call that is under way still has to begin.
            held.callback(self.transfers.close, cancel=True)
            if not self.in_flight.wait(self.wait_ms / 1000):
                self.outcomes.cancel(stopped())
