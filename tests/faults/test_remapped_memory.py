"""Other memory at the addresses of a registered cache: no transfer succeeds with the old pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvplan import (
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    KvCacheExtParam,
    LinkState,
    LlmDataDist,
    LLMStatusCode,
    Rows,
    Transfer,
)
from tests.faults.conftest import Attempt, MakeEngine
from tests.faults.gate import Gate
from tests.faults.peer import Peer
from tests.faults.states import wait_for_state
from tests.faults.transfers import LONG_MS, link
from tests.support.refusals import refused

INVALID, NOT_EXIST = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
DESC = CacheDesc(2, (1, 4096), DataType.DT_INT32)
SIZE = DESC.nbytes  # 8 pages

# A cache over 8 pages; `remap` maps other pages at their addresses, full of a number.
MAPPED = """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
size = 32768

def map_at(address, fixed):
    flags = 0x22 | (0x10 if fixed else 0)  # MAP_PRIVATE | MAP_ANONYMOUS, MAP_FIXED
    found = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), 3, flags, -1, 0)
    assert found not in (None, 2**64 - 1), ctypes.get_errno()
    return found

def fill(number):
    (ctypes.c_int32 * (size // 4)).from_address(base)[:] = [number] * (size // 4)

def remap(number):
    map_at(base, True)
    fill(number)
    datadist.remap_registered_memory([(base, size)])

from kvplan import DataType
desc = CacheDesc(2, (1, 4096), DataType.DT_INT32)
# Far below other mappings, and each time elsewhere, so that no other thread fills a hole.
base = map_at((1 << 45) + time.monotonic_ns() % (1 << 44) // size * size, False)
fill(5)
cache = datadist.register_cache(desc, [base, base + size // 2], [CacheKey(1, 7)])
result = cache.cache_id
"""


@pytest.fixture
def remote(peer: Peer) -> CacheIndex:
    return CacheIndex(1, peer.run(MAPPED))


def test_transfers_after_remapping_read_the_new_memory(
    make_engine: MakeEngine, peer: Peer, remote: CacheIndex
) -> None:
    """The peers know of the new pages when `remap_registered_memory` returns."""
    user = make_engine(2)
    mine = user.allocate_cache(DESC)
    link(user, peer)
    for number in range(30):
        user.pull_cache(remote, mine)
        peer.run(f"remap({number})")
        user.pull_cache(remote, mine)
        assert all((array == number).all() for array in user.arrays(mine))
    user.pull_cache(CacheKey(1, 7), mine)
    user.arrays(mine)[0][:] = 77
    user.push_cache(mine, remote)
    assert peer.run("result = ctypes.c_int32.from_address(base).value") == 77


def test_a_running_transfer_fails_after_remapping(
    gated: MakeEngine,
    peer: Peer,
    remote: CacheIndex,
    gate: Gate,
    attempt: Attempt,
    first_unconfirmed: tuple[int, ...],
) -> None:
    user = gated(2)
    mine = user.allocate_cache(DESC)
    link(user, peer)
    pulling = attempt(lambda: user.pull_cache(remote, mine, timeout_ms=LONG_MS))
    gate.wait()
    peer.run("remap(8)")
    gate.open()
    error = pulling.result(30)
    assert error is not None
    assert error.status_code is NOT_EXIST, error
    assert error.unconfirmed in [((first, 2),) for first in first_unconfirmed]
    user.pull_cache(remote, mine)
    assert all((array == 8).all() for array in user.arrays(mine))


def test_later_layers_are_not_pushed_after_remapping(
    make_engine: MakeEngine, peer: Peer, remote: CacheIndex
) -> None:
    user = make_engine(2)
    mine = user.allocate_cache(DESC)
    link(user, peer)
    task = user.layered(
        Transfer(Rows(mine), Rows(remote), layers=KvCacheExtParam(tensor_num_per_layer=2))
    )
    peer.run("remap(8)")
    task.ready(0)
    with refused(NOT_EXIST):
        task.wait()
    assert peer.run("result = ctypes.c_int32.from_address(base).value") == 8


@pytest.mark.over_tcp
def test_unmapped_memory_is_refused_without_a_change(
    make_engine: MakeEngine, peer: Peer, remote: CacheIndex
) -> None:
    user = make_engine(2)
    mine = user.allocate_cache(DESC)
    link(user, peer)
    peer.run(
        """
        assert libc.munmap(ctypes.c_void_p(base + size // 2), ctypes.c_size_t(4096)) == 0
        for touched in ([(base, 8)], [(base, size)]):
            try:
                datadist.remap_registered_memory(touched)
            except LLMException as error:
                assert error.status_code is LLMStatusCode.LLM_PARAM_INVALID, error
                assert f"cache {cache.cache_id}: tensor 1" in str(error), error
            else:
                raise AssertionError
        """
    )
    with pytest.raises(Exception, match="not mapped"):
        user.pull_cache(remote, mine)
    peer.run("map_at(base, True); fill(3)")
    user.pull_cache(remote, mine)  # by the earlier registration
    assert all((array == 3).all() for array in user.arrays(mine))


def test_only_touched_caches_are_offered_again(
    make_engine: MakeEngine,
    peer: Peer,
    remote: CacheIndex,
    gated: MakeEngine,
    gate: Gate,
    attempt: Attempt,
) -> None:
    other = peer.make_cache("registered")
    user = gated(2)
    mine = user.allocate_cache(CacheDesc(8, (4, 64), DataType.DT_INT32))
    link(user, peer)
    pulling = attempt(lambda: user.pull_cache(CacheIndex(1, other), mine, timeout_ms=LONG_MS))
    gate.wait()
    peer.run("remap(8)")
    gate.open()
    assert pulling.result(30) is None


def test_a_stopped_peer_is_notified_later(make_engine: MakeEngine, peer: Peer) -> None:
    owner = make_engine(2, sync_kv_cache_wait_time=200, heartbeat_timeout_ms=60_000)
    arrays = [np.full(DESC.shape, 4, np.int32) for _ in range(2)]
    cache = owner.register_cache(DESC, arrays)
    link(owner, peer)
    peer.make_cache("allocated", None)
    peer.stop()
    began = time.monotonic()
    owner.remap_registered_memory([(cache.tensor_addrs[1], 16)])
    assert 0.2 <= time.monotonic() - began < 8
    peer.resume()
    peer.run(
        """
        from kvplan import DataType
        mine = datadist.allocate_cache(CacheDesc(2, (1, 4096), DataType.DT_INT32))
        try:
            datadist.pull_cache(CacheIndex(2, 99), mine)  # a request, so that all updates have come
        except LLMException:
            pass
        datadist.pull_cache(CacheIndex(2, 1), mine)
        assert all((it == 4).all() for it in datadist.arrays(mine))
        """
    )


def test_remapping_is_counted_and_keeps_the_properties_of_the_cache(
    make_engine: MakeEngine, peer: Peer, remote: CacheIndex
) -> None:
    user = make_engine(2)
    link(user, peer)
    peer.run(
        """
        from dataclasses import replace
        before = datadist.caches()
        remap(1)
        after = datadist.caches()
        assert [replace(it, age_s=0) for it in before] == [replace(it, age_s=0) for it in after]
        assert after[0].age_s >= before[0].age_s
        counted = datadist.metrics()["operations"]["remap_registered_memory"]["statuses"]
        assert counted == {"LLM_SUCCESS": 1}, counted
        datadist.unregister_cache(cache.cache_id)
        """
    )
    mine = user.allocate_cache(DESC)
    with refused(NOT_EXIST):
        user.pull_cache(remote, mine)


def test_repeated_remapping_leaves_no_registration_behind(
    make_engine: MakeEngine, peer: Peer, remote: CacheIndex
) -> None:
    user = make_engine(2)
    link(user, peer)
    before = peer.run("remap(1); result = footprint()")
    after = peer.run("for number in range(100): remap(number)\nresult = footprint()")
    for name in ("descriptors", "threads", "registrations"):
        assert after[name] == before[name]


REFUSED: dict[str, Callable[[int, int], object]] = {
    "none": lambda own, registered: [],
    "address 0": lambda own, registered: [(0, 16)],
    "no bytes": lambda own, registered: [(registered, 0)],
    "past the end of memory": lambda own, registered: [(2**64 - 1, 2)],
    "beyond the cache": lambda own, registered: [(registered, SIZE // 2 + 1)],
    "before the cache": lambda own, registered: [(registered - 1, 2)],
    "the second of two": lambda own, registered: [(registered, 1), (1, 1)],
    "an allocated cache": lambda own, registered: [(own, 16)],
}


@pytest.fixture
def owner(make_engine: MakeEngine) -> tuple[LlmDataDist, int, int]:
    """An engine with an allocated and a registered cache, and their addresses; not linked."""
    owner = make_engine(2)
    own = owner.allocate_cache(DESC)
    # With a gap between the tensors.
    whole = np.zeros((5, 2048), np.int32)
    registered = owner.register_cache(CacheDesc(2, (1, 2048), DataType.DT_INT32), list(whole[::3]))
    return owner, own.tensor_addrs[0], registered.tensor_addrs[0]


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_ranges_are_refused(
    owner: tuple[LlmDataDist, int, int], peer: Peer, name: str
) -> None:
    user, own, registered = owner
    link(user, peer)
    ranges: Any = REFUSED[name](own, registered)
    with refused(INVALID):
        user.remap_registered_memory(ranges)


@pytest.mark.parametrize("ranges", [None, 5, "ab", b"ab", [5], [(1, 2, 3)], [(1.0, 2)], [("1", 2)]])
def test_values_other_than_ranges_are_refused(
    owner: tuple[LlmDataDist, int, int], ranges: Any
) -> None:
    with pytest.raises(TypeError):
        owner[0].remap_registered_memory(ranges)


@pytest.mark.parametrize("given", [(-1, 4), (2**64, 4), (4, 2**64)])
def test_numbers_beyond_their_width_are_refused(
    owner: tuple[LlmDataDist, int, int], given: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="out of range"):
        owner[0].remap_registered_memory([given])


def test_without_a_link_nothing_is_published(
    owner: tuple[LlmDataDist, int, int], peer: Peer
) -> None:
    user, _, registered = owner
    not_linked = LLMStatusCode.LLM_NOT_YET_LINK
    with refused(not_linked):
        user.remap_registered_memory([(registered, 16)])
    with refused(INVALID):
        user.remap_registered_memory([])
    link(user, peer)
    user.remap_registered_memory([(registered, 16)])
    peer.kill()
    wait_for_state(user, 1, LinkState.BROKEN)
    with refused(not_linked):
        user.remap_registered_memory([(registered, 16)])


def test_a_range_over_adjacent_caches_renews_them_all(make_engine: MakeEngine, peer: Peer) -> None:
    user = make_engine(2)
    whole = np.zeros((4, 2048), np.int32)
    half = CacheDesc(2, (1, 2048), DataType.DT_INT32)
    caches = [
        user.register_cache(half, list(whole[2 * index : 2 * index + 2])) for index in range(2)
    ]
    link(user, peer)
    user.remap_registered_memory([(caches[0].tensor_addrs[1], 2 * 8192)])
    with refused(INVALID):
        user.remap_registered_memory([(caches[0].tensor_addrs[1], 3 * 8192 + 1)])
    assert [cache.cache_id for cache in user.caches()] == [1, 2]
