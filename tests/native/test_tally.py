"""Counters: additions of several threads are complete in any snapshot."""

import math
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnative._tally import Histogram, Traffic

BOUNDS = (1e-5, 2e-5, 1.0)


def in_threads(call: Callable[[], object], count: int = 4) -> None:
    """Call `call` in several threads that start together."""
    begun = threading.Barrier(count, timeout=60)

    def run() -> None:
        begun.wait()
        call()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (1e-5, 0), (1.1e-5, 1), (2e-5, 1), (1.0, 2), (1.1, 3), (math.inf, 3)],
)
def test_a_bound_is_the_last_of_its_bucket(seconds: float, bucket: int) -> None:
    histogram = Histogram(BOUNDS)
    histogram.add(seconds, 7)
    counts = [0, 0, 0, 0]
    counts[bucket] = 1
    assert histogram.snapshot() == (7, seconds, counts)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 2**40)), max_size=20))
def test_all_counts_are_summed(calls: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for seconds, nbytes in calls:
        histogram.add(seconds, nbytes)
    nbytes, seconds, counts = histogram.snapshot()
    assert nbytes == sum(item for _, item in calls)
    assert seconds == pytest.approx(math.fsum(item for item, _ in calls))
    assert sum(counts) == len(calls)
    assert counts[0] == len([item for item, _ in calls if item <= BOUNDS[0]])


def test_counts_of_threads_add_up() -> None:
    histogram, traffic = Histogram(BOUNDS), Traffic()

    def add() -> None:
        for _ in range(2000):
            histogram.add(1.5e-5, 3)
            traffic.add(1, 2, 5)
            nbytes, _, counts = histogram.snapshot()
            assert nbytes == 3 * sum(counts)

    in_threads(add)
    assert histogram.snapshot()[::2] == (24_000, [0, 8000, 0, 0])
    assert (traffic.operations, traffic.pulled, traffic.pushed) == (8000, 16_000, 40_000)


def test_values_that_are_not_numbers_are_refused() -> None:
    histogram, traffic = Histogram(BOUNDS), Traffic()
    for arguments in (("1", 0), (1.0, -1), (1.0, 2**64)):
        with pytest.raises((TypeError, OverflowError)):
            histogram.add(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Histogram([1.0])  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        traffic.add(1, -1)
    assert histogram.snapshot() == (0, 0.0, [0, 0, 0, 0])
