"""The decode engine of `benchmarks.fan_in`: linked with all peers, it pulls from all at once.

It has its own process, so that its memory can be measured. The first argument has its orders; the
result is one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.filled_peer import Shape, check_blocks
from kvplan import BlocksCacheKey, ClusterInfo, LinkState, LlmDataDist, LlmRole, Rows, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvplan import Cache, TransferTask

LOOK_S = 0.0002
"""Pause between two polls of the tasks in flight, if no task has ended."""


@dataclass(frozen=True)
class Orders:
    """The work of the decode engine.

    Attributes:
        peers: cluster id and address of each peer.
        shape: shape of each peer's paged cache, and of the local cache that it is pulled into.
        bursts: number of bursts; each pulls once from all peers at once.
        sustained_s: seconds of the sustained part, which pulls from each peer again and again.
        options: options of the engine.
    """

    peers: list[tuple[int, str]]
    shape: Shape
    bursts: int
    sustained_s: float
    options: dict[str, str]


@dataclass
class Outcome:
    """The measured values.

    Attributes:
        link_s: seconds of the call that links with all peers.
        finished_s: for each burst, the seconds until the end of each peer's pull.
        pulled: bytes from each peer in the sustained part.
        sustained_s: seconds of the sustained part, including the ends of the last pulls.
        anonymous_kib: memory before linking, when linked, after the bursts, at the end.
        descriptors: open descriptors before linking, and when linked.
        threads: threads when linked.
        cpu_s: processor time of the sustained part.
    """

    link_s: float = 0.0
    finished_s: list[list[float]] = field(default_factory=list)
    pulled: list[int] = field(default_factory=list)
    sustained_s: float = 0.0
    anonymous_kib: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: int = 0
    cpu_s: float = 0.0


def anonymous_kib(pid: int | str = "self") -> int:
    """Return the memory of a process that is neither shared nor a file's, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/status has no RssAnon")


class Decode:
    """The decode engine; one thread uses it."""

    def __init__(self, datadist: LlmDataDist, orders: Orders) -> None:
        self._datadist, self._orders = datadist, orders
        self._random = np.random.default_rng(0)
        self._ids = [cluster_id for cluster_id, _ in orders.peers]
        self._numbers = range(len(self._ids))
        self._caches = [datadist.allocate_blocks_cache(orders.shape.desc) for _ in self._ids]
        for cache in self._caches:
            self._clear(cache)

    def run(self) -> Outcome:
        """Link, pull and measure.

        Raises:
            LLMException: a link or a pull failed.
            AssertionError: a byte is wrong, or a link is lost.
        """
        outcome = Outcome()
        self._look(outcome)
        clusters = [ClusterInfo(*peer) for peer in self._orders.peers]
        began = time.perf_counter()
        self._datadist.link_clusters(clusters, timeout_ms=60_000).raise_for_status()
        outcome.link_s = time.perf_counter() - began
        self._look(outcome)
        for _ in range(self._orders.bursts):
            outcome.finished_s.append(self._burst())
        outcome.anonymous_kib.append(anonymous_kib())
        cpu, began = time.process_time(), time.perf_counter()
        outcome.pulled = self._sustained(began + self._orders.sustained_s)
        outcome.sustained_s = time.perf_counter() - began
        outcome.cpu_s = time.process_time() - cpu
        self._look(outcome)
        states = {link.cluster_id: link.state for link in self._datadist.links()}
        assert states == dict.fromkeys(self._ids, LinkState.LINKED), states
        return outcome

    def _burst(self) -> list[float]:
        """Pull every peer's whole cache at once; return the seconds until each pull ended."""
        tables = [self._random.permutation(self._orders.shape.blocks) for _ in range(2)]
        began = time.perf_counter()
        finished = [0.0] * len(self._ids)
        for number in self._ended({item: self._pull(item, *tables) for item in self._numbers}):
            finished[number] = time.perf_counter() - began
        for cluster_id, cache in zip(self._ids, self._caches, strict=True):
            check_blocks(self._datadist.arrays(cache), cluster_id, *tables)
            self._clear(cache)
        return finished

    def _sustained(self, deadline: float) -> list[int]:
        """Pull from each peer again and again until `deadline`; return the bytes of each."""
        pulled = [0] * len(self._ids)
        tables = [self._random.permutation(self._orders.shape.blocks) for _ in range(2)]
        tasks = {item: self._pull(item, *tables) for item in self._numbers}
        for number in self._ended(tasks):
            pulled[number] += self._orders.shape.nbytes
            if time.perf_counter() < deadline:
                tasks[number] = self._pull(number, *tables)
        for cluster_id, cache in zip(self._ids, self._caches, strict=True):
            check_blocks(self._datadist.arrays(cache), cluster_id, *tables)
        return pulled

    def _pull(self, number: int, src: NDArray[np.int64], dst: NDArray[np.int64]) -> TransferTask:
        key = BlocksCacheKey(self._ids[number], 0)
        return self._datadist.submit(Transfer(Rows(key, src), Rows(self._caches[number], dst)))

    def _ended(self, tasks: dict[int, TransferTask]) -> Iterator[int]:
        """Yield the number of each task as it ends; the caller may add tasks meanwhile.

        Raises:
            LLMException: a task has failed, or has not ended after a minute.
        """
        deadline = time.perf_counter() + 60
        while tasks:
            done = [number for number, task in tasks.items() if task.done]
            for number in done:
                tasks.pop(number).wait()
                deadline = time.perf_counter() + 60
                yield number
            if not done:
                time.sleep(LOOK_S)
                if time.perf_counter() > deadline:
                    next(iter(tasks.values())).wait(timeout_ms=0)

    def _clear(self, cache: Cache) -> None:
        for tensor in self._datadist.arrays(cache):
            tensor[:] = 0

    def _look(self, outcome: Outcome) -> None:
        outcome.anonymous_kib.append(anonymous_kib())
        outcome.descriptors.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))
        outcome.threads = sum(1 for _ in Path("/proc/self/task").iterdir())


def main() -> None:
    """Carry out the orders in the first argument."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    orders = Orders(**{**given, "shape": Shape(**given["shape"])})
    with LlmDataDist(0, LlmRole.DECODER) as datadist:
        datadist.initialize(orders.options)
        print(json.dumps(asdict(Decode(datadist, orders).run())), flush=True)


if __name__ == "__main__":
    main()
