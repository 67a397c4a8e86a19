"""Links with other engines: how they begin, are renewed and end, and which caches peers offer.

No operation of an engine and no transport by name may enter: transports are used by their protocol.
"""

from kvplan.links.links import Links
from kvplan.links.peer_link import PeerClaim, PeerLink
from kvplan.links.peer_table import PeerCache
from kvplan.links.rendezvous import RegisterMemStatus
from kvplan.links.values import (
    ClusterInfo,
    IpInfo,
    LinkResult,
    LinkResults,
    LinkState,
    LinkStatus,
)

__all__ = [
    "ClusterInfo",
    "IpInfo",
    "LinkResult",
    "LinkResults",
    "LinkState",
    "LinkStatus",
    "Links",
    "PeerCache",
    "PeerClaim",
    "PeerLink",
    "RegisterMemStatus",
]
