"""The cache side of a worker of a serving engine, for tests and their peers."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import Cache, CacheDesc, DataType, LlmDataDist, LlmRole, Placement, Shard, Transfers
from kvplan.serving import (
    CacheGroup,
    Chunk,
    Compatibility,
    Exchange,
    ExchangeOptions,
    Handle,
    Place,
    PullResult,
    Reference,
    Source,
    Target,
    token_digest,
)
from kvplan.serving.tables import Blocks, heads_of

LAYERS, HEADS, DIM = 2, 4, 8
INSTANCE = bytes(range(16))
DEADLINE_MS = 60_000.0  # reached only by a hanging test


def contents(request: int, tokens: int) -> NDArray[np.float32]:
    """Return the computed content of a request: a value for each layer, head, token and element."""
    whole = np.random.default_rng(request).random((LAYERS, HEADS, 4096, DIM), np.float32)
    return whole[:, :, :tokens]


def prompt(request: int, tokens: int) -> list[int]:
    return [(request * 7919 + index * 31) % 50_000 for index in range(tokens)]


def handle(sequence: int) -> Handle:
    """Return a handle that tests name by a number, while users have random ones."""
    return Handle(sequence.to_bytes(16, "little"))


class Base:
    """An engine, the cache that `make_cache` makes, and their exchange."""

    def __init__(
        self,
        cluster_id: int,
        *,
        block_tokens: int = 8,
        blocks: int = 32,
        place: Place | None = None,
        model: str = "tiny",
        instance: bytes = INSTANCE,
        push: bool = False,
        engine_options: dict[str, str] | None = None,
        transfers: Transfers | None = None,
        **options: Any,
    ) -> None:
        self.place = place or Place()
        self.heads = heads_of(self.place.rank, self.place.ranks, HEADS)
        self.layers = range(*self.place.layers or (0, LAYERS))
        self.block_tokens = block_tokens
        self.names: dict[Handle, str] = {}  # of requests that were entered
        self.engine = LlmDataDist(cluster_id, LlmRole.MIX, transfers=transfers)
        self.engine.initialize({"ListenIpInfo": "127.0.0.1:0"} | (engine_options or {}))
        desc = CacheDesc(
            num_tensors=len(self.layers),
            shape=(blocks, len(self.heads), block_tokens, DIM),
            data_type=DataType.DT_FLOAT,
            placement=Placement.HOST,
            kv_tensor_format="block head token dim",
            shard=Shard(self.layers, self.heads, LAYERS, HEADS),
        )
        self.exchange = Exchange(
            self.engine,
            self.make_cache(desc),
            Compatibility({"model": model, "layers": str(LAYERS)}),
            instance,
            place=place,
            push=push,
            # A request that is not freed expires after the deadline of the test, not before.
            options=ExchangeOptions(**{"lease_ttl_ms": 2 * DEADLINE_MS} | options),
        )

    def make_cache(self, desc: CacheDesc) -> Cache | Sequence[CacheGroup]:
        raise NotImplementedError

    @property
    def source(self) -> Source:
        assert self.engine.listen_address
        return Source(self.engine.cluster_id, self.engine.listen_address, self.place.layers)

    def enter(
        self, sequence: int, request: int, blocks: Blocks, tokens: int, name: str = ""
    ) -> None:
        """Offer a request that is computed."""
        digest = token_digest(prompt(request, tokens))
        named = f"request-{request}"
        made = self.exchange.enter(named, blocks, digest, name, handle=handle(sequence))
        self.names[made] = named

    def fetch(
        self, reference: Reference, blocks: Any, first: int = 0, name: str = "mine"
    ) -> PullResult:
        """Fetch a request, and return its result."""
        self.exchange.fetch(name, reference, Target(blocks, first))
        assert self.exchange.wait(DEADLINE_MS)
        (result,) = self.exchange.take_results()
        assert (result.request, result.blocks) == (name, blocks)
        return result

    def freed(self) -> set[str]:
        """Wait for freed requests, and return their names."""
        assert self.exchange.wait(DEADLINE_MS)
        return {self.names[item] for item in self.exchange.take_freed()}

    def close(self) -> None:
        self.exchange.close()
        self.engine.finalize()


class Worker(Base):
    """A worker with one cache."""

    def make_cache(self, desc: CacheDesc) -> Cache:
        self.cache = self.engine.allocate_blocks_cache(desc)
        return self.cache

    def compute(
        self,
        request: int,
        blocks: Sequence[int],
        tokens: int,
        first: int = 0,
        layers: Sequence[int] = range(LAYERS),
    ) -> None:
        """Fill blocks with the computed content of tokens of a request."""
        arrays = self.engine.arrays(self.cache)
        whole = contents(request, tokens)
        for position in range(first, tokens):
            block, slot = blocks[position // self.block_tokens], position % self.block_tokens
            for layer in set(layers) & set(self.layers):
                content = whole[layer, self.heads.start : self.heads.stop, position]
                arrays[layer - self.layers.start][block, :, slot] = content

    def step(
        self,
        request: int,
        blocks: Sequence[int],
        first: int,
        end: int,
        tokens: int,
        name: str,
        moved: Sequence[str] = (),
    ) -> None:
        """Compute the tokens from `first` to `end` of a request of `tokens`, layer by layer."""
        self.begin(request, blocks, end, tokens, name, moved)
        for layer in range(LAYERS):
            self.compute(request, blocks, end, first, [layer])
            self.exchange.layer_ready(layer)
        self.exchange.end_step()

    def begin(
        self,
        request: int,
        blocks: Sequence[int],
        end: int,
        tokens: int,
        name: str,
        moved: Sequence[str] = (),
    ) -> None:
        """Begin a step that computes the tokens before `end` of a request of `tokens`."""
        digest = token_digest(prompt(request, tokens))
        self.exchange.begin_step([Chunk(name, digest, blocks, end, end == tokens)], moved)

    def has(self, request: int, blocks: Sequence[int], first: int, tokens: int) -> bool:
        """Return True if blocks hold these tokens of a request."""
        arrays = self.engine.arrays(self.cache)
        whole = contents(request, tokens)
        return all(
            np.array_equal(
                array[blocks[index // self.block_tokens], :, index % self.block_tokens],
                whole[layer, self.heads.start : self.heads.stop, index],
            )
            for layer, array in zip(self.layers, arrays, strict=True)
            for index in range(first, tokens)
        )

    def finish(self, sequence: int, request: int, blocks: Sequence[int], tokens: int) -> None:
        """Compute a request, and offer it."""
        self.compute(request, blocks, tokens)
        self.enter(sequence, request, blocks, tokens)

    def wait_asked(self, name: str, readers: int = 1) -> None:
        """Wait until consumers have asked for a transfer."""
        while len(self.exchange._asks.waiting.get(name, ())) < readers:
            select.select([], [], [], 0.001)


def reference(
    sources: Sequence[Source],
    sequence: int,
    request: int,
    tokens: int,
    instance: bytes = INSTANCE,
    transfer: str = "",
) -> Reference:
    digest = token_digest(prompt(request, tokens))
    named = None if transfer else handle(sequence)
    return Reference(instance, named, digest, tokens, tuple(sources), transfer)
