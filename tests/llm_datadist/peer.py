"""The tests' side of peer_process.py: a program of official names in another process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.llm_datadist import LLMClusterInfo, LLMDataDist, LLMStatusCode
from tests.support import peer

REMOTE = {"llm.EnableRemoteCacheAccessible": "1"}
REQUEST = {"llm.EnableRemoteCacheAccessible": "0"}


class Peer(peer.Peer):
    """An LLMDataDist `datadist` with its `manager`, in a process of its own.

    Args:
        cluster_id: of it.
        role: name of an LLMRole.
        options: beside those that `start` of peer_process.py sets.
    """

    module = "tests.llm_datadist.peer_process"
    flags = ("-W", "error")

    def __init__(self, cluster_id: int, role: str = "PROMPT", **options: str) -> None:
        super().__init__()
        self.start(cluster_id, role, **options)

    def start(self, cluster_id: int, role: str = "PROMPT", **options: str) -> None:
        """Let it have a client, if it is new or has ended the one before."""
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
        """End its client, and all that was made there."""
        self.run("forget()")

    @property
    def info(self) -> LLMClusterInfo:
        """What others link to it with."""
        return cluster_info(self.cluster_id, self.address)

    def bytes_of(self, cache: str) -> NDArray[np.uint8]:
        """What a cache of it holds, of shape (tensors, rows, bytes of a row)."""
        found: NDArray[np.uint8] = self.run(f"result = np.stack(views({cache}))")
        return found


def cluster_info(cluster_id: int, address: str) -> LLMClusterInfo:
    """How a cluster that listens at "ip:port" is named."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    ip, _, port = address.partition(":")
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(ip, int(port))
    return info


def link(datadist: LLMDataDist, *peers: Peer) -> None:
    """Link with all of them."""
    codes: Any = datadist.link_clusters([item.info for item in peers], 10_000)
    assert codes == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS] * len(peers))
