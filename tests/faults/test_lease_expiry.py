"""Leases that expire before, while and after a peer moves their blocks."""

from __future__ import annotations

import subprocess
import time
from contextlib import closing
from queue import SimpleQueue

import pytest

from kvplan import (
    BlockLease,
    CacheIndex,
    KvCacheExtParam,
    LeaseEnd,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
)
from tests.faults.conftest import Attempt, MakeEngine, MakePeer
from tests.faults.contents import pattern
from tests.faults.gate import DEADLINE_S, Gate
from tests.faults.leased import (
    BEGIN,
    MINE,
    NOT_EXIST,
    PUSH,
    THEIRS,
    lease_at,
    make_local_cache,
    mover,
    pushed_into,
    their_arrays,
)
from tests.faults.peer import Peer
from tests.faults.states import link_of
from tests.faults.transfers import LONG_MS, link
from tests.support.refusals import refused

EXPIRED = "lease 1 of cmpl-3 was released .*, or has expired"
HOUR_MS = 3_600_000.0
ENDED_BY_THE_OWNER = {"ucx", "ascend"}
"""Machines on which the peer does not know the owner's clock."""
OTHER_CLOCK = ("unshare", "--time", "--monotonic", "100000", "--fork", "--kill-child")
EXPIRE = "datadist.renew(lease, 1e-6)"  # 1 ns from now

pytestmark = [pytest.mark.over_tcp, pytest.mark.over_ucx, pytest.mark.over_hccl]
directions = pytest.mark.parametrize("direction", ["pull", "push"])
memories = pytest.mark.parametrize("memory", ["allocated", "registered"])


@memories
@directions
def test_a_lease_expires_before_the_move(
    make_engine: MakeEngine, peer: Peer, direction: str, memory: str
) -> None:
    user, lease = make_engine(2), lease_at(peer, memory, HOUR_MS)
    cache, _ = make_local_cache(user, 2)
    link(user, peer)
    move = mover(user, direction, lease, cache)
    move()
    peer.run(EXPIRE)
    before = their_arrays(peer)
    for _ in range(2):
        with refused(NOT_EXIST, EXPIRED):
            move()
    assert their_arrays(peer) == before
    peer.run("datadist.release(lease)")
    user.pull_blocks(CacheIndex(1, lease.cache_id), cache, THEIRS, MINE)


