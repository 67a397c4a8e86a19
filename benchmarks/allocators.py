"""Block tables as paged-cache allocators make them: the input of coalescing.

Two pools (prefill and decode) serve the same requests, each with its own history of allocations.
`python -m benchmarks.allocators` prints, for each allocator and each coalescing, the segments of a
request and the planning time; docs/internals/adr/0001-coalescing-order.md quotes them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, Rows, Transfer

POOL = 16_384
"""Blocks of each pool."""

Table = list[int]


class Pool:
    """The free blocks of one process; the arguments are the allocator's policy."""

    def __init__(self, take: Callable[[deque[int]], int], reverse_free: bool) -> None:
        self.free = deque(range(POOL))
        self._take = take
        self._reverse_free = reverse_free

    def allocate(self, blocks: int) -> Table:
        return [self._take(self.free) for _ in range(blocks)]

    def release(self, table: Table) -> None:
        self.free.extend(reversed(table) if self._reverse_free else table)


POLICIES: dict[str, Callable[[], Pool]] = {
    "queue (vLLM: take the oldest, free a request back to front)": lambda: Pool(
        deque.popleft, reverse_free=True
    ),
    "queue (free a request front to back)": lambda: Pool(deque.popleft, reverse_free=False),
    "stack (take the newest, free front to back)": lambda: Pool(deque.pop, reverse_free=False),
}


def tables(policy: str, requests: int, blocks: int, seed: int = 0) -> Iterator[tuple[Table, Table]]:
    """Yield block tables of `requests` requests, after a history of allocations in both pools."""
    rng = random.Random(seed)
    prefill, decode = POLICIES[policy](), POLICIES[policy]()
    live: list[tuple[Pool, Table]] = []
    for step in range(40 * requests):
        size = max(1, int(rng.expovariate(1 / blocks)))
        src, dst = prefill.allocate(size), decode.allocate(size)
        live += [(prefill, src), (decode, dst)]
        # Prefill frees a request at once; decode keeps it for a while.
        while len(live) > rng.randint(2, 24) or len(decode.free) < 8 * blocks:
            owner, table = live.pop(rng.randrange(len(live)))
            owner.release(table)
        if step >= 39 * requests:
            yield src, dst


def main() -> None:
    desc = CacheDesc(122, (POOL, 16, 8, 64), DataType.DT_FLOAT16)
    print(f"{'allocator':<62} {'coalesce':<8} {'slices':>7} {'segments':>9} {'plan us':>8}")
    for policy in POLICIES:
        cases = [(np.array(a), np.array(b)) for a, b in tables(policy, requests=50, blocks=256)]
        for how in Coalesce:
            plans, times = [], []
            for src, dst in cases:
                start = time.perf_counter()
                plans.append(
                    kvplan.plan(
                        Transfer(Rows(desc, src), Rows(desc, dst), coalesce=how), local="dst"
                    )
                )
                times.append((time.perf_counter() - start) * 1e6)
            slices = statistics.mean(p.part.num_slices for p in plans)
            segments = statistics.mean(len(p.part.segments) for p in plans)
            median = statistics.median(times)
            print(f"{policy:<62} {how:<8} {slices:7.0f} {segments:9.1f} {median:8.0f}")


if __name__ == "__main__":
    main()
