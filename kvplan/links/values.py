"""The values that users of links see: addresses, states, results."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Self

from kvplan.control.endpoint import Endpoint
from kvplan.status import LLMException, LLMStatusCode, invalid, link_failed, without_frames
from kvplan.types import LlmRole
from kvplan.validation import UINT64_MAX, check_type, check_width, shown, take_ints

UINT16_MAX = 2**16 - 1


@dataclass(frozen=True, slots=True)
class IpInfo:
    """An address (IPv4, IPv6 or a host name) and a port.

    Attributes:
        ip: IP address or name of the host.
        port: Port on the host; 0 means no port. Linking needs one.
    """

    ip: str
    port: int = 0

    def __post_init__(self) -> None:
        check_type("ip", self.ip, str)
        take_ints(self, "port")
        check_width("port", self.port, 0, UINT16_MAX)

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


Address = str | IpInfo
"""An address as text, `"ip:port"` or `"ipc:///path"`, or as an `IpInfo`."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """A cluster to link with, or to unlink.

    Args:
        remote_cluster_id: Cluster id of the peer.
        remote: Address where the peer listens. Linking needs exactly one, unlinking needs none.
            None means no address, like the `listen_address` of an engine that does not listen.
        local: Not used; the reference has it.
        remote_role_type: Not used; the reference has it.
    """

    remote_cluster_id: int
    remote: Address | Sequence[Address] | None = ()
    local: Address | Sequence[Address] = ()
    remote_role_type: int = 0

    def __post_init__(self) -> None:
        take_ints(self, "remote_cluster_id")
        check_width("remote_cluster_id", self.remote_cluster_id, 0, UINT64_MAX)
        for name in ("remote", "local"):
            object.__setattr__(self, name, _addresses(name, getattr(self, name)))
        check_type("remote_role_type", self.remote_role_type, int)

    def endpoint(self) -> Endpoint:
        """Return the address to link with.

        Raises:
            TypeError: An address has another type.
            LLMException: LLM_PARAM_INVALID if there is not exactly one valid remote address.
        """
        remote = _addresses("remote", self.remote)
        if len(remote) != 1:
            raise invalid(
                f"remote of cluster {self.remote_cluster_id} has {len(remote)} addresses; "
                'exactly one "ip:port" or "ipc:///path" is needed to link'
            )
        endpoint = Endpoint.parse(str(remote[0]))
        if endpoint.port == 0 and not endpoint.path:
            raise invalid(f"remote={endpoint}: port 0 cannot be linked to")
        if endpoint.is_wildcard:
            raise invalid(
                f"remote={endpoint} stands for all addresses of the peer's host; link to one of "
                "them, which the peer can name by kvplan.advertise"
            )
        return endpoint


def _addresses(name: str, given: object) -> tuple[Address, ...]:
    if given is None:
        given = ()
    elif isinstance(given, Address):
        given = (given,)
    if not isinstance(given, Sequence):
        raise TypeError(
            f'{name}={shown(given)} must be "ip:port", "ipc:///path", an IpInfo, or a list of one'
        )
    for position, address in enumerate(given):
        if not isinstance(address, Address):
            raise TypeError(
                f'{name}[{position}]={shown(address)} must be "ip:port", "ipc:///path" or an IpInfo'
            )
        if name == "remote":
            Endpoint.parse(str(address))
    return tuple(given)


def check_clusters(clusters: object, kind: type | UnionType) -> None:
    """Check that `clusters` is a list or tuple of `kind`, and not empty."""
    if not isinstance(clusters, list | tuple):
        raise TypeError(f"clusters={shown(clusters)} must be a list or tuple")
    if not clusters:
        raise invalid("clusters is empty; at least one is needed")
    for position, cluster in enumerate(clusters):
        if not isinstance(cluster, kind) or isinstance(cluster, bool):
            raise TypeError(f"clusters[{position}]={shown(cluster)} must be ClusterInfo")
        if isinstance(cluster, int):
            check_width(f"clusters[{position}]", cluster, 0, UINT64_MAX)


class LinkState(Enum):
    """The state of a link."""

    LINKING = "LINKING"
    """The handshake is running, and transfers are not possible yet."""
    LINKED = "LINKED"
    UNLINKING = "UNLINKING"
    """Transfers cannot start; those in flight may finish."""
    BROKEN = "BROKEN"
    """The peer is gone, or a failure ended the link. At most `max_links` such links are kept."""
    CLOSED = "CLOSED"
    """The peer has ended the link on purpose, as by `finalize`. It is kept like a broken link."""
    UNLINKED = "UNLINKED"
    """The link no longer exists. Only holders of the object see this state."""


LOST = frozenset({LinkState.BROKEN, LinkState.CLOSED})
"""States of a link that the peer or a failure has ended. Transfers raise the reason."""

NEXT_STATES = {
    LinkState.LINKING: {LinkState.LINKED, LinkState.UNLINKED},
    LinkState.LINKED: {LinkState.UNLINKING, LinkState.UNLINKED, *LOST},
    LinkState.UNLINKING: {LinkState.LINKED, LinkState.UNLINKED, *LOST},
    LinkState.BROKEN: {LinkState.UNLINKED},
    LinkState.CLOSED: {LinkState.UNLINKED},
    LinkState.UNLINKED: set[LinkState](),
}
"""The allowed changes of state (drawn in docs/internals/links.md)."""


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """A snapshot of a link.

    Attributes:
        cluster_id: Cluster id of the peer.
        instance: Id of the run of the peer's engine as hex; empty before it has answered.
        role: Role of the peer.
        state: See LinkState.
        transport: Name of the transport ("local"), or of several ("local+tcp"): each moves what the
            earlier ones do not reach. Empty before both ends agree.
        way: How bytes move ("rc_mlx5/mlx5_0:1"); empty before the peer is reached.
        passed_over: Why transports that would be preferred are not used, or not for all memory.
        address: Address of the control channel.
        comm_id: Id of the communicator of the link; None if linked by address.
        since: Start of the state, in seconds since the epoch.
        age_s: Age of the state in seconds.
        caches: Number of caches that the peer offers.
        bytes_pulled: Bytes that this engine has pulled over the link.
        bytes_pushed: Bytes that this engine has pushed over the link.
        operations: Number of operations that have begun, including failed ones.
        in_flight: Number of operations that have not ended, or whose claim the peer has not
            confirmed as released.
        last_error: Last error of an operation, or why the link ended; empty if there was none.
    """

    cluster_id: int
    instance: str
    role: LlmRole | None
    state: LinkState
    transport: str
    way: str
    passed_over: tuple[str, ...]
    address: str
    comm_id: int | None
    since: float
    age_s: float
    caches: int
    bytes_pulled: int
    bytes_pushed: int
    operations: int
    in_flight: int
    last_error: str


@dataclass(frozen=True, slots=True)
class LinkResult:
    """The result for one cluster.

    Attributes:
        cluster_id: Cluster id of the peer.
        status: LLM_SUCCESS, or the status of `error`.
        error: The failure, with its phase and the reason of the system, or None.
    """

    cluster_id: int
    status: LLMStatusCode = LLMStatusCode.LLM_SUCCESS
    error: LLMException | None = None


class LinkResults(list[LinkResult]):
    """One result for each cluster, in the order of the call."""

    @classmethod
    async def of(cls, calls: Iterable[tuple[int, Callable[[], Awaitable[object]]]]) -> Self:
        """Make one call for each cluster, all at the same time."""

        # Functions, not coroutines: cancelling before the start would leave one never awaited.
        async def result(cluster_id: int, call: Callable[[], Awaitable[object]]) -> LinkResult:
            try:
                await call()
            except LLMException as error:
                return LinkResult(cluster_id, error.status_code, error)
            return LinkResult(cluster_id)

        return cls(await asyncio.gather(*(result(*call) for call in calls)))

    @property
    def status(self) -> LLMStatusCode:
        """LLM_SUCCESS if all succeeded, otherwise the status of the first failure."""
        return next(
            (result.status for result in self if result.error is not None),
            LLMStatusCode.LLM_SUCCESS,
        )

    def raise_for_status(self) -> None:
        """Raise the first failure, if any.

        Raises:
            LLMException: As the `error` of the first failed result.
        """
        for result in self:
            if result.error is not None:
                # A copy: the error itself would keep the frames of each caller that raised it.
                raise without_frames(result.error)


def other_cluster(here: int, wanted: int) -> LLMException:
    """Return the refusal for a peer that expects another cluster. `cluster_here` parses it."""
    return link_failed(f"cluster {here} is here, not cluster {wanted}")


def cluster_here(error: LLMException) -> int | None:
    """Return the listening cluster that an error of `other_cluster` names, or None."""
    found = re.search(r"cluster ([0-9]{1,20}) is here, not cluster ", str(error))
    return int(found[1]) if found else None
