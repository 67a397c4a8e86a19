"""Transfers between cache `remote` of cluster 1 and a local one."""

from __future__ import annotations

from kvplan import Cache, CacheIndex, LlmDataDist
from tests.faults.peer import Peer

LONG_MS = 30_000


def link(user: LlmDataDist, *peers: Peer) -> None:
    user.link_clusters([peer.cluster for peer in peers], timeout_ms=10_000).raise_for_status()


def move(
    user: LlmDataDist, direction: str, remote: int, cache: Cache, timeout_ms: float = LONG_MS
) -> None:
    """Pull or push slot 0."""
    if direction == "pull":
        user.pull_cache(CacheIndex(1, remote), cache, timeout_ms=timeout_ms)
    else:
        user.push_cache(cache, CacheIndex(1, remote), timeout_ms=timeout_ms)
