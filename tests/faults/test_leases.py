"""Leased blocks that become another request's before, while and after a peer moves them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvplan import (
    BlockLease,
    CacheDesc,
    CacheIndex,
    DataType,
    GatherError,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
    Rows,
    Shard,
    Transfer,
)
from kvplan.lease import LeaseWord
from tests.faults.conftest import Attempt, MakeEngine, MakePeer
from tests.faults.contents import DESC, pattern
from tests.faults.gate import DEADLINE_S, Gate
from tests.faults.leased import (
    BEGIN,
    MINE,
    NOT_EXIST,
    PUSH,
    RELEASED,
    THEIRS,
    lease_at,
    make_local_cache,
    mover,
    pushed_into,
    their_arrays,
)
from tests.faults.outcomes import COUNT, unconfirmed
from tests.faults.peer import Peer
from tests.faults.states import link_of
from tests.faults.transfers import LONG_MS, link
from tests.support.refusals import refused

pytestmark = [pytest.mark.over_tcp, pytest.mark.over_ucx, pytest.mark.over_hccl]
directions = pytest.mark.parametrize("direction", ["pull", "push"])
memories = pytest.mark.parametrize("memory", ["allocated", "registered"])


@memories
def test_blocks_of_a_lease_are_moved(make_engine: MakeEngine, peer: Peer, memory: str) -> None:
    user, lease = make_engine(2), lease_at(peer, memory)
    cache, arrays = make_local_cache(user)
    link(user, peer)
    mover(user, "pull", lease, cache)()
    for array, tensor in zip(arrays, pattern(1), strict=True):
        assert (array[1] == tensor[2]).all()
        assert (array[3] == tensor[0]).all()
    pushed, _ = make_local_cache(user, 5)
    mover(user, "push", lease, pushed)()
    for array, was, now in zip(their_arrays(peer), pattern(1), pattern(5), strict=True):
        assert array == [now[3].tolist(), was[1].tolist(), now[1].tolist(), was[3].tolist()]
    user.submit(Transfer(Rows(lease, [0]), Rows(cache, [2]))).wait(LONG_MS)
    assert all((item[2] == to[3]).all() for item, to in zip(arrays, pattern(5), strict=True))
    user.submit(Transfer(Rows(cache, [2]), Rows(lease, [2]))).wait(LONG_MS)
    assert [item[2] for item in their_arrays(peer)] == [value[3].tolist() for value in pattern(5)]


@memories
@directions
def test_a_lease_is_released_before_the_move(
    make_engine: MakeEngine, peer: Peer, direction: str, memory: str
) -> None:
    user, lease = make_engine(2), lease_at(peer, memory)
    cache, arrays = make_local_cache(user, 2)
    link(user, peer)
    again = mover(user, direction, lease, cache)
    again()
    before = their_arrays(peer), [array.copy() for array in arrays]
    peer.run("datadist.release(lease)")
    for move in (again, again):
        with refused(NOT_EXIST, RELEASED):
            move()
    assert their_arrays(peer) == before[0]
    if direction == "push":
        with refused(NOT_EXIST, RELEASED):
            user.submit(Transfer(Rows(cache, MINE), Rows(lease))).wait(LONG_MS)
    # Without the lease the blocks can still be read.
    user.pull_blocks(CacheIndex(1, lease.cache_id), cache, THEIRS, MINE)


@memories
@directions
def test_a_lease_is_released_during_the_move(
    gated: MakeEngine,
    peer: Peer,
    gate: Gate,
    attempt: Attempt,
    first_unconfirmed: tuple[int, ...],
    direction: str,
    memory: str,
) -> None:
    user, lease = gated(2), lease_at(peer, memory)
    cache, _ = make_local_cache(user, None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(mover(user, direction, lease, cache))
    gate.wait()
    # Another request has the blocks now.
    peer.run("datadist.release(lease); [it.fill(9) for it in arrays]")
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is NOT_EXIST, error
    assert RELEASED in str(error)
    if direction == "push":  # a writer checks before each piece
        first_unconfirmed = (0, 1)
        assert their_arrays(peer) == [[[9] * 64] * 4] * 8
    whole = 2 * COUNT  # two blocks that are not adjacent
    assert unconfirmed(error) in [set(range(first, whole)) for first in first_unconfirmed]
    mine = link_of(user, 1)
    assert mine is not None
    assert (mine.bytes_pulled, mine.bytes_pushed, mine.in_flight) == (0, 0, 0)


@directions
def test_blocks_are_released_and_leased_again_during_the_move(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, direction: str
) -> None:
    """The blocks are leased again, but by another lease."""
    user, lease = gated(2), lease_at(peer)
    cache, _ = make_local_cache(user, None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(mover(user, direction, lease, cache))
    gate.wait()
    again = "datadist.release(lease); lease = datadist.lease_blocks(cache, blocks)"
    peer.run(again, blocks=THEIRS)
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is NOT_EXIST, error


@directions
def test_a_lease_is_released_after_the_move(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, direction: str
) -> None:
    user, lease = gated(2), lease_at(peer)
    cache, arrays = make_local_cache(user, None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(mover(user, direction, lease, cache))
    gate.wait()
    gate.open()
    assert call.result(30) is None
    peer.run("datadist.release(lease); moved = [it.copy() for it in arrays]")
    if direction == "pull":
        assert all((array[1] == to[2]).all() for array, to in zip(arrays, pattern(1), strict=True))
    else:
        assert [item[2] for item in their_arrays(peer)] == [
            value[1].tolist() for value in pattern(2)
        ]


@directions
def test_forged_leases_are_refused(make_engine: MakeEngine, peer: Peer, direction: str) -> None:
    """Forged words name no lease or another one, but never memory outside of the table."""
    user, lease = make_engine(2), lease_at(peer)
    cache, _ = make_local_cache(user, 2)
    link(user, peer)
    before = their_arrays(peer)
    for slot, generation in (
        (lambda value: value, lambda value: value + 2),
        (lambda value: value, lambda value: value ^ 1 << 40),
        (lambda _: 0, lambda value: value + 2),
        (lambda value: value + 1, lambda value: value),
        (lambda _: 2**32 - 1, lambda value: value),
        (lambda _: 2**32 - 1, lambda _: 2**64 - 1),
    ):
        words = tuple(
            LeaseWord(word.transport, slot(word.slot), generation(word.generation))
            for word in lease.words
        )
        with refused(NOT_EXIST, RELEASED):
            mover(user, direction, replace(lease, words=words), cache)()
    with refused("LLM_FEATURE_NOT_ENABLED", "lease cannot be checked over transport"):
        mover(user, direction, replace(lease, words=()), cache)()
    assert their_arrays(peer) == before
    mover(user, direction, lease, cache)()  # the link still works


@directions
def test_a_lease_of_a_freed_cache_is_refused(
    make_engine: MakeEngine, peer: Peer, direction: str
) -> None:
    user, lease = make_engine(2), lease_at(peer)
    cache, _ = make_local_cache(user, 2)
    link(user, peer)
    mover(user, direction, lease, cache)()
    assert peer.run("datadist.deallocate_cache(cache); result = datadist.leases()") == []
    with refused(NOT_EXIST):
        mover(user, direction, lease, cache)()


def test_a_lease_of_a_restarted_owner_is_refused(
    make_engine: MakeEngine, make_peer: MakePeer
) -> None:
    user, peer = make_engine(2), make_peer(1)
    lease = lease_at(peer)
    link(user, peer)
    cache, _ = make_local_cache(user)
    user.unlink_clusters([1], 10_000).raise_for_status()
    peer.run("old = lease; datadist.finalize(); del cache, arrays")
    peer.start(1)
    assert lease_at(peer).lease_id == lease.lease_id
    link(user, peer)
    with refused(NOT_EXIST, "lease 1 of cmpl-3 has ended: cluster 1 was restarted"):
        mover(user, "pull", lease, cache)()
    peer.run("datadist.release(old); result = len(datadist.leases())")


def is_released(owner: LlmDataDist, lease: BlockLease) -> bool:
    """Release the lease, and return False if a peer may still write."""
    try:
        owner.release(lease)
    except LLMException as error:
        if error.status_code is not LLMStatusCode.LLM_TIMEOUT:
            raise
        return False
    return True


@pytest.mark.parametrize("fate", ["goes on", "is stopped", "is killed"])
@memories
def test_no_byte_changes_after_a_release(
    make_engine: MakeEngine, make_peer: MakePeer, machine: str, memory: str, fate: str
) -> None:
    owner, peer = make_engine(8, heartbeat_timeout_ms=60_000), make_peer(1)
    peer.run(PUSH, address=owner.listen_address)
    kept_alive = []  # keeps registered memory alive
    for _ in range(1 if fate == "is killed" else 4):
        arrays, cache = pushed_into(owner, machine, memory)
        kept_alive.append(arrays)
        lease = owner.lease_blocks(cache, range(4))
        peer.run(BEGIN, blob=lease.to_bytes())
        deadline = time.monotonic() + DEADLINE_S
        while not arrays[0].any():
            assert time.monotonic() < deadline
        if fate == "is stopped":
            peer.stop()
        elif fate == "is killed":
            peer.kill()
        if not is_released(owner, lease):  # the peer was stopped in a write that cannot be revoked
            assert fate == "is stopped"
            assert memory == "allocated" or machine in ("ucx", "ascend", "cuda")
            assert owner.leases() == []
            peer.resume()
            while not is_released(owner, lease):
                assert time.monotonic() < deadline
        for array in arrays:
            array[:] = 2
        peer.resume()
        if fate != "is killed":
            assert peer.run("thread.join(30); result = why")[0] in ENDS[fate, memory]
        assert all((array == 2).all() for array in arrays)
        if fate == "is stopped":  # its writes by address were cut off, so it links again
            peer.run("datadist.unlink_clusters([8], 10_000, force=True)")
            peer.run("datadist.link_clusters([ClusterInfo(8, address)], 10_000).raise_for_status()")


ENDS = {
    ("goes on", "allocated"): {"LLM_KV_CACHE_NOT_EXIST"},
    ("goes on", "registered"): {"LLM_KV_CACHE_NOT_EXIST"},
    ("is stopped", "allocated"): {"LLM_KV_CACHE_NOT_EXIST"},
    ("is stopped", "registered"): {"LLM_KV_CACHE_NOT_EXIST", "LLM_LINK_FAILED"},
}


PAIRS = KvCacheExtParam(tensor_num_per_layer=2)


@memories
def test_a_leased_block_is_moved_layer_by_layer(
    make_engine: MakeEngine, peer: Peer, memory: str
) -> None:
    user, lease = make_engine(2), lease_at(peer, memory)
    cache, _ = make_local_cache(user, 5)
    link(user, peer)
    task = user.layered(Transfer(Rows(cache, MINE), Rows(lease), layers=PAIRS))
    for layer in task.layers:
        task.ready(layer)
    task.wait(LONG_MS)
    for array, was, now in zip(their_arrays(peer), pattern(1), pattern(5), strict=True):
        assert array == [now[3].tolist(), was[1].tolist(), now[1].tolist(), was[3].tolist()]
    with refused("LLM_PARAM_INVALID", r"dst\.blocks\[0\]=1 is not a block of lease 1 of cmpl-3"):
        user.layered(Transfer(Rows(cache, [1]), Rows(lease, [1]), layers=PAIRS))


@memories
def test_a_lease_is_released_between_two_layers(
    make_engine: MakeEngine, peer: Peer, memory: str
) -> None:
    user, lease = make_engine(2), lease_at(peer, memory)
    cache, _ = make_local_cache(user, 5)
    link(user, peer)
    task = user.layered(Transfer(Rows(cache, MINE), Rows(lease), layers=PAIRS))
    task.ready(0)
    task.ready(1)
    while task.progress().done != (0, 1):
        assert not task.done
    peer.run("datadist.release(lease); [it.fill(9) for it in arrays]")
    for layer in (2, 3):
        task.ready(layer)
    with refused(NOT_EXIST, RELEASED):
        task.wait(LONG_MS)
    assert their_arrays(peer) == [[[9] * 64] * 4] * 8
    with refused(NOT_EXIST, RELEASED):
        late = user.layered(Transfer(Rows(cache, MINE), Rows(lease), layers=PAIRS))
        late.ready(0)
        late.wait(LONG_MS)


def test_a_lease_is_released_during_a_layer(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt
) -> None:
    user, lease = gated(2), lease_at(peer)
    cache, _ = make_local_cache(user, 5)
    link(user, peer)
    task = user.layered(Transfer(Rows(cache, MINE), Rows(lease), layers=PAIRS))

    def move() -> None:
        for layer in task.layers:
            task.ready(layer)
        task.wait(LONG_MS)

    call = attempt(move)
    gate.wait()
    peer.run("datadist.release(lease); [it.fill(9) for it in arrays]")
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is NOT_EXIST, error
    assert RELEASED in str(error)
    assert their_arrays(peer) == [[[9] * 64] * 4] * 8


HALF = CacheDesc(
    2,
    (4, 8, 1, 16),
    DataType.DT_INT32,
    kv_tensor_format="block token head dim",
    shard=Shard(range(1), range(1), 1, 2),
)
OFFER_HALF = """
half = replace(desc, shard=Shard(range(1), range(head, head + 1), 1, 2))
full = [np.full(half.shape, 5 + head, np.int32) for _ in range(2)]
arrays, given = own(datadist.cluster_id, full)
cache = datadist.register_blocks_cache(half, given)
lease = datadist.lease_blocks(cache, [2, 0], tag="cmpl-3")
result = lease.to_bytes()
"""


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_source_of_a_gather_releases_its_lease(
    gated: MakeEngine, make_peer: MakePeer, gate: Gate, attempt: Attempt, when: str
) -> None:
    """The second of two sources releases its part."""
    user, peers = gated(2), [make_peer(1), make_peer(3)]
    leases = []
    for head, peer in enumerate(peers):
        blob = peer.run(f"from dataclasses import replace\n{OFFER_HALF}", desc=HALF, head=head)
        leases.append(BlockLease.from_bytes(blob))
    shape, shard = (4, 8, 2, 16), Shard(range(1), range(2), 1, 2)
    cache = user.allocate_blocks_cache(replace(HALF, shape=shape, shard=shard))
    link(user, *peers)
    release = "datadist.release(lease); [it.fill(9) for it in arrays]"
    if when == "before":
        peers[1].run(release)
    call = attempt(
        lambda: user.run(
            Transfer(
                [Rows(cache, blocks) for cache, blocks in zip(leases, [None, None], strict=True)],
                Rows(cache, MINE),
            ),
            timeout_ms=LONG_MS,
        )
    )
    # otherwise the second source fails at once, perhaps before the first begins
    if when != "before":
        gate.wait()
    if when == "during":
        peers[1].run(release)
    gate.open()
    error = call.result(30)
    if when == "after":
        peers[1].run(release)
        assert error is None
        for array in user.arrays(cache):
            assert [set(array[MINE, :, head].flat) for head in range(2)] == [{5}, {6}]
    else:
        assert isinstance(error, GatherError)
        assert error.status_code is NOT_EXIST, error
        assert list(error.failed) == [1]
        assert RELEASED in str(error)
    assert user.metrics()["in_flight"] == 0


SLOT = """
cache = datadist.allocate_cache(DESC)
arrays = datadist.arrays(cache)
for array, tensor in zip(arrays, pattern(1)):
    array[:] = tensor
