"""Peers that die, stop or free memory: engines soon report what happened."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvplan import (
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    LLMStatusCode,
    Rows,
    Transfer,
)
from tests.datadist.conftest import MakeEngine, MakePeer
from tests.datadist.machine import Machine
from tests.datadist.peer import Peer
from tests.support.holding import LetGo
from tests.support.refusals import refused

DESC = CacheDesc(2, (4, 64), DataType.DT_INT8)
SOON_S = 5.0  # on a loaded machine; measured: 0.1


@pytest.fixture
def holding(
    machine: Machine, make_engine: MakeEngine, peer: Peer
) -> Iterator[tuple[LlmDataDist, Cache, LetGo]]:
    """A linked engine whose transfers end only after a call."""
    with machine.held_transfers() as (transfers, let_go):
        user = make_engine(2, transfers=transfers)
        yield *linked(user, peer), let_go


def linked(user: LlmDataDist, peer: Peer) -> tuple[LlmDataDist, Cache]:
    peer.run("cache = datadist.allocate_cache(CacheDesc(2, (4, 64), DataType.DT_INT8))")
    user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
    return user, user.allocate_cache(DESC)


def test_a_peer_that_died_is_a_broken_link_and_calls_fail_fast(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.run("cache = datadist.allocate_cache(CacheDesc(2, (4, 64), DataType.DT_INT8))")
    mine = user.allocate_cache(DESC)
    user.pull_cache(CacheIndex(1, 1), mine)
    peer.kill()
    started = time.monotonic()
    for key in (CacheIndex(1, 1), CacheIndex(1, 2), CacheKey(1, 1)):
        with refused(LLMStatusCode.LLM_LINK_FAILED):
            user.pull_cache(key, mine)
    assert time.monotonic() - started < SOON_S


@pytest.mark.over_tcp
def test_a_peer_that_dies_fails_its_transfer(
    machine: Machine, holding: tuple[LlmDataDist, Cache, LetGo], peer: Peer
) -> None:
    user, mine, let_go = holding
    transfer = Transfer(Rows(CacheIndex(1, 1)), Rows(mine))
    if machine.transport == "tcp":  # the peer could still serve the request before it dies
        user.plan(transfer)  # asks the peer about its cache
        peer.stop()
    task = user.submit(transfer)
    peer.kill()
    let_go()
    with refused(LLMStatusCode.LLM_LINK_FAILED):
        task.wait()


def test_memory_that_is_freed_during_a_transfer_fails_it(
    machine: Machine, holding: tuple[LlmDataDist, Cache, LetGo], peer: Peer
) -> None:
    user, mine, let_go = holding
    task = user.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(mine)))
    peer.run("datadist.deallocate_cache(cache)")
    let_go()
    if machine.transport == "tcp":  # the owner checks before and after, when it still had the cache
        task.wait()
        return
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        task.wait()


@pytest.mark.over_tcp
def test_a_forced_unlink_fails_transfers_in_flight(
    holding: tuple[LlmDataDist, Cache, LetGo],
) -> None:
    user, mine, let_go = holding
    task = user.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(mine)))
    user.unlink_clusters([1], force=True).raise_for_status()
    let_go()
    with refused(LLMStatusCode.LLM_NOT_YET_LINK):
        task.wait()
    with refused(LLMStatusCode.LLM_NOT_YET_LINK):
        user.pull_cache(CacheIndex(1, 1), mine)


def test_a_stopped_peer_delays_neither_pulls_nor_finalize(
    machine: Machine, user: LlmDataDist, peer: Peer
) -> None:
    peer.run("cache = datadist.allocate_cache(CacheDesc(2, (4, 64), DataType.DT_INT8))")
    mine = user.allocate_cache(DESC)
    user.pull_cache(CacheIndex(1, 1), mine)
    peer.stop()
    started = time.monotonic()
    if machine.transport == "tcp":  # the peer serves the pulls itself, though not in Python
        with refused(LLMStatusCode.LLM_TIMEOUT):
            user.pull_cache(CacheIndex(1, 1), mine, timeout_ms=500)
    else:
        user.pull_cache(CacheIndex(1, 1), mine)
    user.finalize()
    assert time.monotonic() - started < SOON_S


@pytest.mark.over_tcp
def test_a_restarted_peer_is_linked_again(
    user: LlmDataDist, peer: Peer, make_peer: MakePeer
) -> None:
    peer.kill()
    again = make_peer()
    mine = user.allocate_cache(DESC)
    with refused(LLMStatusCode.LLM_LINK_FAILED):
        user.pull_cache(CacheIndex(1, 1), mine)
    again.run("datadist.allocate_cache(CacheDesc(2, (4, 64), DataType.DT_INT8))")
    user.link_clusters([ClusterInfo(1, again.address)], timeout_ms=5000).raise_for_status()
    user.pull_cache(CacheIndex(1, 1), mine)


def test_an_exhausted_pool_is_reported(make_engine: MakeEngine) -> None:
    engine = make_engine(2, MemPoolConfig='{"memory_size": 65536}')
    held = engine.allocate_cache(CacheDesc(1, (65536,), DataType.DT_INT8))
    small = CacheDesc(1, (1,), DataType.DT_INT8)
    with refused(LLMStatusCode.LLM_OUT_OF_MEMORY):
        engine.allocate_cache(small)
    engine.deallocate_cache(held)
    assert engine.allocate_cache(small).cache_id == 3


def grown(rounds: Callable[[int], None], few: int, many: int) -> list[int]:
    """Return how many mappings, threads and descriptors the process gains by `many` rounds."""

    def resources() -> tuple[int, ...]:
        gc.collect()
        return (
            len(Path("/proc/self/maps").read_text().splitlines()),
            threading.active_count(),
            len(list(Path("/proc/self/fd").iterdir())),
        )

    rounds(few)
    before = resources()
    rounds(many)
    return [now - then for now, then in zip(resources(), before, strict=True)]


@pytest.mark.over_tcp
@pytest.mark.slow
def test_rounds_of_linking_and_transferring_leave_nothing_behind(make_engine: MakeEngine) -> None:
    owner, user = make_engine(1, listen=True), make_engine(2, SyncKvCacheWaitTime="20000")
    assert owner.listen_address is not None

    def rounds(number: int) -> None:
        for _ in range(number):
            user.link_clusters([ClusterInfo(1, owner.listen_address)], 20_000).raise_for_status()
            theirs, mine = owner.allocate_cache(DESC), user.allocate_cache(DESC)
            user.pull_cache(CacheIndex(1, theirs.cache_id), mine)
            user.submit(Transfer(Rows(mine), Rows(CacheIndex(1, theirs.cache_id))))
            user.unlink_clusters([1]).raise_for_status()
            owner.deallocate_cache(theirs)
            user.deallocate_cache(mine)

    # The last round may still be releasing its resources; a leak would be one per round.
    assert max(grown(rounds, 5, 40)) < 20


def test_short_lived_engines_leave_nothing_behind(machine: Machine) -> None:
    def rounds(number: int) -> None:
        for _ in range(number):
            first, second = (machine.engine(item, LlmRole.MIX) for item in (1, 2))
            with first as owner, second as user:
                owner.initialize({"ListenIpInfo": "127.0.0.1:0"})
                user.initialize()
                assert owner.listen_address is not None
                user.link_clusters([ClusterInfo(1, owner.listen_address)]).raise_for_status()

    assert max(grown(rounds, 3, 30)) < 15
