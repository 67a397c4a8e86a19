"""The number of native calls of a transfer, by the simulator's log (docs/how-to/ascend.md)."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvplan import Cache, CacheDesc, CacheIndex, DataType, LlmDataDist, Rows, Shard, Transfer
from tests.ascend.simulator import Call, Log
from tests.datadist.peer import Peer

LAYERS, BLOCKS = 61, 64  # like a large model, and a prompt of 8,192 tokens in blocks of 128
BATCH = 256  # the limit of HcclBatchPut on A2 and A3
NUM_BLOCKS = 160
DESC = CacheDesc(2 * LAYERS, (NUM_BLOCKS, 8), DataType.DT_INT32, shard=Shard(num_layers=LAYERS))
PER_LAYER = 2 * BLOCKS

PUT, GET = "HcclBatchPut", "HcclBatchGet"
WAITS = ("aclrtSynchronizeStream", "aclrtSynchronizeStreamWithTimeout")
COPIES = ("aclrtMemcpy", "aclrtMemcpyAsync", "aclrtMemcpyBatch", "aclrtMemcpyBatchAsync")

MINE = np.arange(0, 2 * BLOCKS, 2).tolist()
THEIRS = np.random.default_rng(1).permutation(NUM_BLOCKS // 2)[:BLOCKS].tolist()
"""No two neighbours at both ends: every block is a descriptor of its own."""


@pytest.fixture
def there(peer: Peer) -> CacheIndex:
    peer.run(
        f"""
        shard = Shard(num_layers={LAYERS})
        desc = CacheDesc({2 * LAYERS}, {DESC.shape}, DataType.DT_INT32, shard=shard)
        cache = datadist.allocate_blocks_cache(desc)
        """
    )
    return CacheIndex(1, 1)


@pytest.fixture
def cache(user: LlmDataDist, there: CacheIndex) -> Cache:
    """A full cache that was pushed once, so work at the first use of a link is done."""
    cache = user.allocate_blocks_cache(DESC)
    for number, array in enumerate(user.arrays(cache)):
        array[:] = np.arange(array.size).reshape(array.shape) + 10_000 * number
    user.push_blocks(cache, there, [0], [0])
    return cache


def waits(log: Log) -> list[Call]:
    """Return the completed waits of the transfer's thread; the others were looks at the clock.

    The thread that renews a connection waits, too. A wait of 1 ms is a poll of the stream while an
    event is late.
    """
    threads = {call.fields["tid"] for call in log.calls(PUT, pid=os.getpid())}
    ended = [call for call in log.calls(*WAITS, pid=os.getpid()) if not call.code]
    return [
        call for call in ended if call.fields["tid"] in threads and call.fields.get("timeout") != 1
    ]


def arrived(user: LlmDataDist, cache: Cache, peer: Peer) -> None:
    theirs = np.array(peer.run("result = [array.tolist() for array in datadist.arrays(cache)]"))
    for number, array in enumerate(user.arrays(cache)):
        assert (theirs[number][THEIRS] == array[MINE]).all()


def pushed(cache: Cache, there: CacheIndex) -> Transfer:
    return Transfer(Rows(cache, MINE), Rows(there, THEIRS))


def test_a_push_of_all_layers_waits_once(
    user: LlmDataDist, cache: Cache, there: CacheIndex, peer: Peer, sim_log: Log
) -> None:
    plan = user.plan(pushed(cache, there))
    assert plan.num_descriptors == LAYERS * PER_LAYER == 7808
    sim_log.restart()
    user.run(pushed(cache, there))
    sizes = [call.fields["descriptors"] for call in sim_log.calls(PUT)]
    assert sizes == [BATCH] * 30 + [128]  # ceil(7808 / 256) calls
    # The get reads the generations, which show that no memory was deregistered.
    assert len(sim_log.calls(GET)) == 1
    assert len(waits(sim_log)) == 1
    moving = sim_log.calls(PUT, GET, *COPIES)  # the last calls of linking may come later
    assert {item.pid for item in moving} == {os.getpid()}, "the peer took part in it"
    arrived(user, cache, peer)


def test_a_push_by_layers_waits_once_for_each(
    user: LlmDataDist, cache: Cache, there: CacheIndex, peer: Peer, sim_log: Log
) -> None:
    """Each layer moves before the next is ready, as with a model that computes in between."""
    task = user.layered(pushed(cache, there))
    sim_log.restart()
    for layer in task.layers:
        task.ready(layer)
        while layer not in task.progress().done:
            pass
    task.wait(10_000)
    assert len(sim_log.calls(PUT)) == LAYERS
    assert len(sim_log.calls(GET)) == LAYERS
    assert len(waits(sim_log)) == LAYERS
    arrived(user, cache, peer)
