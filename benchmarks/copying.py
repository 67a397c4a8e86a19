"""Copying inside one process, compared with bare loops over the same descriptors."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

import kvplan
from benchmarks.limits import COPIES, Columns, Team, repeat_seconds
from benchmarks.table import Row, Run, Topic, timed
from kvnative._backend import ThreadPool, host_backend
from kvnative._executor import Executor
from kvnative._lower import Descriptors, lower
from kvplan import Rows, Transfer
from kvplan.execution.binding import bind
from kvplan.execution.memory import HostMemory
from kvplan.execution.transfers import Transfers
from kvplan.types import CacheDesc, DataType

if TYPE_CHECKING:
    from collections.abc import Iterable

TOPIC = Topic()
TENSORS, POOL_BLOCKS = 64, 1536
LARGEST_BLOCK = 32 << 10
TENSOR_NBYTES = POOL_BLOCKS * LARGEST_BLOCK
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CACHES = 64 * MIB
"""Bytes that no cache of the CPU is likely to hold."""

Column = NDArray[np.uint64]


@dataclass(frozen=True)
class Pool:
    """The adjacent tensors of one cache, in ordinary pages."""

    words: NDArray[np.uint64]

    @staticmethod
    def mapped() -> Pool:
        """Return a pool of zeros in which every page is present."""
        memory = mmap.mmap(-1, TENSORS * TENSOR_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pool = Pool(np.frombuffer(memory, dtype=np.uint64))
        pool.words[:: mmap.PAGESIZE // 8] = 0
        return pool

    def fill(self) -> Pool:
        """Set each word to its own index, which reveals bytes from a wrong place."""
        for words in np.split(self.words, TENSORS):
            first = (words.ctypes.data - self.words.ctypes.data) // 8
            words[:] = np.arange(first, first + len(words), dtype=np.uint64)
        return self

    @property
    def bases(self) -> NDArray[np.uint64]:
        """The address of each tensor."""
        return tensor_addresses(self.words.ctypes.data)


def tensor_addresses(start: int) -> NDArray[np.uint64]:
    """Return the address of each tensor of the pool at `start`."""
    return np.uint64(start) + np.arange(TENSORS, dtype=np.uint64) * np.uint64(TENSOR_NBYTES)


def source_of(run: Run) -> Pool:
    """Return the run's source pool."""
    return cast("Pool", run.share("source pool", lambda: Pool.mapped().fill()))


def destination_of(run: Run) -> Pool:
    """Return the run's destination pool."""
    return cast("Pool", run.share("destination pool", Pool.mapped))


def threads_of(run: Run) -> ThreadPool:
    """Return the run's copying threads: one for each usable core."""
    return cast("ThreadPool", run.share("threads", ThreadPool))


def host_executor(run: Run) -> Executor:
    """Return the run's executor of plain copies."""

    def make() -> Executor:
        return run.opened.enter_context(Executor(host_backend(threads_of(run))))

    return cast("Executor", run.share("host executor", make))


def team_of(run: Run) -> Team:
    """Return as many bare threads as kvplan uses."""

    def make() -> Team:
        return run.opened.enter_context(Team(threads_of(run).threads))

    return cast("Team", run.share("team", make))


def scattered(src: Column, dst: Column, block: int, total: int) -> Descriptors:
    """Return descriptors of `total` bytes in random distinct blocks of every tensor."""
    rng = np.random.default_rng(total)
    desc = CacheDesc(TENSORS, (POOL_BLOCKS, block), DataType.DT_UINT8)
    blocks = total // block // TENSORS
    src_blocks, dst_blocks = (rng.permutation(POOL_BLOCKS)[:blocks] for _ in range(2))
    segments = kvplan.plan(
        Transfer(Rows(desc, src_blocks), Rows(desc, dst_blocks)), local="dst"
    ).part.segments
    return lower(segments.src_offsets, segments.dst_offsets, segments.nbytes, src, dst)


def columns_of(descriptors: Descriptors) -> Columns:
    """Return the descriptors in the form that the bare loops take."""
    return descriptors.dst, descriptors.src, descriptors.nbytes


