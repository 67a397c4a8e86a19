"""The table of transports, which alone names them: what they are made with, which work here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.memory import POPULATE
from kvplan.transport.tcp.metadata import MAX_CONNECTIONS
from kvplan.transport.ucx.library import check_devices, check_settings
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvplan.device.device import Device
    from kvplan.transport.protocol import Transport

__all__ = [
    "MAX_CONNECTIONS",
    "POPULATE",
    "TRANSPORTS",
    "WHERE_MISSING",
    "TransportOptions",
    "Transports",
    "check_devices",
    "check_settings",
    "make_transports",
]

_LOGGER = Log("kvplan")


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What transports are made with; each takes what is meant for it.

    Attributes:
        permit_any_peer: let every process of this user trace this one, which Yama
            (`kernel.yama.ptrace_scope=1`) asks for where memory is registered by its users.
        device: of this process, whose memory is to be reached; None: there is none.
        local_comm_res: JSON of the reference, with the addresses of the device; empty: found out.
        rdma_traffic_class, rdma_service_level: for RDMA; None: the system's.
        staging_nbytes: of device memory, for what a device cannot send from where it is.
        ucx_devices: that UCX may use, such as "mlx5_0:1"; empty: it chooses.
        ucx_settings: of UCX, JSON such as {"UCX_IB_GID_INDEX": "3"}.
        tcp_connections: that a link over tcp has; None: by the number of cores.
        tcp_encrypt: encrypt all data that goes over tcp.
        tcp_congestion: congestion control of those connections, such as "bbr"; empty: the system's.
        label: what the process is called by tools that look at transports.
        populate: when pages of peers' arenas are mapped here, see `LocalTransport`.
    """

    permit_any_peer: bool = False
    device: Device | None = None
    local_comm_res: str = ""
    rdma_traffic_class: int | None = None
    rdma_service_level: int | None = None
    staging_nbytes: int = 32 << 20
    ucx_devices: str = ""
    ucx_settings: str = ""
    tcp_connections: int | None = None
    tcp_encrypt: bool = False
    tcp_congestion: str = ""
    label: str = "kvplan"
    populate: str = "background"


class Transports(NamedTuple):
    """What `make_transports` has made.

    Attributes:
        made: the preferred first.
        missing: why the others are not there, by name.
    """

    made: tuple[Transport, ...]
    missing: Mapping[str, str]


def _hccl(options: TransportOptions) -> Transport:
    from kvplan.device.ascend import AscendDevice  # its modules only where it is used

    if not isinstance(options.device, AscendDevice):
        raise LLMException(
            "there is no Ascend device (kvplan.accelerator)",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    from kvplan.transport.hccl.transport import HcclTransport

    return HcclTransport(
        options.device,
        local_comm_res=options.local_comm_res,
        traffic_class=options.rdma_traffic_class,
        service_level=options.rdma_service_level,
        staging_nbytes=options.staging_nbytes,
    )


def _ucx(options: TransportOptions) -> Transport:
    from kvplan.transport.ucx.transport import UcxTransport  # its modules only where it is used

    return UcxTransport(
        devices=options.ucx_devices, settings=options.ucx_settings, label=options.label
    )


def _tcp(options: TransportOptions) -> Transport:
    from kvplan.transport.tcp.transport import TcpTransport  # its modules only where it is used

    return TcpTransport(
        device=options.device,
        connections=options.tcp_connections,
        encrypt=options.tcp_encrypt,
        congestion=options.tcp_congestion,
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

WHERE_MISSING: Final[Mapping[str, str]] = {
    "hccl": "it needs an Ascend device there",
    "ucx": (
        "it needs RDMA there, the system's UCX, 1.13 or later, and kvplan.transport at auto or ucx"
    ),
}
"""What to do at a process that does not have a transport, by name."""


def make_transports(
    choice: str = "auto", options: TransportOptions = TransportOptions()
) -> Transports:
    """Make the transport of that name, or with "auto" all that work here.

    Raises:
        LLMException: LLM_PARAM_INVALID: no transport has that name; LLM_FEATURE_NOT_ENABLED: none
            of them works here, and why.
        TypeError: not a str.
    """
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
            missing[name] = str(error.args[0])
            _LOGGER.info("transport=%s cannot be used: %s", name, error)
    if not made:
        tried = TRANSPORTS if choice == "auto" else (choice,)
        reasons = "; ".join(f"{name}: {missing[name]}" for name in tried)
        raise LLMException(
            f"transport={choice!r} does not work here: {reasons}",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    return Transports(tuple(made), missing)
