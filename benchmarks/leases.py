"""Leases: their cost in a pull, and for their owner."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np

from benchmarks.engine_peer import LEASED, LISTEN, leased_key
from benchmarks.engines import linked_engine
from benchmarks.table import Row, Run, Topic, timed
from kvplan import BlockLease, CacheDesc, CacheIndex, ClusterInfo, DataType, LlmDataDist, LlmRole

TOPIC = Topic()
OWNER_CLUSTER = 2
POOL = CacheDesc(1, (65_536, 64), DataType.DT_UINT8)
BLOCKS_OF_EACH = 4
LIVE = 100_000
VIEWED = 64  # blocks
BATCH = 100  # leases that are released one after another


@TOPIC.row("lease_overhead_us")
def lease_overhead(run: Run, name: str) -> Row:
    """Additional time of a pull by a lease, beside a pull by the key; a new lease for each pull.

    A pull by the key makes one more check of the peer than a pull by lease or id.
    """
    datadist = linked_engine(run)
    given = run.shared["leases"]
    leases = cycle(given)
    cache = datadist.allocate_blocks_cache(LEASED)
    by_key = partial(datadist.pull_blocks, leased_key(1), cache, [5], [2])
    by_id = partial(datadist.pull_blocks, CacheIndex(1, given[0].cache_id), cache, [5], [2])

    def leased() -> None:
        datadist.pull_blocks(next(leases), cache, [5], [2])

    leased()
    np.testing.assert_array_equal(datadist.arrays(cache)[0][2], 5)
    candidates = (timed(value, repeats=50) for value in (leased, by_key, by_id))
    ours, key, bare = run.medians(*candidates, rounds=201)
    datadist.deallocate_cache(cache)
    note = (
        f"a block of 4 KiB by key {1e6 * key:.1f} us, by the cache's id {1e6 * bare:.1f} us: than "
        f"that {1e6 * (ours - bare):.1f} us more; limit: the budget"
    )
    cases = {"than by key": 1e6 * (ours - key), "than by id": 1e6 * (ours - bare)}
    return Row(name, 1e6 * (ours - key), "us", 1, note=note, cases=cases)


@TOPIC.row("leased_pull_4KiB_us")
def leased_pull(run: Run, name: str) -> Row:
    """Pull as little as possible by a lease; a new lease for each pull."""
    datadist = linked_engine(run)
    leases = cycle(run.shared["leases"])
    cache = datadist.allocate_blocks_cache(LEASED)

    def leased() -> None:
        datadist.pull_blocks(next(leases), cache, None, [2])

    leased()
    (ours,) = run.medians(timed(leased, repeats=200), rounds=101)
    datadist.deallocate_cache(cache)
    return Row(name, 1e6 * ours, "us", 5, note="a block of 4 KiB; limit: the budget")


@TOPIC.row("notified_pull_4KiB_us")
def notified_pull(run: Run, name: str) -> Row:
    """Do the same with a tag and with the notification that it is done, as in a serving engine."""
    datadist = linked_engine(run)
    with LlmDataDist(OWNER_CLUSTER, LlmRole.PROMPT) as owner:
        owner.initialize({**LISTEN, "kvplan.transport": "local"})
        peers = [ClusterInfo(OWNER_CLUSTER, owner.listen_address)]
        datadist.link_clusters(peers, timeout_ms=10_000).raise_for_status()
        there, cache = (value.allocate_blocks_cache(LEASED) for value in (owner, datadist))
        lease = owner.lease_blocks(there, [5])

        def notified() -> float:
            start = time.perf_counter_ns()
            for _ in range(BATCH):
                datadist.pull_blocks(lease, cache, None, [2], tag="cmpl-1", notify=b"done")
            seconds = (time.perf_counter_ns() - start) / 1e9 / BATCH
            assert len(list(owner.notifications())) == BATCH
            return seconds

        (ours,) = run.medians(notified, rounds=101)
        datadist.unlink_clusters(peers, timeout_ms=10_000).raise_for_status()
        datadist.deallocate_cache(cache)
    return Row(name, 1e6 * ours, "us", 8, note="a block of 4 KiB; limit: the budget")


@TOPIC.row("lease_view_us")
def lease_view(run: Run, name: str) -> Row:
    """Time for an array over a leased block in its owner's memory, without a copy."""
    datadist = linked_engine(run)
    lease = run.shared["leases"][0]
    fields = {item: getattr(lease, item) for item in BlockLease.__slots__}
    blocks = BlockLease(**fields, blocks=(5,) * VIEWED, words=lease.words)

    def viewed() -> None:
        with datadist.arrays(blocks) as view:
            assert len(view[0]) == VIEWED

    (seconds,) = run.medians(timed(viewed, repeats=20), rounds=101)
    each = 1e6 * seconds / VIEWED
    note = f"{VIEWED} blocks of one tensor, with both checks of the lease; limit: the budget"
    return Row(name, each, "us", 0.3, note=note)


