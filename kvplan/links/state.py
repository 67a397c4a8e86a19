"""The states of a link, and the steps between them (drawn in docs/links.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvplan.types import LlmRole


class LinkState(Enum):
    """Where a link is in its life."""

    LINKING = "LINKING"
    """The handshake goes on; nothing can be transferred yet."""
    LINKED = "LINKED"
    UNLINKING = "UNLINKING"
    """No transfer can start; those in flight are waited for."""
    BROKEN = "BROKEN"
    """The peer is gone, or something went wrong; kept, with the reason, until linked again."""
    CLOSED = "CLOSED"
    """The peer has ended the link (`finalize`, or by force); kept as a broken one is."""
    UNLINKED = "UNLINKED"
    """The end: no link. Only those who still hold the object see it."""


LOST = frozenset({LinkState.BROKEN, LinkState.CLOSED})
"""Ended from elsewhere: nothing can be transferred, and who asks is told why."""

STEPS = {
    LinkState.LINKING: {LinkState.LINKED, LinkState.UNLINKED},
    LinkState.LINKED: {LinkState.UNLINKING, LinkState.UNLINKED, *LOST},
    LinkState.UNLINKING: {LinkState.LINKED, LinkState.UNLINKED, *LOST},
    LinkState.BROKEN: {LinkState.UNLINKED},
    LinkState.CLOSED: {LinkState.UNLINKED},
    LinkState.UNLINKED: set[LinkState](),
}
"""All that can happen to a link."""


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
        in_flight: number of operations that have not ended yet, or not that the peer has heard of.
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
