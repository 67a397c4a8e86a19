"""Addresses of Ascend devices, and HCCL's rank table of two devices.

Both ends compute the same table, byte for byte. The rank table that a user gives `link()` is
another one (`kvplan.links.rendezvous`).
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from kvnative.ascend_files import driver_folder, is_file
from kvplan.device.ascend import A2, A3
from kvplan.status import LLMException, invalid, link_failed, unsupported
from kvplan.system.logs import Log
from kvplan.transport.metadata import Record, boot_id, read
from kvplan.validation import resolved, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvnative._hccl import HixlPeer
    from kvplan.device.ascend import AscendDevice, Product

HCCN_CONF: Final = "/etc/hccn.conf"
HCCN_CONF_VARIABLE: Final = "KVPLAN_HCCN_CONF"
"""Environment variable with another path, for containers that lack `HCCN_CONF`."""

_LOG = Log("kvplan")
_TIMEOUT: Final = "HCCL_CONNECT_TIMEOUT"
_TOOL_S: Final = 10.0  # timeout of the tool
_KEYS: Final = ("address_{}", "IPv6address_{}")
_QUERIES: Final = (("-ip", "-g"), ("-ip", "-inet6", "-g"))

_OPTION: Final = "local_comm_res (llm.LocalCommRes)"
_ROCE: Final = "HCCL_INTRA_ROCE_ENABLE"
_SUPER_DEVICE_ID: Final = 403  # of aclrtGetDeviceInfo
_SUPER_POD_ID: Final = 405

# Versions of rank tables: A2 uses 1.0; A3, which has super pods, uses 1.2.
Version = Annotated[str, Meta(pattern=r"^1\.[02]\Z")]
# One spelling for each number, since ranks follow from the order of the texts.
Digits = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,9})\Z")]
AsciiName = Annotated[str, Meta(pattern=r"^[ -~]{1,64}\Z")]


class DeviceAddress(Record, frozen=True):
    """The address of a device in a rank table.

    Attributes:
        version: The highest version of a rank table that can describe the device.
        server_id: The host, unique among all hosts.
        device_id: The physical number on the host.
        device_ip: The address of the network port; None: unknown, which suffices without RDMA.
        device_port: The port to listen on; None: HCCL chooses.
        super_device_id, super_pod_id: The place in a super pod; None in version 1.0.
    """

    version: Version
    server_id: AsciiName
    device_id: Digits
    device_ip: str | None = None
    device_port: Digits | None = None
    super_device_id: Digits | None = None
    super_pod_id: AsciiName | None = None

    def __post_init__(self) -> None:
        _check_device(self)
        for name in ("super_device_id", "super_pod_id"):
            if (getattr(self, name) is not None) is not (self.version == "1.2"):
                has = "needs it" if self.version == "1.2" else "has no such field"
                raise ValueError(f"{name}: version {self.version} {has}")


class _Device(Record, frozen=True):
    device_id: Digits
    device_ip: str | None = None
    device_port: Digits | None = None
    super_device_id: Digits | None = None

    def __post_init__(self) -> None:
        _check_device(self)


class _Server(Record, frozen=True):
    server_id: AsciiName
    device: tuple[_Device]
    host_ip: Any = None


class _PodServer(Record, frozen=True):
    server_id: AsciiName


class _Pod(Record, frozen=True):
    super_pod_id: AsciiName
    server_list: tuple[_PodServer]


@resolved
class _LocalCommRes(Record, frozen=True):
    """The option `llm.LocalCommRes`: a rank table of only this device, without ranks."""

    version: Version
    server_list: tuple[_Server]
    super_pod_list: tuple[_Pod] | None = None
    status: Annotated[str, Meta(pattern=r"^completed\Z")] = "completed"

    def __post_init__(self) -> None:
        if (self.super_pod_list is not None) is not (self.version == "1.2"):
            has = "needs it" if self.version == "1.2" else "has no such field"
            raise ValueError(f"super_pod_list: version {self.version} {has}")
        if self.super_pod_list is not None:
            named, server_id = self.super_pod_list[0].server_list[0], self.server_list[0].server_id
            if named.server_id != server_id:
                raise ValueError(
                    f"super_pod_list[0].server_list[0].server_id is {named.server_id!r}; it must "
                    f"be {server_id!r}"
                )


def read_local_comm_res(text: str) -> DeviceAddress:
    """Read the option `llm.LocalCommRes`, and refuse other fields and values."""
    table = read(_LocalCommRes, text, _OPTION, msgspec.json.decode)
    server, pods = table.server_list[0], table.super_pod_list
    device = server.device[0]
    try:
        return DeviceAddress(
            table.version,
            server.server_id,
            device.device_id,
            device.device_ip,
            device.device_port,
            device.super_device_id,
            None if pods is None else pods[0].super_pod_id,
        )
    except ValueError as error:
        raise invalid(f"{_OPTION}: server_list[0].device[0]: {error}") from None


def _check_device(device: DeviceAddress | _Device) -> None:
    for name, low, high in (
        ("device_id", 0, 2**31 - 1),
        ("device_port", 1, 65535),
        ("super_device_id", 0, 2**32 - 1),
    ):
        value = getattr(device, name)
        if value is not None and not low <= int(value) <= high:
            raise ValueError(f'{name} is {value!r}; it must be in ["{low}", "{high}"], as text')
    if device.device_ip is not None and not is_address(device.device_ip):
        raise ValueError(f"device_ip is {shown(device.device_ip)}; it must be an IP address")


def device_address(device: AscendDevice, local_comm_res: str) -> DeviceAddress:
    """Return the address of `device`: read from `local_comm_res`, or detected if that is empty.

    The boot id names the host: unlike an IP address, it is the same in all containers of a host.
    """
    if local_comm_res:
        given = read_local_comm_res(local_comm_res)
        if given.version == "1.2" and device.product is A2:
            raise invalid(
                f"{_OPTION}: version is '1.2'; it must be '1.0' for {device.name}, which has no "
                "super pods"
            )
        return given
    try:
        host = boot_id()
    except OSError as error:
        raise _unknown("server_id", f"/proc cannot be read ({error.strerror})") from error
    physical_id = device.native.physical_id
    found = DeviceAddress("1.0", host, str(physical_id), device_ip_of(physical_id))
    if device.product is not A3:
        return found
    pod, number = (device.native.attribute(code) for code in (_SUPER_POD_ID, _SUPER_DEVICE_ID))
    if pod is None or number is None:
        name = "super_pod_id" if pod is None else "super_device_id"
        raise _unknown(name, "CANN reports it from 8.5 on")
    if pod < 0 or number < 0:
        return found  # the device is not in a super pod
    return DeviceAddress(
        "1.2",
        found.server_id,
        found.device_id,
        found.device_ip,
        super_device_id=str(number),
        super_pod_id=str(pod),
    )


def _unknown(field: str, why: str) -> LLMException:
    return unsupported(f"{field} of this device is unknown: {why}; give llm.LocalCommRes")


@dataclass(frozen=True, slots=True)
class RankTable:
    """A rank table of two devices.

    Attributes:
        text: The table as JSON, for HCCL.
        rank: The rank of this process.
        remote_rank: The rank of the peer.
        hixl: The peer for HIXL, which needs no table; None: HCCL is used.
    """

    text: str = ""
    rank: int = 0
    remote_rank: int = 1
    hixl: HixlPeer | None = None


def table_of(here: DeviceAddress, there: DeviceAddress) -> RankTable:
    """Return the rank table of this device and a peer's, in the lower of both versions.

    Ranks follow the order of the hosts' names, then of the devices' numbers and addresses, all as
    text. So `table_of(b, a)` has the same text, and the other rank.
    """
    if reason := why_not(here, there):
        raise link_failed(reason)
    version = min(here.version, there.version)
    ranked = sorted((here, there), key=_order)
    table: dict[str, Any] = {"version": version}
    # Inside one host or super pod addresses are optional: give both, or neither.
    with_ip = None not in (here.device_ip, there.device_ip)
    servers = [
        {
            "server_id": server_id,
            "device": [
                _device(address, ranked.index(address), version, with_ip=with_ip)
                for address in of_server
            ],
        }
        for server_id, of_server in groupby(ranked, key=lambda address: address.server_id)
    ]
    table["server_count"] = str(len(servers))
    table["server_list"] = servers
    if version == "1.2":
        table["super_pod_list"] = _pods(ranked)
    table["status"] = "completed"
    rank = ranked.index(here)
    return RankTable(json.dumps(table, separators=(",", ":")), rank, 1 - rank)


def why_not(here: DeviceAddress, there: DeviceAddress) -> str | None:
    """Return why a rank table cannot contain both devices, or None if it can."""
    same_host = here.server_id == there.server_id
    if same_host and here.device_id == there.device_id:
        return (
            f"both ends use device {here.device_id} of host {here.server_id!r}, but HCCL connects "
            "two devices: give each engine a DeviceId of its own"
        )
    same_pod = False
    if min(here.version, there.version) == "1.2":
        same_pod = here.super_pod_id == there.super_pod_id
        if same_host and not same_pod:
            pods = f"{here.super_pod_id!r} and {there.super_pod_id!r}"
            return f"host {here.server_id!r} would be in two super pods, {pods}"
        if same_pod and here.super_device_id == there.super_device_id:
            return f"both ends have the same super_device_id, {here.super_device_id}"
    needs_ip = _is_rdma_wanted() or not (same_host or same_pod)
    for whose, address in (("this", here), ("the peer's", there)):
        if address.device_ip is None and needs_ip:
            return (
                f"device_ip of {whose} device {address.device_id} is unknown, and RDMA needs it: "
                f"put address_{address.device_id}=<ip> into /etc/hccn.conf, or hccn_tool into the "
                "PATH, or give llm.LocalCommRes"
            )
    if None not in (here.device_ip, there.device_ip) and _is_ipv6(here) is not _is_ipv6(there):
        return (
            f"device_ip {here.device_ip} and {there.device_ip} are an IPv4 and an IPv6 address; "
            "HCCL needs two of one family"
        )
    if here.device_ip is not None and here.device_ip == there.device_ip:
        return f"both ends have the same device_ip, {here.device_ip}; give each device its own"
    return None


def is_over_hccs(product: Product, here: DeviceAddress, there: DeviceAddress) -> bool:
    """Return whether HCCL uses HCCS between both devices; otherwise it uses RDMA."""
    if _is_rdma_wanted():
        return False
    if product is A3 and None not in (here.super_pod_id, there.super_pod_id):
        return here.super_pod_id == there.super_pod_id
    return product in (A2, A3) and here.server_id == there.server_id


def check_environment() -> None:
    """Refuse environment variables with which HCCL cannot make a communicator."""
    pcie, roce = (os.environ.get(name) for name in ("HCCL_INTRA_PCIE_ENABLE", _ROCE))
    if (pcie, roce) in (("1", "1"), ("0", None), (None, "0")):
        raise unsupported(
            f"HCCL_INTRA_PCIE_ENABLE is {pcie or 'not set'} and {_ROCE} is {roce or 'not set'}, "
            "which HCCL refuses: set 0 and 1 for RDMA inside a host, or unset both for HCCS"
        )
    timeout = os.environ.get(_TIMEOUT)
    if timeout and not (re.fullmatch(r"[0-9]{1,10}", timeout) and 120 <= int(timeout) <= 7200):
        raise unsupported(
            f"{_TIMEOUT}={shown(timeout)} is not in [120, 7200] seconds, which HCCL refuses: unset "
            "it. Timeouts of kvplan may be shorter"
        )


def _is_rdma_wanted() -> bool:
    """Return whether HCCL uses RDMA inside a host too; both ends must agree."""
    return os.environ.get(_ROCE) == "1"


def _is_ipv6(address: DeviceAddress) -> bool:
    return ":" in (address.device_ip or "")


def _order(address: DeviceAddress) -> tuple[str, ...]:
    return address.server_id, address.device_id, address.device_ip or "", address.device_port or ""


def _device(address: DeviceAddress, rank: int, version: str, *, with_ip: bool) -> dict[str, str]:
    device = {"device_id": address.device_id}
    for name in ("device_ip", "device_port"):
        if with_ip and (value := getattr(address, name)) is not None:
            device[name] = value
    if version == "1.2":
        assert address.super_device_id is not None
        device["super_device_id"] = address.super_device_id
    return {**device, "rank_id": str(rank)}


def _pods(ranked: Sequence[DeviceAddress]) -> list[dict[str, Any]]:
    # Each host once, in the order of ranks.
    hosts = dict.fromkeys((address.super_pod_id or "", address.server_id) for address in ranked)
    return [
        {"super_pod_id": pod, "server_list": [{"server_id": host} for _, host in of_pod]}
        for pod, of_pod in groupby(sorted(hosts), key=lambda row: row[0])
    ]


def device_ip_of(physical_id: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of a device's network port, IPv4 if it has one; None: unknown.

    Args:
        physical_id: The physical number of the device.
        environment: The environment variables that name the file, the driver's folder and the PATH.
    """
    path = Path(environment.get(HCCN_CONF_VARIABLE) or HCCN_CONF)
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return _ask_tool(physical_id, environment)
    values: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition("=")
        values.setdefault(key.strip(), value.strip())
    for name in _KEYS:
        key = name.format(physical_id)
        if key in values:
            return _checked(str(path), key, values[key])
    return None


def is_address(text: str) -> bool:
    """Return whether `text` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _checked(source: str, name: str, text: str) -> str:
    if not is_address(text):
        raise invalid(f"{source}: {name} is {shown(text)}; it must be an IP address")
    return text


def _ask_tool(physical_id: int, environment: Mapping[str, str]) -> str | None:
    """Return the address from the driver's tool, for containers without the file."""
    tool = driver_folder(environment) / "tools" / "hccn_tool"
    command: str | None = str(tool)
    if not is_file(tool):
        command = shutil.which("hccn_tool", path=environment.get("PATH"))
    if command is None:
        return None
    for query in _QUERIES:
        try:
            done = subprocess.run(
                (command, "-i", str(physical_id), *query),
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TOOL_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _LOG.warning("event=no_device_ip device=%d reason=%s", physical_id, error)
            return None
        found = re.search(r"^ipaddr:\s*([^\s/]+)", done.stdout, re.MULTILINE)
        if found:
            return _checked(command, "ipaddr", found[1])
    return None
