"""What a caller names a peer with: its cluster id, and where it listens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType

from kvplan.control.endpoint import Endpoint
from kvplan.status import invalid
from kvplan.validation import UINT64_MAX, check_type, check_width, shown

UINT16_MAX = 2**16 - 1


@dataclass(frozen=True, slots=True)
class IpInfo:
    """An address (IPv4, IPv6 or a host name) and a port."""

    ip: str
    port: int = 0

    def __post_init__(self) -> None:
        check_type("ip", self.ip, str)
        check_width("port", self.port, 0, UINT16_MAX)

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


Address = str | IpInfo
"""`"ip:port"`, or the same as an `IpInfo`."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """A cluster to link with, or to unlink.

    Args:
        remote_cluster_id: of the peer.
        remote: where it listens; exactly one address to link, none needed to unlink.
        local: kept for callers of the reference, which need it; not used here.
        remote_role_type: kept likewise.
    """

    remote_cluster_id: int
    remote: Address | Sequence[Address] = ()
    local: Address | Sequence[Address] = ()
    remote_role_type: int = 0

    def __post_init__(self) -> None:
        check_width("remote_cluster_id", self.remote_cluster_id, 0, UINT64_MAX)
        for name in ("remote", "local"):
            object.__setattr__(self, name, _addresses(name, getattr(self, name)))
        check_type("remote_role_type", self.remote_role_type, int)

    def endpoint(self) -> Endpoint:
        """Where to link.

        Raises:
            LLMException: LLM_PARAM_INVALID: not exactly one remote address, or one that cannot be.
        """
        remote = _addresses("remote", self.remote)
        if len(remote) != 1:
            raise invalid(
                f"remote of cluster {self.remote_cluster_id} has {len(remote)} addresses; "
                'exactly one "ip:port" is needed to link'
            )
        endpoint = Endpoint.parse(str(remote[0]))
        if endpoint.port == 0:
            raise invalid(f"remote={endpoint}: nobody listens on port 0")
        return endpoint


def _addresses(name: str, given: object) -> tuple[Address, ...]:
    if isinstance(given, Address):
        given = (given,)
    if not isinstance(given, Sequence):
        raise TypeError(f'{name}={shown(given)} must be "ip:port", an IpInfo, or a list of one')
    for position, address in enumerate(given):
        if not isinstance(address, Address):
            raise TypeError(f'{name}[{position}]={shown(address)} must be "ip:port" or an IpInfo')
    return tuple(given)


def check_clusters(clusters: object, kind: type | UnionType) -> None:
    """Refuse what does not name clusters.

    Raises:
        TypeError: no list or tuple, or an element that is no `kind`.
        ValueError: an id outside uint64.
        LLMException: LLM_PARAM_INVALID: none at all.
    """
    if not isinstance(clusters, list | tuple):
        raise TypeError(f"clusters={shown(clusters)} must be a list or tuple")
    if not clusters:
        raise invalid("clusters is empty; at least one is needed")
    for position, cluster in enumerate(clusters):
        if not isinstance(cluster, kind) or isinstance(cluster, bool):
            raise TypeError(f"clusters[{position}]={shown(cluster)} must be ClusterInfo")
        if isinstance(cluster, int):
            check_width(f"clusters[{position}]", cluster, 0, UINT64_MAX)
