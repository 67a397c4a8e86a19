"""Why HCCL may not connect: its results name causes that only its own log would tell apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvplan.inspection.units import plural

if TYPE_CHECKING:
    from kvnative._hccl import HcclLibrary
    from kvplan.transport.hccl.addresses import DeviceAddress

# Of HcclResult.
_PTR, _INTERNAL, _UNAVAIL, _TIMEOUT = 2, 4, 7, 9
_TCP_CONNECT, _ROCE_CONNECT, _RUNTIME, _DRV, _NETWORK = 11, 12, 15, 16, 19

MAX_LINKS: Final = 512
"""Connections of a device: as many as the vendor's own engine makes."""

DEFAULT_PORT: Final = 16666
"""That HCCL listens at on a device, where the rank table names none."""


def advice(
    code: int,
    library: HcclLibrary,
    device_id: int,
    address: DeviceAddress,
    *,
    is_hccs: bool,
    num_open: int,
) -> str:
    """What to look at after HCCL's result `code` while connecting; "" if nothing is known of it.

    Args:
        code: of the error.
        library: HCCL.
        device_id: logical number of the device of this process.
        address: of that device, as in the rank table.
        is_hccs: whether the devices are connected by HCCS, and not by RDMA.
        num_open: connections that the transport has besides.
    """
    if code in (_RUNTIME, _DRV, _NETWORK):
        return f"; {_of_memory(library, device_id)}"
    if code == _UNAVAIL:
        port = address.device_port or DEFAULT_PORT
        return (
            f"; port {port} of device {device_id} may be taken: another process that uses the "
            "device over HCCL has it; give this one a device_port of its own (llm.LocalCommRes)"
        )
    if code == _ROCE_CONNECT and num_open:
        return (
            f"; device {device_id} has {plural(num_open, 'connection')} of this engine already, "
            f"and queue pairs for {MAX_LINKS} of all processes at most"
        )
    if is_hccs:
        return ""
    number, ip = address.device_id, address.device_ip
    if code in (_PTR, _INTERNAL):
        return (
            f"; is {ip} still the address of device {device_id} (physical {number})? Compare with "
            f"`hccn_tool -i {number} -ip -g`"
        )
    if code in (_TIMEOUT, _TCP_CONNECT, _ROCE_CONNECT):
        return (
            f"; device {device_id} (physical {number}) at {ip} may not reach the peer's, or TLS "
            f"is on at one end alone (`hccn_tool -i {number} -tls -g`); with TLS, allow 2 s to link"
        )
    return ""


def _of_memory(library: HcclLibrary, device_id: int) -> str:
    """The most likely reason why memory is not registered in the end."""
    host, device = library.registered(device_id)
    hdk = library.driver or "of unknown version"
    return (
        f"{device >> 20} MiB of device {device_id} and {host >> 20} MiB of the host are to be "
        f"registered, with HDK {hdk}: drivers before 25.5 take 20 GiB of the host, and the "
        "device's page tables may hold less"
    )
