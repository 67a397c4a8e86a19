"""A paged KV cache: memory cut into blocks of a few tokens, and a block table for each request.

Token `p` of a request lies in row `p % block_size` of block `block_table[p // block_size]`. Blocks
are given out in the order in which they were freed, so those of a request are scattered, and
differently so in every process. To move a request is to copy, for each i and each tensor, block
`block_table[i]` over there to block `block_table[i]` here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BlockTable = NDArray[np.intp]


class BlockPool:
    """Hands out the indices of free blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))

    def allocate(self, count: int) -> BlockTable:
        if count > len(self._free):
            raise MemoryError(f"count={count} blocks are wanted, {len(self._free)} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, dtype=np.intp)

    def release(self, blocks: BlockTable) -> None:
        self._free.extend(blocks.tolist())

    def serve_others(self, seed: int, longest: int = 6) -> None:
        """Leave the pool as requests of 1 to `longest` blocks do that end in random order.

        Then neighbours often come in short runs: some copies can merge, others cannot. `seed` makes
        it the same in every run of the demo.
        """
        chance = random.Random(seed)
        others = []
        while self._free:
            others.append(self.allocate(min(chance.randint(1, longest), len(self._free))))
        chance.shuffle(others)
        for blocks in others:
            self.release(blocks)


class PagedCache:
    """Keys and values of all layers: tensor `2 * layer` holds keys, `2 * layer + 1` values.

    Every tensor has the shape (num_blocks, block_size, kv_heads, head_size), any floating dtype,
    and lies in whatever memory its owner chose, such as an arena that a peer can read.
    """

    def __init__(self, tensors: Sequence[NDArray[Any]]) -> None:
        self.tensors = tensors
        self.block_size = tensors[0].shape[1]

    def fill(self, value: float) -> None:
        """Write `value` everywhere."""
        for tensor in self.tensors:
            tensor.fill(value)

    def snapshot(self) -> list[NDArray[Any]]:
        """Return every tensor as it is now."""
        return [tensor.copy() for tensor in self.tensors]

    def write(
        self, tensor: int, block_table: BlockTable, start: int, rows: NDArray[np.float32]
    ) -> None:
        """Store `rows` (tokens, kv_heads, head_size) at the request's positions from `start` on."""
        positions = np.arange(start, start + len(rows))
        blocks, offsets = block_table[positions // self.block_size], positions % self.block_size
        self.tensors[tensor][blocks, offsets] = rows

    def gather(self, tensor: int, block_table: BlockTable, length: int) -> NDArray[np.float32]:
        """Return the request's first `length` tokens, in order: (length, kv_heads, head_size)."""
        blocks = self.tensors[tensor][block_table[: blocks_for(length, self.block_size)]]
        return blocks.reshape(-1, *blocks.shape[2:])[:length].astype(np.float32)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` tokens need."""
    return -(-num_tokens // block_size)
