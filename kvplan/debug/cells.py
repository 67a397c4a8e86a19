"""Coordinates of the bytes of a tensor, in the model and in the request."""

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
"""Bytes of a cell if the content of rows is unknown."""


class Cells(NamedTuple):
    """Coordinates of cells; each column has an entry for each cell.

    Attributes:
        offsets: bytes in their tensor.
        layer, head: counted from the cache's first.
        part: 0 for keys, 1 for values; otherwise the position among the layer's tensors.
        row: the block or slot.
        token: the token in its row.
        order: the number of the token in the request, or of the row if there are no tokens.
    """

    offsets: Offsets
    layer: Offsets
    part: Offsets
    head: Offsets
    row: Offsets
    token: Offsets
    order: Offsets

    def take(self, chosen: Any) -> Cells:
        """Return some of the cells, by a NumPy index."""
        return Cells(*(column[chosen] for column in self))


class Coordinates:
    """Meaning of the offsets in the tensors of one side of a part.

    Attributes:
        has_kv, has_heads, knows_tokens: True if these are known.
        apart: tensors of one layer.
        parts: `apart`, or the number of keys and values inside of one tensor.
        tokens: tokens of a row.
        rows: rows of the request, in its order.
        tokens_moved: numbers of the tokens that move, as in `Cells.order`.
        entries: positions of each row in the block table.
        layers: the layers' numbers in the model; None: unknown.
        first_head: the model's number of the first head.
    """

    def __init__(self, part: Part, name: str) -> None:
        self.side: Side = getattr(part, name)
        side, tables = self.side, part.tables
        # Neighbours that share a byte (4 bits an element) are one.
        named = side.layout.axes if side.layout else ()
        axes = [axis for axis in named if _is_whole(side, axis)]
        self.apart = part.tensors_per_layer // (side.extent("kv") if "kv" in part.split else 1)
        self.has_heads = "head" in axes
        self._kv_inside = side.extent("kv") > 1
        self.has_kv = self._kv_inside or (self.apart == 2 and "head" in named)
        self.parts = side.extent("kv") if self._kv_inside else self.apart
        self.tokens = side.extent("token")
        strides = [side.stride_of(axis) for axis in axes if axis not in _INNER]
        self.cell_nbytes = min(strides, default=math.gcd(side.row_nbytes, _OPAQUE_NBYTES))
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
        """Return the coordinates of the cells at these offsets of a tensor."""
        side = self.side
        layer = tensor // self.apart * side.extent("layer") + side.index_along("layer", offsets)
        inside = self._kv_inside
        part = (
            side.index_along("kv", offsets) if inside else np.full_like(layer, tensor % self.apart)
        )
        row = offsets % (side.count * side.stride) // side.stride
        token = side.index_along("token", offsets)
        entry = row
        if self.entries:
            where = np.full(side.count, len(self.rows), np.int64)
            where[self.rows[::-1]] = np.arange(len(self.rows))[::-1]
            entry = where[row]
        order = entry * self.tokens + token + self.shift
        return Cells(offsets, layer, part, side.index_along("head", offsets), row, token, order)

    def model_layer(self, layer: int) -> int:
        """Return the model's number of a layer."""
        return layer if self.layers is None else self.layers[layer]

    def tensor_of(self, layer: int, part: int) -> tuple[int, int]:
        """Return the tensor of one of a layer's parts, and the byte of it where the part begins."""
        side, inside = self.side, self.side.extent("layer")
        start = layer % inside * side.stride_of("layer")
        if self._kv_inside:
            return layer // inside * self.apart, start + part * side.stride_of("kv")
        return layer // inside * self.apart + part, start


def _is_whole(side: Side, axis: str) -> bool:
    """Whether the steps along an axis are whole bytes."""
    assert side.layout is not None
    assert side.data_type is not None
    elements = math.prod(side.shape[side.layout.axes.index(axis) + 1 :])
    return elements * side.data_type.bits % 8 == 0
