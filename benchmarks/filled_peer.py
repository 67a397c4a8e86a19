"""An engine in another process, with filled paged caches: each block identifies its owner.

The process prints its address in one line, and serves until its standard input ends. Its parent
verifies pulled blocks with `check_blocks`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan import BlocksCacheKey, CacheDesc, DataType, LlmDataDist, LlmRole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Shape:
    """The shape of a paged cache: `tensors` tensors of `blocks` blocks of `block_nbytes` bytes."""

    tensors: int
    blocks: int
    block_nbytes: int

    @property
    def desc(self) -> CacheDesc:
        """The description for an engine."""
        return CacheDesc(self.tensors, (self.blocks, self.block_nbytes), DataType.DT_UINT8)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.tensors * self.blocks * self.block_nbytes


@dataclass(frozen=True)
class Filled:
    """An engine to start.

    Attributes:
        cluster_id: id of its cluster.
        shapes: shapes of its caches; cache i has the model id i.
        registered: True to register ordinary memory instead of allocating caches.
        options: options of the engine.
    """

    cluster_id: int
    shapes: tuple[Shape, ...]
    registered: bool = False
    options: dict[str, str] = field(default_factory=dict)

    def key(self, shape: int) -> BlocksCacheKey:
        """Return the key of the cache of `shapes[shape]`."""
        return BlocksCacheKey(self.cluster_id, shape)

    @staticmethod
    def from_json(text: str) -> Filled:
        """Reverse `json.dumps(asdict(...))`."""
        given = json.loads(text)
        shapes = tuple(Shape(**item) for item in given.pop("shapes"))
        return Filled(shapes=shapes, **given)


class Peer(NamedTuple):
    """A serving engine: its cluster id, its address and its process."""

    cluster_id: int
    address: str
    process: subprocess.Popen[str]


def mark(cluster_id: int, tensor: int, blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the word that fills each of these blocks."""
    return np.uint64(cluster_id << 48 | tensor << 32) + blocks.astype(np.uint64)


def check_blocks(
    tensors: Sequence[NDArray[np.uint8]],
    cluster_id: int,
    src_blocks: NDArray[np.int64],
    dst_blocks: NDArray[np.int64],
) -> None:
    """Assert that every byte of `dst_blocks` equals the peer's `src_blocks`."""
    for number, tensor in enumerate(tensors):
        words = tensor.view(np.uint64)[dst_blocks]
        wrong = np.flatnonzero((words != mark(cluster_id, number, src_blocks)[:, None]).any(axis=1))
        if wrong.size:
            block = int(wrong[0])
            raise AssertionError(
                f"cluster {cluster_id} tensor {number} block {src_blocks[block]} -> "
                f"{dst_blocks[block]}: not the peer's bytes ({wrong.size} such blocks)"
            )


@contextmanager
def started(
    engines: Iterable[Filled], commands: Iterable[Sequence[str]] = ()
) -> Iterator[list[Peer]]:
    """Start a process for each engine, all at once, with one of `commands` as prefix, if given."""
    prefixes = list(commands) or [()]
    with ExitStack() as opened:
        processes = []
        for number, engine in enumerate(engines):
            command = [sys.executable, "-m", "benchmarks.filled_peer", json.dumps(asdict(engine))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            prefix = prefixes[number % len(prefixes)]
            # Its exit closes the standard input, and waits.
            process = subprocess.Popen([*prefix, *command], text=True, **pipes)
            processes.append(opened.enter_context(process))
        found = []
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            if len(line) != 2:
                raise RuntimeError(f"peer {process.pid} has not started: see its standard error")
            found.append(Peer(int(line[0]), line[1], process))
        yield found


def serve(engine: Filled) -> None:
    """Hold the caches until the standard input ends."""
    kept = []
    with LlmDataDist(engine.cluster_id, LlmRole.PROMPT) as datadist:
        datadist.initialize({"llm.ListenIpInfo": "127.0.0.1:0", **engine.options})
        for number, shape in enumerate(engine.shapes):
            if engine.registered:
                memory = np.empty((shape.tensors, shape.blocks, shape.block_nbytes), np.uint8)
                kept.append(memory)
                addresses = [tensor.ctypes.data for tensor in memory]
                datadist.register_blocks_cache(shape.desc, addresses, engine.key(number))
                tensors = list(memory)
            else:
                cache = datadist.allocate_blocks_cache(shape.desc, engine.key(number))
                tensors = datadist.arrays(cache)
            for index, tensor in enumerate(tensors):
                marks = mark(engine.cluster_id, index, np.arange(shape.blocks))
                tensor.view(np.uint64)[:] = marks[:, None]
        print(engine.cluster_id, datadist.listen_address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve(Filled.from_json(sys.argv[1]))
