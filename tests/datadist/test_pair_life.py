"""Known pairs end with their caches, links, engines and processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
    Rows,
    Transfer,
)
from kvplan.engine.pairs import PairOperation, find_request, move_now
from kvplan.engine.transfers import TransferOperations
from kvplan.execution.transfers import SMALL_NBYTES
from kvplan.links.peer_link import PeerLink
from kvplan.links.values import LinkState
from kvplan.recording import read
from tests.datadist.layers import wait_until
from tests.datadist.machine import Machine, on_host_only, where_memory_is_mapped
from tests.datadist.peer import Peer
from tests.support.lines import interrupted
from tests.support.refusals import refused

pytestmark = pytest.mark.skipif(SMALL_NBYTES == 0, reason="without a GIL nothing moves at once")

PAGED = CacheDesc(4, (8, 16), DataType.DT_INT32)
KEY = BlocksCacheKey(1, 5)
STEPS = [
    find_request.__code__,
    move_now.__code__,
    PairOperation.use_known.__code__,
    TransferOperations._execute.__code__,
]
OFFER = """
desc = CacheDesc(4, (8, 16), DataType.DT_INT32)
def offer(value, model=5):
    made = datadist.allocate_blocks_cache(desc, BlocksCacheKey(0, model))
    for array in datadist.arrays(made):
        array[:] = value
    return made