@memories
@directions
def test_a_lease_expires_during_the_move(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, direction: str, memory: str
) -> None:
    user, lease = gated(2), lease_at(peer, memory, HOUR_MS)
    cache, _ = make_local_cache(user, None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(mover(user, direction, lease, cache))
    gate.wait()
    peer.run(EXPIRE + "; datadist.release(lease); [it.fill(9) for it in arrays]")
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is NOT_EXIST, error
    if direction == "push":
        assert their_arrays(peer) == [[[9] * 64] * 4] * 8
    mine = link_of(user, 1)
    assert mine is not None
    assert (mine.bytes_pulled, mine.bytes_pushed, mine.in_flight) == (0, 0, 0)


@directions
def test_a_lease_expires_after_the_move(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, direction: str
) -> None:
    user, lease = gated(2), lease_at(peer, ttl_ms=HOUR_MS)
    cache, arrays = make_local_cache(user, None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(mover(user, direction, lease, cache))
    gate.wait()
    gate.open()
    assert call.result(30) is None
    peer.run(EXPIRE)
    if direction == "pull":
        assert all((array[1] == to[2]).all() for array, to in zip(arrays, pattern(1), strict=True))
    else:
        assert [item[2] for item in their_arrays(peer)] == [
            value[1].tolist() for value in pattern(2)
        ]


@pytest.mark.skipif(
    subprocess.run([*OTHER_CLOCK, "true"], stderr=subprocess.DEVNULL).returncode != 0,
    reason="only root can make a time namespace, with `unshare` of util-linux",
)
@pytest.mark.parametrize("direction", ["pull", "push"])
def test_a_lease_of_an_owner_in_another_time_namespace_expires(direction: str) -> None:
    with (
        closing(Peer(prefix=OTHER_CLOCK)) as peer,
        LlmDataDist(2, LlmRole.MIX) as user,
    ):
        peer.start(1)
        user.initialize({})
        lease = lease_at(peer, ttl_ms=HOUR_MS)
        cache, _ = make_local_cache(user, 2)
        link(user, peer)
        assert [item.transport for item in user.links()] == ["tcp"]
        move = mover(user, direction, lease, cache)
        move()
        peer.run(EXPIRE)
        with refused(NOT_EXIST, EXPIRED):
            move()


@directions
def test_a_lease_expires_when_its_time_passes(
    machine: str, make_engine: MakeEngine, peer: Peer, direction: str
) -> None:
    """No move fails before the expiry, and none succeeds later if the peer knows the clock."""
    user, lease = make_engine(2), lease_at(peer, ttl_ms=HOUR_MS)
    cache, _ = make_local_cache(user, 2)
    link(user, peer)
    move = mover(user, direction, lease, cache)
    first, last = peer.run(
        "import time; first = time.monotonic_ns(); datadist.renew(lease, 100.0); "
        "result = first + 100_000_000, time.monotonic_ns() + 100_000_000"
    )
    moved, give_up = 0, time.monotonic() + DEADLINE_S
    while (began := time.monotonic_ns()) < last:
        assert time.monotonic() < give_up
        try:
            move()
            moved += 1
        except Exception:
            assert time.monotonic_ns() >= first
            break
    with refused(NOT_EXIST, EXPIRED):
        move()
        while machine in ENDED_BY_THE_OWNER and time.monotonic() < give_up:
            move()
    assert moved > 0 or began >= first


@directions
def test_a_renewed_lease_does_not_expire(
    make_engine: MakeEngine, peer: Peer, direction: str
) -> None:
    """The peer takes no part in a renewal, and the owner cannot renew an expired lease."""
    user, lease = make_engine(2), lease_at(peer, ttl_ms=HOUR_MS)
    cache, _ = make_local_cache(user, 2)
    link(user, peer)
    first = peer.run(
        "import time; datadist.renew(lease, 250.0); datadist.renew(lease, 3_600_000); "
        "result = time.monotonic_ns() + 250_000_000"
    )
    while time.monotonic_ns() < first:
        mover(user, direction, lease, cache)()
    mover(user, direction, lease, cache)()
    again = peer.run(
        """
        datadist.renew(lease, 1e-6)
        try:
            datadist.renew(lease, 1000)
        except LLMException as error:
            result = str(error)
        """
    )
    assert "lease 1 of cmpl-3 was released or has expired" in again
    with refused(NOT_EXIST, EXPIRED):
        mover(user, direction, lease, cache)()


@memories
@pytest.mark.parametrize("fate", ["pushes on", "is killed"])
def test_the_owner_gets_the_blocks_back(
    make_engine: MakeEngine, make_peer: MakePeer, machine: str, memory: str, fate: str
) -> None:
    """The peer writes when the lease expires, and the owner makes no call: no byte comes later."""
    owner, peer = make_engine(8, heartbeat_timeout_ms=60_000), make_peer(1)
    ended: SimpleQueue[tuple[BlockLease, LeaseEnd]] = SimpleQueue()
    owner.on_released(lambda *array: ended.put(array))
    peer.run(PUSH, address=owner.listen_address)
    arrays, cache = pushed_into(owner, machine, memory)
    lease = owner.lease_blocks(cache, range(4), ttl_ms=HOUR_MS)
    peer.run(BEGIN, blob=lease.to_bytes())
    give_up = time.monotonic() + DEADLINE_S
    while not arrays[0].any():
        assert time.monotonic() < give_up
    owner.renew(lease, 1.0)
    if fate == "is killed":
        peer.kill()
    assert ended.get(timeout=DEADLINE_S) == (lease, LeaseEnd.EXPIRED)
    assert owner.leases() == []
    for array in arrays:
        array[:] = 2
    if fate == "pushes on":
        assert peer.run("thread.join(30); result = why") == ["LLM_KV_CACHE_NOT_EXIST"]
    assert all((array == 2).all() for array in arrays)


PAIRS = KvCacheExtParam(tensor_num_per_layer=2)


@memories
def test_a_lease_expires_between_two_layers(
    make_engine: MakeEngine, peer: Peer, memory: str
) -> None:
    user, lease = make_engine(2), lease_at(peer, memory, HOUR_MS)
    cache, _ = make_local_cache(user, 5)
    link(user, peer)
    task = user.layered(Transfer(Rows(cache, MINE), Rows(lease), layers=PAIRS))
    task.ready(0)
    task.ready(1)
    while task.progress().done != (0, 1):
        assert not task.done
    peer.run(EXPIRE + "; datadist.release(lease); [it.fill(9) for it in arrays]")
    for layer in (2, 3):
        task.ready(layer)
    with refused(NOT_EXIST, "was released"):
        task.wait(LONG_MS)
    assert their_arrays(peer) == [[[9] * 64] * 4] * 8


@pytest.mark.usefixtures("needs_no_running_peer")
def test_a_lease_of_a_stopped_owner_expires(
    machine: str, make_engine: MakeEngine, peer: Peer
) -> None:
    """A reader of the owner's memory finds the deadline in it.

    On other machines a thread of the owner ends the lease when the owner goes on.
    """
    user, lease = make_engine(2), lease_at(peer, ttl_ms=HOUR_MS)
    cache, _ = make_local_cache(user)
    link(user, peer)
    pull = mover(user, "pull", lease, cache)
    pull()
    peer.run("datadist.renew(lease, 100.0)")
    peer.stop()
    last = time.monotonic() + DEADLINE_S
    if machine in ENDED_BY_THE_OWNER:
        peer.resume()
    try:
        with refused(NOT_EXIST, EXPIRED):
            while time.monotonic() < last:
                pull()
    finally:
        peer.resume()
