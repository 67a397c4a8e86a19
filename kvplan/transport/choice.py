"""Which ways of reaching another process there are, and which of them work here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.local import LocalTransport
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvplan.ascend.device import AscendDevice
    from kvplan.transport.protocol import Transport

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
    """

    permit_any_peer: bool = False
    device: AscendDevice | None = None
    local_comm_res: str = ""
    rdma_traffic_class: int | None = None
    rdma_service_level: int | None = None
    staging_nbytes: int = 32 << 20


def _hccl(options: TransportOptions) -> Transport:
    if options.device is None:
        raise LLMException(
            "there is no accelerator (kvplan.accelerator)",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    from kvplan.transport.hccl.transport import HcclTransport  # its modules only where it is used

    return HcclTransport(
        options.device,
        local_comm_res=options.local_comm_res,
        traffic_class=options.rdma_traffic_class,
        service_level=options.rdma_service_level,
        staging_nbytes=options.staging_nbytes,
    )


# In order of preference.
TRANSPORTS: Final[Mapping[str, Callable[[TransportOptions], Transport]]] = {
    "hccl": _hccl,
    "local": lambda options: LocalTransport(permit_any_peer=options.permit_any_peer),
}


def make_transports(
    choice: str = "auto", options: TransportOptions = TransportOptions()
) -> tuple[Transport, ...]:
    """Make the transport of that name, or with "auto" all that work here, the preferred first.

    Raises:
        LLMException: LLM_PARAM_INVALID: no transport has that name; LLM_FEATURE_NOT_ENABLED: none
            of them works here, and why.
        TypeError: not a str.
    """
    check_type("transport", choice, str)
    if choice != "auto" and choice not in TRANSPORTS:
        known = ", ".join(["auto", *TRANSPORTS])
        raise invalid(f"transport={shown(choice)}; it must be one of {known}")
    made, reasons = [], []
    for name in TRANSPORTS if choice == "auto" else (choice,):
        try:
            made.append(TRANSPORTS[name](options))
        except LLMException as error:
            reasons.append(f"{name}: {error.args[0]}")
            _LOGGER.info("transport=%s cannot be used: %s", name, error)
    if not made:
        raise LLMException(
            f"transport={choice!r} does not work here: {'; '.join(reasons)}",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    return tuple(made)