@TOPIC.row("release_us")
def release(run: Run, name: str) -> Row:
    """Release a lease, with one linked peer that has written before but is idle now."""
    peer = linked_engine(run)
    values = {}
    for transport in ("local", "auto"):
        with LlmDataDist(OWNER_CLUSTER, LlmRole.PROMPT) as owner:
            owner.initialize({**LISTEN, "kvplan.transport": transport})
            peers = [ClusterInfo(OWNER_CLUSTER, owner.listen_address)]
            peer.link_clusters(peers, timeout_ms=10_000).raise_for_status()
            cache, theirs = (engine.allocate_blocks_cache(LEASED) for engine in (owner, peer))
            lease = owner.lease_blocks(cache, [5])
            peer.push_blocks(theirs, lease, [2])
            owner.release(lease)

            def released(owner: LlmDataDist = owner, cache: object = cache) -> float:
                held = [owner.lease_blocks(cache, [1, 2, 3, 4]) for _ in range(BATCH)]
                start = time.perf_counter_ns()
                for item in held:
                    owner.release(item)
                return (time.perf_counter_ns() - start) / 1e9 / BATCH

            (seconds,) = run.medians(released, rounds=201)
            values[transport] = 1e6 * seconds
            peer.unlink_clusters(peers, timeout_ms=10_000).raise_for_status()
            peer.deallocate_cache(theirs)
    note = f"over local alone; {values['auto']:.2f} us of an engine that offers tcp too; "
    cases = {f"kvplan.transport={value}": us for value, us in values.items()}
    return Row(name, values["local"], "us", 2, note=f"{note}limit: the budget", cases=cases)


@TOPIC.row("leases_100k_MiB")
def memory_of_leases(run: Run, name: str) -> Row:
    """Memory of 100,000 leases of 4 blocks at their owner: growth of the RSS of a new process."""
    command = [sys.executable, "-m", "benchmarks.leases"]
    grown = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    note = f"{LIVE:,} leases of {BLOCKS_OF_EACH} blocks, which the caller holds too: growth of RSS"
    return Row(name, grown, "MiB", 32, note=f"{note}; limit: the budget")


def resident_mib() -> float:
    """Return the RSS of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def main() -> None:
    """Print the growth of this process."""
    rng = random.Random(LIVE)
    with LlmDataDist(OWNER_CLUSTER, LlmRole.PROMPT) as owner:
        owner.initialize(LISTEN)
        cache = owner.allocate_blocks_cache(POOL)
        held: list[BlockLease] = [owner.lease_blocks(cache, range(BLOCKS_OF_EACH))]
        gc.collect()
        before = resident_mib()
        for _ in range(LIVE):
            blocks = rng.sample(range(POOL.shape[0]), BLOCKS_OF_EACH)
            held.append(owner.lease_blocks(cache, blocks))
        gc.collect()
        print(resident_mib() - before)
        assert owner.leases() == held


if __name__ == "__main__":
    main()
