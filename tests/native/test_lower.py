"""Lowering compared with NumPy's broadcasting, and all its refusals."""

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvnative._lower import Descriptors, lower

Column = NDArray[np.uint64]
Recipe = dict[str, Any]  # keyword arguments of lower(), mostly columns
TOP = 2**64 - 1


def u64(*values: int) -> Column:
    return np.array(values, dtype=np.uint64)


# Two segments of three tensor pairs, of which most tests below change one argument.
RECIPE: Recipe = {
    "src_offsets": u64(0, 64),
    "dst_offsets": u64(128, 32),
    "nbytes": u64(16, 8),
    "src_bases": u64(1000, 2000, 3000),
    "dst_bases": u64(70000, 80000, 90000),
}


def lower_with(**changed: Any) -> Descriptors:
    return lower(**{**RECIPE, **changed})


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Draw recipes of 0 to 9 pairs x 0 to 70 segments over the whole range of addresses."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pairs, segments = draw(st.integers(0, 9)), draw(st.integers(0, 70))
    high = draw(st.sampled_from([2**10, 2**40, 2**62]))

    def column(length: int, low: int, top: int) -> Column:
        return rng.integers(low, top, size=length, dtype=np.uint64, endpoint=True)

    return {
        "src_offsets": column(segments, 0, high),
        "dst_offsets": column(segments, 0, high),
        "nbytes": column(segments, 1, min(high, 2**52)),
        "src_bases": column(pairs, 0, 2**63),
        "dst_bases": column(pairs, 0, 2**63),
    }


def expected_columns(recipe: Recipe) -> tuple[Column, Column, Column]:
    dst = recipe["dst_bases"][:, None] + recipe["dst_offsets"]
    src = recipe["src_bases"][:, None] + recipe["src_offsets"]
    return dst.ravel(), src.ravel(), np.tile(recipe["nbytes"], len(recipe["src_bases"]))


@given(recipes())
def test_columns_are_numpys_broadcast(recipe: Recipe) -> None:
    dst, src, nbytes = expected_columns(recipe)
    descriptors = lower(**recipe)
    np.testing.assert_array_equal(descriptors.dst, dst)
    np.testing.assert_array_equal(descriptors.src, src)
    np.testing.assert_array_equal(descriptors.nbytes, nbytes)
    assert len(descriptors) == descriptors.count == len(dst)
    assert descriptors.total_nbytes == int(nbytes.sum())


@given(st.lists(recipes(), max_size=5))
def test_a_reused_buffer_gives_the_same(recipe_list: list[Recipe]) -> None:
    out = Descriptors()
    for recipe in recipe_list:
        assert lower(**recipe, out=out) is out
        fresh = lower(**recipe)
        for name in ("dst", "src", "nbytes"):
            np.testing.assert_array_equal(getattr(out, name), getattr(fresh, name))


@given(recipes())
def test_the_callers_own_descriptors_are_copied(recipe: Recipe) -> None:
    dst, src, nbytes = expected_columns(recipe)
    descriptors = Descriptors.from_columns(dst, src, nbytes)
    np.testing.assert_array_equal(descriptors.dst, dst)
    np.testing.assert_array_equal(descriptors.src, src)
    np.testing.assert_array_equal(descriptors.nbytes, nbytes)


@given(st.lists(recipes(), max_size=4))
def test_arrays_are_joined_one_after_another(recipe_list: list[Recipe]) -> None:
    parts = [lower(**recipe) for recipe in recipe_list]
    joined = Descriptors.joined(parts)
    assert joined.count == sum(part.count for part in parts)
    assert joined.total_nbytes == sum(part.total_nbytes for part in parts)
    for name in ("dst", "src", "nbytes"):
        columns = [getattr(part, name).tolist() for part in parts]
        assert getattr(joined, name).tolist() == [item for column in columns for item in column]


def test_impossible_joins_are_refused() -> None:
    part = lower_with()
    for wrong in (None, part.dst, 3):
        with pytest.raises(TypeError):
            Descriptors.joined([part, wrong])  # type: ignore[list-item]
    most = Descriptors.from_columns(u64(0), u64(0), u64(2**64 - 1))
    with pytest.raises(OverflowError, match="total of bytes"):
        Descriptors.joined([most, part])
    lower_with(out=part)  # no task holds it any more


def test_columns_start_on_cache_lines() -> None:
    descriptors = lower_with()
    for column in (descriptors.dst, descriptors.src, descriptors.nbytes):
        assert column.ctypes.data % 64 == 0


