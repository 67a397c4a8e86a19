"""LlmDataDist: the time that an engine adds to the executor. Peers are other processes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from benchmarks.engine_peer import BLOCKS, PAGED, RAGGED, SMALL, paged_key, small_key
from benchmarks.table import Row, Run, Topic, timed
from kvnative._backend import ThreadPool, host_backend
from kvnative._executor import Executor
from kvplan import BlockLease, ClusterInfo, LlmDataDist, LlmRole, Rows, Transfer
from kvplan.execution.binding import bind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.execution import TensorMemory
    from kvplan.types import Cache

TOPIC = Topic()
OWN_CLUSTER = 0


@contextmanager
def peers(
    first: int, engines: int, *, paged: bool = False, transport: str = "auto"
) -> Iterator[list[ClusterInfo]]:
    """Yield engines that listen, in one new process."""
    with serving(first, engines, paged=paged, transport=transport) as lines:
        yield [ClusterInfo(int(cluster_id), address) for cluster_id, address, *_ in lines]


@contextmanager
def serving(
    first: int, engines: int, *, paged: bool, transport: str = "auto"
) -> Iterator[list[list[str]]]:
    """Yield the same, as the words of the line that each engine has printed."""
    arguments = str(first), str(engines), str(+paged), transport
    command = [sys.executable, "-m", "benchmarks.engine_peer", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield [process.stdout.readline().split() for _ in range(engines)]
        finally:
            process.stdin.close()


def linked_engine(run: Run) -> LlmDataDist:
    """Return the run's engine, linked with cluster 1, which has paged caches and a small one."""

    def make() -> LlmDataDist:
        [[_, address, *blobs]] = run.opened.enter_context(serving(1, 1, paged=True))
        *leases, ragged = [BlockLease.from_bytes(bytes.fromhex(blob)) for blob in blobs]
        run.shared["leases"], run.shared["ragged lease"] = leases, ragged
        datadist = run.opened.enter_context(LlmDataDist(OWN_CLUSTER, LlmRole.DECODER))
        datadist.initialize()
        clusters = [ClusterInfo(1, address)]
        datadist.link_clusters(clusters, timeout_ms=10_000).raise_for_status()
        return datadist

    return cast("LlmDataDist", run.share("linked engine", make))


@TOPIC.row("facade_pull_ratio")
def facade_pull(run: Run, name: str) -> Row:
    """Pull by a whole call with its planning, beside the executor with the same descriptors."""
    datadist = linked_engine(run)
    cache = datadist.allocate_blocks_cache(PAGED)
    rng = np.random.default_rng(64)
    src_blocks, dst_blocks = (rng.permutation(BLOCKS)[:64].tolist() for _ in range(2))
    pull = partial(datadist.pull_blocks, paged_key(1), cache, src_blocks, dst_blocks)
    pull(timeout_ms=60_000)
    for number, tensor in enumerate(datadist.arrays(cache)):
        np.testing.assert_array_equal(tensor[dst_blocks], number)

    plan = datadist.plan(Transfer(Rows(paged_key(1), src_blocks), Rows(cache, dst_blocks)))
    descriptors = bind(plan, *memories_of(datadist, cache), one_space=True)
    with Executor(host_backend(ThreadPool())) as executor:
        ours, bare = run.medians(timed(pull), timed(lambda: executor.run(descriptors)), rounds=41)
    datadist.deallocate_cache(cache)
    note = "64 layers x 2 tensors x 64 blocks of 32 KiB, from lists; limit: the executor alone"
    rates = plan.nbytes / ours / 1e9, "GB/s", plan.nbytes / bare / 1e9
    return Row(name, *rates, "at least", 0.97, note)


def memories_of(datadist: LlmDataDist, cache: Cache) -> tuple[TensorMemory, TensorMemory]:
    """Return the paged caches of the peer and of this engine, as the facade finds them."""
    engine = datadist._running()
    link = engine.links.get(1)
    theirs = link.memory(link.cache(paged_key(1)), writable=False)
    return theirs, engine.registry.resolve(cache).memory