def gigabytes(descriptors: Descriptors, seconds: float) -> float:
    """Return the throughput in GB/s; reading and writing a byte counts once."""
    return descriptors.total_nbytes / seconds / 1e9


def execute(executor: Executor, descriptors: Descriptors) -> None:
    """Execute the descriptors, and wait.

    Raises:
        RuntimeError: the transfer failed.
    """
    report = executor.run(descriptors)
    if report.status != 0:
        raise RuntimeError(f"the transfer failed: {report}")


def check_moved(descriptors: Descriptors, source: int, target: Pool) -> None:
    """Assert that the first words of 1,000 descriptors are what `Pool.fill` put at their sources.

    Args:
        descriptors: the executed descriptors.
        source: address of the filled pool, as the descriptors give it.
        target: the pool of their destinations.
    """
    sample = np.random.default_rng(0).integers(0, len(descriptors), 1000)
    expected = (descriptors.src[sample] - np.uint64(source)) // np.uint64(8)
    offsets = descriptors.dst[sample] - np.uint64(target.words.ctypes.data)
    np.testing.assert_array_equal(target.words[offsets // np.uint64(8)], expected)


def copy_ratio(run: Run, name: str, block: int, total: int, rounds: int) -> Row:
    """Compare kvplan with the best bare loop over the same blocks, with as many threads."""
    source, target = source_of(run), destination_of(run)
    descriptors = scattered(source.bases, target.bases, block, total)
    return beside_loops(run, name, descriptors, rounds, 0.90 if block < LARGEST_BLOCK else 0.95)


def beside_loops(
    run: Run,
    name: str,
    descriptors: Descriptors,
    rounds: int,
    target_ratio: float,
    loops: Iterable[str] = COPIES,
) -> Row:
    """Compare kvplan with the best bare loop over the same descriptors, with as many threads."""
    loops = [*loops]
    source, target = source_of(run), destination_of(run)
    executor, team = host_executor(run), team_of(run)
    columns = columns_of(descriptors)
    target.words[:: mmap.PAGESIZE // 8] = 0
    execute(executor, descriptors)
    check_moved(descriptors, source.words.ctypes.data, target)
    ours, *bare = run.medians(
        timed(lambda: execute(executor, descriptors)),
        *(partial(team.copy_seconds, how, columns) for how in loops),
        rounds=rounds,
        # A streaming copy after a plain copy, or the reverse, is up to twice as slow.
        settle=2 if descriptors.total_nbytes < CACHES else 0,
    )
    best = min(bare)
    note = (
        f"{len(descriptors):,} descriptors, {threads_of(run).threads} threads; limit: bare "
        f"{loops[bare.index(best)]}"
    )
    figures = gigabytes(descriptors, ours), "GB/s", gigabytes(descriptors, best)
    return Row(name, *figures, "at least", target_ratio, note)


@TOPIC.row("copy_32KiB_1GiB_ratio")
def copy_large(run: Run, name: str) -> Row:
    """Copy far more bytes than any CPU cache holds."""
    return copy_ratio(run, name, 32 * KIB, GIB, rounds=15)


@TOPIC.row("copy_32KiB_8MiB_ratio")
def copy_small(run: Run, name: str) -> Row:
    """Copy one short request: start and end of a transfer count."""
    return copy_ratio(run, name, 32 * KIB, 8 * MIB, rounds=201)


@TOPIC.row("copy_4KiB_ratio")
def copy_small_blocks(run: Run, name: str) -> Row:
    """Small blocks: the cost of a descriptor counts."""
    return copy_ratio(run, name, 4 * KIB, 256 * MIB, rounds=31)


def runs_of(run: Run, src: CacheDesc, dst: CacheDesc, num_tokens: int) -> Descriptors:
    """Return the runs of one request between two caches of different layouts, in random blocks."""
    rng = np.random.default_rng(num_tokens)
    tables = []
    for desc in (src, dst):
        tokens = desc.shape[(desc.kv_tensor_format or "").split().index("token")]
        tables.append(rng.permutation(desc.shape[0])[: num_tokens // tokens])
    plan = kvplan.plan(Transfer(Rows(src, tables[0]), Rows(dst, tables[1])), local="dst")
    segments = plan.part.segments
    return lower(
        segments.src_offsets,
        segments.dst_offsets,
        segments.nbytes,
        source_of(run).bases,
        destination_of(run).bases,
        repeats=segments.repeats,
    )


def cache_of(tokens: int, axes: str) -> CacheDesc:
    """Return a cache that fills the pool: blocks of `tokens` tokens, 8 KV heads of 256 bytes."""
    lengths = {"block": TENSOR_NBYTES // (tokens * 8 * 256), "token": tokens, "head": 8, "dim": 128}
    shape = tuple(lengths[axis] for axis in axes.split())
    return CacheDesc(TENSORS, shape, DataType.DT_FLOAT16, kv_tensor_format=axes)


@TOPIC.row("copy_4KiB_runs_ratio")
def copy_token_runs(run: Run, name: str) -> Row:
    """Copy blocks of 16 tokens into blocks of 64, heads first: runs of 4 KiB."""
    hnd = "block head token dim"
    descriptors = runs_of(run, cache_of(16, hnd), cache_of(64, hnd), 2048)
    return beside_loops(run, name, descriptors, 31, 0.90, ["memcpy"])


@TOPIC.row("copy_256B_runs_ratio")
def copy_head_runs(run: Run, name: str) -> Row:
    """Copy tokens first into heads first: runs of 256 bytes, one for each head and token."""
    src, dst = cache_of(16, "block token head dim"), cache_of(16, "block head token dim")
    return beside_loops(run, name, runs_of(run, src, dst, 2048), 31, 0.80, ["memcpy"])


def one_page() -> tuple[CacheDesc, NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the description of a cache of one 4 KiB block, and two such tensors."""
    src, dst = np.ones((2, 1, 4 * KIB), dtype=np.uint8)
    return CacheDesc(1, src.shape, DataType.DT_UINT8), src, dst


@TOPIC.row("submit_overhead_us")
def submit_overhead(run: Run, name: str) -> Row:
    """Time that Python, the native call and the executor add to one synchronous copy of 4 KiB."""
    _, *pages = one_page()
    src, dst = (page.ctypes.data for page in pages)
    one = (np.array([x], dtype=np.uint64) for x in (dst, src, 4 * KIB))
    descriptors = Descriptors.from_columns(*one)
    executor = host_executor(run)
    submitted, at_once, *bare = run.medians(
        timed(lambda: executor.submit(descriptors).wait(), repeats=500),
        timed(lambda: executor.run(descriptors), repeats=500),
        *(partial(repeat_seconds, how, dst, src, 4 * KIB, 500) for how in COPIES),
        rounds=101,
    )
    raw = min(bare)
    note = f"submit, then wait; run: {1e6 * (at_once - raw):.2f} us; limit: the budget"
    return Row(name, 1e6 * (submitted - raw), "us", 3, note=note)


@TOPIC.row("execute_4KiB_us")
def execute_plan(run: Run, name: str) -> Row:
    """From a ready plan and memory to copied bytes: checks, lowering and copying. No target."""
    desc, src, dst = one_page()
    plan = kvplan.plan(Transfer(Rows(desc, [0]), Rows(desc, [0])), local="dst")
    source, target = (HostMemory.from_arrays([page]) for page in (src, dst))
    transfers = run.opened.enter_context(Transfers())
    descriptors = bind(plan, source, target, one_space=True)
    executor = host_executor(run)
    ours, bare = run.medians(
        timed(lambda: transfers.execute(plan, source, target), repeats=100),
        timed(lambda: executor.run(descriptors), repeats=100),
        rounds=101,
    )
    note = "one block, plan and memory ready; limit: the executor alone"
    return Row(name, 1e6 * ours, "us", 1e6 * bare, target=None, note=note)
