"""check_memory asks the kernel about a range without touching it."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnative._host import Pin, check_memory, check_ranges

PAGE = mmap.PAGESIZE
NUM_PAGES = 8
PLACE = 1 << 45  # the system places mappings far above, so no other thread fills a hole here

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

NONE, READ, WRITE = mmap.PROT_READ & 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
ANONYMOUS, FIXED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10


def _kernel_answers_queries() -> bool:
    here = np.zeros(1)
    try:
        check_memory(here.ctypes.data, 8, via="query")
    except OSError:
        return False
    return True


@pytest.fixture(
    params=[
        "auto",
        "text",
        pytest.param(
            "query",
            marks=pytest.mark.skipif(
                not _kernel_answers_queries(), reason="PROCMAP_QUERY came with Linux 6.11"
            ),
        ),
    ]
)
def via(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pages() -> int:
    """Address of NUM_PAGES reserved pages for the tests of this file."""
    return libc.mmap(PLACE, NUM_PAGES * PAGE, NONE, ANONYMOUS, -1, 0)


def lay_out(pages: int, protections: list[int | None]) -> None:
    """Give each page its protection; None: unmapped."""
    for i, protection in enumerate(protections):
        at = pages + i * PAGE
        if protection is None:
            assert libc.munmap(at, PAGE, 0) == 0
        else:
            assert libc.mmap(at, PAGE, protection, ANONYMOUS | FIXED, -1, 0) == at


@given(
    protections=st.lists(
        st.sampled_from([None, NONE, READ, WRITE]), min_size=NUM_PAGES, max_size=NUM_PAGES
    ),
    offset=st.integers(0, NUM_PAGES * PAGE - 1),
    nbytes=st.integers(1, NUM_PAGES * PAGE),
    writable=st.booleans(),
)
def test_every_byte_counts(
    pages: int, protections: list[int | None], offset: int, nbytes: int, writable: bool
) -> None:
    nbytes = min(nbytes, NUM_PAGES * PAGE - offset)
    lay_out(pages, protections)
    touched = protections[offset // PAGE : (offset + nbytes - 1) // PAGE + 1]
    fits = all(item == WRITE if writable else item in (READ, WRITE) for item in touched)
    for via in ("auto", "text"):
        try:
            check_memory(pages + offset, nbytes, writable, via=via)
        except ValueError:
            assert not fits
        else:
            assert fits
    lay_out(pages, [NONE] * NUM_PAGES)  # keep the holes from other mappings


@pytest.mark.parametrize(
    ("protection", "flaw"), [(None, "not mapped"), (NONE, "not readable"), (READ, "not writable")]
)
def test_the_hole_is_named(pages: int, via: str, protection: int | None, flaw: str) -> None:
    lay_out(pages, [WRITE, WRITE, protection, protection, *[WRITE] * 4])
    start, nbytes = pages + 100, 5 * PAGE
    with pytest.raises(ValueError, match=flaw) as refused:
        check_memory(start, nbytes, True, via=via)
    lay_out(pages, [NONE] * NUM_PAGES)
    for part in (f"{start:#x}", f"nbytes {nbytes}", f"{pages + 2 * PAGE:#x}-{pages + 4 * PAGE:#x}"):
        assert part in str(refused.value)


@given(
    protections=st.lists(
        st.sampled_from([None, NONE, READ, WRITE]), min_size=NUM_PAGES, max_size=NUM_PAGES
    ),
    ranges=st.lists(
        st.tuples(st.integers(0, NUM_PAGES * PAGE - 1), st.integers(1, 2 * PAGE)), max_size=5
    ),
    writable=st.booleans(),
)
def test_many_ranges_have_the_results_of_single_ones(
    pages: int, protections: list[int | None], ranges: list[tuple[int, int]], writable: bool
) -> None:
    addresses = [pages + offset for offset, _ in ranges]
    sizes = [min(nbytes, NUM_PAGES * PAGE - offset) for offset, nbytes in ranges]
    lay_out(pages, protections)
    for via in ("auto", "text"):
        alone = ""
        for i, (address, nbytes) in enumerate(zip(addresses, sizes, strict=True)):
            try:
                check_memory(address, nbytes, writable, via=via)
            except ValueError as error:
                alone = f"tensor {7 + i}: {error}"
                break
        together = ""
        columns = (np.array(column, np.uint64) for column in (addresses, sizes))
        try:
            check_ranges(*columns, writable, name="tensor", first=7, via=via)
        except ValueError as error:
            together = str(error)
        assert together == alone
    lay_out(pages, [NONE] * NUM_PAGES)


def test_ranges_are_columns_of_one_length() -> None:
    ones, two = np.ones(1, np.uint64), np.ones(2, np.uint64)
    with pytest.raises(ValueError, match="nbytes: expected 1 items, as in addresses, got 2"):
        check_ranges(ones, two)
    for columns in ((ones, np.ones(1)), (np.ones(1), ones)):
        with pytest.raises(TypeError, match="expected uint64"):
            check_ranges(*columns)  # type: ignore[arg-type]


def test_a_file_mapping_past_the_end_of_its_file(via: str) -> None:
    """A load there raises SIGBUS, although the page table allows it."""
    fd = os.memfd_create("truncated")
    os.ftruncate(fd, 4 * PAGE)
    with mmap.mmap(fd, 4 * PAGE) as mapped:
        pin = Pin(mapped)
        check_memory(pin.address, 4 * PAGE, True, via=via)
        os.ftruncate(fd, 2 * PAGE)
        check_memory(pin.address, 2 * PAGE, True, via=via)
        with pytest.raises(ValueError, match="past the file's end"):
            check_memory(pin.address, 4 * PAGE, via=via)
        pin.release()
    os.close(fd)


@pytest.mark.parametrize(
    ("address", "nbytes", "message"),
    [
        (PAGE, 0, "nbytes is 0"),
        (2**64 - 4, 8, "past the end of the address space"),
        (0, 8, "not mapped"),
        (2**64 - 8, 8, "past the end of the address space|not mapped|not readable|reached"),
        (-1, 8, "address is -1"),
        (PAGE, 2**64, f"nbytes is {2**64}"),
        (PAGE, -5, "nbytes is -5"),
    ],
)
def test_numbers_that_cannot_be_a_range(via: str, address: int, nbytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_memory(address, nbytes, via=via)


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match="via is 'guess'"):
        check_memory(0, 1, via="guess")  # type: ignore[arg-type]
