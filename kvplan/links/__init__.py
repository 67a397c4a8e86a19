"""Links with other engines: their handshake, state, renewal and end, and the caches of the peer.

This room must not import engine operations. It uses transports only through their protocol.
"""

from kvplan.links.links import Links
from kvplan.links.peer_link import PeerClaim, PeerLink
from kvplan.links.peer_table import PeerCache
from kvplan.links.rendezvous import RegisterMemStatus
from kvplan.links.values import ClusterInfo, IpInfo, LinkResult, LinkResults, LinkState, LinkStatus

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
