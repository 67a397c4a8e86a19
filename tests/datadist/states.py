"""States of a request of hybrid models, whole, and in pages as vLLM's ranks have them.

NumPy cuts the part of each rank here: heads are repeated until the ranks divide them, and split
evenly, as vLLM 0.33 loads its weights. No arithmetic of kvplan is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan import CacheDesc, Shard
from kvplan.tensors.states import Columns, StateCache, convolution_caches, recurrent_cache

Array = NDArray[Any]
BLOCKS, TOKENS = 7, 4
STATE_BLOCKS, ATTENTION_BLOCKS = [5], [1, 3]


class Model(NamedTuple):
    """A hybrid model: `ssm` is the shape of the recurrent state of a head."""

    columns: dict[str, Columns]
    positions: int
    heads: int
    ssm: tuple[int, ...]
    kv_heads: int = 2
    dim: int = 8
    layers: int = 3


MODELS = {
    "Mamba2, one group": Model(
        {"x": Columns(8, 4), "B": Columns(1, 6), "C": Columns(1, 6)}, 3, 8, (4, 6)
    ),
    "Mamba2, four groups": Model(
        {"x": Columns(8, 4), "B": Columns(4, 5), "C": Columns(4, 5)}, 3, 8, (4, 5)
    ),
    "gated delta net": Model(
        {"q": Columns(4, 6), "k": Columns(4, 6), "v": Columns(8, 4)}, 4, 8, (4, 6)
    ),
    "Mamba1": Model({"x": Columns(16, 1)}, 3, 16, (6,)),
}


def whole(model: Model, seed: int) -> dict[str, Array]:
    """Return the state of a request for all heads, which are axis 1."""
    random = np.random.default_rng(seed)

    def numbers(*shape: int, of: Any = np.uint16) -> Array:
        return random.integers(1, 60_000, shape).astype(of)

    made = {
        name: numbers(model.layers, of.num_heads, model.positions, of.dim)
        for name, of in model.columns.items()
    }
    made["ssm"] = numbers(model.layers, model.heads, *model.ssm, of=np.float32)
    made["kv"] = numbers(model.layers, model.kv_heads, 2, 2 * TOKENS, model.dim)
    return made


def share(array: Array, rank: int, ranks: int) -> Array:
    """Return the heads of one rank."""
    heads = array.shape[1]
    if heads % ranks:
        array = np.repeat(array, ranks // heads, axis=1)
    return np.split(array, ranks, axis=1)[rank]


class Rank:
    """The pages of one rank: states first, then padding. They hold only a fill value at first."""

    def __init__(self, model: Model, rank: int, ranks: int, columns_first: bool) -> None:
        self.model, self.rank, self.ranks = model, rank, ranks
        self.columns_first = columns_first
        empty = {name: share(item, rank, ranks) for name, item in whole(model, 0).items()}
        width = sum(
            array.shape[1] * array.shape[3]
            for name, array in empty.items()
            if name in model.columns
        )
        inner = (width, model.positions) if columns_first else (model.positions, width)
        heads = empty["ssm"].shape[1]
        conv_nbytes = (2 * width * model.positions + 3) // 4 * 4
        ssm_nbytes = 4 * heads * int(np.prod(model.ssm))
        kv_shape = (2, TOKENS, empty["kv"].shape[1], model.dim)
        page = max(conv_nbytes + ssm_nbytes, 2 * int(np.prod(kv_shape))) + 16
        self.pages = [np.full((BLOCKS, page), 0xEE, np.uint8) for _ in range(model.layers)]
        self.conv = [
            item[:, : 2 * width * model.positions].view(np.uint16).reshape(BLOCKS, *inner)
            for item in self.pages
        ]
        self.ssm = [
            item[:, conv_nbytes : conv_nbytes + ssm_nbytes]
            .view(np.float32)
            .reshape(BLOCKS, heads, *model.ssm)
            for item in self.pages
        ]
        self.kv = [
            item[:, : 2 * int(np.prod(kv_shape))].view(np.uint16).reshape(BLOCKS, *kv_shape)
            for item in self.pages
        ]

    def fill(self, request: dict[str, Array]) -> None:
        """Write the state of a request to one block, and its keys and values to two others."""
        mine = {name: share(item, self.rank, self.ranks) for name, item in request.items()}
        for layer in range(self.model.layers):
            columns = np.concatenate(
                [
                    mine[name][layer].transpose(1, 0, 2).reshape(self.model.positions, -1)
                    for name in self.model.columns
                ],
                axis=1,
            )
            (block,) = STATE_BLOCKS
            self.conv[layer][block] = columns.T if self.columns_first else columns
            self.ssm[layer][block] = mine["ssm"][layer]
            for number, block in enumerate(ATTENTION_BLOCKS):
                tokens = mine["kv"][layer][:, :, number * TOKENS : (number + 1) * TOKENS]
                self.kv[layer][block] = tokens.transpose(1, 2, 0, 3)

    def caches(self) -> dict[str, StateCache]:
        """Return kvplan's caches over these pages."""
        model, shard = self.model, Shard(num_layers=self.model.layers)
        place = self.rank, self.ranks
        made = convolution_caches(
            self.conv, model.columns, *place, columns_first=self.columns_first, shard=shard
        )
        layout = "block head dim state" if len(model.ssm) == 2 else "block head state"
        made["ssm"] = recurrent_cache(self.ssm, model.heads, *place, layout=layout, shard=shard)
        made["kv"] = recurrent_cache(
            self.kv, model.kv_heads, *place, layout="block kv token head dim", shard=shard
        )
        return made


def blocks_of(name: str) -> list[int]:
    return ATTENTION_BLOCKS if name == "kv" else STATE_BLOCKS


def descs(caches: dict[str, StateCache]) -> dict[str, CacheDesc]:
    return {name: cache.desc for name, cache in caches.items()}
