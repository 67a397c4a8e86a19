"""Memory of peers is mapped after linking, before the first transfer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvnative._host import Arena, page_use
from kvplan import BlocksCacheKey, CacheDesc, ClusterInfo, DataType, LlmDataDist, LlmRole
from tests.datadist.peer import Peer
from tests.support.smaps import num_mappings, smaps_of

DESC = CacheDesc(4, (64, 32768), DataType.DT_UINT8)  # 8 MiB
DEADLINE_S = 60.0
MIB = 1 << 20
FILLED = """
    theirs = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1))
    for tensor in datadist.arrays(theirs): tensor[:] = 7
"""


def wait_until_done() -> None:
    """Wait until the populating thread ends, because nothing is left to do."""
    for thread in threading.enumerate():
        if thread.name == "kvplan-pages":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with closing(Peer()) as item:
        item.run(FILLED, desc=DESC)
        yield item


@pytest.fixture
def engine() -> Iterator[LlmDataDist]:
    with LlmDataDist(2, LlmRole.DECODER) as item:
        item.initialize()
        yield item


def mapped(engine: LlmDataDist) -> list[Arena]:
    """Return the arenas of peers that are mapped here."""
    return [arena for _, arena in engine._running().links.mapped()]


def link(engine: LlmDataDist, peer: Peer) -> None:
    engine.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=10_000).raise_for_status()

    engine._running().links.get(1).sync()  # now the peer's table of caches is here


def test_the_peers_memory_is_mapped_before_the_first_transfer(
    peer: Peer, engine: LlmDataDist
) -> None:
    link(engine, peer)
    wait_until_done()
    (arena,) = mapped(engine)
    assert (arena.nbytes, arena.writable) == (DESC.nbytes, True)
    present, here, _ = page_use(arena.address, arena.nbytes)
    assert present == DESC.nbytes
    assert here in (DESC.nbytes, None)


def test_a_cache_that_is_made_later_is_mapped_too(peer: Peer, engine: LlmDataDist) -> None:
    link(engine, peer)
    peer.run(
        "more = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1, 5));"
        "[tensor.fill(1) for tensor in datadist.arrays(more)]",
        desc=DESC,
    )
    engine._running().links.get(1).sync()
    wait_until_done()
    present = [page_use(arena.address, arena.nbytes)[0] for arena in mapped(engine)]
    assert present == [DESC.nbytes] * 2


def test_a_cache_that_is_freed_is_unmapped(peer: Peer, engine: LlmDataDist) -> None:
    link(engine, peer)
    wait_until_done()
    assert len(mapped(engine)) == 1
    peer.run("datadist.deallocate_cache(theirs)")
    engine._running().links.get(1).sync()
    wait_until_done()
    assert mapped(engine) == []


def test_the_option_off_maps_no_memory_in_advance(peer: Peer) -> None:
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize({"kvplan.populate": "off"})
        link(engine, peer)
        assert mapped(engine) == []
        mine = engine.allocate_blocks_cache(DESC)
        engine.pull_blocks(BlocksCacheKey(1), mine, [3], [5])
        (arena,) = mapped(engine)
        _, here, _ = page_use(arena.address, arena.nbytes)
        assert here is None or here < DESC.nbytes


def test_the_populating_thread_ends_with_the_engine(peer: Peer) -> None:
    desc = CacheDesc(4, (1024, 32768), DataType.DT_UINT8)  # 128 MiB, which takes a while
    inode = peer.run(
        "large = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1, 9));"
        "[tensor.fill(1) for tensor in datadist.arrays(large)];"
        "result = datadist._engine.registry.get(large.cache_id).memory._owner.allocation.inode",
        desc=desc,
    )
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize()
        link(engine, peer)
    assert num_mappings(inode) == 0
    wait_until_done()


def test_prefaulted_caches_have_huge_pages_if_the_kernel_supports_them(peer: Peer) -> None:
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize({"kvplan.prefault": "1"})
        cache = engine.allocate_blocks_cache(DESC)
        facts = smaps_of(cache.tensor_addrs[0])
        assert facts["Rss"] == DESC.nbytes
        assert facts["ShmemPmdMapped"] in (0, DESC.nbytes)


def test_filled_pages_become_huge_by_an_option() -> None:
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize({"kvplan.pages": "collapse", "kvplan.numa_node": "0"})
        cache = engine.allocate_blocks_cache(DESC)
        for array in engine.arrays(cache):
            array[:] = 3
        wait_until_done()
        facts = smaps_of(cache.tensor_addrs[0])
        if facts["ShmemPmdMapped"] == 0:
            pytest.skip("the kernel makes no huge pages of shared memory now")
        assert facts["ShmemPmdMapped"] == DESC.nbytes
        assert all((array == 3).all() for array in engine.arrays(cache))
