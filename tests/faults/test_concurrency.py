"""Many threads, links and peers at once: every byte arrives at its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvplan import (
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    LinkState,
    LlmDataDist,
    Rows,
    Transfer,
)
from tests.faults.conftest import MakeEngine, MakePeer
from tests.faults.contents import DESC, make_cache, pattern
from tests.faults.outcomes import assert_confirmed
from tests.faults.states import wait_for_state
from tests.faults.transfers import link
from tests.support.peer import Peer
from tests.support.places import PEER_COMMAND

NUM_PEERS = 64


@pytest.mark.parametrize("memory", ["allocated", "registered"])
def test_threads_pull_and_push_over_several_links(
    make_engine: MakeEngine, make_peer: MakePeer, memory: str
) -> None:
    """Each thread writes to a slot of its own at each peer, and reads the same bytes back."""
    rounds, num_threads = 25, DESC.batch_size
    user = make_engine(9)
    peers = [make_peer(cluster_id) for cluster_id in (1, 2, 3)]
    remotes = {peer.cluster_id: peer.make_cache(memory, seed=None) for peer in peers}
    link(user, *peers)
    mine = [make_cache(user, memory, None) for _ in range(num_threads)]
    begin = threading.Barrier(num_threads)

    def work(slot: int) -> None:
        cache, arrays = mine[slot]
        begin.wait()
        for round_ in range(rounds):
            for cluster_id, remote in remotes.items():
                seed = (slot * rounds + round_) * 4 + cluster_id
                for tensor, array in enumerate(arrays):
                    array[0] = seed + tensor
                user.push_cache(cache, CacheIndex(cluster_id, remote, slot), 0)
            tasks = [
                user.submit(
                    Transfer(Rows(CacheIndex(cluster_id, remote, slot)), Rows(cache, slot=row))
                )
                for row, (cluster_id, remote) in enumerate(remotes.items(), 1)
            ]
            for task in tasks:
                task.wait(30_000)
            for row, cluster_id in enumerate(remotes, 1):
                seed = (slot * rounds + round_) * 4 + cluster_id
                for tensor, array in enumerate(arrays):
                    assert (array[row] == seed + tensor).all()

    with ThreadPoolExecutor(num_threads) as threads:
        for done in [threads.submit(work, slot) for slot in range(num_threads)]:
            done.result(60)
    for status in user.links():
        assert (status.state, status.in_flight) == (LinkState.LINKED, 0)
        assert status.operations == 2 * rounds * num_threads
        assert status.bytes_pulled == status.bytes_pushed == rounds * num_threads * 256 * 8
        assert status.last_error == ""


def test_threads_link_and_unlink_while_others_transfer(
    make_engine: MakeEngine, make_peer: MakePeer
) -> None:
    user = make_engine(9)
    steady, coming = make_peer(1), make_peer(2)
    remote = steady.make_cache(seed=1)
    link(user, steady)
    cache, arrays = make_cache(user, "allocated", None)
    done = threading.Event()

    def come_and_go() -> None:
        try:
            for _ in range(30):
                link(user, coming)
                user.unlink_clusters([2], timeout_ms=10_000).raise_for_status()
        finally:
            done.set()

    with ThreadPoolExecutor(1) as threads:
        coming_and_going = threads.submit(come_and_go)
        while not done.is_set():
            for array in arrays:
                array[0] = 0
            user.pull_cache(CacheIndex(1, remote), cache)
            assert_confirmed(None, arrays, pattern(1))
        coming_and_going.result(30)


class ManyEngines(Peer):
    module = "tests.faults.many_engines_process"


@pytest.fixture
def many_engines() -> Iterator[dict[int, tuple[str, int]]]:
    """Engines of clusters 1 to 64, each in a process: their addresses and pids."""
    peer = ManyEngines(str(NUM_PEERS), prefix=PEER_COMMAND)
    yield peer.run("result = engines")
    peer.finish()


@pytest.mark.slow
def test_one_engine_is_linked_to_64_peers(
    make_engine: MakeEngine, many_engines: dict[int, tuple[str, int]]
) -> None:
    user = make_engine(99)
    before = len(list(Path("/proc/self/fd").iterdir()))
    calls = [ClusterInfo(cluster_id, address) for cluster_id, (address, _) in many_engines.items()]
    user.link_clusters(calls, timeout_ms=30_000).raise_for_status()
    assert {item.state for item in user.links()} == {LinkState.LINKED}
    assert [notification.cluster_id for notification in user.links()] == sorted(many_engines)
    pull_all(user, many_engines)
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(pull_all, user, many_engines) for _ in range(4)]:
            done.result(60)
    os.kill(many_engines[7][1], 9)
    wait_for_state(user, 7, LinkState.BROKEN)
    assert sum(item.state is LinkState.LINKED for item in user.links()) == NUM_PEERS - 1
    user.unlink_clusters(sorted(many_engines), timeout_ms=30_000).raise_for_status()
    assert user.links() == []
    user.finalize()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def pull_all(user: LlmDataDist, many_engines: dict[int, tuple[str, int]]) -> None:
    cache, arrays = make_cache(user, "allocated", None)
    for cluster_id in many_engines:
        user.pull_cache(CacheIndex(cluster_id, 1, cluster_id % DESC.batch_size), cache)
        expected = pattern(cluster_id)
        for array, tensor in zip(arrays, expected, strict=True):
            assert (array[0] == tensor[cluster_id % DESC.batch_size]).all()
    user.deallocate_cache(cache)


def test_two_engines_pull_from_each_other_at_once(
    make_engine: MakeEngine, make_peer: MakePeer
) -> None:
    desc = CacheDesc(4, (4, 65536), DataType.DT_INT32)
    user, peer = make_engine(2), make_peer(1)
    peer.run(
        """
        desc = CacheDesc(4, (4, 65536), DataType.DT_INT32)
        source, _ = make_cache(datadist, "allocated", 1, desc)
        target, arrays = make_cache(datadist, "allocated", None, desc)
        """
    )
    make_cache(user, "allocated", 2, desc)
    target, arrays = make_cache(user, "allocated", None, desc)
    link(user, peer)
    peer.send(
        """
        for _ in range(20):
            datadist.pull_cache(CacheIndex(2, 1), target, 0, timeout_ms=30_000)
        result = all((a[0] == p[0]).all() for a, p in zip(arrays, pattern(2, desc)))
        """
    )
    for _ in range(20):
        user.pull_cache(CacheIndex(1, 1), target, 0, timeout_ms=30_000)
    assert peer.answer()
    for array, tensor in zip(arrays, pattern(1, desc), strict=True):
        assert np.array_equal(array[0], tensor[0])
