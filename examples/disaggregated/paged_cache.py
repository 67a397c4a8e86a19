"""A paged KV cache: memory cut into blocks of a few tokens, and a block table for each request.

Token `p` of a request lives in row `p % block_size` of block `block_table[p // block_size]`. Blocks are
handed out in whatever order they fall free, so a request's blocks are scattered, and differently so in
every process. Moving a request therefore means: block `src_blocks[i]` there -> block `dst_blocks[i]` here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.intp]


class BlockPool:
    """Hands out the indices of free blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))

    def allocate(self, count: int) -> Blocks:
        if count > len(self._free):
            raise MemoryError(f"count={count} blocks wanted, {len(self._free)} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, dtype=np.intp)

    def release(self, blocks: Sequence[int] | Blocks) -> None:
        self._free.extend(int(block) for block in blocks)

    def serve_others(self, seed: int, longest: int = 6) -> None:
        """Leave the pool as earlier requests of 1..`longest` blocks would, finished in random order.

        What remains free is runs of neighbours in shuffled order: some slices of a transfer can merge,
        others cannot. That is how a cache looks after a minute of service.
        """
        chance = random.Random(seed)
        earlier = []
        while self._free:
            earlier.append(self.allocate(min(chance.randint(1, longest), len(self._free))))
        chance.shuffle(earlier)
        for blocks in earlier:
            self.release(blocks)


class PagedCache:
    """The keys and values of all layers, in blocks: `tensors[2 * layer]` keys, `[2 * layer + 1]` values.

    tensors: one array of shape (num_blocks, block_size, kv_heads, head_size) for each; any float dtype,
        any owner of the memory (here: a kvplan arena, so that a peer can read it).
    """

    def __init__(self, tensors: Sequence[NDArray[np.floating]]) -> None:
        self.tensors = tensors
        self.block_size = tensors[0].shape[1]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def write(self, tensor: int, block_table: Blocks, start: int, rows: NDArray[np.float32]) -> None:
        """Put `rows` (tokens, kv_heads, head_size) at positions `start` and up of the request."""
        positions = np.arange(start, start + len(rows))
        self.tensors[tensor][block_table[positions // self.block_size], positions % self.block_size] = rows

    def gather(self, tensor: int, block_table: Blocks, length: int) -> NDArray[np.float32]:
        """The first `length` tokens of the request in their order: (length, kv_heads, head_size)."""
        blocks = self.tensors[tensor][block_table[: self.blocks_for(length)]]
        return blocks.reshape(-1, *blocks.shape[2:])[:length].astype(np.float32)
