"""Pages of arenas: populated if they exist, made huge, counted, placed on a node."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvnative._host import Arena, PageWalk, page_use
from tests.support.smaps import nodes_of, smaps_of

MIB = 1 << 20
CHUNK = 2 * MIB
STEP = MIB // 2
FOREVER_S = 60.0


def twin_of(arena: Arena) -> Arena:
    """Map an arena a second time, as a peer does."""
    return Arena.of_peer(os.getpid(), arena.fd, arena.inode, arena.nbytes, writable=True)


def allocated(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def mapped(arena: Arena) -> int:
    return smaps_of(arena.address)["Rss"]


def huge_pages_work() -> bool:
    """Return whether this kernel makes huge pages of shared memory on request."""
    with Arena(2 * CHUNK, prefault=True) as arena:
        return smaps_of(arena.address)["ShmemPmdMapped"] == 2 * CHUNK


needs_huge_pages = pytest.mark.skipif(
    not huge_pages_work(), reason="the kernel makes no huge pages of shared memory now"
)


class TestPopulating:
    @pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, 5 * MIB + 3 * mmap.PAGESIZE + 17])
    def test_existing_pages_are_mapped(self, nbytes: int) -> None:
        arena = Arena(nbytes, prefault=True, pages="small")
        twin, walk = twin_of(arena), PageWalk(nbytes)
        assert mapped(twin) == 0
        assert walk.advance(twin, FOREVER_S) == mapped(twin) == allocated(arena)
        assert walk.is_pass_over
        assert walk.is_complete

    def test_holes_stay_holes(self) -> None:
        arena = Arena(3 * CHUNK)
        array = np.frombuffer(arena, np.uint8)
        for start, size in ((0, 1), (CHUNK - 5, 10), (2 * CHUNK + MIB, MIB)):
            array[start : start + size] = 7
        before = allocated(arena)
        twin, walk = twin_of(arena), PageWalk(arena.nbytes)
        assert walk.advance(twin, FOREVER_S) == before == mapped(twin)
        assert allocated(arena) == before == 3 * mmap.PAGESIZE + MIB
        assert walk.is_pass_over
        assert not walk.is_complete

    def test_later_pages_are_found_by_the_next_pass(self) -> None:
        arena = Arena(2 * CHUNK)
        twin, walk = twin_of(arena), PageWalk(arena.nbytes)
        assert walk.advance(twin, FOREVER_S) == 0
        np.frombuffer(arena, np.uint8)[CHUNK:] = 1
        assert walk.advance(twin, FOREVER_S) == 0, "the pass is over"
        walk.again()
        assert walk.advance(twin, FOREVER_S) == CHUNK
        np.frombuffer(arena, np.uint8)[: mmap.PAGESIZE] = 1
        walk.again()
        assert walk.advance(twin, FOREVER_S) == mmap.PAGESIZE
        np.frombuffer(arena, np.uint8)[:] = 1
        walk.again()
        assert walk.advance(twin, FOREVER_S) == CHUNK - mmap.PAGESIZE
        assert walk.is_complete
        assert mapped(twin) == allocated(arena) == 2 * CHUNK

    def test_pages_that_were_populated_are_written_without_a_fault(self) -> None:
        arena = Arena(CHUNK, prefault=True, pages="small")
        twin = twin_of(arena)
        PageWalk(CHUNK).advance(twin, FOREVER_S)
        before = mapped(twin)
        np.frombuffer(twin, np.uint8)[:] = 3
        assert (np.frombuffer(arena, np.uint8) == 3).all()
        assert mapped(twin) == before == CHUNK

    def test_a_walk_takes_turns(self) -> None:
        arena = Arena(8 * CHUNK, prefault=True, pages="small")
        twin, walk = twin_of(arena), PageWalk(arena.nbytes)
        turns = 0
        while not walk.is_pass_over:
            assert walk.advance(twin, 1e-9) == STEP, "at least one step, and no more"
            turns += 1
        assert turns == 8 * CHUNK // STEP

    def test_a_stopped_walk_does_nothing(self) -> None:
        arena = Arena(CHUNK, prefault=True)
        twin, walk = twin_of(arena), PageWalk(CHUNK)
        walk.stop()
        assert walk.stopped
        assert walk.advance(twin, FOREVER_S) == 0
        assert mapped(twin) == 0

    def test_another_arena_is_refused(self) -> None:
        arena, walk = Arena(CHUNK), PageWalk(2 * CHUNK)
        with pytest.raises(
            ValueError, match=f"arena has {CHUNK} bytes; the walk is of {2 * CHUNK}"
        ):
            walk.advance(arena, 1)
        arena.close()
        with pytest.raises(ValueError, match="closed"):
            PageWalk(CHUNK).advance(arena, 1)


class TestHugePages:
    @pytest.mark.parametrize("nbytes", [CHUNK, 5 * MIB])
    def test_arenas_begin_where_a_huge_page_can(self, nbytes: int) -> None:
        arena = Arena(nbytes)
        twin = twin_of(arena)
        assert arena.address % CHUNK == twin.address % CHUNK == 0

    @needs_huge_pages
    def test_prefaulted_pages_are_huge_here_and_in_the_peer(self) -> None:
        arena = Arena(2 * CHUNK + MIB, prefault=True)
        assert not np.frombuffer(arena, np.uint8).any()
        assert allocated(arena) == mapped(arena) == arena.nbytes
        assert smaps_of(arena.address)["ShmemPmdMapped"] == 2 * CHUNK
        twin, walk = twin_of(arena), PageWalk(arena.nbytes)
        walk.advance(twin, FOREVER_S)
        assert smaps_of(twin.address)["ShmemPmdMapped"] == 2 * CHUNK
        assert mapped(twin) == arena.nbytes

    def test_an_option_selects_small_pages(self) -> None:
        with Arena(2 * CHUNK, prefault=True, pages="small") as arena:
            assert arena.pages == "small"
            assert mapped(arena) == arena.nbytes
            assert smaps_of(arena.address)["ShmemPmdMapped"] == 0

    @needs_huge_pages
    def test_complete_ranges_become_huge_pages(self) -> None:
        arena = Arena(3 * CHUNK)
        array = np.frombuffer(arena, np.uint8)
        array[: 2 * CHUNK - mmap.PAGESIZE] = 5
        walk = PageWalk(arena.nbytes, collapse=True)
        assert walk.advance(arena, FOREVER_S) == CHUNK
        assert not walk.is_complete
        assert allocated(arena) == 2 * CHUNK - mmap.PAGESIZE, "nothing was allocated"
        array[CHUNK:] = 6
        walk.again()
        assert walk.advance(arena, FOREVER_S) == 2 * CHUNK
        assert walk.is_complete
        assert smaps_of(arena.address)["ShmemPmdMapped"] == 3 * CHUNK
        assert (array[:CHUNK] == 5).all()
        assert (array[CHUNK:] == 6).all()

    def test_unknown_pages_are_refused(self) -> None:
        with pytest.raises(ValueError, match="pages is 'large'; it must be one of 'auto', 'small'"):
            Arena(CHUNK, pages="large")


def reserved() -> tuple[int, int]:
    """Return the number of free huge pages of hugetlbfs, and the size of one."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":") for line in lines)
    free = int(fields.get("HugePages_Free", "0")) - int(fields.get("HugePages_Rsvd", "0"))
    return free, int(fields.get("Hugepagesize", "0 kB").split()[0]) * 1024


