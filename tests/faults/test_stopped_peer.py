"""A peer that is stopped by SIGSTOP and continued: before, during and after a transfer."""

from __future__ import annotations

import asyncio
from threading import Barrier, Event
from typing import Any

import pytest

from kvplan import (
    AddressRanges,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    LinkState,
    LlmDataDist,
    LLMStatusCode,
    PeerTensors,
    PlanEvent,
    Rows,
    Transfer,
)
from tests.faults.conftest import Attempt, MakeEngine, MakePeer
from tests.faults.contents import DESC, Tensor, make_cache, pattern
from tests.faults.gate import DEADLINE_S, Gate
from tests.faults.outcomes import assert_confirmed, unconfirmed
from tests.faults.peer import Peer
from tests.faults.states import link_of, wait_for_state
from tests.faults.transfers import link, move
from tests.support.refusals import refused

QUICK = {"heartbeat_interval_ms": 50, "heartbeat_timeout_ms": 1000}
SLOW = {"heartbeat_interval_ms": 20_000, "heartbeat_timeout_ms": 60_000}
LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
KEY = CacheKey(1, 7)
directions = pytest.mark.parametrize("direction", ["pull", "push"])
memories = pytest.mark.parametrize("memory", ["allocated", "registered"])


def make_keyed_cache(peer: Peer) -> None:
    """Make cache 1 in the peer; its slot 0 has KEY."""
    peer.run(
        """
        cache = datadist.allocate_cache(DESC, [CacheKey(1, 7)])
        for array, tensor in zip(datadist.arrays(cache), pattern(1)):
            array[:] = tensor
        """
    )


