"""Where the bytes of a tensor are in the model and in the request."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.contents import tokens_spanned
from kvplan.planning.part import Part
from kvplan.planning.side import Side

Offsets = NDArray[np.int64]

_INNER: Final = ("dim", "group", "state")
"""Axes of a cell: what one token has in one head of the keys or values of a layer."""

_OPAQUE_NBYTES: Final = 64
"""Of a cell where nothing is known of what a row holds."""


class Cells(NamedTuple):
    """Where cells are, an entry of each column for each of them.

    Attributes:
        offsets: in their tensor, in bytes.
        layer, head: counted from the cache's first.
        part: 0 for keys, 1 for values; which of a layer's tensors, where they are neither.
        row: the block or slot.
        token: in its row.
        order: in the request: the number of the token, or of the row where there are no tokens.
    """

    offsets: Offsets
    layer: Offsets
    part: Offsets
    head: Offsets
    row: Offsets
    token: Offsets
    order: Offsets

    def take(self, chosen: Any) -> Cells:
        """Some of them, by anything that NumPy takes for an index."""
        return Cells(*(it[chosen] for it in self))


class Coordinates:
    """What offsets in the tensors of one side of a plan mean.

    Attributes:
        has_kv, has_heads, knows_tokens: whether these are known.
        apart: tensors of one layer; parts: the same, or keys and values where they are inside.
        tokens: of a row.
        rows: of the request, in its order.
        tokens_moved: numbers of those that the plan moves, as in `Cells.order`.
        entries: positions of each row in the block table.
        layers: their numbers in the model; None: they are not known.
        first_head: its number in the model.
    """

    def __init__(self, part: Part, name: str) -> None:
        self.side: Side = getattr(part, name)
        side, tables = self.side, part.tables
        # Two neighbours that share a byte (4 bits an element) are not told apart.
        named = side.layout.axes if side.layout else ()
        axes = [it for it in named if _is_whole(side, it)]
        self.apart = part.tensors_per_layer // (side.extent("kv") if "kv" in part.split else 1)
        self.has_heads = "head" in axes
        self._kv_inside = side.extent("kv") > 1
        self.has_kv = self._kv_inside or (self.apart == 2 and "head" in named)
        self.parts = side.extent("kv") if self._kv_inside else self.apart
        self.tokens = side.extent("token")
        strides = [side.stride_of(axis) for axis in axes if axis not in _INNER]
        self.cell_nbytes = min(strides, default=math.gcd(side.stride, _OPAQUE_NBYTES))
        rows = [] if tables is None else getattr(tables, name).tolist()
        self.rows: Offsets = np.array(rows, np.int64)
        self.entries: dict[int, list[int]] = {}
        for entry, row in enumerate(rows):
            self.entries.setdefault(row, []).append(entry)
        self.knows_tokens = (
            bool(rows) and part.local != "both" and "token" in axes and side.has_all_tokens
        )
        self.shift = 0 if tables is None else tables.src_token - tables.dst_token
        self.tokens_moved = range(0)
        if tables is not None:
            count = tokens_spanned(part) if self.knows_tokens else None
            last = len(rows) * self.tokens + self.shift
            first = tables.src_token if self.knows_tokens else self.shift
            self.tokens_moved = range(first, last if count is None else first + count)
        shard = side.shard
        self.layers = side.numbered_layers(part.split, part.tensors_per_layer)
        self.first_head = 0 if shard is None or shard.heads is None else shard.heads.start

    def cells(self, tensor: int, offsets: Offsets) -> Cells:
        """Where the cells at these offsets of a tensor are."""
        side = self.side
        layer = tensor // self.apart * side.extent("layer") + self._index("layer", offsets)
        inside = self._kv_inside
        part = self._index("kv", offsets) if inside else np.full_like(layer, tensor % self.apart)
        row = offsets % (side.count * side.stride) // side.stride
        token = self._index("token", offsets)
        entry = row
        if self.entries:
            where = np.full(side.count, len(self.rows), np.int64)
            where[self.rows[::-1]] = np.arange(len(self.rows))[::-1]
            entry = where[row]
        order = entry * self.tokens + token + self.shift
        return Cells(offsets, layer, part, self._index("head", offsets), row, token, order)

    def model_layer(self, layer: int) -> int:
        """The number of a layer in the model."""
        return layer if self.layers is None else self.layers[layer]

    def _index(self, axis: str, offsets: Offsets) -> Offsets:
        stride = self.side.stride_of(axis)
        return offsets // stride % self.side.extent(axis) if stride else np.zeros_like(offsets)

    def tensor_of(self, layer: int, part: int) -> tuple[int, int]:
        """The tensor of one of a layer's parts, and the byte of it where that begins."""
        side, inside = self.side, self.side.extent("layer")
        start = layer % inside * side.stride_of("layer")
        if self._kv_inside:
            return layer // inside * self.apart, start + part * side.stride_of("kv")
        return layer // inside * self.apart + part, start


def _is_whole(side: Side, axis: str) -> bool:
    """Whether it is whole bytes from one to the next along an axis."""
    assert side.layout is not None
    assert side.data_type is not None
    elements = math.prod(side.shape[side.layout.axes.index(axis) + 1 :])
    return elements * side.data_type.bits % 8 == 0
