"""A peer in another process, with an `End` there."""

from __future__ import annotations

from typing import Any

from kvplan.links import ClusterInfo
from tests.support import peer


class Peer(peer.Peer):
    """A process whose snippets can use its `end`."""

    module = "tests.links.peer_process"

    def __init__(self, cluster_id: int, **options: Any) -> None:
        super().__init__()
        self.cluster_id = cluster_id
        start = "end = End(cluster_id, **options); result = end.address"
        self.address = str(self.run(start, cluster_id=cluster_id, options=options))

    @property
    def cluster(self) -> ClusterInfo:
        return ClusterInfo(self.cluster_id, self.address)

    def link(self, cluster: ClusterInfo) -> None:
        self.run(f"end.link({cluster!r})")

    def wait_for(self, cluster_id: int, state: str) -> str:
        return str(self.run(f"result = end.wait_for({cluster_id}, {state!r})"))

    def state(self, cluster_id: int) -> str | None:
        found = self.run(f"state = end.state({cluster_id}); result = state and state.name")
        return None if found is None else str(found)
