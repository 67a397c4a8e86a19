"""A peer that dies by SIGKILL before, during and after a transfer, and is started again."""

from __future__ import annotations

import pytest

from kvplan import CacheKey, ClusterInfo, LinkState, LlmDataDist, LLMStatusCode
from tests.faults.conftest import Attempt, MakeEngine, MakePeer
from tests.faults.contents import DESC, make_cache, pattern
from tests.faults.gate import Gate
from tests.faults.outcomes import COUNT, assert_confirmed, unconfirmed
from tests.faults.peer import Peer
from tests.faults.states import link_of, wait_for_state
from tests.faults.transfers import link, move
from tests.support.refusals import refused

LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
SLOW = {"heartbeat_interval_ms": 20_000, "heartbeat_timeout_ms": 60_000}
memories = pytest.mark.parametrize("memory", ["allocated", "registered"])
directions = pytest.mark.parametrize("direction", ["pull", "push"])


def assert_broken(user: LlmDataDist) -> None:
    wait_for_state(user, 1, LinkState.BROKEN)
    status = link_of(user, 1)
    assert status is not None
    assert status.in_flight == 0
    assert status.last_error
    assert user.metrics()["in_flight"] == 0


@memories
@directions
def test_a_peer_dies_before_a_transfer(
    make_engine: MakeEngine, peer: Peer, direction: str, memory: str
) -> None:
    user, remote = make_engine(2, **SLOW), peer.make_cache(memory)
    cache, arrays = make_cache(user, memory, None)
    link(user, peer)
    move(user, "pull", remote, cache)  # so that everything about the pair is known
    for array in arrays:
        array[:] = 0
    peer.kill()
    # Both if the death was noticed by now and if it was not.
    with refused(LINK_FAILED):
        move(user, direction, remote, cache)
    assert_broken(user)
    assert not any(item.any() for item in arrays)
    with refused(LINK_FAILED, "is broken: "):
        move(user, direction, remote, cache)


@pytest.mark.over_tcp
@memories
@directions
def test_a_peer_dies_during_a_transfer(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, direction: str, memory: str
) -> None:
    user, remote = gated(2, **SLOW), peer.make_cache(memory)
    cache, arrays = make_cache(user, memory, None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(lambda: move(user, direction, remote, cache))
    gate.wait()
    peer.kill()
    wait_for_state(user, 1, LinkState.BROKEN)
    during = link_of(user, 1)
    assert during is not None
    assert during.in_flight == 1
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is LINK_FAILED, error
    assert unconfirmed(error)
    if direction == "pull":
        assert_confirmed(error, arrays, pattern(1))
    else:
        assert all((array == to).all() for array, to in zip(arrays, pattern(2), strict=True))
    assert_broken(user)


@memories
def test_a_peer_dies_after_a_transfer(make_engine: MakeEngine, peer: Peer, memory: str) -> None:
    user, remote = make_engine(2, **SLOW), peer.make_cache(memory)
    cache, arrays = make_cache(user, memory, None)
    link(user, peer)
    move(user, "pull", remote, cache)
    peer.kill()
    assert_broken(user)
    assert_confirmed(None, arrays, pattern(1))
    status = link_of(user, 1)
    assert status is not None
    assert status.bytes_pulled == 256 * COUNT


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not noticed"])
def test_a_peer_restarts_on_the_same_port(
    make_engine: MakeEngine, make_peer: MakePeer, noticed: bool
) -> None:
    user = make_engine(2, **SLOW)
    cache, arrays = make_cache(user, "allocated", None)
    peer = make_peer(1)
    remote = peer.make_cache(seed=1)
    link(user, peer)
    move(user, "pull", remote, cache)
    before = link_of(user, 1)
    peer.kill()
    if noticed:
        wait_for_state(user, 1, LinkState.BROKEN)
    again = make_peer(1, listen=peer.address)
    assert again.make_cache(seed=3) == remote
    # The content of the dead process never arrives, and that of the new one only over a new link.
    with refused(LINK_FAILED):
        move(user, "pull", remote, cache)
    assert_confirmed(None, arrays, pattern(1))
    wait_for_state(user, 1, LinkState.BROKEN)
    link(user, again)
    move(user, "pull", remote, cache)
    assert_confirmed(None, arrays, pattern(3))
    after = link_of(user, 1)
    assert before is not None
    assert after is not None
    assert after.instance != before.instance
    assert (after.state, again.state(2)) == (LinkState.LINKED, "LINKED")
    assert after.operations == 1


@directions
def test_a_peer_restarts_during_a_transfer(
    gated: MakeEngine, make_peer: MakePeer, gate: Gate, attempt: Attempt, direction: str
) -> None:
    """A transfer from the dead process fails, although a link to its successor exists."""
    user, peer = gated(2, **SLOW), make_peer(1)
    remote = peer.make_cache(seed=1)
    cache, arrays = make_cache(user, "allocated", None)
    link(user, peer)
    call = attempt(lambda: move(user, direction, remote, cache))
    gate.wait()
    peer.kill()
    again = make_peer(1, listen=peer.address)
    again.make_cache(seed=3)
    wait_for_state(user, 1, LinkState.BROKEN)
    link(user, again)
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is LINK_FAILED, error
    status = link_of(user, 1)
    assert status is not None
    assert (status.state, status.operations, status.in_flight) == (LinkState.LINKED, 0, 0)
    move(user, "pull", remote, cache)
    assert_confirmed(None, arrays, pattern(3))
    assert again.run("result = all((a == p).all() for a, p in zip(arrays, pattern(3)))")
    again.run("datadist.unlink_clusters([2], 10_000).raise_for_status()")
    assert link_of(user, 1) is None


def test_the_claims_of_a_dead_peer_are_released(
    make_engine: MakeEngine, make_peer: MakePeer
) -> None:
    owner, user = make_engine(1), make_engine(2)
    key = CacheKey(1, 7)
    cache = owner.allocate_cache(DESC, [key])
    owner.arrays(cache)[0][:] = 5
    dying = make_peer(3)
    dying.run(
        """
        transfers = Transfers(1, lambda backend: delay(backend, 600_000))
        holding = LlmDataDist(4, LlmRole.MIX, transfers=transfers)
        holding.initialize()
        holding.link_clusters([ClusterInfo(1, address)], 10_000).raise_for_status()
        mine = holding.allocate_cache(DESC)
        task = holding.submit(Transfer(Rows(CacheKey(1, 7)), Rows(mine)))
        """,
        address=owner.listen_address,
    )
    assert owner.listen_address is not None
    mine, arrays = make_cache(user, "allocated", None)
    user.link_clusters([ClusterInfo(1, owner.listen_address)], timeout_ms=10_000).raise_for_status()
    with refused(LLMStatusCode.LLM_REPEAT_REQUEST):
        user.pull_cache(key, mine)
    dying.kill()
    wait_for_state(owner, 4, LinkState.BROKEN)
    user.pull_cache(key, mine)
    assert (arrays[0][0] == 5).all()
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_cache(key, mine)
