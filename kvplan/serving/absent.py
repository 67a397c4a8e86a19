"""Peers whose link has broken, and may return: their state is kept for a while."""

from __future__ import annotations

from collections.abc import Iterable


class Absent:
    """The peers with state that were not linked at the last look at all links."""

    def __init__(self) -> None:
        self._peers: set[int] = set()  # cluster ids

    def heard(self, cluster_id: int) -> None:
        """Note a message of a peer: it was linked after the last look."""
        self._peers.discard(cluster_id)

    def gone(self, known: Iterable[int], linked: Iterable[int]) -> set[int]:
        """Look at the links; return the peers of `known` without one now and at the last look."""
        absent = {*known} - {*linked}
        gone = absent & self._peers
        self._peers = absent
        return gone
