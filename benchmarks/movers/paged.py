"""The paged work, and the messages that start it. NumPy and nothing else.

The serving end prints one line of JSON, which says how to reach it, and serves until its input
ends. The moving end gets that line as its last argument. Then it answers each line of its input,
"pull BLOCKS" or "push BLOCKS", with one of JSON: how many seconds that took. To "request BLOCKS",
and to "single BLOCKS" of one tensor alone, it answers with the median of many pulls, each of other
blocks, of which nothing is known before.
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
"""Tensors, blocks, bytes."""
Pool = OnePool | Sequence[OnePool]
"""The same, or each tensor by itself."""
Ids = NDArray[np.int64]


class Mover(Protocol):
    """The moving end of one library."""

    @property
    def pool(self) -> Pool:
        """Our blocks."""

    def prepared(self, direction: str, remote: Ids, local: Ids) -> Callable[[], object]:
        """A call that moves blocks `remote` of every tensor of the peer to or from `local` of ours.

        What the library lets its users do beforehand is done beforehand; the call is timed.
        """


class Requester(Mover, Protocol):
    """A moving end that also pulls what was not prepared."""

    def request(self, tensors: int, remote: Ids, local: Ids) -> object:
        """Pull these blocks of the first `tensors` tensors, 1 or all; done on return."""


REQUESTS = 1000
"""As many are timed at once, of one block; of many blocks fewer."""


def pool_at(memory: Any) -> OnePool:
    """The tensors in `memory`, every page of which is touched."""
    pool = np.frombuffer(memory, dtype=np.uint8).reshape(TENSORS, POOL_BLOCKS, BLOCK)
    pool[:, :, :: mmap.PAGESIZE] = 1
    return pool


def ordinary_pool() -> OnePool:
    """Memory as any allocator gives it."""
    return pool_at(mmap.mmap(-1, POOL_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def huge_pool() -> OnePool:
    """The same in huge pages, where the system has any."""
    memory = mmap.mmap(-1, POOL_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return pool_at(memory)


def shared_pool() -> OnePool:
    """Memory that other processes can map: what a library that is good at it may make use of."""
    return pool_at(mmap.mmap(-1, POOL_NBYTES, flags=mmap.MAP_SHARED))


POOLS: dict[str, Callable[[], OnePool]] = {
    "ordinary": ordinary_pool,
    "huge": huge_pool,
    "shared": shared_pool,
}


def tables(blocks: int) -> list[Ids]:
    """Random distinct blocks: of the peer, of ours, and others of ours."""
    rng = np.random.default_rng(blocks)
    remote, local, elsewhere = (rng.permutation(POOL_BLOCKS)[:blocks] for _ in range(3))
    return [remote, local, elsewhere]


def offsets(ids: Ids) -> NDArray[np.int64]:
    """Where the blocks of every tensor lie in a pool, in the order of tensors, then `ids`."""
    tensors = np.arange(TENSORS, dtype=np.int64)[:, None]
    return (tensors * TENSOR_NBYTES + ids * BLOCK).ravel()


def forwarding(method: Callable[..., Any]) -> Callable[..., Any]:
    """The least that a wrapper of a method can cost: it passes every argument on."""

    def forwarded(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return forwarded


def answers() -> IO[str]:
    """The standard output, for answers alone: what libraries print goes to the standard error."""
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return ours


def serve(say: IO[str], whereabouts: object, poll: Callable[[], object] | None = None) -> None:
    """Say how to reach this end; be there until the input ends, and call `poll` all the while."""
    print(json.dumps(whereabouts), file=say)
    if poll is None:
        sys.stdin.read()
        return
    input_ends = threading.Thread(target=sys.stdin.read, daemon=True)
    input_ends.start()
    while input_ends.is_alive():
        poll()


def obey(say: IO[str], work: Callable[[str, int], Callable[[], float]]) -> None:
    """Answer each line of the input, a word and a number, with the seconds of the work it names."""
    ready: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        if line not in ready:
            word, number = line.split()
            ready[line] = work(word, int(number))
        print(json.dumps({"seconds": ready[line]()}), file=say)


def timed(mover: Mover) -> Callable[[str, int], Callable[[], float]]:
    """Work for `obey`: of a direction and a number of blocks, checked before the first is timed."""

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
    """Pulls of random blocks, one after another; a call returns the median of their seconds."""
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
    """Push blocks that are all different, pull them back to other places, and compare.

    Raises:
        AssertionError: they came back changed.
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