def test_empty_columns_are_lowered() -> None:
    none = u64()
    descriptors = lower_with(src_offsets=none, dst_offsets=none, nbytes=none)
    assert (len(descriptors), descriptors.total_nbytes) == (0, 0)
    assert len(lower_with(src_bases=none, dst_bases=none)) == 0


def test_new_descriptors_are_empty() -> None:
    assert (len(Descriptors()), len(Descriptors().dst)) == (0, 0)


# --- columns from Python ----------------------------------------------------------------------


@pytest.mark.parametrize("argument", RECIPE)
def test_only_native_contiguous_uint64_is_accepted(argument: str) -> None:
    column = RECIPE[argument]
    for wrong in (
        column.astype(np.int64),
        column.astype(np.uint32),
        column.astype(np.float64),
        column.astype(">u8"),
        column.view("V8"),
        column.tolist(),
        None,
    ):
        with pytest.raises(TypeError, match=f"^{argument}: expected"):
            lower_with(**{argument: wrong})
    for wrong in (np.repeat(column, 2)[::2], column[::-1], column[None], np.uint64(1)):
        with pytest.raises((TypeError, ValueError), match=f"^{argument}: expected"):
            lower_with(**{argument: wrong})


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"^dst_offsets: expected 2 items, as in nbytes, got 1$"):
        lower_with(dst_offsets=u64(0))
    with pytest.raises(ValueError, match=r"^dst_bases: expected 3 items, as in src_bases, got 2$"):
        lower_with(dst_bases=u64(0, 1))


# --- overflow ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nbytes": u64(16, 0)}, "nbytes[1] = 0: expected at least 1 byte"),
        (
            {"src_offsets": u64(0, TOP - 7)},
            f"src_offsets[1] = {TOP - 7}: expected at most {TOP - 8}, or the end of a range",
        ),
        (
            {"dst_bases": u64(0, TOP - 143, 5)},
            f"dst_bases[1] = {TOP - 143}: expected at most {TOP - 144}, or the end of a range",
        ),
        (
            {"nbytes": u64(2**62, 2**62)},
            f"nbytes[1] = {2**62}: expected at most {TOP // 3 - 2**62}, or the total of bytes",
        ),
    ],
)
def test_overflow_names_the_item(changed: dict[str, Column], message: str) -> None:
    with pytest.raises((OverflowError, ValueError)) as refusal:
        lower_with(**changed)
    assert str(refusal.value).startswith(message)


