"""Batches cut into messages: every byte once, within the limits, in a range of the peer's."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_bool, c_uint32, c_uint64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.ucx.hostile import NATIVE, build

Column = NDArray[np.uint64]
WORDS = POINTER(c_uint64)


class Range(Structure):
    _fields_ = (("generation", c_uint64), ("slot", c_uint32), ("reserved", c_uint32))


class Piece(Structure):
    _fields_ = (("address", c_uint64), ("nbytes", c_uint32), ("range", c_uint32))


class Remote(Structure):
    _fields_ = (
        *((name, WORDS) for name in ("addresses", "nbytes")),
        ("ranges", POINTER(Range)),
        ("marks", WORDS),
        ("epoch", c_uint64),
        ("count", c_uint32),
        ("last", c_uint32),
    )


class Batch(Structure):
    _fields_ = (
        *((name, WORDS) for name in ("local", "remote", "nbytes")),
        ("count", c_uint64),
    )


class Cursor(Structure):
    _fields_ = (("index", c_uint64), ("skip", c_uint64))


class Limits(Structure):
    _fields_ = (("pieces", c_uint32), ("ranges", c_uint32), ("nbytes", c_uint32))


class Section(Structure):
    _fields_ = (
        ("begin", Cursor),
        ("last_end", c_uint64),
        ("nbytes", c_uint64),
        ("num_pieces", c_uint32),
        ("num_ranges", c_uint32),
    )


def column(values: list[int]) -> Column:
    return np.array(values, dtype=np.uint64)


def words(array: Column) -> object:
    return array.ctypes.data_as(WORDS)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = build(tmp_path_factory.mktemp("cut"), NATIVE / "ucx_cut.c")
    library.kvn_ucx_cut.restype = library.kvn_ucx_scatter.restype = c_bool
    library.kvn_ucx_remote_find.restype = c_uint32
    library.kvn_ucx_remote_find.argtypes = [POINTER(Remote), c_uint32, c_uint64, c_uint64]
    return library


def remote_of(calls: ctypes.CDLL, ranges: list[tuple[int, int]]) -> Remote:
    """Ranges of (address, nbytes); the slot of each is its place in the list."""
    remote = Remote()
    slots = column(list(range(len(ranges))))
    generations = slots + np.uint64(100)
    addresses, sizes = (column([it[k] for it in ranges]) for k in (0, 1))
    columns = [words(it) for it in (slots, generations, addresses, sizes)]
    assert calls.kvn_ucx_remote_init(byref(remote), *columns, c_uint64(len(ranges))) == 0
    return remote


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30),
    most=st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 60)),
    width=st.integers(50, 130),
    seed=st.integers(0, 99),
)
def test_every_byte_once(
    calls: ctypes.CDLL, sizes: list[int], most: tuple[int, int, int], width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Each descriptor lies in a range of the peer's of its own size class; ranges touch.
    homes = [int(it) for it in rng.integers(0, 6, len(sizes))]
    starts = [1000 + home * width + int(rng.integers(0, width - 49)) for home in homes]
    slots = [1000 + k * width for k in rng.permutation(6).tolist()]
    remote = remote_of(calls, [(start, width) for start in slots])
    source = rng.integers(0, 256, 1000 + 6 * width, dtype=np.uint8)
    target = np.zeros(sum(sizes) + 1, dtype=np.uint8)
    places = np.cumsum([0, *sizes])[:-1].astype(np.uint64) + np.uint64(target.ctypes.data)
    there, nbytes = column(starts), column(sizes)
    batch = Batch(words(places), words(there), words(nbytes), len(sizes))
    at, limits = Cursor(), Limits(*most)
    pieces, ranges = (Piece * most[0])(), (Range * most[1])()
    while at.index < len(sizes):
        section = Section()
        before = (at.index, at.skip)
        assert calls.kvn_ucx_cut(
            byref(remote), byref(batch), byref(at), byref(limits), pieces, ranges, byref(section)
        )
        assert (at.index, at.skip) > before == (section.begin.index, section.begin.skip)
        assert 1 <= section.num_pieces <= most[0]
        assert section.num_ranges <= most[1]
        assert section.nbytes == sum(it.nbytes for it in pieces[: section.num_pieces]) <= most[2]
        arrived = b""
        for it in pieces[: section.num_pieces]:
            if it.nbytes:
                assert it.range < section.num_ranges
                home = ranges[it.range].slot
                first = slots[home]
                assert first <= it.address <= first + width - it.nbytes
                assert ranges[it.range].generation == ranges[it.range].slot + 100
            arrived += source[it.address : it.address + it.nbytes].tobytes()
        # In two messages, as it may come.
        half = len(arrived) // 2
        skip, piece = half, 0
        while skip >= pieces[piece].nbytes and piece + 1 < section.num_pieces:
            skip -= pieces[piece].nbytes
            piece += 1
        for where, offset, chunk in [(0, 0, arrived[:half]), (piece, skip, arrived[half:])]:
            assert calls.kvn_ucx_scatter(
                byref(batch),
                byref(section),
                c_uint32(where),
                c_uint32(offset),
                chunk,
                ctypes.c_size_t(len(chunk)),
                ctypes.memmove,
            )
        # One byte more is refused.
        assert not calls.kvn_ucx_scatter(
            byref(batch),
            byref(section),
            c_uint32(0),
            c_uint32(0),
            arrived + b"x",
            ctypes.c_size_t(len(arrived) + 1),
            ctypes.memmove,
        )
    expected = b"".join(
        source[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True)
    )
    assert target.tobytes() == expected + b"\0"
    calls.kvn_ucx_remote_fini(byref(remote))


@given(
    ranges=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), max_size=8),
    wanted=st.tuples(st.integers(0, 160), st.integers(0, 40)),
    near=st.integers(0, 9),
)
def test_the_range_of_an_address(
    calls: ctypes.CDLL, ranges: list[tuple[int, int]], wanted: tuple[int, int], near: int
) -> None:
    """Ranges may overlap, lie in one another, or be the same."""
    remote = remote_of(calls, ranges)
    first, last = wanted[0], wanted[0] + wanted[1]
    fits = [start <= first and last <= start + size for start, size in ranges]
    found = calls.kvn_ucx_remote_find(byref(remote), near, *wanted)
    if any(fits):
        assert fits[remote.ranges[found].slot]
    else:
        assert found == len(ranges)
    calls.kvn_ucx_remote_fini(byref(remote))


def test_a_descriptor_that_lies_nowhere(calls: ctypes.CDLL) -> None:
    remote = remote_of(calls, [(1000, 100), (1100, 100)])
    local, there, nbytes = column([1, 2]), column([1000, 1090]), column([8, 20])  # across two
    batch = Batch(words(local), words(there), words(nbytes), 2)
    at, limits, section = Cursor(), Limits(9, 9, 900), Section()
    pieces, ranges = (Piece * 9)(), (Range * 9)()
    arguments = (byref(remote), byref(batch), byref(at), byref(limits), pieces, ranges)
    assert calls.kvn_ucx_cut(*arguments, byref(section))
    assert (section.num_pieces, at.index) == (1, 1)
    assert not calls.kvn_ucx_cut(*arguments, byref(section))
    assert at.index == 1
    calls.kvn_ucx_remote_fini(byref(remote))
