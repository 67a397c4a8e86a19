"""The paged work, and the messages that start it. Needs only NumPy.

The serving end prints one line of JSON with its address, and serves until its input ends. The
moving end gets that line as its last argument. It answers each line of its input, "pull BLOCKS" or
"push BLOCKS", with a line of JSON: the seconds of the transfer. To "request BLOCKS", and to
"single BLOCKS" of only one tensor, it answers with the median of many pulls, each of new blocks
that are not known in advance.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

TENSORS, POOL_BLOCKS, BLOCK = 64, 512, 32 << 10  # 1 GiB
TENSOR_NBYTES = POOL_BLOCKS * BLOCK
POOL_NBYTES = TENSORS * TENSOR_NBYTES

OnePool = NDArray[np.uint8]
"""An array of shape (tensors, blocks, bytes)."""
Pool = OnePool | Sequence[OnePool]
"""One array, or an array for each tensor."""
Ids = NDArray[np.int64]


class Mover(Protocol):
    """The moving end of one library."""

    @property
    def pool(self) -> Pool:
        """The local blocks."""

    def prepared(self, direction: str, remote: Ids, local: Ids) -> Callable[[], object]:
        """Return a call that moves blocks `remote` of every tensor to or from local blocks `local`.

        Everything that the library can prepare is prepared; only the call is timed.
        """


class Requester(Mover, Protocol):
    """A moving end that also pulls unprepared blocks."""

    def request(self, tensors: int, remote: Ids, local: Ids) -> object:
        """Pull these blocks of the first `tensors` tensors, 1 or all, and wait."""


REQUESTS = 1000
"""Number of requests of one block that are timed together; fewer of many blocks."""


def pool_at(memory: Any) -> OnePool:
    """Return the tensors in `memory`; touch every page."""
    pool = np.frombuffer(memory, dtype=np.uint8).reshape(TENSORS, POOL_BLOCKS, BLOCK)
    pool[:, :, :: mmap.PAGESIZE] = 1
    return pool


def ordinary_pool() -> OnePool:
    """Return a pool in ordinary memory."""
    return pool_at(mmap.mmap(-1, POOL_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def huge_pool() -> OnePool:
    """Return a pool in huge pages, if the system has any."""
    memory = mmap.mmap(-1, POOL_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return pool_at(memory)


def shared_pool() -> OnePool:
    """Return a pool that other processes can map, for libraries that use this."""
    return pool_at(mmap.mmap(-1, POOL_NBYTES, flags=mmap.MAP_SHARED))


POOLS: dict[str, Callable[[], OnePool]] = {
    "ordinary": ordinary_pool,
    "huge": huge_pool,
    "shared": shared_pool,
}


def tables(blocks: int) -> list[Ids]:
    """Return random distinct blocks: of the peer, local ones, and other local ones."""
    rng = np.random.default_rng(blocks)
    remote, local, elsewhere = (rng.permutation(POOL_BLOCKS)[:blocks] for _ in range(3))
    return [remote, local, elsewhere]


def offsets(ids: Ids) -> NDArray[np.int64]:
    """Return the offsets of blocks of every tensor in a pool, in order of tensors, then `ids`."""
    tensors = np.arange(TENSORS, dtype=np.int64)[:, None]
    return (tensors * TENSOR_NBYTES + ids * BLOCK).ravel()


def forwarding(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the cheapest wrapper of a method: it only forwards."""

    def forwarded(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return forwarded


def answers() -> IO[str]:
    """Return the standard output, for answers only; output of libraries goes to standard error."""
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return ours


def serve(say: IO[str], whereabouts: object, poll: Callable[[], object] | None = None) -> None:
    """Print how to reach this end; serve until the input ends, and call `poll` meanwhile."""
    print(json.dumps(whereabouts), file=say)
    if poll is None:
        sys.stdin.read()
        return
    input_ends = threading.Thread(target=sys.stdin.read, daemon=True)
    input_ends.start()
    while input_ends.is_alive():
        poll()


def obey(say: IO[str], work: Callable[[str, int], Callable[[], float]]) -> None:
    """Answer each line of the input, a word and a number, with the seconds of that work."""
    ready: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        if line not in ready:
            word, number = line.split()
            ready[line] = work(word, int(number))
        print(json.dumps({"seconds": ready[line]()}), file=say)


def timed(mover: Mover) -> Callable[[str, int], Callable[[], float]]:
    """Return work for `obey`, by direction and number of blocks; check it before it is timed."""

    def work(direction: str, blocks: int) -> Callable[[], float]:
        if direction in ("request", "single"):
            return requests(cast(Requester, mover), 1 if direction == "single" else TENSORS, blocks)
        remote, local, elsewhere = tables(blocks)
        check(mover, remote, local, elsewhere)
        move = mover.prepared(direction, remote, local)

        def seconds() -> float:
            start = time.perf_counter()
            move()
            return time.perf_counter() - start

        return seconds

    return work


def requests(mover: Requester, tensors: int, blocks: int) -> Callable[[], float]:
    """Return a call that pulls random blocks many times, and returns the median seconds."""
    rng = np.random.default_rng(blocks)

    def table() -> Ids:
        return rng.permutation(POOL_BLOCKS)[:blocks]

    def seconds() -> float:
        asked = [(table(), table()) for _ in range(max(REQUESTS // (tensors * blocks), 10))]
        taken = []
        for remote, local in asked:
            start = time.perf_counter()
            mover.request(tensors, remote, local)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    return seconds


def check(mover: Mover, remote: Ids, local: Ids, elsewhere: Ids) -> None:
    """Push blocks of distinct content, pull them back to other places, and compare.

    Raises:
        AssertionError: a block came back changed.
    """

    def numbers(tensor: int) -> NDArray[np.uint32]:
        words = len(local) * BLOCK // 4
        numbers = np.arange(tensor * words, (tensor + 1) * words, dtype=np.uint32)
        return numbers.reshape(len(local), BLOCK // 4)

    pool = [tensor.view(np.uint32) for tensor in mover.pool]
    for tensor, words in enumerate(pool):
        words[local] = numbers(tensor)
    mover.prepared("push", remote, local)()
    for words in pool:
        words[local] = words[elsewhere] = 0
    mover.prepared("pull", remote, elsewhere)()
    for tensor, words in enumerate(pool):
        if not np.array_equal(words[elsewhere], numbers(tensor)):
            raise AssertionError(f"blocks of tensor {tensor} came back changed")
