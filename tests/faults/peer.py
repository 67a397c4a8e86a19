"""The tests' side of peer_process.py: an engine in another process that tests may kill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplan import ClusterInfo
from tests.support import peer
from tests.support.places import PEER_COMMAND, PEER_LISTEN


class Peer(peer.Peer):
    """A process that has, after `start`, an engine `datadist` listening at `address`."""

    module = "tests.faults.peer_process"
    flags = ("-W", "error")

    def __init__(self, machine: str = "host", prefix: Sequence[str] = PEER_COMMAND) -> None:
        super().__init__(machine, prefix=prefix)
        self.cluster_id = 0
        self.address = ""

    def start(self, cluster_id: int, *, listen: str = PEER_LISTEN, **options: Any) -> None:
        self.cluster_id = cluster_id
        self.address = self.run(
            """
            datadist = LlmDataDist(cluster_id, LlmRole.MIX)
            datadist.initialize(Options(**options))
            result = datadist.listen_address
            """,
            cluster_id=cluster_id,
            options={"listen_ip_info": listen, **options},
        )

    @property
    def cluster(self) -> ClusterInfo:
        return ClusterInfo(self.cluster_id, self.address)

    def make_cache(self, memory: str = "allocated", seed: int | None = 1) -> int:
        """Make a cache of DESC in the peer, with its arrays as `arrays`, and return its id."""
        return int(
            self.run(
                "cache, arrays = make_cache(datadist, memory, seed); result = cache.cache_id",
                memory=memory,
                seed=seed,
            )
        )

    def state(self, cluster_id: int) -> str | None:
        cache_id = self.run(
            "link = link_of(datadist, them); result = link and link.state.name", them=cluster_id
        )
        return None if cache_id is None else str(cache_id)

    def wait_for_state(self, cluster_id: int, state: str) -> str:
        """Wait in the peer for a state of a link, and return the last error of the link."""
        code = "result = wait_for_state(datadist, them, LinkState[state])"
        return str(self.run(code, them=cluster_id, state=state))
