"""A worker of a model whose layers form two groups, one of them with a sliding window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import CacheDesc
from kvplan.serving import CacheGroup, PullResult, Reference, Table
from tests.serving.worker import Base, contents

BLOCK_TOKENS, BLOCKS = 8, 32
GROUPS = ("window", "full")

Tables = Sequence[tuple[Sequence[int], int]]
"""The blocks of each group, and the number of skipped blocks before them."""


class GroupWorker(Base):
    """A worker with a cache for each group, in the same memory."""

    def __init__(self, cluster_id: int, *, groups: int = 2, **options: Any) -> None:
        self.groups = GROUPS[:groups]
        super().__init__(cluster_id, block_tokens=BLOCK_TOKENS, blocks=BLOCKS, **options)

    def make_cache(self, desc: CacheDesc) -> list[CacheGroup]:
        self.arrays = [np.zeros(desc.shape, np.float32) for _ in self.layers]
        return [
            CacheGroup(name, self.engine.register_blocks_cache(desc, self.arrays))
            for name in self.groups
        ]

    def finish(self, sequence: int, request: int, tables: Tables, tokens: int) -> None:
        """Compute the tokens that a request still has in each group, and offer it."""
        for mine, right in self._rows(request, tables, 0, tokens):
            mine[:] = right
        self.enter(sequence, request, _tables(tables), tokens)

    def fetch(
        self, reference: Reference, tables: Any, first: int = 0, name: str = "mine"
    ) -> PullResult:
        return super().fetch(reference, _tables(tables), first, name)

    def has(self, request: int, tables: Tables, first: int, tokens: int) -> bool:
        """Return True if blocks hold these tokens of a request, except skipped ones."""
        return all(
            np.array_equal(mine, right)
            for mine, right in self._rows(request, tables, first, tokens)
        )

    def written(self) -> set[int]:
        """Return the blocks that have changed since the beginning."""
        return {
            block for block in range(BLOCKS) if any(array[block].any() for array in self.arrays)
        }

    def _rows(
        self, request: int, tables: Tables, first: int, tokens: int
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Yield the place of each token, and its computed value, which differs between groups."""
        for group, (blocks, skipped) in enumerate(tables):
            whole = contents(1000 * group + request, tokens)
            for token in range(max(first, skipped * BLOCK_TOKENS), tokens):
                block = blocks[token // BLOCK_TOKENS - skipped]
                for layer, array in enumerate(self.arrays):
                    heads = whole[layer, self.heads.start : self.heads.stop, token]
                    yield array[block, :, token % BLOCK_TOKENS], heads


def _tables(tables: Tables) -> tuple[Table, ...]:
    return tuple(Table(tuple(blocks), skipped) for blocks, skipped in tables)
