"""Where a device is found by the others: its address, and the rank table of two devices.

Both ends compute that alike, byte for byte. It is not the one that a user gives `link()`
(`kvplan.links.rendezvous`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvplan.device.ascend import A2, A3
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.base import link_failed
from kvplan.transport.hccl.hccn import device_ip_of, is_address
from kvplan.transport.wire import Document

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvplan.device.ascend import AscendDevice, Product

VERSIONS: Final = ("1.0", "1.2")
"""Of rank tables: of A2, and of A3, which knows super pods."""

_GIVEN: Final = Document("local_comm_res (llm.LocalCommRes)", 1 << 20)
_MAX_NAME: Final = 64
_ROCE: Final = "HCCL_INTRA_ROCE_ENABLE"
_SUPER: Final = ("super_device_id", "super_pod_id")
_REQUIRED: Final = ("server_id", "device_id")
_SUPER_DEVICE_ID: Final = 403  # of aclrtGetDeviceInfo
_SUPER_POD_ID: Final = 405


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """A device, as a rank table says it.

    Attributes:
        version: of the rank table that this is enough for.
        server_id: names its host, among all hosts.
        device_id: its physical number there, in digits.
        device_ip: of its network port; None: not known, which will do inside one host.
        device_port: to listen at, in digits; None: HCCL's own choice.
        super_device_id, super_pod_id: of its super pod; None in version 1.0.
    """

    version: str
    server_id: str
    device_id: str
    device_ip: str | None = None
    device_port: str | None = None
    super_device_id: str | None = None
    super_pod_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `of_fields` reads it."""
        return asdict(self)

    @classmethod
    def of_fields(cls, document: Document, path: str, value: object) -> DeviceAddress:
        """Check and read what `to_dict` has made.

        Raises:
            LLMException: LLM_PARAM_INVALID, naming the field.
        """
        fields = document.fields(path, value, cls.__slots__)
        version = check_version(document, f"{path}.version", fields["version"])
        read = {name: it for name, it in fields.items() if name != "version"}
        given = {name: it for name, it in read.items() if it is not None or name in _REQUIRED}
        return cls(version, **_checked(document, path, given, version))

    @classmethod
    def of_local_comm_res(cls, text: str) -> DeviceAddress:
        """Read the option `llm.LocalCommRes`: a rank table of this device alone, without ranks.

        Raises:
            LLMException: LLM_PARAM_INVALID, naming the field, its value and what it must be.
        """
        table = _GIVEN.read(text)
        version = table.get("version") if isinstance(table, dict) else None
        check_version(_GIVEN, "version", version)
        pods = {"super_pod_list"} if version == "1.2" else set()
        table = _GIVEN.fields("", table, {"version", "server_list", *pods}, {"status"})
        if table.get("status", "completed") != "completed":
            raise _GIVEN.bad(f'status is {table["status"]!r}; it must be "completed"')
        server, server_path = _only(table["server_list"], "server_list")
        server = _GIVEN.fields(server_path, server, {"server_id", "device"}, {"host_ip"})
        device, path = _only(server["device"], f"{server_path}.device")
        needed = {"device_id", "super_device_id"} if pods else {"device_id"}
        given = _GIVEN.fields(path, device, needed, {"device_ip", "device_port"})
        checked = _checked(_GIVEN, path, given, version, pod=False)
        checked["server_id"] = _name(_GIVEN, f"{server_path}.server_id", server["server_id"])
        if pods:
            checked["super_pod_id"] = _pod_of(table["super_pod_list"], checked["server_id"])
        return cls(str(version), **checked)


