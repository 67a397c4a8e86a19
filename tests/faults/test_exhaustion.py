"""Pools, links and descriptors that run out, and are free again."""

from __future__ import annotations

import pytest

from kvplan import CacheDesc, DataType, LinkState, LLMStatusCode, PoolConfig
from tests.faults.conftest import MakeEngine, MakePeer
from tests.faults.contents import DESC, make_cache, pattern
from tests.faults.outcomes import assert_confirmed
from tests.faults.peer import Peer
from tests.faults.states import link_of, wait_for_state
from tests.faults.transfers import link, move
from tests.support.places import TCP_CONNECTIONS
from tests.support.refusals import refused

POOL = PoolConfig(4 * DESC.nbytes, 10)
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
EXCEEDED = LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT


def larger_than(pool: PoolConfig) -> CacheDesc:
    return CacheDesc(1, (1, pool.memory_size + 1), DataType.DT_INT8)


def test_a_pool_runs_out_and_recovers(make_engine: MakeEngine, make_peer: MakePeer) -> None:
    user, peer = make_engine(2, mem_pool_config=POOL), make_peer(1, mem_pool_config=POOL)
    cache, arrays = make_cache(user, "allocated", None)
    link(user, peer)
    for round_ in range(20):
        ids = peer.run(
            """
            made = []
            try:
                while True:
                    made.append(make_cache(datadist, "allocated", seed + len(made)))
            except LLMException as error:
                status = error.status_code.name
            result = [it.cache_id for it, _ in made]
            """,
            seed=round_,
        )
        assert peer.run("result = status") == "LLM_OUT_OF_MEMORY"
        assert len(ids) == 4
        for number, remote in enumerate(ids):
            move(user, "pull", remote, cache)
            assert_confirmed(None, arrays, pattern(round_ + number))
        peer.run("for it, _ in made: datadist.deallocate_cache(it)")
        peer.run("del made, it, _")
        for remote in ids:
            with refused(NOT_EXIST):
                move(user, "pull", remote, cache)


def test_freed_memory_is_free_while_a_peer_is_stopped(make_engine: MakeEngine, peer: Peer) -> None:
    """Updates that wait for a stopped peer keep no memory of its pool."""
    slow = {"heartbeat_interval_ms": 20_000, "heartbeat_timeout_ms": 60_000}
    user = make_engine(2, mem_pool_config=POOL, **slow)
    link(user, peer)
    peer.stop()
    for _ in range(300):
        for made in [user.allocate_cache(DESC) for _ in range(4)]:
            user.deallocate_cache(made)
    with refused(LLMStatusCode.LLM_OUT_OF_MEMORY):
        user.allocate_cache(larger_than(POOL))
    peer.resume()


def test_a_failed_allocation_takes_nothing(make_engine: MakeEngine) -> None:
    user = make_engine(2, mem_pool_config=POOL)
    for _ in range(10):
        with refused(LLMStatusCode.LLM_OUT_OF_MEMORY):
            user.allocate_cache(larger_than(POOL))
    made = [user.allocate_cache(DESC) for _ in range(4)]
    assert [cache.cache_id for cache in made] == [11, 12, 13, 14]
    assert user.metrics()["cache_bytes"] == {"DEVICE": 4 * DESC.nbytes}


def test_links_run_out_and_recover(make_engine: MakeEngine, make_peer: MakePeer) -> None:
    user = make_engine(9, max_links=2)
    peers = [make_peer(cluster_id) for cluster_id in (1, 2, 3)]
    link(user, *peers[:2])
    (result,) = user.link_clusters([peers[2].cluster])
    assert result.status is EXCEEDED
    assert peers[2].state(9) is None
    user.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
    link(user, peers[2])
    # A broken link takes no place either.
    peers[1].kill()
    wait_for_state(user, 2, LinkState.BROKEN)
    link(user, peers[0])
    assert [value.state(9) for value in (peers[0], peers[2])] == ["LINKED"] * 2


