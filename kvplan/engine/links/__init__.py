"""Links between engines: who is linked, in which state, and what can be reached over them."""

from kvplan.engine.links.claims import PeerClaim
from kvplan.engine.links.clusters import ClusterInfo, IpInfo
from kvplan.engine.links.links import Links
from kvplan.engine.links.peer_link import PeerLink
from kvplan.engine.links.peer_table import PeerCache
from kvplan.engine.links.rendezvous import RegisterMemStatus
from kvplan.engine.links.results import LinkResult, LinkResults
from kvplan.engine.links.state import LinkState, LinkStatus

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