@TOPIC.row("facade_pull_4KiB_us")
def facade_pull_small(run: Run, name: str) -> Row:
    """Pull as little as is useful: check the peer, copy, check again, count."""
    datadist = linked_engine(run)
    cache = datadist.allocate_cache(SMALL)
    pull = partial(datadist.pull_cache, small_key(1), cache)
    pull()
    np.testing.assert_array_equal(datadist.arrays(cache)[0], 1)
    (ours,) = run.medians(timed(pull, repeats=200), rounds=101)
    datadist.deallocate_cache(cache)
    return Row(name, 1e6 * ours, "us", 6, note="a slot of 4 KiB by id; limit: the budget")


@TOPIC.row("run_4KiB_us")
def run_small(run: Run, name: str) -> Row:
    """Do the same pull by a ready `Transfer`: no argument is converted."""
    datadist = linked_engine(run)
    cache = datadist.allocate_cache(SMALL)
    move = partial(datadist.run, Transfer(Rows(small_key(1)), Rows(cache)))
    move()
    np.testing.assert_array_equal(datadist.arrays(cache)[0], 1)
    (ours,) = run.medians(timed(move, repeats=200), rounds=101)
    datadist.deallocate_cache(cache)
    return Row(name, 1e6 * ours, "us", 4, note="a slot of 4 KiB by id; limit: the budget")


@TOPIC.row("ragged_lease_ratio")
def ragged_lease(run: Run, name: str) -> Row:
    """Pull as a serving engine does: by a lease, with a tag, the last block not full."""
    datadist = linked_engine(run)
    cache = datadist.allocate_blocks_cache(RAGGED)
    lease = run.shared["ragged lease"]
    mine = np.random.default_rng(5).permutation(RAGGED.batch_size)[: len(lease.blocks)].tolist()
    transfer = Transfer(Rows(lease), Rows(cache, mine))
    move = partial(datadist.run, transfer, tag="cmpl-1")
    move()
    engine = datadist._running()
    link = engine.links.get(1)
    theirs = link.memory(link.leased(lease), writable=False)
    ours_memory = engine.registry.resolve(cache).memory
    descriptors = bind(datadist.plan(transfer), theirs, ours_memory, one_space=True)
    with Executor(host_backend(ThreadPool())) as executor:
        ours, bare = run.medians(timed(move), timed(lambda: executor.run(descriptors)), rounds=101)
    datadist.deallocate_cache(cache)
    note = (
        f"{len(lease.blocks)} blocks x {RAGGED.num_tensors} tensors of 4 KiB, the last with "
        f"{lease.tokens % RAGGED.shape[1]} of {RAGGED.shape[1]} tokens; {1e6 * ours:.0f} us; "
        "limit: copies of the same runs"
    )
    return Row(name, ours / bare, "x", 1.25, note=note)


@TOPIC.row("verify_pull_ratio")
def verified_pull(run: Run, name: str) -> Row:
    """Pull, read all bytes again and compare them, beside an unverified pull."""
    datadist = linked_engine(run)
    cache = datadist.allocate_blocks_cache(PAGED)
    rng = np.random.default_rng(64)
    src_blocks, dst_blocks = (rng.permutation(BLOCKS)[:64].tolist() for _ in range(2))
    pull = partial(datadist.pull_blocks, paged_key(1), cache, src_blocks, dst_blocks)
    pull(timeout_ms=60_000)
    nbytes = datadist.plan(Transfer(Rows(paged_key(1), src_blocks), Rows(cache, dst_blocks))).nbytes
    ours, bare = run.medians(timed(partial(pull, verify=True)), timed(pull), rounds=41)
    datadist.deallocate_cache(cache)
    # Bytes are processed three times: moved, read again, and compared by one thread.
    note = "64 layers x 2 tensors x 64 blocks of 32 KiB; limit: the pull alone"
    rates = nbytes / ours / 1e9, "GB/s", nbytes / bare / 1e9
    return Row(name, *rates, "at least", 0.2, note)
