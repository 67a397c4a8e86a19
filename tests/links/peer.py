"""A peer in a process of its own: an `End` there, asked line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvplan.links import ClusterInfo
from tests.transport.owner import Owner


class Peer(Owner):
    """Its `end` can be used in the lines that it runs."""

    script = Path(__file__).with_name("peer_process.py")

    def __init__(self, cluster_id: int, **options: Any) -> None:
        super().__init__()
        self.cluster_id = cluster_id
        self.address = str(
            self.run(f"end = End({cluster_id}, **{options!r}); result = end.address")
        )

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
