"""The host backend against NumPy: every copy, inline and on the pool."""

import os
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnative._backend import KVN_INVALID, KVN_OK, NativeError, ThreadPool, host_backend, node_of
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._tuning import NEVER, Tuning, builtin_tuning, measure_copies
from tests.native.scatter import UNTOUCHED, scatter, write_again
from tests.support.spare import assert_same
from tests.support.wrappers import limit_batch

POOL = ThreadPool(3)
EXECUTOR = Executor(host_backend(POOL))
PLAIN = Executor(host_backend(ThreadPool(3, builtin_tuning()._replace(bypass_nbytes=NEVER))))
PAST_CACHES = Executor(host_backend(ThreadPool(3, builtin_tuning()._replace(bypass_nbytes=0))))
PROCESSORS = sorted(os.sched_getaffinity(0))
ON_NODES = Executor(host_backend(ThreadPool(3, nodes={0: PROCESSORS[:1], 7: PROCESSORS[-1:]})))
EXECUTORS = [EXECUTOR, PLAIN, PAST_CACHES, ON_NODES]
each_copy = pytest.mark.parametrize("executor", [PLAIN, PAST_CACHES], ids=["plain", "past-caches"])

small = st.lists(st.integers(1, 2000), min_size=1, max_size=40)
# From one byte to several MiB: split descriptors, grouped ones, and both in one batch.
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
    sizes=st.one_of(small, mixed),
    seed=st.integers(0, 2**32),
    executor=st.sampled_from(EXECUTORS),
)
@settings(max_examples=5 * settings().max_examples // 2, deadline=None)
def test_every_copy_moves_the_bytes_that_numpy_moves(
    sizes: list[int], seed: int, executor: Executor
) -> None:
    case = scatter(sizes, seed)
    report = executor.run(case.descriptors)
    assert (report.status, report.bytes_done, report.descriptors_done) == (
        KVN_OK,
        case.total,
        len(sizes),
    )
    case.assert_moved()


@each_copy
def test_a_batch_larger_than_the_caches(executor: Executor) -> None:
    case = scatter([32768] * 1200 + [5, 9_000_001], seed=1)
    assert executor.submit(case.descriptors).wait().status == KVN_OK
    case.assert_moved()


@each_copy
@pytest.mark.parametrize("src_shift", [0, 1, 7, 8, 15, 16, 31, 33, 63])
def test_every_alignment_and_size(executor: Executor, src_shift: int) -> None:
    """A batch has each alignment of the destination in a cache line with each of the sizes."""
    sizes = [*range(1, 340), 500, 511, 512, 513, 1023, *range(1024, 1216), 2000, 4095, 4096, 4097]
    room = 8192
    source = np.random.default_rng(2).integers(0, 256, room, dtype=np.uint8)
    shifts, nbytes = (column.ravel() for column in np.meshgrid(np.arange(64), np.array(sizes)))
    lines = 2 + nbytes // 64  # with a gap
    places = 64 * (np.cumsum(lines) - lines) + shifts
    memory = np.full(places[-1] + room, UNTOUCHED, np.uint8)
    to_line = -memory.ctypes.data % 64
    expected = memory.copy()
    for place, size in zip(places + to_line, nbytes, strict=True):
        expected[place : place + size] = source[src_shift : src_shift + size]
    dst = (places + to_line + memory.ctypes.data).astype(np.uint64)
    src = np.full(len(dst), source.ctypes.data + src_shift, np.uint64)
    report = executor.run(Descriptors.from_columns(dst, src, nbytes.astype(np.uint64)))
    assert report.status == KVN_OK
    assert_same(memory, expected)


@given(
    tuning=st.builds(
        Tuning,
        threads=st.just(3),
        bypass_nbytes=st.one_of(st.integers(0, 2**63 - 1), st.integers(0, 10_000_000)),
        piece_nbytes=st.integers(64 << 10, 16 << 20),
    ),
    sizes=st.one_of(small, mixed),
)
@settings(max_examples=4 * settings().max_examples // 3, deadline=None)
def test_every_tuning_moves_the_bytes_that_numpy_moves(tuning: Tuning, sizes: list[int]) -> None:
    pool = ThreadPool(tuning=tuning)
    assert (pool.threads, pool.tuning) == (3, tuning)
    case = scatter(sizes)
    assert Executor(host_backend(pool)).run(case.descriptors).status == KVN_OK
    case.assert_moved()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("threads", 0, "threads = 0: expected 1 to 64"),
        ("bypass_nbytes", -1, "bypass_nbytes = -1: expected 0 to"),
        ("piece_nbytes", 65535, "piece_nbytes = 65535: expected 65536 to 16777216"),
        ("piece_nbytes", 1 << 25, "expected 65536 to 16777216"),
    ],
)
def test_a_tuning_is_checked(field: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ThreadPool(tuning=Tuning(**{**builtin_tuning()._asdict(), field: value}))
    wrong = {**builtin_tuning()._asdict(), "piece_nbytes": 1e6}
    with pytest.raises(TypeError, match=r"piece_nbytes = 1000000.0 must be an int"):
        ThreadPool(tuning=Tuning(**wrong))


def test_measuring_copies_and_ends_with_the_time() -> None:
    case = scatter([100_000] * 30)
    tunings = [builtin_tuning()._replace(threads=2), builtin_tuning()._replace(threads=1)]
    forever = 2**63 - 1
    rounds, share = measure_copies(
        tunings, case.descriptors, at_once=30, rounds=3, deadline_ns=forever
    )
    case.assert_moved()
    assert [len(times) for times in rounds] == [2, 2, 2]
    assert all(ns > 0 for times in rounds for ns in times)
    assert share > 0
    late, _ = measure_copies(tunings, case.descriptors, at_once=30, rounds=3, deadline_ns=0)
    assert late == []
    with pytest.raises(ValueError, match="rounds = 0: expected 1 to 64, 1 to 1000"):
        measure_copies(tunings, case.descriptors, at_once=30, rounds=0, deadline_ns=0)
    for wrong in (0, 31):
        with pytest.raises(ValueError, match=f"at_once = {wrong}: expected 1 to 30"):
            measure_copies(tunings, case.descriptors, at_once=wrong, rounds=1, deadline_ns=0)
    write_again(case.descriptors)


@pytest.mark.parametrize(
    ("at_once", "rounds", "moved"), [(5, 1, 15), (5, 2, 25), (9, 1, 27), (9, 3, 27), (28, 1, 28)]
)
def test_each_measured_copy_takes_the_next_descriptors(
    at_once: int, rounds: int, moved: int
) -> None:
    """Three copies in a round; where too few descriptors are left, the first ones come again."""
    case = scatter([10_000] * 28)
    measure_copies(
        [builtin_tuning()],
        case.descriptors,
        at_once=at_once,
        rounds=rounds,
        deadline_ns=2**63 - 1,
    )
    case.assert_moved({*range(moved)})


def test_many_tiny_descriptors() -> None:
    case = scatter([1, 3] * 50_000, seed=3, gap=2)
    assert EXECUTOR.run(case.descriptors).descriptors_done == 100_000
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
    report = EXECUTOR.run(Descriptors.from_columns(address, address, np.array([nbytes], np.uint64)))
    assert (report.status, report.bytes_done) == (KVN_OK, nbytes)
    assert np.array_equal(array, before)


@pytest.mark.parametrize("most", [2, 1000])
@pytest.mark.parametrize("filler", [10, 1_000_000])
def test_a_descriptor_that_overlaps_itself_is_refused_and_named(filler: int, most: int) -> None:
    """Its index in the part of the batch that the executor submits is not used."""
    case = scatter([filler] * 3, seed=4)
    array = np.zeros(200, np.uint8)
    where = np.uint64(array.ctypes.data)
    descriptors = Descriptors.from_columns(
        np.append(case.descriptors.dst, where + np.uint64(50)),
        np.append(case.descriptors.src, where),
        np.append(case.nbytes, np.uint64(100)),
    )
    executor = Executor(limit_batch(host_backend(ThreadPool(1)), most))
    report = executor.run(descriptors)
    assert (report.status, report.failed, report.unconfirmed) == (KVN_INVALID, 3, ((3, 4),))
    assert "descriptor 3" in report.message
    assert "100 bytes" in report.message
    case.assert_moved()


def test_an_empty_array_is_done() -> None:
    report = EXECUTOR.run(Descriptors())
    assert (report.status, report.bytes_done, report.unconfirmed) == (KVN_OK, 0, ())


def test_options_are_checked() -> None:
    for threads in (0, 65, -1):
        with pytest.raises(ValueError, match=rf"threads = {threads}: expected 1 to 64"):
            ThreadPool(threads)
    for wrong in (1.5, True, "1"):
        with pytest.raises(TypeError, match=f"threads = {wrong!r}: expected an int"):
            ThreadPool(wrong)  # type: ignore[arg-type]
    assert ThreadPool(np.int64(2)).threads == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({0: [1024]}, r"nodes\[0\] has processor 1024: expected 0 to 1023"),
        ({5: []}, r"nodes\[5\] has no processor"),
        ({3: [-1]}, r"nodes\[3\] has processor -1: expected 0 to 1023"),
        ({number: [0] for number in range(65)}, "nodes has 65 nodes: expected at most 64"),
    ],
)
def test_nodes_are_checked(nodes: dict[int, list[int]], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ThreadPool(2, nodes=nodes)


def test_a_node_whose_processors_this_process_lacks_is_refused() -> None:
    with pytest.raises(NativeError, match="no pool of 2 threads: Invalid argument"):
        ThreadPool(2, nodes={0: PROCESSORS[:1], 1: [1023]})


def test_the_node_of_a_page_that_exists() -> None:
    with mmap(-1, 4096) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        try:
            assert node_of(address) is None
        except OSError as error:
            pytest.skip(f"this sandbox refuses move_pages: {error}")
        memory[0] = 1
        assert node_of(address) in numbers_of_nodes()


def numbers_of_nodes() -> set[int]:
    """Return the numbers of the nodes of this machine."""
    folders = Path("/sys/devices/system/node").glob("node[0-9]*")
    return {int(folder.name.removeprefix("node")) for folder in folders}


def test_the_backend_has_a_name() -> None:
    backend = host_backend(POOL)
    assert backend.name == "host"


def test_the_first_of_many_failures_is_reported() -> None:
    """Every piece of 512 KiB ends in a descriptor that overlaps itself, so several threads fail."""
    pieces, good, bad = 16, 448 << 10, 64 << 10
    memory = np.zeros(pieces * (2 * good + 2 * bad), np.uint8)
    nbytes = np.array([good, bad] * pieces, np.uint64)
    src = memory.ctypes.data + 2 * np.cumsum(nbytes) - 2 * nbytes
    dst = src + np.array([good, 1] * pieces, np.uint64)
    descriptors = Descriptors.from_columns(dst.astype(np.uint64), src.astype(np.uint64), nbytes)
    for _ in range(2000):
        report = EXECUTOR.submit(descriptors).wait()
        assert (report.status, report.failed) == (KVN_INVALID, 1)
        assert report.unconfirmed[-1][1] == 2 * pieces
