"""The tests' side of peer_process.py: a program with official names in another process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.llm_datadist import LLMClusterInfo, LLMDataDist, LLMStatusCode
from tests.support import peer

REMOTE = {"llm.EnableRemoteCacheAccessible": "1"}
REQUEST = {"llm.EnableRemoteCacheAccessible": "0"}


class Peer(peer.Peer):
    """A process with an LLMDataDist `datadist` and its `manager`.

    Args:
        cluster_id: Cluster id of the LLMDataDist.
        role: Name of an LLMRole.
        options: Options in addition to those of `start` in peer_process.py.
    """

    module = "tests.llm_datadist.peer_process"
    flags = ("-W", "error")

    def __init__(self, cluster_id: int, role: str = "PROMPT", **options: str) -> None:
        super().__init__()
        self.start(cluster_id, role, **options)

    def start(self, cluster_id: int, role: str = "PROMPT", **options: str) -> None:
        """Make a client in a process that has none."""
        self.cluster_id = cluster_id
        self.address = self.run(
            """
            datadist = start(cluster_id, role, options)
            manager = datadist.cache_manager
            result = datadist._llm_datadist.listen_address
            """,
            cluster_id=cluster_id,
            role=role,
            options=options,
        )

    def forget(self) -> None:
        """Finalize the client, and delete all that the test has made in the process."""
        self.run("forget()")

    @property
    def info(self) -> LLMClusterInfo:
        """The cluster info by which others link to the peer."""
        return cluster_info(self.cluster_id, self.address)

    def bytes_of(self, cache: str) -> NDArray[np.uint8]:
        """Return the bytes of a cache of the peer, of shape (tensors, rows, bytes of a row)."""
        found: NDArray[np.uint8] = self.run(f"result = np.stack(views({cache}))")
        return found


def cluster_info(cluster_id: int, address: str) -> LLMClusterInfo:
    """Return the cluster info of a cluster that listens at "ip:port" of 127.0.0.1."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    ip, _, port = address.partition(":")
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(ip, int(port))
    return info


def link(datadist: LLMDataDist, *peers: Peer) -> None:
    """Link with all of the peers."""
    codes: Any = datadist.link_clusters([item.info for item in peers], 10_000)
    assert codes == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS] * len(peers))
