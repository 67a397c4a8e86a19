"""Copying threads on several NUMA nodes. The tests make the nodes up: each has one processor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
)
from kvplan.engine.numa import transfers_on
from tests.datadist.peer import OnItsOwn, Peer
from tests.support.rights import denying

DESC = CacheDesc(4, (64, 32768), DataType.DT_UINT8)  # 8 MiB
CORES = sorted(os.sched_getaffinity(0))
TABLE = [(7 * i + 3) % 64 for i in range(64)]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with closing(Peer()) as item:
        item.run(
            """
            theirs = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1))
            numbers = np.arange(64 * 32768, dtype=np.uint32).reshape(64, 32768) * 2654435761 >> 13
            for tensor in datadist.arrays(theirs): tensor[:] = numbers
            """,
            desc=DESC,
        )
        yield item


@pytest.mark.skipif(len(CORES) < 2, reason="needs two processors")
def test_pulls_and_pushes_with_threads_on_two_nodes(peer: Peer) -> None:
    nodes = {0: frozenset(CORES[:1]), 5: frozenset(CORES[1:])}
    transfers = transfers_on("all", nodes, '{"threads": 2}')
    numbers = np.arange(64 * 32768, dtype=np.uint32).reshape(64, 32768) * 2654435761 >> 13
    with LlmDataDist(2, LlmRole.MIX, transfers=transfers) as engine:
        engine.initialize({"SyncKvCacheWaitTime": "30000"})
        engine.link_clusters([ClusterInfo(1, peer.address)], 20_000).raise_for_status()
        mine = engine.allocate_blocks_cache(DESC)
        engine.pull_blocks(BlocksCacheKey(1), mine, TABLE, list(range(64)))
        for tensor in engine.arrays(mine):
            assert np.array_equal(tensor, numbers.astype(np.uint8)[TABLE])
        # Back to where they came from, in another order.
        rows = Rows(mine, list(range(64))), Rows(BlocksCacheKey(1), list(range(64)))
        engine.submit(Transfer(*rows)).wait(30_000)
        got = peer.run("result = np.stack(datadist.arrays(theirs)).copy()")
        assert all(np.array_equal(tensor, numbers.astype(np.uint8)[TABLE]) for tensor in got)


def test_a_sandbox_that_hides_the_nodes_of_pages() -> None:
    with closing(OnItsOwn("host")) as process:
        same, warnings = process.run(
            denying("move_pages"),
            """
            import logging
            from kvplan.engine.numa import transfers_on
            from kvplan.execution import default_transfers
            warnings = []
            handler = logging.Handler()
            handler.emit = lambda record: warnings.append(record.getMessage())
            logging.getLogger("kvplan").addHandler(handler)
            nodes = {0: frozenset(cores[:1]), 1: frozenset(cores[-1:])}
            result = transfers_on("all", nodes, None) is default_transfers(), warnings
            """,
            cores=CORES,
        )
    assert same
    (warning,) = warnings
    assert "event=numa_node_all_without_effect" in warning
    assert "Operation not permitted" in warning