def test_the_last_byte_of_the_address_space_is_in_range() -> None:
    lowered = lower(u64(8), u64(0), u64(16), u64(TOP - 24), u64(TOP - 16))
    assert (lowered.src.tolist(), lowered.dst.tolist()) == ([TOP - 16], [TOP - 16])
    assert len(lower_with(nbytes=u64(TOP // 3 - 1000, 999), src_bases=u64(0, 0, 0))) == 6


def test_the_array_itself_must_be_addressable() -> None:
    # Untouched zero pages: the size is refused before any value is read.
    many = np.zeros(700_000_000, dtype=np.uint64)
    with pytest.raises(OverflowError, match=r"^700000000 tensor pairs x 700000000 segments: "):
        lower(many, many, many, many, many)


# --- repeats ----------------------------------------------------------------------------------


@st.composite
def repeating(draw: st.DrawFn) -> Recipe:
    """Draw recipes with one or two levels of repeats, whose counts vary by segment."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pairs, segments = draw(st.integers(0, 4)), draw(st.integers(0, 12))
    levels = draw(st.integers(1, 2))
    stride = st.sampled_from([0, 1, 8, 4096, 2**40])

    def column(length: int, low: int, top: int) -> Column:
        return rng.integers(low, top, size=length, dtype=np.uint64, endpoint=True)

    return {
        "src_offsets": column(segments, 0, 2**40),
        "dst_offsets": column(segments, 0, 2**40),
        "nbytes": column(segments, 1, 2**20),
        "src_bases": column(pairs, 0, 2**62),
        "dst_bases": column(pairs, 0, 2**62),
        "repeats": [
            (column(segments, 1, draw(st.sampled_from([1, 5]))), draw(stride), draw(stride))
            for _ in range(levels)
        ],
    }


def expanded(recipe: Recipe, side: str, level: int) -> list[Column]:
    """Return the offsets of each run: a grid of steps for each segment, outermost first."""
    runs = []
    for segment, offset in enumerate(recipe[f"{side}_offsets"].tolist()):
        shape = tuple(int(counts[segment]) for counts, *_ in recipe["repeats"])
        steps = np.indices(shape).reshape(len(shape), -1)
        strides = [item[level] for item in recipe["repeats"]]
        runs.append(u64(*(offset + sum(map(int.__mul__, at, strides)) for at in steps.T.tolist())))
    return runs


@given(repeating())
def test_segments_that_repeat_are_numpys_grid(recipe: Recipe) -> None:
    lowered = lower(**recipe)
    src, dst = expanded(recipe, "src", 1), expanded(recipe, "dst", 2)
    for name, runs in (("src", src), ("dst", dst)):
        one = np.concatenate([u64(), *runs])
        every = [one + base for base in recipe[f"{name}_bases"]]
        np.testing.assert_array_equal(getattr(lowered, name), np.concatenate([u64(), *every]))
    nbytes = [
        np.full(len(runs), item, np.uint64)
        for runs, item in zip(src, recipe["nbytes"], strict=True)
    ]
    one = np.concatenate([u64(), *nbytes])
    np.testing.assert_array_equal(lowered.nbytes, np.tile(one, len(recipe["src_bases"])))
    assert lowered.total_nbytes == int(one.sum()) * len(recipe["src_bases"])
    # A reused buffer gives the same.
    out = lower_with()
    np.testing.assert_array_equal(lower(**recipe, out=out).dst, lowered.dst)


def test_the_inner_level_is_the_last_one() -> None:
    lowered = lower(
        u64(0, 500),
        u64(1, 600),
        u64(4, 2),
        u64(1000),
        u64(9000),
        repeats=[(u64(2, 1), 100, 10), (u64(3, 2), 7, 5)],
    )
    assert lowered.src.tolist() == [1000, 1007, 1014, 1100, 1107, 1114, 1500, 1507]
    assert lowered.dst.tolist() == [9001, 9006, 9011, 9011, 9016, 9021, 9600, 9605]
    assert lowered.nbytes.tolist() == [4] * 6 + [2] * 2
    assert lowered.total_nbytes == 28


def test_a_count_of_one_needs_no_stride() -> None:
    once = [(u64(1, 1), TOP, TOP)]
    assert lower_with(repeats=once).src.tolist() == lower_with().src.tolist()


@pytest.mark.parametrize(
    ("repeats", "error", "message"),
    [
        ([(u64(2, 0), 8, 8)], ValueError, "repeats[0].counts[1] = 0: expected at least 1"),
        (
            [(u64(1, 1), 8, 8), (u64(0, 1), 8, 8)],
            ValueError,
            "repeats[1].counts[0] = 0: expected at least 1",
        ),
        ([(u64(2), 8, 8)], ValueError, "repeats[0].counts: expected 2 items, as in nbytes, got 1"),
        (
            [(u64(1, 1), 8, 8), (u64(1, 1, 1), 8, 8)],
            ValueError,
            "repeats[1].counts: expected 2 items, as in nbytes, got 3",
        ),
        ([(u64(1, 1), 8, 8)] * 3, ValueError, "repeats: expected at most 2 levels, got 3"),
        # The end of a run, at src and at dst.
        (
            [(u64(1, 2), TOP - 70, 0)],
            OverflowError,
            f"src_offsets[1] = 64: expected at most {TOP - (TOP - 70) - 8}, or the end of a range",
        ),
        ([(u64(1, 2), 0, TOP)], OverflowError, "repeats[0].counts[1] = 2: the runs, or the end"),
        ([(u64(3, 1), 2**63, 0)], OverflowError, "repeats[0].counts[0] = 3: the runs, or the end"),
        (
            [(u64(1, 2), 2**63, 0), (u64(1, 2), 2**63, 0)],
            OverflowError,
            "repeats[0].counts[1] = 2: the runs, or the end",
        ),
        # The number of runs.
        (
            [(u64(2**32, 1), 0, 0), (u64(2**32, 1), 0, 0)],
            OverflowError,
            f"repeats[1].counts[0] = {2**32}: the runs, or the end",
        ),
        ([(u64(TOP, 1), 0, 0)], OverflowError, "repeats[0].counts[1] = 1: the runs, or the end"),
    ],
)
def test_repeats_that_are_refused(
    repeats: list[tuple[Column, int, int]], error: type[Exception], message: str
) -> None:
    out = lower_with()
    before = expected_columns(RECIPE)[0].tolist()
    with pytest.raises(error) as refusal:
        lower_with(repeats=repeats, out=out)
    assert str(refusal.value).startswith(message)
    assert out.dst.tolist() == before


def test_the_total_of_bytes_counts_every_run() -> None:
    most = TOP // 3 // 4  # three pairs, each of four runs
    one = {"src_offsets": u64(0), "dst_offsets": u64(0), "src_bases": u64(0, 0, 0)}
    four = {**RECIPE, **one, "dst_bases": u64(0, 0, 0), "repeats": [(u64(4), 0, 0)]}
    assert lower(**{**four, "nbytes": u64(most)}).total_nbytes == 12 * most
    with pytest.raises(OverflowError, match=rf"^nbytes\[0\] = {most + 1}: .* total of bytes"):
        lower(**{**four, "nbytes": u64(most + 1)})


def test_more_runs_than_an_array_can_hold() -> None:
    with pytest.raises(OverflowError, match=r"^3 tensor pairs x "):
        lower_with(repeats=[(u64(2**60, 1), 0, 0)])


@pytest.mark.parametrize(
    ("level", "error"),
    [
        ((u64(1, 1), -1, 0), OverflowError),
        ((u64(1, 1), 0, 2**64), OverflowError),
        ((u64(1, 1), 0, "8"), TypeError),
        ((u64(1, 1), 0), ValueError),
        (([1, 1], 0, 0), TypeError),
        ((np.ones(2, np.int64), 0, 0), TypeError),
        (None, TypeError),
    ],
)
def test_impossible_repeats_are_refused(level: Any, error: type[Exception]) -> None:
    for repeats in ([level], [(u64(1, 1), 8, 8), level]):
        with pytest.raises(error):
            lower_with(repeats=repeats)


# --- ownership --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dst", "src", "nbytes"])
def test_views_are_read_only_and_not_copies(name: str) -> None:
    descriptors = lower_with()
    column = getattr(descriptors, name)
    assert not column.flags.writeable
    assert not column.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        column.flags.writeable = True
    assert column.ctypes.data == getattr(descriptors, name).ctypes.data


def test_a_view_keeps_its_memory() -> None:
    column = lower_with().dst
    part = lower_with().src[1:]
    gc.collect()
    others = [lower_with() for _ in range(100)]
    assert column.tolist() == expected_columns(RECIPE)[0].tolist()
    assert part.tolist() == expected_columns(RECIPE)[1][1:].tolist()
    assert len(others) == 100


@pytest.mark.parametrize("part", [lambda column: column, lambda column: column[2:4]])
def test_a_view_never_changes(part: Callable[[Column], Column]) -> None:
    out = lower_with()
    view = part(out.src)
    before = view.tolist()
    with pytest.raises(BufferError, match=r"^out: .* is in use by 1 views or tasks in flight$"):
        lower_with(src_bases=u64(5, 6, 7), out=out)
    assert view.tolist() == before
    del view
    lower_with(src_bases=u64(5, 6, 7), out=out)
    assert out.src.tolist() == [5, 69, 6, 70, 7, 71]


def test_a_refused_recipe_does_not_change_out() -> None:
    out = lower_with()
    with pytest.raises(OverflowError):
        lower_with(dst_bases=u64(0, 0, TOP), out=out)
    assert out.dst.tolist() == expected_columns(RECIPE)[0].tolist()
    lower_with(out=out)


def test_a_large_enough_buffer_is_reused() -> None:
    hundred = u64(*range(1, 101))
    out = lower(hundred, hundred, hundred, u64(0), u64(0))
    address = out.dst.ctypes.data
    lower_with(out=out)
    assert out.dst.ctypes.data == address


def test_other_threads_run_while_lowering() -> None:
    """Lowering releases the GIL, so another thread sees `out` during the write and is refused.

    If the GIL were held during the whole write, no thread could see that state.
    """
    give_up = time.monotonic() + 60
    segments = np.arange(1, 2_001, dtype=np.uint64)
    bases = np.zeros(2_000, dtype=np.uint64)
    out = lower(segments, segments, segments, bases, bases)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            try:
                lower(segments, segments, segments, bases, bases, out=out)
            except BufferError:
                continue  # this thread's turn came while the other one held a view

    writer = threading.Thread(target=write)
    writer.start()
    try:
        refusal = ""
        while "is being written" not in refusal:
            assert time.monotonic() < give_up, "the writer never let go of the GIL"
            try:
                assert len(out.dst) == 4_000_000
            except BufferError as error:
                refusal = str(error)
    finally:
        stop.set()
        writer.join()