def device_address(device: AscendDevice, local_comm_res: str) -> DeviceAddress:
    """The address of `device`: read from `local_comm_res`, or found out if that is empty.

    A host is called by the id of its running kernel: unlike an IP address, it is the same in all
    containers of the host, and no other host's.

    Raises:
        LLMException: LLM_PARAM_INVALID: `local_comm_res`, or /etc/hccn.conf, is not as it must be;
            LLM_FEATURE_NOT_ENABLED: what the system does not say.
    """
    if local_comm_res:
        given = DeviceAddress.of_local_comm_res(local_comm_res)
        if given.version == "1.2" and device.product is A2:
            raise invalid(
                "local_comm_res (llm.LocalCommRes): version is '1.2'; devices of "
                f"{device.name} have no super pods: it must be 1.0"
            )
        return given
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise _unknown("server_id", f"/proc cannot be read ({error.strerror})") from error
    physical_id = device.native.physical_id
    found = DeviceAddress("1.0", host, str(physical_id), device_ip_of(physical_id))
    if device.product is not A3:
        return found
    pod, number = (device.native.attribute(it) for it in (_SUPER_POD_ID, _SUPER_DEVICE_ID))
    if pod is None or number is None:
        name = "super_pod_id" if pod is None else "super_device_id"
        raise _unknown(name, "this CANN does not say it (8.5 and later do)")
    if pod < 0 or number < 0:
        return found  # it is in no super pod
    return DeviceAddress(
        "1.2",
        found.server_id,
        found.device_id,
        found.device_ip,
        super_device_id=str(number),
        super_pod_id=str(pod),
    )


def _unknown(field: str, why: str) -> LLMException:
    return LLMException(
        f"{field} of this device is not known: {why}; give llm.LocalCommRes",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    )


def check_version(document: Document, path: str, value: object) -> str:
    """`value`, if it is the version of a rank table that is known here."""
    return document.text(path, value, VERSIONS.__contains__, f"one of {', '.join(VERSIONS)}")


def _checked(
    document: Document,
    path: str,
    given: Mapping[str, object],
    version: str | None,
    *,
    pod: bool = True,
) -> dict[str, str]:
    """The fields of a device, each if it is what it must be."""
    rules = {
        "server_id": lambda where, it: _name(document, where, it),
        "device_id": lambda where, it: _digits(document, where, it, 2**31 - 1),
        "device_ip": lambda where, it: document.text(where, it, is_address, "an IP address"),
        "device_port": lambda where, it: _digits(document, where, it, 65535, low=1),
        "super_device_id": lambda where, it: _digits(document, where, it, 2**32 - 1),
        "super_pod_id": lambda where, it: _name(document, where, it),
    }
    checked = {name: rules[name](f"{path}.{name}", it) for name, it in given.items()}
    for name in _SUPER if pod else _SUPER[:1]:
        if (name in checked) is not (version == "1.2"):
            has = "needs it" if version == "1.2" else "has no such field"
            raise document.bad(f"{path}.{name}: version {version} {has}")
    return checked


def _only(value: object, path: str) -> tuple[Any, str]:
    """The one element of a list, and its path."""
    return _GIVEN.elements(path, value, 1)[0], f"{path}[0]"


def _pod_of(value: object, server_id: str) -> str:
    pod, path = _only(value, "super_pod_list")
    pod = _GIVEN.fields(path, pod, {"super_pod_id", "server_list"})
    server, server_path = _only(pod["server_list"], f"{path}.server_list")
    named = _GIVEN.fields(server_path, server, {"server_id"})["server_id"]
    if named != server_id:
        raise _GIVEN.bad(f"{server_path}.server_id is {named!r}; it must be {server_id!r}")
    return _name(_GIVEN, f"{path}.super_pod_id", pod["super_pod_id"])


def _name(document: Document, path: str, value: object) -> str:
    return document.text(
        path,
        value,
        lambda it: 0 < len(it) <= _MAX_NAME and it.isascii() and it.isprintable(),
        f"1 to {_MAX_NAME} printable ASCII characters",
    )


def _digits(document: Document, path: str, value: object, high: int, low: int = 0) -> str:
    return document.text(
        path,
        value,
        lambda it: (
            it.isascii()
            and it.isdecimal()
            and len(it) <= 10
            and low <= int(it) <= high
            # One spelling of each number: ranks follow from it as text.
            and it == str(int(it))
        ),
        f'a whole number in ["{low}", "{high}"], as text',
    )


@dataclass(frozen=True, slots=True)
class RankTable:
    """A rank table of two.

    Attributes:
        text: as HCCL takes it, JSON.
        rank: of this process.
        remote_rank: of the other.
    """

    text: str
    rank: int
    remote_rank: int


