"""A peer is stopped by SIGSTOP, and continued: before, during and after a transfer."""

from __future__ import annotations

from threading import Barrier, Event

import pytest

from kvplan import (
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    LinkState,
    LlmDataDist,
    LLMStatusCode,
    PlanEvent,
)
from tests.faults.conftest import Attempt, MakeEngine, MakePeer
from tests.faults.contents import Tensor, make_cache, pattern
from tests.faults.gate import DEADLINE_S, Gate
from tests.faults.outcomes import assert_confirmed, unconfirmed
from tests.faults.peer import Peer
from tests.faults.states import link_of, wait_for_state
from tests.faults.transfers import link, move
from tests.support.refusals import refused

QUICK = {"heartbeat_interval_ms": 50, "heartbeat_timeout_ms": 300}
SLOW = {"heartbeat_interval_ms": 20_000, "heartbeat_timeout_ms": 60_000}
LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
KEY = CacheKey(1, 7)
directions = pytest.mark.parametrize("direction", ["pull", "push"])
memories = pytest.mark.parametrize("memory", ["allocated", "registered"])


def keyed(peer: Peer) -> None:
    """Cache 1 there, whose slot 0 is named by KEY."""
    peer.run(
        """
        cache = datadist.allocate_cache(DESC, [CacheKey(1, 7)])
        for array, tensor in zip(datadist.arrays(cache), pattern(1)):
            array[:] = tensor
        """
    )


@pytest.mark.usefixtures("served_by_nobody")
@memories
@directions
def test_whoever_is_not_asked_need_not_run(
    make_engine: MakeEngine, peer: Peer, direction: str, memory: str
) -> None:
    user, remote = make_engine(2, **SLOW), peer.make_cache(memory)
    cache, arrays = make_cache(user, memory, None)
    link(user, peer)
    move(user, "pull", remote, cache)
    for array in arrays:
        array[:] = 0
    peer.stop()
    move(user, direction, remote, cache)
    peer.resume()
    if direction == "pull":
        assert_confirmed(None, arrays, pattern(1))
    else:
        code = "result = all(not a[0].any() and (a[1:] == p[1:]).all() for a, p in pairs)"
        assert peer.run("pairs = list(zip(arrays, pattern(1)))\n" + code)
    assert peer.state(2) == "LINKED"
    assert link_of(user, 1).state is LinkState.LINKED


@pytest.mark.usefixtures("served_by_nobody")
@memories
def test_during_and_continued(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, memory: str
) -> None:
    user, remote = gated(2, **SLOW), peer.make_cache(memory)
    cache, arrays = make_cache(user, "allocated", None)
    link(user, peer)
    call = attempt(lambda: move(user, "pull", remote, cache))
    gate.wait()
    peer.stop()
    gate.open()
    assert call.result(30) is None
    peer.resume()
    assert_confirmed(None, arrays, pattern(1))
    assert (link_of(user, 1).state, peer.state(2)) == (LinkState.LINKED, "LINKED")