cache = offer(7)
result = cache.cache_id
"""


@pytest.fixture
def theirs(peer: Peer) -> CacheIndex:
    return CacheIndex(1, peer.run(OFFER))


@pytest.fixture
def mine(user: LlmDataDist) -> Cache:
    return user.allocate_blocks_cache(PAGED)


def test_pushes_are_announced_to_the_owner(
    peer: Peer, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    """After the owner has freed memory, no peer writes to it."""
    user.arrays(mine)[0][:] = 5
    for dst in (theirs, KEY):
        user.push_blocks(mine, dst, [1], [2])
    assert peer.run("result = datadist.arrays(cache)[0][:, 0].tolist()") == [7, 7, 5, *[7] * 5]
    peer.run("kept = datadist.arrays(cache)[0]", "datadist.deallocate_cache(cache)")
    for dst in (theirs, KEY):
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            user.push_blocks(mine, dst, [1], [3])
    assert peer.run("result = kept[:, 0].tolist()") == [7, 7, 5, *[7] * 5]


def pulled(user: LlmDataDist, src: Any, cache: Cache, block: int = 1) -> int:
    """Pull a block, and return its value."""
    user.arrays(cache)[0][block] = -1
    user.pull_blocks(src, cache, [0], [block])
    return int(user.arrays(cache)[0][block, 0])


def test_memory_that_the_peer_has_freed_is_not_pulled(
    peer: Peer, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    assert pulled(user, theirs, mine) == pulled(user, KEY, mine) == 7
    peer.run("datadist.deallocate_cache(cache)")
    for src in (theirs, KEY):
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            pulled(user, src, mine)
    assert user.arrays(mine)[0][1, 0] == -1
    peer.run("cache = offer(8)")
    assert pulled(user, KEY, mine) == 8  # the key belongs to another cache now
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        pulled(user, theirs, mine)


@pytest.mark.over_tcp
@pytest.mark.parametrize("place", [None, 0, 1, 2], ids=["alone", "first", "second", "last"])
@pytest.mark.usefixtures("theirs")
def test_a_key_that_names_another_cache_is_looked_up_again(
    machine: Machine, peer: Peer, user: LlmDataDist, mine: Cache, place: int | None
) -> None:
    """The key is looked up again in a request of several pairs, too.

    The peer cannot publish the other cache meanwhile.
    """
    on_host_only(machine, "over HCCL the peer is asked in any case")
    sources: list[Any] = []
    if place is not None:
        made = peer.run("result = [offer(n, n).cache_id for n in (1, 2)]")
        sources = [CacheIndex(1, cache_id) for cache_id in made]
    sources.insert(place or 0, KEY)
    targets = [mine, *(user.allocate_blocks_cache(PAGED) for _ in sources[1:])]
    pairs = {
        str(n): Transfer(Rows(source, [0]), Rows(target, [1]))
        for n, (source, target) in enumerate(zip(sources, targets, strict=True))
    }
    found: list[list[int]] = []

    def pull() -> None:
        user.run(pairs["0"] if place is None else pairs)
        found.append([int(user.arrays(target)[0][1, 0]) for target in targets])

    for _ in range(2):  # then the pairs are known
        pull()
    peer.run(
        """
        from threading import Event
        stands, goes_on = Event(), Event()
        datadist._running().links._control.call_soon(lambda: stands.set() or goes_on.wait(60))
        assert stands.wait(60)
        datadist.deallocate_cache(cache)
        cache = offer(8)
        """
    )
    asking, calls = threading.Thread(target=pull), user._running().links._control._calls
    asking.start()
    try:
        wait_until(lambda: bool(calls) or not asking.is_alive())
    finally:
        peer.run("goes_on.set()")
        asking.join()
    others = [] if place is None else [1, 2]
    before, after = (
        [*others[:place], value, *others[place or 0 :]] if others else [value] for value in (7, 8)
    )
    assert found == [before, before, after]


def test_a_request_is_known_unless_the_peer_must_be_asked_first(
    machine: Machine, peer: Peer, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    """HCCL can move memory that its owner has freed, so writes and keys ask the owner first."""
    is_asked = machine.transport == "hccl"
    links = user._running().links
    link_to_peer = links.get(1)
    for move, is_known in (
        (lambda: pulled(user, theirs, mine), True),
        (lambda: pulled(user, KEY, mine), not is_asked),
        (lambda: user.push_blocks(mine, theirs, [1], [2]), not is_asked),
    ):
        move()  # knows the peer's cache as soon as the table has it, before the pairs are dropped
        links._control.run(asyncio.sleep(0))  # the control thread has dropped them
        link_to_peer.forget()
        move()
        assert bool(link_to_peer.pairs) is is_known


def test_pairs_end_with_their_link(
    peer: Peer, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    transfer = Transfer(Rows(theirs, [0]), Rows(mine, [1]))
    user.run(transfer)
    user.unlink_clusters([1]).raise_for_status()
    for call in (lambda: pulled(user, theirs, mine), lambda: user.run(transfer)):
        with refused(LLMStatusCode.LLM_NOT_YET_LINK):
            call()
    peer.run("for array in datadist.arrays(cache): array[:] = 9")
    user.link_clusters([ClusterInfo(1, peer.address)]).raise_for_status()
    assert pulled(user, theirs, mine) == 9
    user.run(Transfer(Rows(theirs, [0]), Rows(mine, [2])))
    assert user.arrays(mine)[0][2, 0] == 9


def test_pairs_end_with_caches_of_this_process(
    machine: Machine, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    on_host_only(machine, "arrays are host memory")
    assert pulled(user, theirs, mine) == 7
    user.deallocate_cache(mine)
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_blocks(theirs, mine, [0], [1])
    array = np.zeros((8, 16), np.int32)
    tensors = [array, *(np.zeros((8, 16), np.int32) for _ in range(3))]
    registered = user.register_blocks_cache(PAGED, tensors)
    assert pulled(user, theirs, registered) == 7
    user.unregister_cache(registered.cache_id)
    array[:] = 3
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_blocks(theirs, registered, [0], [1])
    assert (array == 3).all()


def test_a_killed_peer_fails_the_next_transfer(
    peer: Peer, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    assert pulled(user, theirs, mine) == 7
    peer.kill()
    with refused(LLMStatusCode.LLM_LINK_FAILED):
        pulled(user, theirs, mine)


def test_nothing_is_pulled_after_finalize_or_in_a_child(
    user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    transfer = Transfer(Rows(theirs, [0]), Rows(mine, [1]))
    user.run(transfer)
    pid = os.fork()
    if pid == 0:
        try:
            user.run(transfer)
        except LLMException as error:
            os._exit(17 if error.status_code is LLMStatusCode.LLM_FAILED else 18)
        os._exit(19)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    user.finalize()
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED):
        user.run(transfer)


def test_observers_see_each_transfer(
    user: LlmDataDist, theirs: CacheIndex, mine: Cache, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    assert pulled(user, theirs, mine) == 7
    seen: list[int] = []
    remove = user.on_plan(lambda value: seen.append(value.plan.nbytes))
    pulled(user, theirs, mine)
    remove()
    assert seen == [4 * 64]
    other = user.allocate_blocks_cache(PAGED)  # of another id than the peer's
    there, here = Rows(theirs, [6, 1]), Rows(other, [0, 5])
    pull, push = Transfer(there, here), Transfer(here, there)
    for transfer in (pull, push):
        user.run(transfer)
    with user.record(tmp_path / "it.kvtrace"):
        for number, transfer in enumerate((pull, push, pull)):
            user.run(transfer, tag=f"request {number}")
    found = read(tmp_path / "it.kvtrace").transfers
    assert [(each.operation, each.tag) for each in found] == [
        ("pull_blocks", "request 0"),
        ("push_blocks", "request 1"),
        ("pull_blocks", "request 2"),
    ]
    nbytes, success = 2 * 4 * 64, LLMStatusCode.LLM_SUCCESS
    for each, transfer in zip(found, (pull, push, pull), strict=True):
        assert (each.peer, each.cache_id, each.leases) == (1, other.cache_id, ())
        assert (each.nbytes, each.status, each.error) == (nbytes, success, "")
        assert each.plan == user.plan(transfer)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="kvplan"):
        pulled(user, theirs, mine)
    assert [message for message in caplog.messages if "operation=pull_blocks" in message]
    assert pulled(user, theirs, mine) == 7


def test_a_pair_keeps_no_memory(
    machine: Machine, peer: Peer, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    """A pair keeps no memory of this process, and none of the peer after it is freed."""
    where_memory_is_mapped(machine)
    other = user.allocate_blocks_cache(PAGED)
    transfer = Transfer(Rows(theirs, [0]), Rows(mine, [1]))
    user.run(transfer)
    before = mapped_arenas()
    user.deallocate_cache(mine)
    assert mapped_arenas() == before - 1
    peer.run("datadist.deallocate_cache(cache)")
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        pulled(user, KEY, other)  # asks the peer
    assert mapped_arenas() == before - 2


def test_a_pair_keeps_no_link(
    machine: Machine, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    on_host_only(machine, "memory of devices is not mapped")
    assert pulled(user, theirs, mine) == 7
    links = [
        ref(link) for link in gc.get_objects() if type(link) is PeerLink and link.cluster_id == 1
    ]
    user.unlink_clusters([1]).raise_for_status()

    def are_gone() -> bool:
        gc.collect()
        states = {item.state for held in links if (item := held()) is not None}
        return states <= {LinkState.LINKED}  # links of other tests

    wait_until(are_gone)  # the control thread holds it a little longer


def pair_with(user: LlmDataDist, call: Callable[[], object]) -> None:
    """Transfer until the link knows the pair; it forgets pairs when the peer publishes caches."""
    link = user._running().links.get(1)
    call()
    while not link.pairs:
        call()


def test_a_pair_that_writes_to_the_peer_announces_it(
    machine: Machine, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    """The peer waits only for announced writes before it takes its memory back."""
    where_memory_is_mapped(machine)
    link = user._running().links.get(1)
    while {pulls for pulls, *_ in link.pairs} != {False, True}:
        user.push_blocks(mine, theirs, [1], [2])
        user.pull_blocks(theirs, mine, [1], [2])
    for (pulls, *_), pair in link.pairs.items():
        assert (pair.write_guard is None) == pulls


@pytest.mark.over_tcp
@pytest.mark.parametrize("ends", ["cache", "link"])
def test_memory_that_ends_in_the_middle_is_not_written(
    machine: Machine, peer: Peer, user: LlmDataDist, theirs: CacheIndex, ends: str
) -> None:
    """Interrupt at any line: after the call that ends the cache or the link, no byte is written."""
    on_host_only(machine, "memory of devices is not mapped")
    array = np.zeros((8, 16), np.int32)
    rest = [np.zeros((8, 16), np.int32) for _ in range(3)]
    found: list[list[int]] = []
    for line in range(1, 100):
        cache = user.register_blocks_cache(PAGED, [array, *rest])
        pair_with(user, partial(user.pull_blocks, theirs, cache, [0], [0]))
        array[:] = 0

        def end(cache_id: int = cache.cache_id) -> None:
            if ends == "cache":
                user.unregister_cache(cache_id)
            else:
                user.unlink_clusters([1], force=True).raise_for_status()
            found.append(array[:, 0].tolist())

        with suppress(LLMException):
            pull = partial(user.pull_blocks, theirs, cache, [0], [1])
            if not interrupted(line, pull, end, STEPS):
                break
        assert array[:, 0].tolist() == found[-1], line
        user.unregister_cache(cache.cache_id)
        if ends == "link":
            user.link_clusters([ClusterInfo(1, peer.address)]).raise_for_status()
    assert {row[1] for row in found} == {0, 7}  # moved before, or not at all


@pytest.mark.over_tcp
def test_memory_that_the_peer_frees_in_the_middle_is_not_written(
    machine: Machine, peer: Peer, user: LlmDataDist, theirs: CacheIndex, mine: Cache
) -> None:
    on_host_only(machine, "memory of devices is not mapped")
    user.arrays(mine)[0][:] = 5
    found = []
    free = (
        "kept = datadist.arrays(cache)[0]",
        "datadist.deallocate_cache(cache)",
        "result = kept[:, 0].tolist()",
    )
    for line in range(1, 100):
        pair_with(user, partial(user.push_blocks, mine, KEY, [1], [0]))
        push = partial(user.push_blocks, mine, KEY, [1], [2])
        with suppress(LLMException):
            if not interrupted(line, push, lambda: found.append(peer.run(*free)), STEPS):
                break
        assert peer.run("result = kept[:, 0].tolist()") == found[-1], line
        peer.run("cache = offer(7)")
    assert {row[2] for row in found} == {5, 7}


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:kvplan")


def test_threads_pull_while_links_and_caches_are_replaced(
    peer: Peer, user: LlmDataDist, theirs: CacheIndex
) -> None:
    """Each pull brings the peer's bytes, or raises; nothing hangs."""
    cache = user.allocate_blocks_cache(PAGED)
    ended = threading.Event()
    wrong: list[object] = []
    known = {
        LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_FAILED,
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    }  # fmt: skip

    def pull(block: int) -> None:
        while not ended.is_set():
            try:
                if pulled(user, theirs, cache, block) != 7:
                    wrong.append("another byte")
            except LLMException as error:
                if error.status_code not in known:
                    wrong.append(error)

    threads = [threading.Thread(target=pull, args=(block,)) for block in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            user.deallocate_cache(user.allocate_blocks_cache(PAGED))
            user.unlink_clusters([1]).raise_for_status()
            user.link_clusters([ClusterInfo(1, peer.address)]).raise_for_status()
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)
    assert wrong == []
    assert pulled(user, theirs, cache) == 7