lease = datadist.lease_blocks(cache, [2], tag="cmpl-3")
result = lease.to_bytes()
"""


def test_a_leased_slot_is_moved(make_engine: MakeEngine, peer: Peer) -> None:
    user, lease = make_engine(2), BlockLease.from_bytes(peer.run(SLOT))
    cache = user.allocate_cache(DESC)
    arrays = user.arrays(cache)
    link(user, peer)
    user.pull_cache(lease, cache, 1)
    assert all((array[1] == to[2]).all() for array, to in zip(arrays, pattern(1), strict=True))
    for array in arrays:
        array[3] = 7
    user.push_cache(cache, lease, 3)
    assert [item[2] for item in their_arrays(peer)] == [[7] * 64] * 8
    assert [item[3] for item in their_arrays(peer)] == [value[3].tolist() for value in pattern(1)]
    paged, blocks = make_local_cache(user)
    with refused("LLM_PARAM_INVALID", "src_blocks"):
        user.pull_blocks(lease, paged, [2], [0])
    with refused("LLM_PARAM_INVALID", "contiguous"):
        user.push_blocks(paged, lease, [0])
    user.pull_blocks(lease, paged, None, [0])
    assert all((block[0] == 7).all() for block in blocks)
    peer.run("datadist.release(lease)")
    for move in (
        lambda: user.pull_cache(lease, cache, 1),
        lambda: user.push_cache(cache, lease, 3),
        lambda: user.pull_blocks(lease, paged, None, [0]),
    ):
        with refused(NOT_EXIST, RELEASED):
            move()
    of_blocks = lease_at(peer)
    with refused("LLM_PARAM_INVALID", "paged"):
        user.pull_cache(of_blocks, cache, 1)
    with refused("LLM_PARAM_INVALID", "has blocks; a lease of a slot"):
        user.pull_cache(replace(lease, paged=True), cache, 1)


@directions
def test_a_leased_slot_is_released_during_the_move(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, direction: str
) -> None:
    user, lease = gated(2), BlockLease.from_bytes(peer.run(SLOT))
    cache = user.allocate_cache(DESC)
    link(user, peer)
    call = attempt(
        (lambda: user.pull_cache(lease, cache, timeout_ms=LONG_MS))
        if direction == "pull"
        else (lambda: user.push_cache(cache, lease, timeout_ms=LONG_MS))
    )
    gate.wait()
    peer.run("datadist.release(lease); [it.fill(9) for it in arrays]")
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is NOT_EXIST, error
    if direction == "push":
        assert their_arrays(peer) == [[[9] * 64] * 4] * 8
