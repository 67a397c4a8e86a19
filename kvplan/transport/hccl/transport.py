"""Memory of Ascend devices, and of hosts where the product allows it, over HCCL."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from kvnative._backend import NativeError
from kvnative._hccl import HcclLibrary, Staging
from kvnative._signals import Mutex
from kvplan.device.device import device_error
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.announced import Writers, tag_of
from kvplan.transport.base import BaseTransport, link_failed
from kvplan.transport.hccl.addresses import (
    check_environment,
    device_address,
    is_over_hccs,
    table_of,
    why_not,
)
from kvplan.transport.hccl.connections import Connections
from kvplan.transport.hccl.device import BackgroundWorker, HcclDevice
from kvplan.transport.hccl.link import HcclLink
from kvplan.transport.hccl.metadata import Metadata
from kvplan.transport.hccl.registrations import GenerationTable, HcclRegistration, Registrations
from kvplan.transport.lease_expiry import LeaseExpiry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvplan.device.ascend import AscendDevice, Product
    from kvplan.transport import protocol
    from kvplan.transport.hccl.metadata import Range
    from kvplan.transport.protocol import Kind, Registrable

_LOG = Log("kvplan")
_CLOSING_S = 2.0  # for connections that nobody uses any more to be taken down
# Of the staging memory: two transfers at once, each in a pipeline of four buffers.
_BUFFERS, _BUFFER_SETS = 4, 2


class HcclTransport(BaseTransport):
    """What this process lets its peers on other devices reach, and its links to them.

    Close it before the device, and before the memory goes. In a forked child it is of no use.

    Attributes:
        reaches: device memory, and host memory on products whose HCCL takes it.
    """

    name = HcclLink.transport

    def __init__(
        self,
        device: AscendDevice,
        *,
        local_comm_res: str = "",
        traffic_class: int | None = None,
        service_level: int | None = None,
        staging_nbytes: int = 32 << 20,
        max_registrations: int = 65536,
    ) -> None:
        """Show this process to its peers.

        Args:
            device: of this process.
            local_comm_res: what the device is called by others, as llm.LocalCommRes; empty: found
                out.
            traffic_class, service_level: for RDMA; None: the system's.
            staging_nbytes: of device memory, through which local memory goes that HCCL does not
                take as it is; 0: none.
            max_registrations: how many there can be at once; each takes 8 bytes of the device, as
                do the leases that there can be besides.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: a device that does not transfer one-sided, no
                HCCL, an address that is not known, or variables that HCCL refuses;
                LLM_PARAM_INVALID: `local_comm_res`; LLM_DEVICE_OUT_OF_MEMORY; what HCCL says.
        """
        super().__init__()
        self._product = _product_of(device)
        check_environment()
        self._address = device_address(device, local_comm_res)
        self._instance = secrets.token_hex(16)
        self.reaches: frozenset[Kind] = self._product.registers
        self.maps_host = "host" in self.reaches and not device.notes_pins
        self._mutex = Mutex()  # re-entrant: a signal handler may end a lease
        self._links: set[Connections] = set()
        tag = tag_of(self._instance)
        self._writers: Writers[Connections] = Writers(lambda link: link.tickets(tag))
        self._background = BackgroundWorker(f"kvplan-hccl-{device.id}")
        try:
            library = HcclLibrary.load(device.native.library)
            self._generations = GenerationTable(device, max_registrations)
            self._expiry = LeaseExpiry(self._generations.end_lease, f"kvplan-leases-{device.id}")
            buffer_nbytes = staging_nbytes // (_BUFFERS * _BUFFER_SETS)
            staging = (
                Staging(
                    library,
                    device.native,
                    slot_nbytes=buffer_nbytes,
                    slots=_BUFFERS,
                    buffer_sets=_BUFFER_SETS,
                )
                if buffer_nbytes
                else None
            )
            self._hccl = HcclDevice(
                library,
                device,
                self._product,
                self._generations,
                staging,
                self._background,
                traffic_class,
                service_level,
            )
            self._registrations = Registrations(self._hccl)
        except BaseException as error:
            self._background.close()
            if isinstance(error, NativeError):
                raise device_error(error, f"HCCL on device {device.id}") from error
            raise

    def preregister_pool(self, memory: Registrable, keep: object = None) -> None:
        """See `Transport.preregister_pool`: one HCCL region; parts renew no connection."""
        self._check_open()
        self._registrations.preregister_pool(memory, keep)

    def register(
        self, memory: Registrable, *, writable: bool = True, keep: object = None
    ) -> HcclRegistration:
        """See `Transport.register`; memory of the host where the product allows it.

        Memory may be registered several times, and a part of what is registered. What lies partly
        in other registrations is known to HCCL in parts, and no tensor may cross their borders.
        `keep` is not used: what peers write is not seen.
        """
        self._check_open()
        return self._registrations.add(memory, writable=writable)

    def deregister(self, registration: protocol.Registration) -> None:
        """End it: from here on no peer reports a success for it. It may be freed afterwards.

        A peer's `put` that is in flight at this moment may still write to it, or fail; agree on the
        end of transfers first. A second time is fine.
        """
        self._check_open()
        self._registrations.remove(registration)

    def begin_lease(self, deadline_ns: int = 0) -> tuple[int, int]:
        """See `Transport.begin_lease`; a thread ends it, as peers do not know this clock."""
        self._check_open()
        slot, generation = self._generations.begin_lease()
        if deadline_ns:
            try:
                self._expiry.add(slot, generation, deadline_ns)
            except BaseException:  # no more threads, or an interrupt
                self.end_leases([(slot, generation)])
                raise
        return slot, generation

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """See `Transport.renew_lease`."""
        self._check_open()
        self._expiry.renew(slot, generation, deadline_ns)

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """See `Transport.end_leases`; the tickets of each linked peer are read, by a get each."""
        self._check_open()
        for slot, generation in leases:
            self._expiry.forget(slot, generation)
            self._generations.end_lease(slot, generation)
        with self._mutex:
            links = tuple(self._links)
        self._writers.check(links)

    def metadata(self, registrations: Iterable[protocol.Registration] | None = None) -> bytes:
        """See `Transport.metadata`."""
        self._check_open()
        return self._metadata(self._registrations.ranges(registrations)).to_bytes()

    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float,
        session: bytes = b"",
        streams: protocol.Streams | None = None,
    ) -> HcclLink:
        """See `Transport.connect`; the peer must do so too, in any order; `streams` is not used.

        What either end registers later is reached once both have renewed the connection
        (`Renewable`). HCCL takes whole seconds of `timeout_ms`.
        """
        self._check_open()
        peer = Metadata.from_bytes(metadata)
        if reason := self._refusal(peer):
            raise link_failed(reason)
        table = table_of(self._address, peer.device)
        is_hccs = is_over_hccs(self._product, self._address, peer.device)
        connections = Connections(self._hccl, peer, table, session, self._metadata, is_hccs=is_hccs)
        with self._mutex:
            self._check_open()
            self._links = {it for it in self._links if not it.is_down}
            self._links.add(connections)
        try:
            connections.connect(timeout_ms)
        except BaseException as error:
            connections.close(link_failed(f"it was never connected: {error}"))
            raise
        return HcclLink(self._hccl, peer, connections)

    def close(self) -> None:
        """Close the links, deregister everything, take the generation table down; idempotent.

        Connections whose transfers are in flight are taken down after those, and so is the rest.
        """
        if os.getpid() != self._pid:
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            links, self._links = list(self._links), set()
        self._expiry.close()
        for connections in links:
            connections.close(link_failed("the transport is closed"))
        self._registrations.close()
        self._background.do(self._hccl.shut)
        if not self._background.wait(_CLOSING_S):
            _LOG.warning("event=closes_late transport=hccl device=%d", self._hccl.device.id)
        self._background.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._registrations)} registrations"
        return f"<HcclTransport of {self._hccl.device!r}: {state}>"

    def _metadata(self, ranges: tuple[Range, ...] = ()) -> Metadata:
        newest = self._hccl.regions.newest
        return Metadata(
            self._instance, self._product.name, self._address, self._generations.ref, newest, ranges
        )

    def _refusal(self, peer: Metadata) -> str | None:
        if peer.product != self._product.name:
            return (
                f"the peer's device is of product {peer.product}, this one of "
                f"{self._product.name}; HCCL connects devices of one product"
            )
        return why_not(self._address, peer.device)

    def _check_reachable(self, metadata: bytes) -> None:
        if reason := self._refusal(Metadata.from_bytes(metadata)):
            raise link_failed(reason)


def _product_of(device: AscendDevice) -> Product:
    if (product := device.product) is None:
        raise LLMException(
            f"device {device.id} is {device.name}, which does not transfer one-sided over "
            "HCCL; Atlas A2, A3 and 950 do",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    return product
