"""The table of all transports and their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvplan.status import LLMException, invalid, message_of, unsupported
from kvplan.system.logs import Log
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.memory import POPULATE
from kvplan.transport.tcp.metadata import MAX_BUSY_POLL_US, MAX_CONNECTIONS
from kvplan.transport.ucx.library import check_devices, check_settings
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvplan.device.device import Device
    from kvplan.transport.transport import Transport

__all__ = [
    "MAX_BUSY_POLL_US",
    "MAX_CONNECTIONS",
    "POPULATE",
    "TRANSPORTS",
    "TransportOptions",
    "Transports",
    "check_devices",
    "check_settings",
    "make_transports",
]

_LOGGER = Log("kvplan")


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Options of all transports; the constructors describe them."""

    permit_any_peer: bool = False
    device: Device | None = None
    local_comm_res: str = ""
    rdma_traffic_class: int | None = None
    rdma_service_level: int | None = None
    staging_nbytes: int = 32 << 20
    hixl_address: str = ""
    ucx_devices: str = ""
    ucx_settings: str = ""
    tcp_connections: int | None = None
    encrypt: bool = False
    tcp_congestion: str = ""
    tcp_busy_poll_us: int = 0
    label: str = "kvplan"
    populate: str = "background"


class Transports(NamedTuple):
    """The result of `make_transports`.

    Attributes:
        made: The transports that work here, in order of preference.
        missing: The reasons why the others do not work, by name.
    """

    made: tuple[Transport, ...]
    missing: Mapping[str, str]


def _hccl(options: TransportOptions) -> Transport:
    from kvplan.device.ascend import AscendDevice  # here: loaded only if used

    if not isinstance(options.device, AscendDevice):
        raise unsupported("no Ascend device was found (kvplan.accelerator)")
    from kvplan.transport.hccl.transport import HcclTransport

    return HcclTransport(
        options.device,
        local_comm_res=options.local_comm_res,
        traffic_class=options.rdma_traffic_class,
        service_level=options.rdma_service_level,
        staging_nbytes=options.staging_nbytes,
        hixl_address=options.hixl_address,
    )


def _ucx(options: TransportOptions) -> Transport:
    from kvplan.transport.ucx.transport import UcxTransport

    return UcxTransport(
        devices=options.ucx_devices, settings=options.ucx_settings, label=options.label
    )


def _tcp(options: TransportOptions) -> Transport:
    from kvplan.transport.tcp.transport import TcpTransport

    return TcpTransport(
        device=options.device,
        connections=options.tcp_connections,
        encrypt=options.encrypt,
        congestion=options.tcp_congestion,
        busy_poll_us=options.tcp_busy_poll_us,
        label=options.label,
    )


# In order of preference.
TRANSPORTS: Final[Mapping[str, Callable[[TransportOptions], Transport]]] = {
    "hccl": _hccl,
    "local": lambda options: LocalTransport(
        permit_any_peer=options.permit_any_peer, populate=options.populate, device=options.device
    ),
    "ucx": _ucx,
    "tcp": _tcp,
}


def make_transports(
    choice: str = "auto", options: TransportOptions = TransportOptions()
) -> Transports:
    """Make the transport `choice`, or with "auto" all transports that work here."""
    check_type("transport", choice, str)
    if choice != "auto" and choice not in TRANSPORTS:
        known = ", ".join(["auto", *TRANSPORTS])
        raise invalid(f"transport={shown(choice)}; it must be one of {known}")
    made: list[Transport] = []
    missing: dict[str, str] = {}
    for name in TRANSPORTS:
        if choice not in ("auto", name):
            missing[name] = f"kvplan.transport={choice} leaves it out"
            continue
        try:
            made.append(TRANSPORTS[name](options))
        except LLMException as error:
            missing[name] = message_of(error)
            _LOGGER.info("transport=%s cannot be used: %s", name, error)
    if not made:
        tried = TRANSPORTS if choice == "auto" else (choice,)
        reasons = "; ".join(f"{name}: {missing[name]}" for name in tried)
        raise unsupported(f"transport={choice!r} does not work here: {reasons}")
    return Transports(tuple(made), missing)