def test_an_engine_with_the_maximum_of_links_refuses_callers(
    make_engine: MakeEngine, make_peer: MakePeer
) -> None:
    peer = make_peer(1, max_links=1)
    first, second = make_engine(2), make_engine(3)
    link(first, peer)
    (result,) = second.link_clusters([peer.cluster])
    assert result.status is EXCEEDED
    assert "cluster 1 has 1 link; max_links=1" in str(result.error)
    assert second.links() == []
    first.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
    link(second, peer)
    assert peer.state(3) == "LINKED"


LIMIT = """
import os, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
def descriptors_left(count):
    "The next `count` can be opened, but no more."
    used = {int(it) for it in os.listdir('/proc/self/fd')}
    free = [it for it in range(max(used) + count + 2) if it not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], hard))
"""


CONNECTIONS = 8
MANY = {"tcp_connections": CONNECTIONS}
"""Connections of a link, so that a link over TCP takes more descriptors than a conversation."""

first_or_later = pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
"""The first link makes resources that later links find."""


@pytest.mark.over_tcp
@first_or_later
def test_a_caller_without_descriptors(
    make_engine: MakeEngine, make_peer: MakePeer, is_first: bool
) -> None:
    owner, peer = make_engine(1, **MANY), make_peer(2, **MANY)
    make_cache(owner, "allocated", 1)
    peer.run(LIMIT)
    if not is_first:
        link(owner, peer)
        owner.unlink_clusters([2], timeout_ms=10_000).raise_for_status()
    enough = 48 + 8 * max(CONNECTIONS, TCP_CONNECTIONS)
    for count in (*range(0, 32, 2), enough):
        said = peer.run(
            """
            descriptors_left(count)
            (it,) = datadist.link_clusters([ClusterInfo(1, address)], timeout_ms=timeout_ms)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            result = it.status.name, str(it.error)
            if it.error is None:
                datadist.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
            """,
            count=count,
            timeout_ms=10_000 if count == enough else 300,
            address=owner.listen_address,
        )
        assert said[0] in {"LLM_SUCCESS", "LLM_LINK_FAILED"}, said
        if count == 0:
            assert "Too many open files" in said[1]
    assert said[0] == "LLM_SUCCESS"
    peer.run(
        """
        datadist.link_clusters([ClusterInfo(1, address)], timeout_ms=10_000).raise_for_status()
        cache, arrays = make_cache(datadist, "allocated", None)
        datadist.pull_cache(CacheIndex(1, 1), cache)
        assert (arrays[7][0] == pattern(1)[7][0]).all()
        datadist.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
        """,
        address=owner.listen_address,
    )
    assert owner.links() == []


@pytest.mark.over_tcp
@first_or_later
def test_an_accepting_engine_without_descriptors(
    make_engine: MakeEngine, make_peer: MakePeer, is_first: bool
) -> None:
    user, peer = make_engine(2, **MANY), make_peer(1, **MANY)
    remote = peer.make_cache()
    cache, arrays = make_cache(user, "allocated", None)
    peer.run(LIMIT)
    if not is_first:
        link(user, peer)
        user.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
    for count in (0, 1, *range(2, 32, 2)):
        peer.run("descriptors_left(count)", count=count)
        (result,) = user.link_clusters([peer.cluster], timeout_ms=200)
        assert result.status in {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_FAILED}, result
        peer.run("resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))")
        if result.error is None:
            user.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
    link(user, peer)
    move(user, "pull", remote, cache)
    assert_confirmed(None, arrays, pattern(1))


def test_an_allocation_without_descriptors(make_engine: MakeEngine, peer: Peer) -> None:
    user, remote = make_engine(2), peer.make_cache(seed=1)
    cache, arrays = make_cache(user, "allocated", None)
    link(user, peer)
    peer.run(LIMIT)
    said = peer.run(
        """
        result = []
        descriptors_left(2)
        for _ in range(5):
            try:
                more = make_cache(datadist, "allocated", 2)
                result.append(more[0].cache_id)
            except LLMException as error:
                result.append(str(error))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        """
    )
    assert "RLIMIT_NOFILE" in said[-1]
    move(user, "pull", remote, cache)
    assert_confirmed(None, arrays, pattern(1))
    move(user, "pull", peer.make_cache(seed=3), cache)
    assert_confirmed(None, arrays, pattern(3))
    assert link_of(user, 1).state is LinkState.LINKED
