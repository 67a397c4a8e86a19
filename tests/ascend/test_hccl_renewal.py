"""Engines renew their connection over HCCL during transfers, from both ends at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from kvplan import (
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LlmDataDist,
    LLMStatusCode,
    PlanEvent,
    Rows,
    Transfer,
)
from tests.ascend.simulator import Controls, Log
from tests.datadist.conftest import MakeEngine
from tests.datadist.conftest import link as connect
from tests.device.compute import AscendCompute
from tests.support.refusals import refused

DESC = CacheDesc(2, (4, 4096), DataType.DT_INT32)
DEADLINE_S = 60.0
ROUNDS = 8

Pair = tuple[LlmDataDist, LlmDataDist]


def test_both_ends_replace_caches_while_both_pull(pair: Pair) -> None:
    """Each cache is newer than the connection, so nearly every pull renews it."""
    meeting = threading.Barrier(2)

    def exchange(own: LlmDataDist, other: LlmDataDist, seed: int) -> None:
        for turn in range(ROUNDS):
            source, target = own.allocate_cache(DESC), own.allocate_cache(DESC)
            for array in own.arrays(source):
                array[...] = 1000 * seed + turn
            offered[seed] = source.cache_id
            meeting.wait(DEADLINE_S)
            theirs = CacheKeyByIdAndIndex(other.cluster_id, offered[3 - seed], 0)
            own.pull_cache(theirs, target)
            for array in own.arrays(target):
                assert (array[0] == 1000 * (3 - seed) + turn).all()
            meeting.wait(DEADLINE_S)
            own.deallocate_cache(source)
            own.deallocate_cache(target)

    offered: dict[int, int] = {}
    one, two = pair
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(exchange, one, two, 1), threads.submit(exchange, two, one, 2)]
        for call in calls:
            call.result(DEADLINE_S)


def test_a_transfer_on_the_previous_connection_succeeds(
    pair: Pair, simulator: Controls, sim_log: Log
) -> None:
    owner, user = pair
    theirs, mine = owner.allocate_cache(DESC), user.allocate_cache(DESC)
    for i, array in enumerate(owner.arrays(theirs)):
        array[...] = np.arange(array.size).reshape(array.shape) + i
    key = CacheKeyByIdAndIndex(owner.cluster_id, theirs.cache_id, 0)
    user.pull_cache(key, mine)  # renews, so the next call does not
    simulator.set("latency_us", 200_000)
    slow = user.submit(Transfer(Rows(key), Rows(mine)))
    simulator.set("latency_us", 0)
    later, target = owner.allocate_cache(DESC), user.allocate_cache(DESC)
    sim_log.restart()
    user.pull_cache(CacheKeyByIdAndIndex(owner.cluster_id, later.cache_id, 0), target)
    assert sim_log.counts("HcclCommPrepare")["HcclCommPrepare"] == 2
    slow.wait(DEADLINE_S * 1000)
    for array, expected in zip(user.arrays(mine), owner.arrays(theirs), strict=True):
        np.testing.assert_array_equal(array[0], expected[0])


@pytest.mark.parametrize("wait_ms", ["1", "3600000"])
@pytest.mark.parametrize("kind", ["one", "after", "several peers"])
def test_a_call_waits_for_a_renewal_as_long_as_its_timeout(
    make_engine: MakeEngine, simulator: Controls, kind: str, wait_ms: str
) -> None:
    """The call must not wait for the option's time, or several times."""
    owners = [make_engine(i, listen=True) for i in ((1, 3) if kind == "several peers" else (1,))]
    user = make_engine(2, SyncKvCacheWaitTime=wait_ms)
    transfers = {}
    for owner in owners:
        connect(user, owner)
        key = CacheKeyByIdAndIndex(owner.cluster_id, owner.allocate_blocks_cache(DESC).cache_id)
        mine = user.allocate_blocks_cache(DESC)
        transfers[str(owner.cluster_id)] = Transfer(Rows(key, [0]), Rows(mine, [1]))
    while not all(link.caches for link in user.links()):
        pass
    whole = transfers if kind == "several peers" else transfers["1"]
    with closing(AscendCompute(simulator, device_id=2)) as compute:
        after = compute.event() if kind == "after" else None
        with refused(LLMStatusCode.LLM_TIMEOUT, "was not renewed in time"):
            user.run(whole, timeout_ms=0.5, after=after)
        user.run(whole, timeout_ms=DEADLINE_S * 1000, after=after)


@pytest.mark.parametrize("kind", ["one", "after", "several peers"])
def test_a_renewal_may_take_as_long_as_the_call(
    make_engine: MakeEngine, simulator: Controls, kind: str
) -> None:
    """The option limits calls without a timeout of their own."""
    owners = [make_engine(i, listen=True) for i in ((1, 3) if kind == "several peers" else (1,))]
    user = make_engine(2, SyncKvCacheWaitTime="1")
    mine: dict[str, Cache] = {}
    transfers = {}
    for owner in owners:
        connect(user, owner)
        theirs = owner.allocate_blocks_cache(DESC)
        for array in owner.arrays(theirs):
            array[...] = owner.cluster_id
        key = CacheKeyByIdAndIndex(owner.cluster_id, theirs.cache_id)
        target = mine[str(owner.cluster_id)] = user.allocate_blocks_cache(DESC)
        transfers[str(owner.cluster_id)] = Transfer(Rows(key, [0, 3]), Rows(target, [2, 1]))
    while not all(link.caches for link in user.links()):  # otherwise peers are asked within 1 ms
        pass
    events: list[PlanEvent] = []
    user.on_plan(events.append)
    whole = transfers if kind == "several peers" else transfers["1"]
    with closing(AscendCompute(simulator, device_id=2)) as compute:
        after = compute.event() if kind == "after" else None
        user.run(whole, timeout_ms=DEADLINE_S * 1000, after=after)
    for name, cache in mine.items():
        assert all((array[1:3] == int(name)).all() for array in user.arrays(cache))
    assert len(events) == len(owners)


def test_no_side_prepares_a_connection_that_the_other_cannot_open(
    pair: Pair, simulator: Controls, sim_log: Log
) -> None:
    """Memory that is bound to a connection under preparation could not be freed for long."""
    owner, user = pair
    theirs, mine = owner.allocate_cache(DESC), user.allocate_cache(DESC)
    key = CacheKeyByIdAndIndex(owner.cluster_id, theirs.cache_id, 0)
    sim_log.restart()
    for nth in (1, 2):  # of one end, and of the other
        simulator.add_fault(f"HcclCommInitClusterInfoMemConfig:{nth}=2")
        with refused(LLMStatusCode.LLM_LINK_FAILED, "HcclCommInitClusterInfoMemConfig: 2"):
            user.pull_cache(key, mine)
        assert simulator.faults_left() == 0
    assert sim_log.calls("HcclCommPrepare") == []
    user.pull_cache(key, mine)
