"""HIXL's client/server mode: the ports of devices, the server of this process, and its address.

Version 1.3 of `llm.LocalCommRes` selects the mode, which docs/internals/hixl.md describes.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvnative._hccl_memory import ENDPOINT_NBYTES, HcclError, Server
from kvplan.status import invalid, unsupported
from kvplan.transport.hccl.addresses import AsciiName, DeviceAddress, is_address
from kvplan.transport.metadata import Record, read
from kvplan.validation import resolved, shown

if TYPE_CHECKING:
    from kvnative._hccl_memory import HcclLibrary
    from kvplan.device.ascend import AscendDevice

_OPTION: Final = "local_comm_res (llm.LocalCommRes)"
_VERSION: Final = "1.3"
_MAX_PORTS: Final = 64
_TRIES: Final = 3  # another process may take a free port before HIXL listens there

# Numbers of CommProtocol and of CommAddrType.
_PROTOCOLS: Final = {"hccs": 0, "roce": 1, "ub_ctp": 4, "ub_tp": 5, "uboe": 7}
_IPV4, _IPV6, _ID, _EID = range(4)
_ENDPOINT: Final = struct.Struct("<ii36si4I96x")
assert _ENDPOINT.size == ENDPOINT_NBYTES
_NO_SUPER_DEVICE: Final = 2**32 - 1  # over HCCS

# In the order of preference, after ports of UB.
_SAME_INSTANCE: Final = ("hccs", "uboe", "roce")
_ACROSS: Final = ("uboe", "roce")

Text = Annotated[str, Meta(pattern=r"^[ -~]{0,64}\Z")]


class Port(Record, frozen=True):
    """A network port of a device or host, as an entry of `endpoint_list`.

    Attributes:
        protocol: The protocol of the port.
        comm_id: The address: an EID for UB, an IP address, or for HCCS the number of the device.
        placement: The place of the port; kvplan uses only ports of devices.
        plane: The plane of a port of UB, which reaches only ports of the same plane.
        dst_eid: The only port that reaches this port of UB; empty: any.
    """

    protocol: Literal["hccs", "roce", "ub_ctp", "ub_tp", "uboe"]
    comm_id: str
    placement: Literal["device", "host"]
    plane: Text = ""
    dst_eid: Text = ""

    def __post_init__(self) -> None:
        is_eid = self.is_ub and re.fullmatch(r"[0-9a-fA-F]{32}", self.comm_id)
        is_id = self.protocol == "hccs" and re.fullmatch(r"[0-9]{1,9}", self.comm_id)
        if not (is_eid or is_id or (self.protocol in _ACROSS and is_address(self.comm_id))):
            raise ValueError(
                f"comm_id is {shown(self.comm_id)}; for {self.protocol} it must be "
                f"{'32 hexadecimal digits' if self.is_ub else 'a number or an IP address'}"
            )

    @property
    def is_ub(self) -> bool:
        """True for ports of the unified bus."""
        return self.protocol.startswith("ub_")

    def reaches(self, other: Port) -> bool:
        """Return whether this port of UB reaches another one."""
        reached = other.dst_eid.lower().removeprefix("0x")
        is_direct = not reached or reached == self.comm_id.lower()
        is_same_bus = (self.protocol, self.plane) == (other.protocol, other.plane)
        return is_same_bus and is_direct and other.comm_id != self.comm_id


class ServerAddress(Record, frozen=True):
    """The address of a process's server, and the ports that it offers memory on.

    Attributes:
        address, port: The IP address and port at which the server listens.
        net_instance_id: The network; UB and HCCS connect only ports of one network.
        ports: The ports of the device.
    """

    address: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    net_instance_id: AsciiName
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=_MAX_PORTS)]

    def __post_init__(self) -> None:
        if not is_address(self.address):
            raise ValueError(f"address is {shown(self.address)}; it must be an IP address")


class _Listed(Port, frozen=True):
    device_info: dict[str, object] | None = None  # not used: the driver knows these numbers


@resolved
class _LocalCommRes(Record, frozen=True):
    version: Annotated[str, Meta(pattern=r"^1\.3\Z")]
    net_instance_id: AsciiName = ""
    endpoint_list: tuple[_Listed, ...] = ()


class _Versioned(msgspec.Struct):
    version: str


class Request(NamedTuple):
    """A valid request for the mode.

    Attributes:
        address: The IP address of this host at which the server listens.
        net_instance_id, ports: As in `ServerAddress`.
    """

    address: str
    net_instance_id: str
    ports: tuple[Port, ...]


def requested(local_comm_res: str, address: str) -> Request | None:
    """Return what the options request, or None if they do not select the mode.

    Args:
        local_comm_res: The option `llm.LocalCommRes`, which lists the ports.
        address: The option `kvplan.hixl_address`.
    """
    if not _is_client_server(local_comm_res):
        if address:
            raise invalid(
                f"hixl_address={shown(address)} is used only with llm.LocalCommRes of version "
                f"{_VERSION}"
            )
        return None
    given = read(_LocalCommRes, local_comm_res, _OPTION, msgspec.json.decode)
    ports = tuple(
        Port(port.protocol, port.comm_id, port.placement, port.plane, port.dst_eid)
        for port in given.endpoint_list
        if port.placement == "device"
    )
    if len(ports) > _MAX_PORTS:  # peers would refuse the metadata
        raise invalid(f"{_OPTION} lists {len(ports)} ports of devices; at most {_MAX_PORTS}")
    if not given.net_instance_id or not ports:
        raise unsupported(
            f"{_OPTION} of version {_VERSION} needs net_instance_id, and in endpoint_list a port "
            "with placement 'device': kvplan does not generate them; HIXL's scripts/tools/lcrgen "
            "does"
        )
    if not address:
        raise unsupported(
            f"{_OPTION} of version {_VERSION} selects HIXL's client/server mode, whose server "
            "listens for peers: give kvplan.hixl_address, an IP address of this host. HIXL does "
            "not authenticate connections to it"
        )
    if not is_address(address) or ipaddress.ip_address(address).is_unspecified:
        raise invalid(f"hixl_address={shown(address)} must be an IP address that peers connect to")
    return Request(address, given.net_instance_id, ports)


def serve(
    library: HcclLibrary, device: AscendDevice, here: DeviceAddress, request: Request
) -> tuple[Server, ServerAddress]:
    """Start the server of this process with HIXL's library, and return its address too.

    `here` has the numbers of the device.
    """
    packed = b"".join(_packed(port, here) for port in request.ports)
    for attempt in range(_TRIES):
        port = _free_port(request.address)
        try:
            server = Server(library, device.native, packed, request.address, port)
        except ValueError as error:
            raise unsupported(
                f"{error}, and one engine at a time uses HIXL on a device: finalize the other "
                "engine first, even if the program has dropped it"
            ) from error
        except HcclError:
            if attempt == _TRIES - 1:
                raise
        else:
            address = ServerAddress(request.address, port, request.net_instance_id, request.ports)
            return server, address
    raise AssertionError


def _is_client_server(local_comm_res: str) -> bool:
    try:
        return msgspec.json.decode(local_comm_res or "{}", type=_Versioned).version == _VERSION
    except msgspec.MsgspecError:
        return False


def match(here: ServerAddress, there: ServerAddress) -> tuple[Port, Port] | None:
    """Return the ports over which this end reaches the peer, its own first; None: no ports match.

    The order of preference is that of the vendor's engine.
    """
    same = here.net_instance_id == there.net_instance_id
    for local in sorted(
        (port for port in here.ports if port.is_ub), key=lambda port: not port.dst_eid
    ):
        for remote in there.ports:
            if same and local.reaches(remote):
                return local, remote
    for protocol in _SAME_INSTANCE if same else _ACROSS:
        ours, theirs = (
            next((port for port in end.ports if port.protocol == protocol), None)
            for end in (here, there)
        )
        if ours is not None and theirs is not None and ours != theirs:
            return ours, theirs
    return None


def why_unreachable(here: ServerAddress | None, there: ServerAddress | None) -> str | None:
    """Return why HIXL cannot connect two ends, at least one of which uses it, or None."""
    if here is None or there is None:
        which = "this end uses" if here is not None else "the peer uses"
        return (
            f"only {which} HIXL's client/server mode (llm.LocalCommRes of version {_VERSION}); use "
            "it at both ends, or at neither"
        )
    if match(here, there) is None:
        ours, theirs = (
            ", ".join(sorted({port.protocol for port in end.ports})) for end in (here, there)
        )
        return (
            f"no port of this device ({ours}; net_instance_id {here.net_instance_id!r}) reaches "
            f"one of the peer's ({theirs}; {there.net_instance_id!r})"
        )
    return None


def packed_pair(
    own: tuple[DeviceAddress, ServerAddress], peer: tuple[DeviceAddress, ServerAddress]
) -> tuple[bytes, bytes, str]:
    """Return both ports, as HIXL's records, and their protocol; `why_unreachable` was None."""
    found = match(own[1], peer[1])
    assert found is not None
    local, remote = found
    return _packed(local, own[0]), _packed(remote, peer[0]), local.protocol


