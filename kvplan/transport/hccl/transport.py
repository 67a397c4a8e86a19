"""The transport `hccl`: memory of Ascend devices, and of their hosts if the product allows it."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from kvnative._backend import NativeError
from kvnative._hccl import HIXL_MAX_BATCH, HixlPeer
from kvnative._hccl_memory import HcclLibrary, Staging
from kvplan.execution.task import native_error
from kvplan.status import invalid, link_failed, unsupported
from kvplan.system.logs import Log
from kvplan.transport.hccl.addresses import (
    RankTable,
    check_environment,
    device_address,
    is_over_hccs,
    table_of,
    why_not,
)
from kvplan.transport.hccl.connections import Connections
from kvplan.transport.hccl.device import BackgroundWorker, GenerationTable, HcclDevice
from kvplan.transport.hccl.link import HcclLink
from kvplan.transport.hccl.metadata import Metadata
from kvplan.transport.hccl.ports import packed_pair, requested, serve, why_unreachable
from kvplan.transport.hccl.registrations import HcclRegistrations
from kvplan.transport.metadata import tag_of
from kvplan.transport.transport import Transport
from kvplan.validation import check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvnative._hccl_memory import Server
    from kvplan.device.ascend import AscendDevice, Product
    from kvplan.transport.hccl.ports import ServerAddress
    from kvplan.transport.protocol import Kind, Streams
    from kvplan.transport.registrations import AnyRegistration

_LOG = Log("kvplan")
_CLOSING_S = 2.0  # timeout of closing unused connections
_BUFFER_SETS = 2  # transfers that use the staging memory at a time, each with two slots
_DEVICE: Final[frozenset[Literal["host", "device"]]] = frozenset({"device"})
_LEAST_STAGING, _MOST_STAGING = 1 << 14, 1 << 32  # bytes, as a slot has 4 KiB to 1 GiB


class HcclTransport(Transport):
    """The memory that this process offers over HCCL, and its links to peers on other devices.

    In HIXL's client/server mode, HIXL takes the place of HCCL, and reaches only device memory.

    Close the transport before the device, and before the memory is freed.

    Memory may be registered several times, and so may a part of registered memory. If a part was
    registered first, the memory has several HCCL regions, and a tensor must lie inside one.
    `deregister` does not wait for writes in flight, which may still write to the memory, or fail:
    agree with peers on the end of transfers first.

    Attributes:
        reaches: Device memory, and host memory on products whose HCCL transfers it.
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
        hixl_address: str = "",
    ) -> None:
        """Make this process reachable.

        Args:
            device: The device of this process.
            local_comm_res: The address of the device, as for llm.LocalCommRes; empty: detected.
                Version 1.3 selects HIXL's client/server mode.
            traffic_class: Of RDMA, a multiple of 4 in [0, 255]; None: the system's default.
            service_level: Of RDMA, in [0, 7]; None: the system's default.
            staging_nbytes: Bytes of device memory that stage local memory which HCCL does not
                transfer directly, 2**14 to 2**32; 0: no staging.
            max_registrations: The maximum number at one time. Each takes 8 bytes of the device, as
                does each possible lease.
            hixl_address: IP address of this host, for HIXL's client/server mode.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: the device has no one-sided transfers, HCCL is
                not installed, an address is unknown, or an environment variable excludes HCCL;
                LLM_PARAM_INVALID: an argument; LLM_DEVICE_OUT_OF_MEMORY; an error of HCCL.
        """
        super().__init__()
        if staging_nbytes and not _LEAST_STAGING <= staging_nbytes <= _MOST_STAGING:
            raise invalid(
                f"staging_nbytes={staging_nbytes} must be 0 or in [{_LEAST_STAGING}, "
                f"{_MOST_STAGING}]"
            )
        if traffic_class is not None:
            check_range("traffic_class", traffic_class, 0, 255)
            if traffic_class % 4:
                raise invalid(f"traffic_class={traffic_class} must be a multiple of 4")
        if service_level is not None:
            check_range("service_level", service_level, 0, 7)
        product = _product_of(device)
        request = requested(local_comm_res, hixl_address)
        if is_hixl := request is not None:
            product = replace(product, max_batch=HIXL_MAX_BATCH, registers=_DEVICE, hccs=_DEVICE)
        else:
            check_environment()
        self._product = product
        self._address = device_address(device, "" if is_hixl else local_comm_res)
        self._instance = secrets.token_hex(16)
        self.reaches: frozenset[Kind] = self._product.registers
        self.maps_host = "host" in self.reaches and not device.notes_pins
        self._links: set[Connections] = set()
        self._background = BackgroundWorker(f"kvplan-hccl-{device.id}")
        server: Server | None = None
        try:
            library = HcclLibrary.load(device.native.library, client_server=is_hixl)
            self._server: ServerAddress | None = None
            if request is not None:
                server, self._server = serve(library, device, self._address, request)
            self._generations = GenerationTable(device, max_registrations)
            slot_nbytes = staging_nbytes // (2 * _BUFFER_SETS)
            staging = (
                Staging(library, device.native, slot_nbytes=slot_nbytes, buffer_sets=_BUFFER_SETS)
                if slot_nbytes
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
                server,
            )
            self._hccl.notify_disturbed = self._renew_disturbed
            tag = tag_of(self._instance)
            self._registrations: HcclRegistrations = HcclRegistrations(
                self._hccl, lambda link: link.tickets(tag), self._linked
            )
        except BaseException as error:
            self._background.close()
            if server is not None:  # the error keeps it, and the device has one server
                with suppress(NativeError):
                    server.close()
            if isinstance(error, NativeError):
                raise native_error(error, f"HCCL on device {device.id}") from error
            raise

    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float,
        session: bytes = b"",
        streams: Streams | None = None,
    ) -> HcclLink:
        """See `Transport.connect`; `streams` is not used.

        To reach memory that either end registers later, both renew the connection (`Renewable`).
        For HCCL `timeout_ms` is rounded up to whole seconds.
        """
        self._check_open()
        peer = Metadata.from_bytes(metadata)
        if reason := self._refusal(peer):
            raise link_failed(reason)
        table, way = self._way_to(peer)
        is_hccs = table.hixl is not None or is_over_hccs(self._product, self._address, peer.device)
        connections = Connections(self._hccl, peer, table, session, self._metadata, is_hccs=is_hccs)
        with self._mutex:
            self._check_open()
            self._links = {link for link in self._links if not link.is_down}
            self._links.add(connections)
        try:
            connections.connect(timeout_ms)
        except BaseException as error:
            connections.close(link_failed(f"the link was never connected: {error}"))
            raise
        return HcclLink(self._hccl, peer, connections, way)

    def _close(self) -> None:
        # Connections are closed after their transfers, and the device after the connections.
        with self._mutex:
            links, self._links = list(self._links), set()
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

    def _linked(self) -> tuple[Connections, ...]:
        with self._mutex:
            return tuple(self._links)

    def _renew_disturbed(self) -> None:
        for connections in self._linked():
            connections.renew_disturbed()

    def _metadata(self, registrations: Sequence[AnyRegistration] = ()) -> Metadata:
        ranges = tuple(registration.range for registration in registrations)
        newest = self._hccl.regions.newest
        return Metadata(
            self._instance,
            self._product.name,
            self._address,
            self._generations.ref,
            newest,
            ranges,
            self._server,
        )

    def _way_to(self, peer: Metadata) -> tuple[RankTable, str]:
        """Return the rank table with the peer, and the `way` of the link if HIXL connects both."""
        if self._server is None or peer.server is None:
            return table_of(self._address, peer.device), ""
        local, remote, protocol = packed_pair(
            (self._address, self._server), (peer.device, peer.server)
        )
        hixl = HixlPeer(local, remote, peer.server.address, peer.server.port)
        return RankTable(hixl=hixl), f"one-sided over {protocol}, by HIXL"

    def _refusal(self, peer: Metadata) -> str | None:
        if peer.product != self._product.name:
            return (
                f"the peer's device is of product {peer.product}, this one of "
                f"{self._product.name}; HCCL connects devices of one product"
            )
        if self._server is not None or peer.server is not None:
            return why_unreachable(self._server, peer.server)
        return why_not(self._address, peer.device)

    def _check_reachable(self, metadata: bytes) -> None:
        if reason := self._refusal(Metadata.from_bytes(metadata)):
            raise link_failed(reason)


def _product_of(device: AscendDevice) -> Product:
    if (product := device.product) is None:
        raise unsupported(
            f"device {device.id} is {device.name}, which has no one-sided transfers over HCCL; "
            "Atlas A2, A3 and 950 have them"
        )
    return product
