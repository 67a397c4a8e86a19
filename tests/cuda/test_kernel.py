"""The copy kernel, compiled for the host, compared with NumPy: sizes, alignments, blocks and stops.

Each access is checked: it must be aligned to its size and lie inside a descriptor.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.cuda.kernel import FEW, LOOK, PIECE, WARPS, Descriptors

Memory = NDArray[np.uint8]


def memories(nbytes: int) -> tuple[Memory, Memory]:
    rng = np.random.default_rng(nbytes)
    return tuple(rng.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(2))  # type: ignore[return-value]


@st.composite
def descriptors(draw: st.DrawFn, alike: bool) -> Descriptors:
    """Draw descriptors in any order on both sides, so close that overruns are detected."""
    sizes = st.one_of(
        st.integers(0, 40), st.integers(PIECE - 20, PIECE + 20), st.integers(0, 100_000)
    )
    if alike:
        chosen = [draw(sizes.filter(bool))] * draw(st.integers(1, 12))
    else:
        chosen = draw(st.lists(sizes, max_size=12))
    sides = []
    for _ in range(2):
        places, at = [0] * len(chosen), 0
        for i in draw(st.permutations(range(len(chosen)))):
            places[i] = at + draw(st.integers(0, 33))
            at = places[i] + chosen[i]
        sides.append(places)
    return Descriptors(list(zip(*sides, chosen, strict=True)))


@pytest.mark.parametrize("few", [True, False], ids=["parameters", "memory"])
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "unlike"])
@given(data=st.data(), blocks=st.integers(1, 5))
def test_the_kernel_copies_the_same_bytes_as_numpy(
    data: st.DataObject, blocks: int, alike: bool, few: bool
) -> None:
    work = data.draw(descriptors(alike))
    dst, src = memories(1 + max((max(row[:2]) + row[2] for row in work.rows), default=0))
    expected = work.expected(dst, src)
    stored = work.launch(dst, src, blocks=blocks, few=few, alike=alike)
    assert stored == sum(nbytes for _, _, nbytes in work.rows)
    np.testing.assert_array_equal(dst, expected)
    assert (work.control.begun, work.control.stop) == (1, 0)


@pytest.mark.parametrize("dst_at", range(17))
@pytest.mark.parametrize("src_at", [0, 1, 2, 4, 8, 15])
def test_all_alignments_of_both_sides_are_copied(dst_at: int, src_at: int) -> None:
    dst, src = memories(3 * PIECE)
    for nbytes in (0, 1, 15, 16, 17, 31, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5):
        work = Descriptors([(dst_at, src_at, nbytes)])
        expected = work.expected(dst, src)
        work.launch(dst, src, blocks=1, few=True)
        np.testing.assert_array_equal(dst, expected)


def test_descriptors_in_parameters_are_copied() -> None:
    dst, src = memories(FEW * 64)
    work = Descriptors([(64 * i, 64 * (FEW - 1 - i), 64) for i in range(FEW)])
    expected = work.expected(dst, src)
    work.launch(dst, src, blocks=3, few=True)
    np.testing.assert_array_equal(dst, expected)


def test_any_number_of_blocks_moves_each_byte_once() -> None:
    dst, src = memories(40 * PIECE)
    rows = [(0, 0, 17 * PIECE), (17 * PIECE, 17 * PIECE, 100), (20 * PIECE, 20 * PIECE, 20 * PIECE)]
    for blocks in (1, 2, 4, 5, 6, 100):
        work = Descriptors(rows)
        dst[:] = 0
        expected = work.expected(dst, src)
        assert work.launch(dst, src, blocks=blocks, few=False) == 37 * PIECE + 100
        np.testing.assert_array_equal(dst, expected)


def test_a_launch_that_is_stopped_before_it_begins_touches_no_memory() -> None:
    dst, src = memories(4 * PIECE)
    work = Descriptors([(0, 0, 4 * PIECE)])
    before = dst.copy()
    work.control.stop = 1
    assert work.launch(dst, src, blocks=3, few=True) == 0
    np.testing.assert_array_equal(dst, before)
    assert work.control.begun == 1


def test_a_stopped_warp_copies_at_most_about_256_kib_more() -> None:
    dst, src = memories(8 << 20)
    work = Descriptors([(0, 0, 8 << 20)])
    # The later blocks begin when the stop is already requested.
    stored = work.launch(dst, src, blocks=4, few=True, stop_at=1)
    assert 0 < stored <= WARPS * (LOOK + PIECE)
    assert work.launch(dst, src, blocks=4, few=True) == 0, "it was told before"


def test_a_launch_is_stopped_in_the_midst_of_a_block() -> None:
    dst, src = memories(8 << 20)
    work = Descriptors([(0, 0, 8 << 20)])
    stop_nbytes = 3 * (8 << 20) // 4
    stored = work.launch(dst, src, blocks=1, few=False, stop_at=stop_nbytes)
    assert stop_nbytes <= stored <= stop_nbytes + WARPS * (LOOK + PIECE)
