"""The rate at which the event thread polls the device, and the delay of its observations.

The test compiles only the arithmetic of that thread, so no clock is involved.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
US, MS = 1_000, 1_000_000
Seen = list[tuple[int, int]]
"""Per event, its delay in ns and the number of polls since the previous event."""


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Iterable[int]], Seen]:
    """A function that simulates events at given intervals in ns."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    program = tmp_path_factory.mktemp("pace") / "pace"
    # The linker drops the rest of the source, which calls a device.
    flags = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread")
    unused = ("-ffunction-sections", "-Wl,--gc-sections")
    includes = (f"-I{ROOT / name}" for name in ("kvnative/src", "include"))
    source = str(ROOT / "tests/device/pace_main.c")
    subprocess.run(["cc", *flags, *unused, *includes, source, "-o", str(program)], check=True)

    def run(intervals: Iterable[int]) -> Seen:
        times = map(str, accumulate(intervals))
        done = subprocess.run([program, *times], capture_output=True, text=True, check=True)
        rows = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
        looks = [0, *(row[1] for row in rows)]
        return [(row[0], b - a) for row, (a, b) in zip(rows, pairwise(looks), strict=True)]

    return run


@pytest.mark.parametrize("interval", [200 * US, MS, 5 * MS, 50 * MS])
def test_events_at_regular_intervals_are_seen_at_once(
    watch: Callable[[Iterable[int]], Seen], interval: int
) -> None:
    varied = [interval + interval * (number % 5 - 2) // 100 for number in range(40)]
    seen = watch(varied)
    assert all(late <= 20 * US for late, _ in seen[2:])
    # A poll takes about 3 us, so this bound is a few percent of one processor.
    assert all(looks <= 40 + interval // (50 * US) for _, looks in seen[2:])


def test_the_delay_of_irregular_events_is_a_fraction_of_their_interval(
    watch: Callable[[Iterable[int]], Seen],
) -> None:
    intervals = [300 * US, 4 * MS, 500 * US, 900 * US, 100 * MS, 17 * MS, 2 * MS]
    for interval, (late, looks) in zip(intervals, watch(intervals), strict=True):
        assert late <= min(20 * US + interval // 12, 250 * US)
        assert looks <= 80 + interval // (200 * US)
