"""Planning: the time from block tables to a Plan, and its growth."""

from __future__ import annotations

import struct
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import kvplan
from benchmarks.table import Row, Run, Topic, timed
from kvplan import Rows, Transfer
from kvplan.layout import Shard
from kvplan.planning import Plan
from kvplan.types import CacheDesc, DataType

if TYPE_CHECKING:
    from collections.abc import Callable

TOPIC = Topic()
TENSORS_PER_LAYER = 2
ROUNDS = 201
BLOCK_NBYTES = 16 * 8 * 128 * 2
LARGE = 24 << 20  # bytes: below 32 MiB, from which size on glibc always asks the system


def request(blocks: int, layers: int, table: Callable[[Any], Any]) -> Callable[[], Plan]:
    """Return a call that plans one request, with random distinct block tables of type `table`."""
    rng = np.random.default_rng(blocks)
    pool = 2 * blocks
    desc = CacheDesc(layers * TENSORS_PER_LAYER, (pool, 16, 8, 128), DataType.DT_FLOAT16)
    src, dst = (table(rng.permutation(pool)[:blocks]) for _ in range(2))
    return lambda: kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")


def compare(run: Run, *requests: Callable[[], Plan]) -> list[float]:
    """Return the median microseconds of each request.

    Before, a large array is freed, as in every program that holds a model: from then on glibc
    keeps the memory of smaller ones.
    """
    np.ones(LARGE, np.uint8)
    return [1e6 * s for s in run.medians(*map(timed, requests), rounds=ROUNDS)]


def as_numpy(table: Any) -> Any:
    """Return the block table as an array, as fast engines keep it."""
    return table


def bare(blocks: int, read: Callable[[Any], Any], table: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a call with only what a plan of these blocks needs from NumPy.

    The tables are copied, because a plan keeps them. Each block must exist, and no destination may
    occur twice. Blocks are in order of sources, and those that are adjacent on both sides merge.
    """
    rng = np.random.default_rng(blocks)
    pool = 2 * blocks
    given = [table(rng.permutation(pool)[:blocks]) for _ in range(2)]

    def work() -> Any:
        src, dst = map(read, given)
        for column in (src, dst):
            assert np.maximum.reduce(column.view(np.uint64)) < pool
        seen = np.zeros(pool, np.bool_)
        seen[dst] = True
        assert np.count_nonzero(seen) == blocks
        dst_of = np.full(pool, -1)
        dst_of[src] = dst
        src = (dst_of >= 0).nonzero()[0]
        dst = dst_of.take(src)
        src *= BLOCK_NBYTES
        dst *= BLOCK_NBYTES
        apart = dst - src
        assert np.count_nonzero(apart[1:] == apart[:-1]) < blocks
        return src, dst, np.full(blocks, BLOCK_NBYTES)

    return work


def packed(table: list[int]) -> Any:
    """Read a list of int in the quickest way that was found."""
    return np.frombuffer(struct.Struct(f"{len(table)}q").pack(*table), np.int64)


@TOPIC.row("plan_numpy_us")
def plan_numpy(run: Run, name: str) -> Row:
    """Planning 4,096 blocks and 61 layers from NumPy tables, beside the bare calls of NumPy."""
    us, limit = compare(run, request(4096, 61, as_numpy), bare(4096, np.array, as_numpy))
    note = "4,096 blocks x 61 layers; limit: the calls of NumPy that any such plan needs"
    return Row(name, us, "us", limit, target=1.75, note=note)


@TOPIC.row("plan_list_us")
def plan_list(run: Run, name: str) -> Row:
    """Plan the same from lists."""
    tables = np.ndarray.tolist
    us, limit = compare(run, request(4096, 61, tables), bare(4096, packed, tables))
    return Row(name, us, "us", limit, target=1.75, note="the same from lists; limit: likewise")


@TOPIC.row("plan_16384_blocks_us")
def plan_blocks(run: Run, name: str) -> Row:
    """Four times as many blocks: four times the time, and some more for larger tables."""
    us, base = compare(run, request(16384, 61, as_numpy), request(4096, 61, as_numpy))
    note = "limit: 4 x the time of 4,096 blocks"
    return Row(name, us, "us", 4 * base, target=1.25, note=note)


@TOPIC.row("plan_610_layers_us")
def plan_layers(run: Run, name: str) -> Row:
    """Ten times as many layers: the same time."""
    us, base = compare(run, request(4096, 610, as_numpy), request(4096, 61, as_numpy))
    return Row(name, us, "us", base, target=1.1, note="limit: the time of 61 layers")


def unlike(src: CacheDesc, dst: CacheDesc, num_tokens: int) -> Callable[[], Plan]:
    """Return a call that plans one request between two caches of different layouts."""
    rng = np.random.default_rng(num_tokens)
    tables = [rng.permutation(desc.shape[0])[: num_tokens // desc.shape[2]] for desc in (src, dst)]
    transfer = Transfer(Rows(src, tables[0]), Rows(dst, tables[1]))
    return lambda: kvplan.plan(transfer, local="dst")


def hnd(blocks: int, tokens: int, heads: range) -> CacheDesc:
    """Describe 61 layers with some of 8 KV heads, heads before tokens."""
    return CacheDesc(
        61 * TENSORS_PER_LAYER,
        (blocks, len(heads), tokens, 128),
        DataType.DT_FLOAT16,
        kv_tensor_format="HND",
        shard=Shard(heads=heads, num_heads=8),
    )


@TOPIC.row("plan_reshard_us")
def plan_reshard(run: Run, name: str) -> Row:
    """Tensor parallelism 4 at the source, 2 at the destination: budget 400 microseconds."""
    src, dst = hnd(2048, 16, range(4, 6)), hnd(2048, 16, range(4, 8))
    (us,) = compare(run, unlike(src, dst, 1024 * 16))
    note = "1,024 blocks x 61 layers, 2 of 4 heads, HND; limit: the budget"
    return Row(name, us, "us", 400, note=note)


@TOPIC.row("plan_block_ratio_us")
def plan_block_ratio(run: Run, name: str) -> Row:
    """Plan the same request from blocks of 16 tokens into blocks of 64: budget 400 microseconds."""
    src, dst = hnd(2048, 16, range(8)), hnd(512, 64, range(8))
    (us,) = compare(run, unlike(src, dst, 1024 * 16))
    note = "blocks of 16 tokens -> 64, HND; limit: the budget"
    return Row(name, us, "us", 400, note=note)


@TOPIC.row("html_ms")
def html(run: Run, name: str) -> Row:
    """Draw 4,096 scattered blocks, none of which merge: budget 150 milliseconds."""
    rng, desc = np.random.default_rng(4096), hnd(8192, 16, range(8))
    src, dst = (rng.permutation(8192)[:4096] for _ in range(2))
    plan = kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")
    (seconds,) = run.medians(timed(plan.to_html), rounds=21)
    cases = {"KB": len(plan.to_html().encode()) / 1000}
    note = "to_html() of 4,096 blocks x 61 layers; limit: the budget"
    return Row(name, 1e3 * seconds, "ms", 150, note=note, cases=cases)


def import_seconds(module: str) -> float:
    """Return the seconds of `import module` in a new process."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@TOPIC.row("import_ms")
def import_kvplan(run: Run, name: str) -> Row:
    """Import what a planning program needs: at most 1.2 times the import of NumPy."""
    ours, numpys = run.medians(
        partial(import_seconds, "kvplan.planning"), partial(import_seconds, "numpy"), rounds=11
    )
    return Row(name, 1e3 * ours, "ms", 1e3 * numpys, target=1.2, note="limit: NumPy, within it")
