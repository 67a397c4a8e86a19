"""The host backend against NumPy: every strategy, inline and on the pool."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnative._executor import (
    KVN_INVALID,
    KVN_OK,
    STRATEGIES,
    Executor,
    ThreadPool,
    host_backend,
)
from kvnative._lower import Descriptors
from tests.native.scatter import UNTOUCHED, scatter

POOL = ThreadPool(3)
EXECUTORS = {strategy: Executor(host_backend(POOL, strategy)) for strategy in STRATEGIES}

small = st.lists(st.integers(1, 2000), min_size=1, max_size=40)
# From one byte to several MiB: cut descriptors, grouped ones, and both in one batch.
mixed = st.lists(
    st.one_of(
        st.integers(1, 300),
        st.sampled_from([4096, 32768, 65536, 65537]),
        st.integers(100_000, 3_000_000),
    ),
    min_size=1,
    max_size=12,
)


@given(
    sizes=st.one_of(small, mixed), seed=st.integers(0, 2**32), strategy=st.sampled_from(STRATEGIES)
)
@settings(max_examples=150, deadline=None)
def test_every_strategy_moves_what_numpy_moves(sizes: list[int], seed: int, strategy: str) -> None:
    case = scatter(sizes, seed)
    report = EXECUTORS[strategy].run(case.descriptors)
    assert (report.status, report.bytes_done, report.descriptors_done) == (
        KVN_OK,
        case.total,
        len(sizes),
    )
    case.assert_moved()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_larger_than_the_caches(strategy: str) -> None:
    case = scatter([32768] * 1200 + [5, 9_000_001], seed=1)
    assert EXECUTORS[strategy].submit(case.descriptors).wait().status == KVN_OK
    case.assert_moved()


def test_every_alignment_of_both_sides() -> None:
    source = np.random.default_rng(2).integers(0, 256, 4096, dtype=np.uint8)
    for strategy, executor in EXECUTORS.items():
        for dst_shift in range(0, 67, 3):
            for src_shift in range(0, 67, 5):
                target = np.full(4096, UNTOUCHED, np.uint8)
                nbytes = 2000 + dst_shift
                columns = (target.ctypes.data + dst_shift, source.ctypes.data + src_shift, nbytes)
                executor.run(Descriptors.from_columns(*(np.array([x], np.uint64) for x in columns)))
                expected = np.full(4096, UNTOUCHED, np.uint8)
                expected[dst_shift : dst_shift + nbytes] = source[src_shift : src_shift + nbytes]
                assert np.array_equal(target, expected), (strategy, dst_shift, src_shift)


def test_many_tiny_descriptors() -> None:
    case = scatter([1, 3] * 50_000, seed=3, gap=2)
    assert EXECUTORS["auto"].run(case.descriptors).descriptors_done == 100_000
    source, target = case.source, case.target
    first = case.nbytes == 1
    assert np.array_equal(target[case.dst_offsets[first]], source[case.src_offsets[first]])
    for byte in (0, 1, 2):
        dst = case.dst_offsets[~first] + np.uint64(byte)
        assert np.array_equal(target[dst], source[case.src_offsets[~first] + np.uint64(byte)])
    assert np.count_nonzero(target != UNTOUCHED) <= case.total


@pytest.mark.parametrize("nbytes", [100, 10_000_000])
def test_a_copy_onto_itself_is_already_done(nbytes: int) -> None:
    array = np.arange(nbytes, dtype=np.uint64).view(np.uint8)[:nbytes].copy()
    before = array.copy()
    address = np.array([array.ctypes.data], np.uint64)
    report = EXECUTORS["auto"].run(
        Descriptors.from_columns(address, address, np.array([nbytes], np.uint64))
    )
    assert (report.status, report.bytes_done) == (KVN_OK, nbytes)
    assert np.array_equal(array, before)


@pytest.mark.parametrize("filler", [10, 1_000_000])
def test_a_descriptor_that_overlaps_itself_is_refused_and_named(filler: int) -> None:
    case = scatter([filler] * 3, seed=4)
    array = np.zeros(200, np.uint8)
    where = np.uint64(array.ctypes.data)
    descriptors = Descriptors.from_columns(
        np.append(case.descriptors.dst, where + np.uint64(50)),
        np.append(case.descriptors.src, where),
        np.append(case.nbytes, np.uint64(100)),
    )
    executor = Executor(host_backend(ThreadPool(1)))
    report = executor.run(descriptors)
    assert (report.status, report.failed, report.unconfirmed) == (KVN_INVALID, 3, ((3, 4),))
    assert "descriptor 3" in report.message
    assert "100 bytes" in report.message
    case.assert_moved()


def test_an_empty_array_is_done() -> None:
    report = EXECUTORS["auto"].run(Descriptors())
    assert (report.status, report.bytes_done, report.unconfirmed) == (KVN_OK, 0, ())


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"strategy = 'fast': expected one of 'auto', 'memcpy'"):
        host_backend(POOL, "fast")
    for threads in (0, 65, -1):
        with pytest.raises(ValueError, match=rf"threads = {threads}: expected 1 to 64"):
            ThreadPool(threads)


def test_the_backend_has_a_name() -> None:
    backend = host_backend(POOL)
    assert backend.name == "host"


def test_of_many_failures_the_first_is_reported() -> None:
    """Every piece of 512 KiB ends in a descriptor that overlaps itself; several threads fail."""
    pieces, good, bad = 16, 448 << 10, 64 << 10
    memory = np.zeros(pieces * (2 * good + 2 * bad), np.uint8)
    nbytes = np.array([good, bad] * pieces, np.uint64)
    src = memory.ctypes.data + 2 * np.cumsum(nbytes) - 2 * nbytes
    dst = src + np.array([good, 1] * pieces, np.uint64)
    descriptors = Descriptors.from_columns(dst.astype(np.uint64), src.astype(np.uint64), nbytes)
    for _ in range(2000):
        report = EXECUTORS["auto"].submit(descriptors).wait()
        assert (report.status, report.failed) == (KVN_INVALID, 1)
        assert report.unconfirmed[-1][1] == 2 * pieces
