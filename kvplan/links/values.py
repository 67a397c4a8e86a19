"""What users of links see: whom to link with, states, the results of a call, and failures."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Any, Self

from kvplan.control.endpoint import Endpoint
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import LlmRole
from kvplan.validation import UINT64_MAX, check_type, check_width, shown, take_ints

UINT16_MAX = 2**16 - 1


@dataclass(frozen=True, slots=True)
class IpInfo:
    """An address (IPv4, IPv6 or a host name) and a port.

    Attributes:
        ip: the address, or the name of the host.
        port: the port there; 0: none, and it cannot be linked to.
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
"""`"ip:port"`, or the same as an `IpInfo`."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """A cluster to link with, or to unlink.

    Args:
        remote_cluster_id: of the peer.
        remote: where it listens; exactly one address to link, none needed to unlink. None, as an
            engine that does not listen has for `listen_address`, is no address.
        local: as in the reference; not used here.
        remote_role_type: likewise.
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
        """Where to link.

        Raises:
            TypeError: an address of another type.
            LLMException: LLM_PARAM_INVALID: not exactly one remote address, or an impossible one.
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
    if given is None:
        given = ()
    elif isinstance(given, Address):
        given = (given,)
    if not isinstance(given, Sequence):
        raise TypeError(f'{name}={shown(given)} must be "ip:port", an IpInfo, or a list of one')
    for position, address in enumerate(given):
        if not isinstance(address, Address):
            raise TypeError(f'{name}[{position}]={shown(address)} must be "ip:port" or an IpInfo')
        if name == "remote":
            Endpoint.parse(str(address))
    return tuple(given)


def check_clusters(clusters: object, kind: type | UnionType) -> None:
    """Check a list of clusters."""
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
    """The handshake is going on; nothing can be transferred yet."""
    LINKED = "LINKED"
    UNLINKING = "UNLINKING"
    """No transfer can start; those in flight are waited for."""
    BROKEN = "BROKEN"
    """The peer is gone, or something failed; kept, with the reason, until linked again."""
    CLOSED = "CLOSED"
    """The peer has ended the link (`finalize`, or by force); kept as a broken one is."""
    UNLINKED = "UNLINKED"
    """There is no link any more; only who still holds the object sees this state."""


LOST = frozenset({LinkState.BROKEN, LinkState.CLOSED})
"""Ended by the peer or a failure: no transfer can start, and operations get the reason."""

NEXT_STATES = {
    LinkState.LINKING: {LinkState.LINKED, LinkState.UNLINKED},
    LinkState.LINKED: {LinkState.UNLINKING, LinkState.UNLINKED, *LOST},
    LinkState.UNLINKING: {LinkState.LINKED, LinkState.UNLINKED, *LOST},
    LinkState.BROKEN: {LinkState.UNLINKED},
    LinkState.CLOSED: {LinkState.UNLINKED},
    LinkState.UNLINKED: set[LinkState](),
}
"""The changes of state that are allowed (drawn in docs/internals/links.md)."""


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """A link as it was when asked for.

    Attributes:
        cluster_id: the peer's.
        instance: which process of that cluster, as hex; empty before it has answered.
        role: the peer's.
        state: see LinkState.
        transport: how its memory is reached ("local"); empty before that is agreed.
        way: by what means that moves bytes ("rc_mlx5/mlx5_0:1"); empty before it is reached.
        address: of its control conversation.
        comm_id: of the communicator that the link belongs to; None: linked by address.
        since: when the state began, in seconds since the epoch.
        age_s: how long ago that is, in seconds.
        caches: number of caches that the peer offers.
        bytes_pulled, bytes_pushed: moved over the link by this engine.
        operations: number of them, failed ones too.
        in_flight: number of operations that have not ended yet, or whose claim the peer has not
            confirmed as released.
        last_error: of an operation, or why the link is broken or closed; empty: none.
    """

    cluster_id: int
    instance: str
    role: LlmRole | None
    state: LinkState
    transport: str
    way: str
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
        cluster_id: the peer's.
        status: LLM_SUCCESS, or that of `error`.
        error: why it failed: who, in which phase, and the reason of the system.
    """

    cluster_id: int
    status: LLMStatusCode = LLMStatusCode.LLM_SUCCESS
    error: LLMException | None = None


class LinkResults(list[LinkResult]):
    """One result for each cluster, in the order of the call."""

    @classmethod
    async def of(cls, tasks: Iterable[tuple[int, Coroutine[Any, Any, object]]]) -> Self:
        """Run a task for each cluster, all at once."""

        async def result(cluster_id: int, task: Coroutine[Any, Any, object]) -> LinkResult:
            try:
                await task
            except LLMException as error:
                return LinkResult(cluster_id, error.status_code, error)
            return LinkResult(cluster_id)

        return cls(await asyncio.gather(*(result(*it) for it in tasks)))

    @property
    def status(self) -> LLMStatusCode:
        """LLM_SUCCESS if all succeeded, otherwise the first failure's."""
        return next((it.status for it in self if it.error is not None), LLMStatusCode.LLM_SUCCESS)

    def raise_for_status(self) -> None:
        """Raise the first failure, if there is one.

        Raises:
            LLMException: as `LinkResult.error` says.
        """
        for it in self:
            if it.error is not None:
                raise it.error


def link_failed(message: str) -> LLMException:
    """LLM_LINK_FAILED with a message that says who, in which phase, and why."""
    return LLMException(message, status_code=LLMStatusCode.LLM_LINK_FAILED)


def in_phase(phase: str, error: LLMException) -> LLMException:
    """`error` with the phase or place in front that its message need not name."""
    return LLMException(f"{phase}: {error.args[0]}", status_code=error.status_code)


def other_cluster(here: int, wanted: int) -> LLMException:
    """The refusal of a peer that meant another cluster; `cluster_here` reads it."""
    return link_failed(f"cluster {here} is here, not cluster {wanted}")


def cluster_here(error: LLMException) -> int | None:
    """Which cluster listens where another was looked for; None: `error` does not say that.

    Refusals travel as text, which has been the same since the first version of the protocol.
    """
    found = re.search(r"cluster ([0-9]{1,20}) is here, not cluster ", str(error))
    return int(found[1]) if found else None
