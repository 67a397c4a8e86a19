"""Links between engines: who is linked, in which state, and what can be reached over them."""

from kvplan.links.clusters import ClusterInfo, IpInfo
from kvplan.links.links import Links
from kvplan.links.peer_link import PeerClaim, PeerLink
from kvplan.links.peer_table import PeerCache
from kvplan.links.rendezvous import RegisterMemStatus
from kvplan.links.results import LinkResult, LinkResults
from kvplan.links.state import LinkState, LinkStatus

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