class TestHugetlb:
    def test_without_reserved_pages_the_error_says_what_to_do(self) -> None:
        free, page = reserved()
        if not page:
            pytest.skip("this kernel has no hugetlbfs")
        wanted = (free + 3) * page
        with pytest.raises(MemoryError) as caught:
            Arena(wanted - 1, pages="hugetlb")
        assert f"an arena of {wanted} bytes needs {free + 3} huge pages" in str(caught.value)
        assert "sysctl vm.nr_hugepages" in str(caught.value)
        assert reserved() == (free, page), "nothing is left taken"

    @pytest.mark.skipif(reserved()[0] < 2, reason="needs vm.nr_hugepages of 2")
    def test_a_peer_maps_the_whole_arena(self) -> None:
        _, page = reserved()
        arena = Arena(page + 1, pages="hugetlb")
        assert (arena.nbytes, arena.pages) == (2 * page, "hugetlb")
        twin = twin_of(arena)
        assert twin.pages == "hugetlb"
        np.frombuffer(twin, np.uint8)[:] = 9
        assert (np.frombuffer(arena, np.uint8) == 9).all()
        assert page_use(twin.address, twin.nbytes)[0] == 2 * page
        assert smaps_of(twin.address)["KernelPageSize"] == page

    @pytest.mark.skipif(reserved()[0] < 2, reason="needs vm.nr_hugepages of 2")
    def test_an_arena_with_a_missing_page_is_not_mapped(self) -> None:
        _, page = reserved()
        fd = os.memfd_create("holes", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, page)
            with pytest.raises(ValueError, match="some of its huge pages are missing"):
                Arena.of_peer(os.getpid(), fd, os.fstat(fd).st_ino, page, writable=True)
        finally:
            os.close(fd)


class TestLooking:
    def test_page_use_agrees_with_smaps(self) -> None:
        arena = Arena(3 * CHUNK)
        array = np.frombuffer(arena, np.uint8)
        array[:MIB] = 1
        array[CHUNK : CHUNK + 3] = 1
        twin = twin_of(arena)
        there = MIB + mmap.PAGESIZE
        assert page_use(twin.address, twin.nbytes)[0] == there
        assert page_use(twin.address + CHUNK - 1, 2)[0] == mmap.PAGESIZE
        for item in (arena, twin):
            present, here, huge = page_use(item.address, item.nbytes)
            facts = smaps_of(item.address)
            assert present == there
            if here is not None:
                assert (here, huge) == (facts["Rss"], facts["ShmemPmdMapped"])

    def test_any_memory_can_be_inspected(self) -> None:
        with mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE) as memory:
            array = np.frombuffer(memory, np.uint8)
            array[mmap.PAGESIZE] = 1
            assert page_use(array.ctypes.data, array.nbytes)[0] == mmap.PAGESIZE
            del array

    def test_memory_that_is_not_mapped_is_refused(self) -> None:
        arena = Arena(CHUNK)
        address = arena.address
        arena.close()
        with pytest.raises(ValueError, match="not all of it is mapped"):
            page_use(address, CHUNK)

    @pytest.mark.parametrize(
        ("address", "nbytes"), [(2**64 - 1, 2), (2**64 - 4096, 4096), (4096, 2**64 - 1)]
    )
    def test_a_range_beyond_all_addresses_is_refused(self, address: int, nbytes: int) -> None:
        with pytest.raises(ValueError, match="not all of it is mapped"):
            page_use(address, nbytes)


class TestNode:
    def test_memory_of_node_0(self) -> None:
        try:
            arena = Arena(CHUNK, prefault=True, node=0)
        except OSError as error:
            pytest.skip(str(error))  # a kernel without NUMA, or a sandbox
        assert nodes_of(arena.address) <= {0}

    @pytest.mark.parametrize(("node", "why"), [(1023, "no such node"), (1024, r"in \[0, 1024\)")])
    def test_others_are_refused(self, node: int, why: str) -> None:
        with pytest.raises((ValueError, OSError), match=why):
            Arena(CHUNK, node=node)
