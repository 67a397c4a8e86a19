"""The tests' side of peer_process.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.llm_datadist import LLMClusterInfo, LLMDataDist, LLMStatusCode
from tests.datadist.peer import ROOT
from tests.datadist.peer import Peer as EnginePeer

SCRIPT = Path(__file__).with_name("peer_process.py")
REMOTE = {"llm.EnableRemoteCacheAccessible": "1"}
REQUEST = {"llm.EnableRemoteCacheAccessible": "0"}


class Peer(EnginePeer):
    """An LLMDataDist `datadist` with its `manager`, in a process of its own.

    Args:
        cluster_id: of it.
        role: name of an LLMRole.
        options: beside those that `start` of peer_process.py sets.
    """

    def __init__(self, cluster_id: int, role: str = "PROMPT", **options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
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
        return np.array(self.run(f"result = np.stack(views({cache})).tolist()"), dtype=np.uint8)


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
    codes: Any = datadist.link_clusters([it.info for it in peers], 10_000)
    assert codes == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS] * len(peers))