def _packed(port: Port, device: DeviceAddress) -> bytes:
    """Return an EndpointDesc, with the numbers that the vendor's engine writes into it."""
    if port.is_ub:
        kind, address = _EID, bytes.fromhex(port.comm_id)
    elif port.protocol == "hccs":
        kind, address = _ID, int(port.comm_id).to_bytes(4, "little")
    else:
        ip = ipaddress.ip_address(port.comm_id)
        kind, address = (_IPV4 if ip.version == 4 else _IPV6), ip.packed
    super_device, super_pod = 0, 0
    if not port.is_ub:
        unknown = _NO_SUPER_DEVICE if port.protocol == "hccs" else 0
        super_device = int(device.super_device_id or unknown)
        super_pod = int(device.super_pod_id or 0)
    numbers = int(device.device_id), super_device, 0, super_pod
    return _ENDPOINT.pack(_PROTOCOLS[port.protocol], kind, address, 0, *numbers)


def _free_port(address: str) -> int:
    family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
    with closing(socket.socket(family, socket.SOCK_STREAM)) as listener:
        try:
            listener.bind((address, 0))
        except OSError as error:
            raise unsupported(
                f"kvplan.hixl_address={address} cannot be used: {error.strerror}"
            ) from None
        port: int = listener.getsockname()[1]
        return port