def table_of(here: DeviceAddress, there: DeviceAddress) -> RankTable:
    """The rank table of this device and a peer's, of the lower of both versions.

    Ranks are numbered in the order of the hosts' names, then of the devices' numbers and addresses,
    all as text; so `table_of(b, a)` has the same text, and the ranks the other way round.

    Raises:
        LLMException: LLM_LINK_FAILED: no table has both, and what is missing.
    """
    if reason := why_not(here, there):
        raise link_failed(reason)
    version = min(here.version, there.version)
    ranked = sorted((here, there), key=_order)
    table: dict[str, Any] = {"version": version}
    # Of one host or super pod addresses need not be known: then neither is given.
    with_ip = None not in (here.device_ip, there.device_ip)
    servers = [
        {
            "server_id": server_id,
            "device": [_device(it, ranked.index(it), version, with_ip=with_ip) for it in of_it],
        }
        for server_id, of_it in groupby(ranked, key=lambda it: it.server_id)
    ]
    table["server_count"] = str(len(servers))
    table["server_list"] = servers
    if version == "1.2":
        table["super_pod_list"] = _pods(ranked)
    table["status"] = "completed"
    rank = ranked.index(here)
    return RankTable(json.dumps(table, separators=(",", ":")), rank, 1 - rank)


def why_not(here: DeviceAddress, there: DeviceAddress) -> str | None:
    """Why no rank table can have both devices; None: one can."""
    same_host = here.server_id == there.server_id
    if same_host and here.device_id == there.device_id:
        return (
            f"both ends use device {here.device_id} of host {here.server_id!r}; HCCL connects two "
            "devices: give each engine a DeviceId of its own"
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
    for whose, it in (("this", here), ("the peer's", there)):
        if it.device_ip is None and needs_ip:
            return (
                f"device_ip of {whose} device {it.device_id} is not known, which two hosts need: "
                f"have address_{it.device_id}=<ip> in /etc/hccn.conf, or hccn_tool in the PATH, or "
                "give llm.LocalCommRes"
            )
    if None not in (here.device_ip, there.device_ip) and _is_ipv6(here) is not _is_ipv6(there):
        return (
            f"device_ip {here.device_ip} and {there.device_ip} are of two families: HCCL connects "
            "devices of one"
        )
    if here.device_ip is not None and here.device_ip == there.device_ip:
        return f"both ends have the same device_ip, {here.device_ip}; each device has its own"
    return None


def is_over_hccs(product: Product, here: DeviceAddress, there: DeviceAddress) -> bool:
    """Whether HCCL takes HCCS between the two, as it decides from their rank table; else RDMA."""
    if _is_rdma_wanted():
        return False
    if product is A3 and None not in (here.super_pod_id, there.super_pod_id):
        return here.super_pod_id == there.super_pod_id
    return product in (A2, A3) and here.server_id == there.server_id


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse variables with which HCCL makes no communicator at all.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: HCCL_INTRA_PCIE_ENABLE and HCCL_INTRA_ROCE_ENABLE
            exclude each other.
    """
    pcie, roce = (environment.get(it) for it in ("HCCL_INTRA_PCIE_ENABLE", _ROCE))
    if (pcie, roce) in (("1", "1"), ("0", None), (None, "0")):
        raise LLMException(
            f"HCCL_INTRA_PCIE_ENABLE is {pcie or 'not set'} and {_ROCE} is {roce or 'not set'}, "
            "which HCCL refuses: set 0 and 1 for RDMA inside a host, neither for HCCS",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )


def _is_rdma_wanted() -> bool:
    """HCCL's own variable: RDMA inside a host, too. Both ends must have it alike."""
    return os.environ.get(_ROCE) == "1"


def _is_ipv6(it: DeviceAddress) -> bool:
    return ":" in (it.device_ip or "")


def _order(it: DeviceAddress) -> tuple[str, ...]:
    return it.server_id, it.device_id, it.device_ip or "", it.device_port or ""


def _device(it: DeviceAddress, rank: int, version: str, *, with_ip: bool) -> dict[str, str]:
    device = {"device_id": it.device_id}
    for name in ("device_ip", "device_port"):
        if with_ip and (value := getattr(it, name)) is not None:
            device[name] = value
    if version == "1.2":
        assert it.super_device_id is not None
        device["super_device_id"] = it.super_device_id
    return {**device, "rank_id": str(rank)}


def _pods(ranked: Sequence[DeviceAddress]) -> list[dict[str, Any]]:
    # Each host once, in the order of the ranks.
    hosts = dict.fromkeys((it.super_pod_id or "", it.server_id) for it in ranked)
    return [
        {"super_pod_id": pod, "server_list": [{"server_id": host} for _, host in of_it]}
        for pod, of_it in groupby(sorted(hosts), key=lambda it: it[0])
    ]
