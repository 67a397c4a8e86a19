"""Recording: additional time on the calling thread, and bytes of the file."""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.engine_peer import LEASED, SMALL, leased_key, small_key
from benchmarks.engines import linked_engine
from benchmarks.table import Row, Run, Topic
from kvplan.recording import read
from kvplan.recording.format import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan import LlmDataDist
    from kvplan.recording.writer import Recorder

TOPIC = Topic()
TAG = "chatcmpl-5b1cf7b8e0f94d6c9d6b5a0a2f3c1d2e"
REPEATS = 100
ROUNDS = 301
BLOCKS = 8


@TOPIC.row("record_us")
def record(run: Run, name: str) -> Row:
    """Additional time of a small pull while the engine is recorded; with and without, in turns.

    The figure is processor time of the calling thread: other work only affects the wall clock.
    """
    datadist = linked_engine(run)
    slots, paged = datadist.allocate_cache(SMALL), datadist.allocate_blocks_cache(LEASED)
    table = [*range(BLOCKS)]
    pulls = {
        "a slot of 4 KiB": partial(datadist.pull_cache, small_key(1), slots, tag=TAG),
        f"{BLOCKS} blocks of 4 KiB": partial(
            datadist.pull_blocks, leased_key(1), paged, table, table, tag=TAG
        ),
    }
    cases: dict[str, float] = {}
    texts: list[str] = []
    for case, pull in pulls.items():
        own, wall = (1e6 * difference for difference in differences(run, datadist, pull))
        cases |= {case: own, f"{case}, wall": wall}
        texts.append(f"{case} {own:.2f} us ({wall:.2f} us by the wall)")
    for value in (slots, paged):
        datadist.deallocate_cache(value)
    note = (
        f"of the calling thread's time, a pull of {', of '.join(texts)}; limit: the budget; "
        f"msgspec and a list alone take {1e6 * bare_seconds():.2f} us"
    )
    return Row(name, cases[next(iter(pulls))], "us", 2, note=note, cases=cases)


def bare_seconds() -> float:
    """Return the time to encode a record of such a pull and to keep it, with nothing else."""
    part = "", None, 1, b"", b"", (1, 0, 0, 4096)
    record = 1, 12345.678, 8e-6, "pull_cache", 0, "", TAG, 1, 2, (), 4096, (part,)
    kept: list[bytes] = []

    def seconds() -> float:
        kept.clear()
        start = time.thread_time_ns()
        kept.extend(encode(record) for _ in range(REPEATS))
        return (time.thread_time_ns() - start) / 1e9 / REPEATS

    return statistics.median(seconds() for _ in range(ROUNDS))


def differences(run: Run, datadist: LlmDataDist, pull: Callable[[], object]) -> tuple[float, float]:
    """Return the median additional time of a recorded call: of its thread, and by the wall."""
    engine = datadist._running()

    def seconds(recorder: Recorder | None) -> tuple[float, float]:
        engine.recorder = recorder
        wall, own = time.perf_counter_ns(), time.thread_time_ns()
        for _ in range(REPEATS):
            pull()
        ends = time.thread_time_ns() - own, time.perf_counter_ns() - wall
        return ends[0] / 1e9 / REPEATS, ends[1] / 1e9 / REPEATS

    with tempfile.TemporaryDirectory() as folder, datadist.record(Path(folder, "a.kvrec")) as item:
        pairs = []
        for turn in range(ROUNDS // 4 if run.quick else ROUNDS):
            order = (item, None) if turn % 2 else (None, item)  # neither is always first
            times = {recorder: seconds(recorder) for recorder in order}
            pairs.append([a - b for a, b in zip(times[item], times[None], strict=True)])
        engine.recorder = item
        item.flush()
        assert item.dropped == 0
    own, wall = (statistics.median(column) for column in zip(*pairs[2:], strict=True))
    return own, wall


@TOPIC.row("record_bytes")
def size(run: Run, name: str) -> Row:
    """Count the bytes of the file for each transfer, without its block tables."""
    datadist = linked_engine(run)
    cache, count = datadist.allocate_blocks_cache(LEASED), 1000
    table = [*range(BLOCKS)]
    with (
        tempfile.TemporaryDirectory() as folder,
        datadist.record(Path(folder, "a.kvrec")) as recorder,
    ):
        pull = partial(datadist.pull_blocks, leased_key(1), cache, table, table, tag=TAG)
        pull()
        recorder.flush()
        before = recorder.path.stat().st_size
        for _ in range(count):
            pull()
        recorder.flush()
        nbytes = (recorder.path.stat().st_size - before) / count
        assert len(read(recorder.path).transfers) == count + 1
    datadist.deallocate_cache(cache)
    tables = 2 * 8 * BLOCKS
    note = f"a pull of {BLOCKS} blocks with a tag of {len(TAG)} characters: {nbytes:.0f} bytes"
    return Row(name, nbytes - tables, "B", 200, note=f"{note}, {tables} of them tables")
