"""Memory that is unregistered or freed during a transfer, at either end."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import CacheIndex, CacheKey, LinkState, LLMStatusCode, PoolConfig
from tests.faults.conftest import Attempt, MakeEngine, MakePeer
from tests.faults.contents import DESC, make_cache, pattern
from tests.faults.gate import Gate
from tests.faults.outcomes import COUNT, assert_confirmed, unconfirmed
from tests.faults.peer import Peer
from tests.faults.states import link_of
from tests.faults.transfers import link, move
from tests.support.refusals import refused

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
DEREGISTER = {
    "allocated": "datadist.deallocate_cache(cache)",
    "registered": "datadist.unregister_cache(cache.cache_id)",
}
directions = pytest.mark.parametrize("direction", ["pull", "push"])
memories = pytest.mark.parametrize("memory", DEREGISTER)


@pytest.mark.over_tcp
@memories
@directions
def test_unregistering_at_the_peer_during_a_transfer(
    gated: MakeEngine,
    peer: Peer,
    gate: Gate,
    attempt: Attempt,
    first_unconfirmed: tuple[int, ...],
    direction: str,
    memory: str,
) -> None:
    user, remote = gated(2), peer.make_cache(memory)
    cache, arrays = make_cache(user, "allocated", None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(lambda: move(user, direction, remote, cache))
    gate.wait()
    peer.run(DEREGISTER[memory])
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is NOT_EXIST, error
    if direction == "push":  # a writer checks before each piece
        first_unconfirmed = (0, 1)
    assert unconfirmed(error) in [set(range(first, COUNT)) for first in first_unconfirmed]
    mine = link_of(user, 1)
    assert mine is not None
    assert (mine.state, mine.in_flight, peer.state(2)) == (LinkState.LINKED, 0, "LINKED")
    assert mine.last_error == str(error)
    assert (mine.bytes_pulled, mine.bytes_pushed) == (0, 0)
    # The link still works.
    with refused(NOT_EXIST):
        move(user, direction, remote, cache)
    again = peer.make_cache(memory, seed=3)
    move(user, "pull", again, cache)
    assert all((array[0] == to[0]).all() for array, to in zip(arrays, pattern(3), strict=True))


@pytest.mark.over_tcp
def test_pages_that_another_cache_has_taken_over(
    gated: MakeEngine,
    make_peer: MakePeer,
    gate: Gate,
    attempt: Attempt,
    first_unconfirmed: tuple[int, ...],
) -> None:
    """The address is still mapped and offered, but as part of another cache."""
    peer = make_peer(1, mem_pool_config=PoolConfig(DESC.nbytes, 10))
    user, remote = gated(2), peer.make_cache(seed=1)
    cache, _ = make_cache(user, "allocated", None)
    link(user, peer)
    call = attempt(lambda: move(user, "pull", remote, cache))
    gate.wait()
    peer.run("was = cache.tensor_addrs; datadist.deallocate_cache(cache); del cache, arrays")
    again = peer.make_cache(seed=3)
    assert peer.run("result = was == cache.tensor_addrs")
    gate.open()
    error = call.result(30)
    assert error is not None
    assert error.status_code is NOT_EXIST, error
    assert unconfirmed(error) in [set(range(first, COUNT)) for first in first_unconfirmed]
    with refused(NOT_EXIST):
        move(user, "pull", remote, cache)
    move(user, "pull", again, cache)
    assert_confirmed(None, user.arrays(cache), pattern(3))


@directions
def test_freeing_a_local_cache_during_its_transfer(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt, direction: str
) -> None:
    """A transfer keeps its local memory until it ends.

    So it succeeds, and moves no foreign bytes.
    """
    user = gated(2, mem_pool_config=PoolConfig(DESC.nbytes, 10))
    remote = peer.make_cache(seed=1 if direction == "pull" else None)
    cache, arrays = make_cache(user, "allocated", None if direction == "pull" else 2)
    link(user, peer)
    call = attempt(lambda: move(user, direction, remote, cache))
    gate.wait()
    user.deallocate_cache(cache)
    with refused(LLMStatusCode.LLM_OUT_OF_MEMORY):
        user.allocate_cache(DESC)
    with refused(NOT_EXIST):
        move(user, direction, remote, cache)
    gate.open()
    assert call.result(30) is None
    if direction == "pull":
        assert_confirmed(None, arrays, pattern(1))
    else:
        assert peer.run(
            "result = all((a[0] == p[0]).all() and not a[1:].any()"
            " for a, p in zip(arrays, pattern(2)))"
        )
    del arrays
    user.allocate_cache(DESC)


def test_a_cache_that_is_freed_stays_for_its_claimant(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt
) -> None:
    user = gated(2)
    peer.run(
        """
        cache = datadist.allocate_cache(DESC, [CacheKey(1, 7)])
        for array, tensor in zip(datadist.arrays(cache), pattern(1)):
            array[:] = tensor
        """
    )
    cache, arrays = make_cache(user, "allocated", None)
    link(user, peer)
    call = attempt(lambda: user.pull_cache(CacheKey(1, 7), cache, timeout_ms=30_000))
    gate.wait()
    peer.run("datadist.remove_cache_key(CacheKey(1, 7)); datadist.deallocate_cache(cache)")
    gate.open()
    assert call.result(30) is None
    assert_confirmed(None, arrays, pattern(1))
    with refused(NOT_EXIST):
        user.pull_cache(CacheKey(1, 7), cache)
    with refused(NOT_EXIST):
        user.pull_cache(CacheIndex(1, 1), cache)


@pytest.mark.over_tcp
def test_pages_that_their_owner_has_unmapped(make_engine: MakeEngine, peer: Peer) -> None:
    """Memory that is unmapped but still registered causes an error. Neither end crashes."""
    user = make_engine(2)
    remote = peer.run(
        """
        import ctypes, mmap
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        size = -(-DESC.nbytes // 4096) * 4096
        # Far below other mappings, so that no other thread fills the hole.
        free = ctypes.c_void_p(1 << 45)
        address = libc.mmap(free, ctypes.c_size_t(size), 3, 0x22, -1, ctypes.c_long(0))
        addresses = [address + i * DESC.tensor_nbytes for i in range(DESC.num_tensors)]
        result = datadist.register_cache(DESC, addresses).cache_id
        """
    )
    cache, arrays = make_cache(user, "allocated", 5)
    link(user, peer)
    move(user, "push", remote, cache)
    half = DESC.nbytes // 2 // 4096 * 4096
    peer.run(
        "libc.munmap(ctypes.c_void_p(address + half), ctypes.c_size_t(size - half))", half=half
    )
    for array in arrays:
        array[:] = 0
    with refused(NOT_EXIST) as error:
        move(user, "pull", remote, cache)
    missing = unconfirmed(error.value)
    assert missing
    for number, array in enumerate(arrays):
        if number not in missing:
            assert np.array_equal(array[0], pattern(5)[number][0])
    peer.run(
        "datadist.unregister_cache(cache_id)",
        "libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(half))",
        cache_id=remote,
    )
    assert link_of(user, 1).state is LinkState.LINKED
