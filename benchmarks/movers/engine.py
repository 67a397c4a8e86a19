"""kvplan as its users call it: the time includes planning, lowering and checking.

The moving end also answers "facade TIMES" and "executor TIMES" with the median seconds of a pull of
4 KiB: of a whole call, and of the executor with a ready descriptor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.movers.paged import (
    BLOCK,
    POOL_BLOCKS,
    TENSORS,
    Ids,
    Pool,
    answers,
    obey,
    ordinary_pool,
    serve,
    timed,
)
from kvnative._backend import ThreadPool, host_backend
from kvnative._executor import Executor
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
)
from kvplan.execution.binding import bind

SERVING, MOVING = 1, 2
PAGED = CacheDesc(TENSORS, (POOL_BLOCKS, BLOCK), DataType.DT_UINT8)
SMALL = CacheDesc(1, (1, 4096), DataType.DT_UINT8)
SINGLE = CacheDesc(1, (POOL_BLOCKS, BLOCK), DataType.DT_UINT8)
SINGLE_KEY = BlocksCacheKey(SERVING, 1)
PAGED_KEY, SMALL_KEY = BlocksCacheKey(SERVING), CacheKeyByIdAndIndex(SERVING, 1)
LONG_MS = 60_000


@contextmanager
def engine(cluster_id: int, address: str, options: list[str]) -> Iterator[LlmDataDist]:
    """Yield an engine that listens at `address`; options are KEY=VALUE."""
    with LlmDataDist(cluster_id, LlmRole.MIX) as datadist:
        given = dict(option.split("=", 1) for option in options)
        datadist.initialize({"llm.ListenIpInfo": f"{address}:0", **given})
        yield datadist


def paged_cache(
    datadist: LlmDataDist, memory: str, key: BlocksCacheKey | None
) -> tuple[Cache, Pool]:
    """Make a cache in the engine's arena or, if "registered", in the caller's memory."""
    if memory == "registered":
        pool = list(ordinary_pool())
        return datadist.register_blocks_cache(PAGED, pool, key), pool
    cache = datadist.allocate_blocks_cache(PAGED, key)
    pool = datadist.arrays(cache)
    for tensor in pool:
        tensor[:] = 1
    return cache, pool


def single_cache(datadist: LlmDataDist, key: BlocksCacheKey | None) -> Cache:
    """Make a cache of one tensor of the paged work; every page is touched."""
    cache = datadist.allocate_blocks_cache(SINGLE, key)
    datadist.arrays(cache)[0][:] = 1
    return cache


class EngineMover:
    """The moving end with kvplan."""

    def __init__(self, datadist: LlmDataDist, cache: Cache, pool: Pool) -> None:
        self.pool = pool
        self._datadist, self._cache = datadist, cache
        self._single = single_cache(datadist, None)

    def prepared(self, direction: str, remote: Ids, local: Ids) -> Callable[[], object]:
        theirs, ours = remote.tolist(), local.tolist()
        if direction == "pull":
            move = partial(self._datadist.pull_blocks, PAGED_KEY, self._cache, theirs, ours)
        else:
            move = partial(self._datadist.push_blocks, self._cache, PAGED_KEY, ours, theirs)
        return partial(move, timeout_ms=LONG_MS)

    def request(self, tensors: int, remote: Ids, local: Ids) -> None:
        key, cache = (SINGLE_KEY, self._single) if tensors == 1 else (PAGED_KEY, self._cache)
        self._datadist.pull_blocks(key, cache, remote, local)


class SmallPulls:
    """Pulls of a slot of 4 KiB by the id of its cache."""

    def __init__(self, datadist: LlmDataDist) -> None:
        cache = datadist.allocate_cache(SMALL)
        self._facade = partial(datadist.pull_cache, SMALL_KEY, cache)
        self._facade()
        if datadist.arrays(cache)[0][0].tolist() != [7] * 4096:
            raise AssertionError("the slot came back changed")
        link = datadist._running().links.get(SERVING)
        theirs = link.memory(link.cache(SMALL_KEY), writable=False)
        ours = datadist._running().registry.resolve(cache).memory
        plan = datadist.plan(Transfer(Rows(SMALL_KEY), Rows(cache)))
        pool = ThreadPool()
        executor = Executor(theirs.backend(pool, "get", ours, None) or host_backend(pool))
        descriptors = bind(plan, theirs, ours, one_space=theirs.in_process)
        self._executor = partial(executor.run, descriptors, keep=(theirs, ours))

    def seconds(self, level: str, times: int) -> float:
        """Return the median seconds of a pull at level "facade" or "executor"."""
        pull = self._facade if level == "facade" else self._executor
        clock = time.perf_counter_ns
        taken = []
        for _ in range(times):
            start = clock()
            pull()
            taken.append(clock() - start)
        return statistics.median(taken) / 1e9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="engine option")
    add("--memory", choices=("arena", "registered"), default="arena")
    add("--work", choices=("paged", "small"), default="paged")
    add("--address", default="127.0.0.1", help="of this end")
    add("peer", nargs="?", help="line that the serving end printed")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    say = answers()
    with engine(MOVING if asked.peer else SERVING, asked.address, asked.option) as datadist:
        small = asked.work == "small"
        if asked.peer is None:
            if small:
                cache = datadist.allocate_cache(SMALL)
                datadist.arrays(cache)[0][:] = 7
            else:
                paged_cache(datadist, asked.memory, PAGED_KEY)
                single_cache(datadist, SINGLE_KEY)
            serve(say, datadist.listen_address)
            return
        clusters = [ClusterInfo(SERVING, json.loads(asked.peer))]
        datadist.link_clusters(clusters, timeout_ms=LONG_MS).raise_for_status()
        if small:
            pulls = SmallPulls(datadist)
            obey(say, lambda level, times: partial(pulls.seconds, level, times))
        else:
            obey(say, timed(EngineMover(datadist, *paged_cache(datadist, asked.memory, None))))


if __name__ == "__main__":
    main()
