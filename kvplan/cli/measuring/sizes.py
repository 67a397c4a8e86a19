"""Caches that are measured with, of both processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvplan.types import BlocksCacheKey, CacheDesc, DataType, Placement

PEER = 2
"""The cluster id of the other process."""


@dataclass(frozen=True)
class Shape:
    """Of a paged cache: `tensors` tensors of `blocks` blocks of `block_nbytes` bytes.

    Attributes:
        registered: whether the peer registers memory of its own, rather than to allocate it.
    """

    tensors: int
    blocks: int
    block_nbytes: int
    registered: bool = False

    @property
    def desc(self) -> CacheDesc:
        """As an engine takes it."""
        shape = (self.blocks, self.block_nbytes)
        return CacheDesc(self.tensors, shape, DataType.DT_UINT8, Placement.HOST)


@dataclass(frozen=True)
class Setup:
    """What the other process is to have.

    Attributes:
        key_file: of both engines: no other can link with them.
        transport: of both engines.
        shapes: of its caches; cache i has the model id i.
        plain_nbytes: of memory that is not the engine's, to be read without it; 0: none.
    """

    key_file: str
    transport: str
    shapes: tuple[Shape, ...]
    plain_nbytes: int = 0

    def key(self, number: int) -> BlocksCacheKey:
        """Of the cache of `shapes[number]`."""
        return BlocksCacheKey(PEER, number)

    def options(self, address: str) -> dict[str, str]:
        """Of an engine that listens at `address`; empty: nowhere."""
        return {
            "llm.ListenIpInfo": address,
            "kvplan.transport": self.transport,
            "kvplan.accelerator": "none",
            "kvplan.permit_any_peer": "1",  # Yama would refuse reads of registered memory
            "kvplan.cluster_key_file": self.key_file,
        }

    def to_json(self) -> str:
        """As it is given to the other process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Setup:
        """The reverse of `to_json`."""
        given = json.loads(text)
        shapes = tuple(Shape(**it) for it in given.pop("shapes"))
        return Setup(shapes=shapes, **given)
