"""`finalize` returns in every state of the peers, and disconnects those that live."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvplan import (
    CacheDesc,
    CacheIndex,
    CacheKey,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMStatusCode,
    Rows,
    Transfer,
    Transfers,
)
from tests.faults.conftest import Attempt, MakeEngine, MakePeer
from tests.faults.contents import make_cache
from tests.faults.gate import Gate
from tests.faults.peer import Peer
from tests.faults.transfers import link
from tests.support.refusals import refused
from tests.support.wrappers import delay, limit_bandwidth

SLOW = {"heartbeat_interval_ms": 20_000, "heartbeat_timeout_ms": 60_000}
MAX_FINALIZE_S = 8.0  # the waits below take 100 ms, the disconnect 0.5 s; the default limit is 10 s


@pytest.fixture
def held(make_engine: MakeEngine) -> Iterator[LlmDataDist]:
    """An engine of cluster 9 whose transfers would take minutes; a pull may take 100 ms."""
    with Transfers(1, lambda backend: delay(backend, 600_000)) as transfers:
        yield make_engine(9, transfers=transfers, sync_kv_cache_wait_time=100, **SLOW)
        transfers.close(cancel=True)


def finalize(user: LlmDataDist) -> None:
    began = time.monotonic()
    user.finalize()
    assert time.monotonic() - began < MAX_FINALIZE_S


def test_with_peers_in_any_state(make_engine: MakeEngine, make_peer: MakePeer) -> None:
    user = make_engine(9, **SLOW)
    alive, dead, stopped = (make_peer(cluster_id) for cluster_id in (1, 2, 3))
    link(user, alive, dead, stopped)
    dead.kill()
    stopped.stop()
    finalize(user)
    assert "cluster 9 is finalized" in alive.wait_for_state(9, "CLOSED")
    stopped.resume()
    assert "cluster 9 is finalized" in stopped.wait_for_state(9, "CLOSED")
    again = make_engine(9)
    link(again, alive, stopped)


def test_with_transfers_in_flight_to_peers_in_any_state(
    held: LlmDataDist, make_peer: MakePeer
) -> None:
    peers = [make_peer(cluster_id) for cluster_id in (1, 2, 3)]
    for peer in peers:
        peer.make_cache()
    link(held, *peers)
    tasks = []
    for peer in peers:
        cache, _ = make_cache(held, "allocated", None)
        tasks += [
            held.submit(Transfer(Rows(CacheIndex(peer.cluster_id, 1)), Rows(cache)))
            for _ in range(3)
        ]
    peers[1].kill()
    peers[2].stop()
    finalize(held)
    for task in tasks:
        assert task.done
        # Stopped, or failed when the link broke, but never a success.
        with pytest.raises(Exception, match=r"LLM_(FAILED|LINK_FAILED|NOT_YET_LINK)"):
            task.wait()
    assert "finalized" in peers[0].wait_for_state(9, "CLOSED")


@pytest.mark.over_tcp
@pytest.mark.parametrize("direction", ["pull", "push", "copy"])
def test_nothing_is_written_after_finalize(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt, direction: str
) -> None:
    """A synchronous call in another thread, which would take seconds, ends with the engine."""
    desc = CacheDesc(4, (4, 1 << 18), DataType.DT_INT32)  # 16 MiB
    with Transfers(1, lambda backend: limit_bandwidth(backend, 1e7)) as transfers:
        user = make_engine(9, transfers=transfers, sync_kv_cache_wait_time=1, **SLOW)
        cache, arrays = make_cache(user, "allocated", 1, desc)
        remote = int(
            peer.run(
                "desc = CacheDesc(4, (4, 1 << 18), DataType.DT_INT32)\n"
                "cache, arrays = make_cache(datadist, 'registered', 2, desc)\n"
                "result = cache.cache_id"
            )
        )
        other = user.allocate_cache(desc)
        watched = user.arrays(other)[0] if direction == "copy" else arrays[0]
        link(user, peer)

        def move() -> None:
            if direction == "pull":
                user.pull_cache(CacheIndex(1, remote), cache, timeout_ms=60_000)
            elif direction == "push":
                user.push_cache(cache, CacheIndex(1, remote), timeout_ms=60_000)
            else:
                user.copy_cache(cache, other)

        def first() -> int:
            if direction == "push":
                return int(peer.run("result = int(arrays[0][0, 0])"))
            return int(watched[0, 0])

        before = first()
        call = attempt(move)
        while first() == before:  # until bytes arrive
            assert not call.done(), call.result()
        finalize(user)
        arrived = peer.run("was = [it.copy() for it in arrays]"), watched.copy()
        error = call.result(10)
        assert error is not None
        assert "stopped because the engine" in str(error)
        assert (watched == arrived[1]).all(), "bytes were written after finalize had returned"
        assert peer.run("result = all((a == b).all() for a, b in zip(arrays, was))")


def test_finalize_continues_when_the_last_transfer_has_ended(
    gated: MakeEngine, gate: Gate, attempt: Attempt
) -> None:
    """The transfer and `finalize` may take an hour each, so neither times out."""
    user = gated(9, sync_kv_cache_wait_time=3_600_000)
    desc = CacheDesc(4, (4, 64), DataType.DT_INT32)
    (cache, _), (other, _) = (make_cache(user, "allocated", seed, desc) for seed in (1, None))
    in_flight = user._running().in_flight
    copying = attempt(lambda: user.copy_cache(cache, other))
    gate.wait()
    ending = attempt(user.finalize)
    while not in_flight._changed._waiters:  # type: ignore[attr-defined]
        assert not ending.done(), ending.result()
    gate.open()
    assert (copying.result(30), ending.result(30)) == (None, None)


def test_while_other_calls_wait_for_a_stopped_peer(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt
) -> None:
    user = make_engine(9, sync_kv_cache_wait_time=500, **SLOW)
    cache, _ = make_cache(user, "allocated", None)
    link(user, peer)
    peer.stop()
    waiting = [attempt(lambda: user.pull_cache(CacheKey(1, 7), cache)) for _ in range(4)]
    unlinking = attempt(lambda: user.unlink_clusters([1], 30_000))
    finalize(user)
    assert all(task.result(10) is not None for task in waiting)
    unlinking.result(10)  # whether it succeeds or fails: the link has ended, and so has the call
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED):
        user.links()


def test_while_a_link_is_being_made_with_a_stopped_peer(
    make_engine: MakeEngine, peer: Peer, attempt: Attempt
) -> None:
    user = make_engine(9, **SLOW)
    peer.stop()
    begun = threading.Event()

    def call() -> None:
        begun.set()
        user.link_clusters([ClusterInfo(1, peer.address)], 60_000).raise_for_status()

    linking = attempt(call)
    begun.wait()
    finalize(user)
    error = linking.result(10)
    assert error is not None
    peer.resume()
    assert peer.state(9) is None
    again = make_engine(9)
    link(again, peer)


def test_both_ends_at_once(make_engine: MakeEngine, peer: Peer) -> None:
    for _ in range(20):
        user = make_engine(9)
        link(user, peer)
        peer.send(
            "datadist.finalize(); datadist.initialize(Options(listen_ip_info=address))",
            address=peer.address,
        )
        finalize(user)
        peer.answer()