@pytest.mark.over_tcp
@memories
@directions
def test_during_until_it_is_given_up(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, direction: str, memory: str
) -> None:
    user, remote = gated(2, **QUICK), peer.make_cache(memory)
    cache, arrays = make_cache(user, "allocated", None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(lambda: move(user, direction, remote, cache))
    gate.wait()
    peer.stop()
    assert "nothing heard for" in wait_for_state(user, 1, LinkState.BROKEN)
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is LINK_FAILED, error
    assert "nothing heard for" in str(error)
    assert unconfirmed(error)
    if direction == "pull":
        assert_confirmed(error, arrays, pattern(1))
    with refused(LINK_FAILED, "nothing heard for"):
        move(user, "pull", remote, cache)
    peer.resume()
    peer.wait_for_state(2, "BROKEN")
    link(user, peer)
    assert (link_of(user, 1).state, peer.state(2)) == (LinkState.LINKED, "LINKED")
    move(user, "pull", remote, cache)


def test_a_key_that_is_asked_for_in_vain_is_not_lost(make_engine: MakeEngine, peer: Peer) -> None:
    user = make_engine(2, **SLOW, sync_kv_cache_wait_time=100)
    other = make_engine(3, **SLOW, sync_kv_cache_wait_time=10_000)
    keyed(peer)
    cache, arrays = make_cache(user, "allocated", None)
    theirs, others_arrays = make_cache(other, "allocated", None)
    link(user, peer)
    link(other, peer)
    peer.stop()
    with refused(LLMStatusCode.LLM_TIMEOUT, "has not answered"):
        user.pull_cache(KEY, cache)
    assert (link_of(user, 1).state, link_of(user, 1).in_flight) == (LinkState.LINKED, 0)
    assert not any(array.any() for array in arrays)
    peer.resume()
    unknown = CacheIndex(1, 99)
    for _ in range(3):  # questions are answered in order: what was granted too late is back
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            user.pull_cache(unknown, cache)
    other.pull_cache(KEY, theirs, timeout_ms=30_000)
    assert_confirmed(None, others_arrays, pattern(1))
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        other.pull_cache(KEY, theirs)


@pytest.mark.usefixtures("served_by_nobody")
def test_a_key_whose_pull_was_not_acknowledged_is_consumed_all_the_same(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt
) -> None:
    user = gated(2, **SLOW, sync_kv_cache_wait_time=100)
    keyed(peer)
    cache, arrays = make_cache(user, "allocated", None)
    link(user, peer)
    call = attempt(lambda: user.pull_cache(KEY, cache, timeout_ms=30_000))
    gate.wait()
    peer.stop()
    gate.open()
    assert call.result(30) is None
    assert_confirmed(None, arrays, pattern(1))
    peer.resume()
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_cache(KEY, cache)


MANY = 24  # more than are published at a time


def pull_unheard(
    user: LlmDataDist, peer: Peer, attempt: Attempt
) -> tuple[list[CacheKey], Cache, list[Tensor]]:
    """Pull by many keys of a peer that stops after it was asked, and leave it stopped."""
    code = """
        desc = CacheDesc(1, (many, 64), DataType.DT_INT32)
        cache = datadist.allocate_cache(desc, [CacheKey(1, row) for row in range(many)])
        datadist.arrays(cache)[0][:] = 5
        datadist.deallocate_cache(cache)
        """
    peer.run(code, many=MANY)
    keys = [CacheKey(1, row) for row in range(MANY)]
    cache, arrays = make_cache(user, "allocated", None, CacheDesc(1, (MANY, 64), DataType.DT_INT32))
    link(user, peer)
    claimed, stopped = Barrier(MANY + 1), Event()

    def hold(_event: PlanEvent) -> None:
        claimed.wait(DEADLINE_S)
        stopped.wait(DEADLINE_S)

    remove = user.on_plan(hold)
    calls = [
        attempt(lambda key=key, row=row: user.pull_cache(key, cache, row, timeout_ms=30_000))
        for row, key in enumerate(keys)
    ]
    claimed.wait(DEADLINE_S)
    peer.stop()
    stopped.set()
    assert [call.result(DEADLINE_S) for call in calls] == [None] * MANY
    remove()
    return keys, cache, arrays


@pytest.mark.usefixtures("served_by_nobody")
def test_pending_updates_reach_a_stopped_peer_later(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt
) -> None:
    user = make_engine(2, **SLOW, sync_kv_cache_wait_time=500)
    keys, cache, arrays = pull_unheard(user, peer, attempt)
    assert all((array == 5).all() for array in arrays)
    (busy,) = user.unlink_clusters([1], timeout_ms=50)
    assert busy.status is LLMStatusCode.LLM_LINK_BUSY
    assert (link_of(user, 1).state, link_of(user, 1).in_flight) == (LinkState.LINKED, MANY)
    peer.resume()
    user.unlink_clusters([1], timeout_ms=30_000).raise_for_status()  # has heard of all by then
    link(user, peer)
    assert link_of(user, 1).caches == 0
    for key in keys:
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            user.pull_cache(key, cache)


@pytest.mark.usefixtures("served_by_nobody")
def test_pending_updates_of_a_stopped_peer_end_with_the_link(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt
) -> None:
    user = make_engine(2, **SLOW, sync_kv_cache_wait_time=500)
    pull_unheard(user, peer, attempt)
    user.unlink_clusters([1], force=True).raise_for_status()
    peer.resume()
    peer.wait_for_state(2, "CLOSED")
    link(user, peer)
    user.unlink_clusters([1], timeout_ms=30_000).raise_for_status()  # nothing is in flight


def test_a_stopped_peer_holds_up_nobody_else(
    make_engine: MakeEngine, make_peer: MakePeer, attempt: Attempt
) -> None:
    user = make_engine(2, **SLOW, sync_kv_cache_wait_time=30_000)
    stopped, running = make_peer(1), make_peer(3)
    link(user, stopped, running)
    running.run("cache = datadist.allocate_cache(DESC, [CacheKey(3, 7)])")
    cache, _ = make_cache(user, "allocated", None)
    stopped.stop()
    waiting = [attempt(lambda: user.pull_cache(KEY, cache)) for _ in range(20)]
    user.pull_cache(CacheKey(3, 7), cache)
    user.unlink_clusters([3], timeout_ms=10_000).raise_for_status()
    link(user, running)
    assert not any(task.done() for task in waiting)
    user.unlink_clusters([1], force=True).raise_for_status()
    errors = [task.result(30) for task in waiting]
    assert {error and error.status_code for error in errors} == {LLMStatusCode.LLM_NOT_YET_LINK}
    stopped.resume()
    assert "unlinked by force" in stopped.wait_for_state(2, "CLOSED")