@pytest.mark.usefixtures("needs_no_running_peer")
@memories
@directions
def test_a_peer_that_is_not_asked_need_not_run(
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


@pytest.mark.over_tcp
def test_a_request_to_the_peer_ends_with_the_timeout_of_the_call(
    make_engine: MakeEngine, peer: Peer
) -> None:
    """Keys and addresses that this engine does not know are looked up at the peer."""
    user = make_engine(2, sync_kv_cache_wait_time=3_600_000, **SLOW)
    make_keyed_cache(peer)
    slots, blocks = user.allocate_cache(DESC), user.allocate_blocks_cache(DESC)
    link(user, peer)
    peer.stop()
    unknown, to = BlocksCacheKey(1, 77), Rows(blocks, [0])
    requests: list[Any] = [
        Transfer(Rows(KEY), Rows(slots)),
        Transfer(Rows(unknown, [0]), to),
        Transfer(Rows(CacheIndex(1, 77), [0]), to),
        Transfer([Rows(unknown, [0])], to),
        {"a": Transfer(Rows(unknown, [0]), to)},
        Transfer(to, Rows(unknown, [0])),
        Transfer(to, Rows(PeerTensors(1, [4096] * DESC.num_tensors), [0])),
        AddressRanges(1, slots.tensor_addrs[:1], [4096], [1]),
        AddressRanges(1, slots.tensor_addrs[:1], [4096], [1], "push"),
    ]
    for request in requests:
        with refused("LLM_TIMEOUT", "cluster 1 has not answered within "):
            user.run(request, timeout_ms=20)


@pytest.mark.usefixtures("needs_no_running_peer")
@memories
def test_a_peer_is_stopped_during_a_transfer_and_continued(
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
def test_a_peer_is_stopped_during_a_transfer_until_the_timeout(
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


def test_a_key_is_not_lost_if_its_claim_times_out(make_engine: MakeEngine, peer: Peer) -> None:
    user = make_engine(2, **SLOW, sync_kv_cache_wait_time=100)
    other = make_engine(3, **SLOW, sync_kv_cache_wait_time=10_000)
    make_keyed_cache(peer)
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
    # requests are answered in order, so a claim that was granted too late has been returned
    for _ in range(3):
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            user.pull_cache(unknown, cache)
    other.pull_cache(KEY, theirs, timeout_ms=30_000)
    assert_confirmed(None, others_arrays, pattern(1))
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        other.pull_cache(KEY, theirs)


@pytest.mark.usefixtures("needs_no_running_peer")
def test_a_key_is_consumed_although_its_pull_was_not_acknowledged(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt
) -> None:
    user = gated(2, **SLOW, sync_kv_cache_wait_time=100)
    make_keyed_cache(peer)
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


def pull_and_stop(
    user: LlmDataDist, peer: Peer, attempt: Attempt
) -> tuple[list[CacheKey], Cache, list[Tensor]]:
    """Pull by many keys from a peer that stops after the claims, and leave it stopped."""
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


@pytest.mark.usefixtures("needs_no_running_peer")
def test_pending_updates_reach_a_stopped_peer_later(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt
) -> None:
    user = make_engine(2, **SLOW, sync_kv_cache_wait_time=500)
    keys, cache, arrays = pull_and_stop(user, peer, attempt)
    assert all((array == 5).all() for array in arrays)
    (busy,) = user.unlink_clusters([1], timeout_ms=50)
    assert busy.status is LLMStatusCode.LLM_LINK_BUSY
    assert (link_of(user, 1).state, link_of(user, 1).in_flight) == (LinkState.LINKED, MANY)
    peer.resume()
    # the peer has received all updates by then
    user.unlink_clusters([1], timeout_ms=30_000).raise_for_status()
    link(user, peer)
    assert link_of(user, 1).caches == 0
    for key in keys:
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            user.pull_cache(key, cache)


@pytest.mark.usefixtures("needs_no_running_peer")
def test_pending_updates_of_a_stopped_peer_end_with_the_link(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt
) -> None:
    user = make_engine(2, **SLOW, sync_kv_cache_wait_time=500)
    pull_and_stop(user, peer, attempt)
    user.unlink_clusters([1], force=True).raise_for_status()
    peer.resume()
    peer.wait_for_state(2, "CLOSED")
    link(user, peer)
    user.unlink_clusters([1], timeout_ms=30_000).raise_for_status()  # nothing is in flight


def test_a_stopped_peer_delays_no_other_peer(
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


@pytest.mark.usefixtures("needs_no_running_peer")
def test_the_release_of_a_key_takes_no_longer_than_the_call_may(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt
) -> None:
    user = make_engine(2, **SLOW, sync_kv_cache_wait_time=3_600_000)
    make_keyed_cache(peer)
    cache, _arrays = make_cache(user, "allocated", None)
    link(user, peer)
    user.on_plan(lambda _event: peer.stop())  # after the claim
    call = attempt(lambda: user.pull_cache(KEY, cache, timeout_ms=1000))
    error = call.result(DEADLINE_S)
    assert error is None or error.status_code is LLMStatusCode.LLM_TIMEOUT, error
    peer.resume()


@pytest.mark.usefixtures("needs_no_running_peer")
@pytest.mark.parametrize("end", ["confirmed", "given up"])
def test_a_pull_by_key_succeeds_once_its_claim_has_ended(
    make_engine: MakeEngine, peer: Peer, end: str
) -> None:
    wait_ms = 3_600_000 if end == "confirmed" else 2000
    user = make_engine(2, **SLOW, sync_kv_cache_wait_time=wait_ms)
    make_keyed_cache(peer)
    cache, arrays = make_cache(user, "allocated", None)
    link(user, peer)
    user.on_plan(lambda _event: peer.stop())  # after the claim
    ended = user.completions()
    task = user.submit(Transfer(Rows(KEY), Rows(cache)))
    assert task.wait_done(DEADLINE_S * 1000)
    if end == "confirmed":  # otherwise the claim may end meanwhile
        with refused("LLM_TIMEOUT", "0 ms passed .* the transfer goes on"):
            task.wait(0)
        assert (task.settled, user.metrics()["in_flight"]) == (False, 1)
        peer.resume()
    asyncio.run(task.coroutine())
    task.wait(0)
    assert ended.wait(DEADLINE_S * 1000)
    assert list(ended) == [task]
    for array, sent in zip(arrays, pattern(1), strict=True):
        assert (array[0] == sent[0]).all()
    metrics = user.metrics()
    assert metrics["in_flight"] == 0
    assert metrics["operations"]["pull_cache"]["statuses"] == {"LLM_SUCCESS": 1}
    peer.resume()
