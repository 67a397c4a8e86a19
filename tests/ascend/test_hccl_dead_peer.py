"""A dead peer over HCCS: deadlines and heartbeats end the wait of HCCL, which takes 1,836 s."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvnative._backend import KVN_PEER_GONE, KVN_TIMEOUT
from kvplan import CacheDesc, CacheIndex, ClusterInfo, DataType, LLMStatusCode, Rows, Transfer
from tests.ascend.hccl_ends import A2, A3, Ends, Product, rank_table, two_ends
from tests.ascend.simulator import Controls
from tests.datadist.conftest import MakeEngine
from tests.datadist.peer import Peer
from tests.support.refusals import refused

NBYTES = 1 << 20
LOOK_S = 20.0  # at most; the call waits for nothing
HEARTBEAT = {"kvplan.heartbeat_interval_ms": "50", "kvplan.heartbeat_timeout_ms": "1000"}


def end_alone(ends: Ends, name: str, address: int) -> None:
    """End the surviving side, and check that it leaves nothing behind."""
    ends[0].close(name)
    ends[0].deregister(address)
    ends[0].free(address)
    assert ends[0].left() == {}


@pytest.mark.parametrize("product", [A2, A3], ids=["A2", "A3"])
@pytest.mark.parametrize("direction", ["get", "put"])
@pytest.mark.parametrize("how", ["deadline", "given up"])
def test_a_killed_peer_ends_the_transfer(
    tmp_path: Path, product: Product, direction: str, how: str
) -> None:
    with two_ends(tmp_path, product) as ends:
        ends.table = rank_table(product.table_version, num_hosts=1)
        connection = ends.connect(NBYTES)
        ends[1].peer.kill()
        connection.begin(direction, connection.rows([64] * 1000))
        if how == "deadline":
            assert connection.wait(100).status == KVN_TIMEOUT
        else:  # as a link does after a missed heartbeat
            ends[0].cancel(connection.name, "cluster 1 does not answer")
            report = connection.wait(None)
            assert (report.status, report.message) == (KVN_PEER_GONE, "cluster 1 does not answer")
        end_alone(ends, connection.name, connection.addresses[0])


def test_a_blocking_call_in_hccl_does_not_block_readers_of_the_connection(
    tmp_path: Path,
) -> None:
    """Closing or renewing a link looks at its connections, while it holds its lock."""
    with two_ends(tmp_path, A2) as ends:
        connection = ends.connect(NBYTES)
        ends[0].set("issue_blocks", 1)
        connection.start("put", connection.rows([64]))
        while not ends.log.calls("blocks"):
            pass
        try:
            ends[0].call_in_thread("look", "ask", connection.name, "state")
            assert tuple(ends[0].join("look", LOOK_S)) == (True, "ready")
            ends[0].cancel(connection.name, "cluster 1 does not answer")
        finally:
            ends[0].set("issue_blocks", 0)
        assert connection.wait(None).status == KVN_PEER_GONE
        connection.close()


def test_a_silent_peer_is_declared_dead_by_its_heartbeat(
    simulator: Controls, make_engine: MakeEngine, peer: Peer
) -> None:
    """A peer whose host is gone does not close its connections, either."""
    blocks = list(range(0, 600, 2))
    desc = CacheDesc(2, (600, 16), DataType.DT_INT32)
    peer.run("cache = datadist.allocate_blocks_cache(CacheDesc(2, (600, 16), DataType.DT_INT32))")
    user = make_engine(2, **HEARTBEAT)
    cache = user.allocate_blocks_cache(desc)
    user.link_clusters([ClusterInfo(1, peer.address)]).raise_for_status()
    user.push_blocks(cache, CacheIndex(1, 1), [1], [1])
    simulator.add_fault("HcclBatchPut:1=hang")
    task = user.submit(Transfer(Rows(cache, blocks), Rows(CacheIndex(1, 1), blocks)))
    peer.stop()
    try:
        with refused(LLMStatusCode.LLM_LINK_FAILED):
            task.wait()
    finally:
        peer.resume()
