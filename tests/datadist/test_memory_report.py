"""Memory of peers is mapped after linking, before the first transfer; and what pages it has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvplan import BlocksCacheKey, CacheDesc, ClusterInfo, DataType, LlmDataDist, LlmRole
from kvplan.engine.memory_report import _parts, memory_report
from kvplan.status import LLMStatusCode
from tests.datadist.peer import Peer
from tests.support.refusals import refused
from tests.support.smaps import num_mappings, smaps_of

DESC = CacheDesc(4, (64, 32768), DataType.DT_UINT8)  # 8 MiB
DEADLINE_S = 60.0
MIB = 1 << 20
FILLED = """
    theirs = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1))
    for tensor in datadist.arrays(theirs): tensor[:] = 7
"""


def wait_until_done() -> None:
    """The thread that populates ends when nothing is left to do."""
    for thread in threading.enumerate():
        if thread.name == "kvplan-pages":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with closing(Peer()) as it:
        it.run(FILLED, desc=DESC)
        yield it


@pytest.fixture
def engine() -> Iterator[LlmDataDist]:
    with LlmDataDist(2, LlmRole.DECODER) as it:
        it.initialize()
        yield it


def link(engine: LlmDataDist, peer: Peer) -> None:
    engine.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=10_000).raise_for_status()

    engine._running().links.get(1).sync()  # its table of caches is here


def test_the_peers_memory_is_mapped_before_the_first_transfer(
    peer: Peer, engine: LlmDataDist
) -> None:
    link(engine, peer)
    wait_until_done()
    (mapped,) = memory_report(engine).peers
    assert (mapped.cluster_id, mapped.writable) == (1, True)
    assert mapped.use is not None
    assert mapped.use.nbytes == mapped.use.resident == DESC.nbytes
    assert mapped.use.mapped in (DESC.nbytes, None)


def test_a_cache_that_is_made_later_is_mapped_too(peer: Peer, engine: LlmDataDist) -> None:
    link(engine, peer)
    peer.run(
        "more = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1, 5));"
        "[tensor.fill(1) for tensor in datadist.arrays(more)]",
        desc=DESC,
    )
    engine._running().links.get(1).sync()
    wait_until_done()
    uses = [it.use for it in memory_report(engine).peers]
    assert [it and it.resident for it in uses] == [DESC.nbytes] * 2


def test_a_cache_that_is_freed_is_unmapped(peer: Peer, engine: LlmDataDist) -> None:
    link(engine, peer)
    wait_until_done()
    assert len(memory_report(engine).peers) == 1
    peer.run("datadist.deallocate_cache(theirs)")
    engine._running().links.get(1).sync()
    wait_until_done()
    assert memory_report(engine).peers == ()


def test_off_maps_nothing_ahead(peer: Peer) -> None:
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize({"kvplan.populate": "off"})
        link(engine, peer)
        assert memory_report(engine).peers == ()
        mine = engine.allocate_blocks_cache(DESC)
        engine.pull_blocks(BlocksCacheKey(1), mine, [3], [5])
        (mapped,) = memory_report(engine).peers
        assert mapped.use is not None
        if mapped.use.mapped is not None:
            assert mapped.use.mapped < DESC.nbytes


def test_it_ends_with_the_engine(peer: Peer) -> None:
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


def test_a_report_is_as_the_kernel_says(engine: LlmDataDist) -> None:
    cache = engine.allocate_blocks_cache(DESC)
    arrays = engine.arrays(cache)
    arrays[1][:] = 1
    registered = engine.register_blocks_cache(DESC, list(np.ones((4, 64, 32768), np.uint8)))
    report = memory_report(engine)
    assert [it.cache_id for it in report.caches] == [cache.cache_id, registered.cache_id]
    assert [it.allocated for it in report.caches] == [True, False]
    own, theirs = (it.use for it in report.caches)
    assert own is not None
    assert theirs is not None
    facts = smaps_of(cache.tensor_addrs[0])
    assert own.resident == facts["Rss"]
    assert DESC.tensor_nbytes <= own.resident < 2 * DESC.tensor_nbytes
    assert own.mapped in (facts["Rss"], None)
    assert own.huge in (facts["ShmemPmdMapped"], None)
    assert own.is_exact
    assert theirs.resident >= DESC.nbytes
    lines = str(report).splitlines()
    assert lines[0].split() == [
        "memory",
        "bytes",
        "resident",
        "mapped",
        "here",
        "pages",
        "NUMA",
        "nodes",
    ]
    assert lines[1].startswith("cache 1 (DEVICE, allocated)")
    assert "8.0 MiB" in lines[1]
    assert "2.0 MiB" in lines[1]
    assert lines[2].startswith("cache 2 (DEVICE, registered)")


def test_prefaulted_caches_are_huge_where_the_kernel_can(peer: Peer) -> None:
    with LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize({"kvplan.prefault": "1"})
        cache = engine.allocate_blocks_cache(DESC)
        (own,) = memory_report(engine).caches
        assert own.use is not None
        assert own.use.resident == DESC.nbytes
        huge = smaps_of(cache.tensor_addrs[0])["ShmemPmdMapped"]
        assert own.use.huge in (huge, None)
        if own.use.huge is not None:
            assert own.use.pages == ("huge" if huge else "4 KiB")


def test_what_fills_becomes_huge_where_that_is_asked_for() -> None:
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


def test_of_much_memory_even_parts_are_looked_at(engine: LlmDataDist) -> None:
    desc = CacheDesc(1, (4, 1 << 30), DataType.DT_UINT8)  # 4 GiB, half of which is looked at
    cache = engine.allocate_blocks_cache(desc)
    engine.arrays(cache)[0][:, : 16 << 20] = 1
    (found,) = memory_report(engine).caches
    assert found.use is not None
    assert not found.use.is_exact
    assert 0 < found.use.resident < 256 << 20
    assert "~" in str(memory_report(engine))


@pytest.mark.parametrize(("count", "nbytes"), [(4000, MIB), (3000, 3 * MIB), (3, 4 << 30)])
def test_the_parts_come_to_their_share_however_small_the_ranges(count: int, nbytes: int) -> None:
    ranges = [(2 * nbytes * it, nbytes) for it in range(count)]
    parts = list(_parts(ranges, 0.125))
    assert abs(sum(size for _, size in parts) - count * nbytes / 8) <= 4 * MIB
    assert parts[0][0] == 0
    assert parts[-1][0] >= ranges[-1][0] - 64 * nbytes, "evenly"
    for start, size in parts:
        assert any(at <= start <= start + size <= at + nbytes for at, nbytes in ranges)


def test_it_needs_an_engine() -> None:
    with refused(LLMStatusCode.LLM_FAILED, "not initialized"):
        memory_report(LlmDataDist(2, LlmRole.DECODER))
