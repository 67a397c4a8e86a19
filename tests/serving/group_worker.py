"""A worker of a model whose layers are in two groups, one of them with a sliding window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import CacheDesc, DataType, LlmDataDist, LlmRole, Placement, Shard
from kvplan.serving import (
    CacheGroup,
    Compatibility,
    Exchange,
    ExchangeOptions,
    Handle,
    Place,
    PullResult,
    Reference,
    Source,
    Table,
    Target,
    token_digest,
)
from kvplan.serving.tables import heads_of
from tests.serving.worker import (
    DEADLINE_MS,
    DIM,
    HEADS,
    INSTANCE,
    LAYERS,
    contents,
    handle,
    prompt,
)

BLOCK_TOKENS, BLOCKS = 8, 32
GROUPS = ("window", "full")

Tables = Sequence[tuple[Sequence[int], int]]
"""Of each group its blocks, and how many before them are skipped."""


class GroupWorker:
    """An engine, a cache of each group in the same memory, and their exchange."""

    def __init__(
        self, cluster_id: int, *, place: Place | None = None, groups: int = 2, **options: Any
    ) -> None:
        place = place or Place()
        self.heads = heads_of(place.rank, place.ranks, HEADS)
        self.groups = groups
        self.names: dict[Handle, str] = {}  # of requests that were entered
        shape = (BLOCKS, len(self.heads), BLOCK_TOKENS, DIM)
        self.arrays = [np.zeros(shape, np.float32) for _ in range(LAYERS)]
        self.engine = LlmDataDist(cluster_id, LlmRole.MIX)
        self.engine.initialize({"ListenIpInfo": "127.0.0.1:0"})
        desc = CacheDesc(
            num_tensors=LAYERS,
            shape=shape,
            data_type=DataType.DT_FLOAT,
            placement=Placement.HOST,
            kv_tensor_format="block head token dim",
            shard=Shard(range(LAYERS), self.heads, LAYERS, HEADS),
        )
        caches = [
            CacheGroup(name, self.engine.register_blocks_cache(desc, self.arrays))
            for name in GROUPS[:groups]
        ]
        self.exchange = Exchange(
            self.engine,
            caches,
            Compatibility({"model": "hybrid"}),
            INSTANCE,
            place=place,
            options=ExchangeOptions(**options),
        )

    @property
    def source(self) -> Source:
        assert self.engine.listen_address
        return Source(self.engine.cluster_id, self.engine.listen_address)

    def finish(self, sequence: int, request: int, tables: Tables, tokens: int) -> None:
        """Compute what a request still has in each group, and offer it."""
        for mine, right in self._rows(request, tables, 0, tokens):
            mine[:] = right
        digest = token_digest(prompt(request, tokens))
        name = f"request-{request}"
        made = self.exchange.enter(name, _tables(tables), digest, handle=handle(sequence))
        self.names[made] = name

    def fetch(self, reference: Reference, tables: Tables, first: int = 0) -> PullResult:
        """Fetch a request, and return how it ended."""
        self.exchange.fetch("mine", reference, Target(_tables(tables), first))
        assert self.exchange.wait(DEADLINE_MS)
        (result,) = self.exchange.take_results()
        return result

    def has(self, request: int, tables: Tables, first: int, tokens: int) -> bool:
        """Whether blocks hold these tokens of a request, as far as they are not skipped."""
        return all(
            np.array_equal(mine, right)
            for mine, right in self._rows(request, tables, first, tokens)
        )

    def written(self) -> set[int]:
        """Blocks that are not as they were at the beginning."""
        return {
            block for block in range(BLOCKS) if any(array[block].any() for array in self.arrays)
        }

    def freed(self) -> set[str]:
        """The requests whose blocks have become free, once there is one."""
        assert self.exchange.wait(DEADLINE_MS)
        return {self.names[it] for it in self.exchange.take_freed()}

    def close(self) -> None:
        self.exchange.close()
        self.engine.finalize()

    def _rows(
        self, request: int, tables: Tables, first: int, tokens: int
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Where each token is, and what the model computes for it: other layers in each group."""
        for group, (blocks, skipped) in enumerate(tables):
            whole = contents(1000 * group + request, tokens)
            for token in range(max(first, skipped * BLOCK_TOKENS), tokens):
                block = blocks[token // BLOCK_TOKENS - skipped]
                for layer, array in enumerate(self.arrays):
                    heads = whole[layer, self.heads.start : self.heads.stop, token]
                    yield array[block, :, token % BLOCK_TOKENS], heads


def _tables(tables: Tables) -> tuple[Table, ...]:
    return tuple(Table(tuple(blocks), skipped) for blocks, skipped in tables)
