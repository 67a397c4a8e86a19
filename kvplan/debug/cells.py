"""Cells of tensors: their bytes, their comparison, and their place in the model and the request."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.contents import tokens_spanned
from kvplan.planning.part import Part
from kvplan.planning.side import Side
from kvplan.planning.texts import plural
from kvplan.status import invalid
from kvplan.tensors.form import read_form
from kvplan.types import DataType

Offsets = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Same = Callable[[Bytes, Bytes], NDArray[np.bool_]]

CHUNK: Final = 16 << 20
"""Bytes of a tensor that are compared at once."""

_FLOATS: Final = {
    DataType.DT_FLOAT16: "<f2",
    DataType.DT_BF16: "<u2",  # the upper half of a float
    DataType.DT_FLOAT: "<f4",
    DataType.DT_DOUBLE: "<f8",
}

_SEARCHED: Final = ("layer", "kv", "head", "token")

_INNER: Final = ("dim", "group", "state")
"""Axes inside a cell, which is one token in one head of the keys or values of a layer."""

_OPAQUE_NBYTES: Final = 64
"""Maximum bytes of a cell if the content of rows is unknown."""


class Cells(NamedTuple):
    """Coordinates of cells; each column has an entry for each cell."""

    offsets: Offsets  # in bytes, in the tensor
    layer: Offsets  # counted from the first layer of the cache
    part: Offsets  # 0: keys, 1: values; without them, the position among the layer's tensors
    head: Offsets  # counted from the first head of the cache
    row: Offsets  # block or slot
    token: Offsets  # in the row
    order: Offsets  # position of the token in the request; without tokens, of the row

    def take(self, chosen: Any) -> Cells:
        """Return some of the cells, by a NumPy index."""
        return Cells(*(column[chosen] for column in self))


class Coordinates:
    """The map from offsets in the tensors of one side of a part to coordinates."""

    def __init__(self, part: Part, name: str) -> None:
        self.side: Side = getattr(part, name)
        side, tables = self.side, part.tables
        # Steps of less than a byte (elements of 4 bits) are indistinguishable.
        named = side.layout.axes if side.layout else ()
        axes = [axis for axis in named if _is_whole(side, axis)]
        # Tensors of one layer; `parts` also counts keys and values inside one tensor.
        self.apart = part.tensors_per_layer // (side.extent("kv") if "kv" in part.split else 1)
        # Along these axes the content can be searched elsewhere.
        self.steps = {axis for axis in _SEARCHED if axis in axes or side.extent(axis) == 1}
        self.has_heads = "head" in axes
        self._kv_inside = side.extent("kv") > 1
        self.has_kv = self._kv_inside or (self.apart == 2 and "head" in named)
        self.parts = side.extent("kv") if self._kv_inside else self.apart
        self.tokens = side.extent("token")
        strides = [side.stride_of(axis) for axis in axes if axis not in _INNER]
        self.cell_nbytes = min(strides, default=math.gcd(side.row_nbytes, _OPAQUE_NBYTES))
        rows = [] if tables is None else getattr(tables, name).tolist()
        self.rows: Offsets = np.array(rows, np.int64)  # rows of the request, in order
        self.entries: dict[int, list[int]] = {}
        for entry, row in enumerate(rows):
            self.entries.setdefault(row, []).append(entry)
        self.knows_tokens = (
            bool(rows) and part.local != "both" and "token" in axes and side.has_all_tokens
        )
        self.shift = 0 if tables is None else tables.src_token - tables.dst_token
        self.tokens_moved = range(0)  # as in `Cells.order`
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
        """Return the tensor of a layer's keys or values, and their offset in this tensor."""
        side, inside = self.side, self.side.extent("layer")
        start = layer % inside * side.stride_of("layer")
        if self._kv_inside:
            return layer // inside * self.apart, start + part * side.stride_of("kv")
        return layer // inside * self.apart + part, start


def _is_whole(side: Side, axis: str) -> bool:
    """Return True if the steps along an axis are whole bytes."""
    assert side.layout is not None
    assert side.data_type is not None
    elements = math.prod(side.shape[side.layout.axes.index(axis) + 1 :])
    return elements * side.data_type.bits % 8 == 0


def tensors_of(name: str, given: Any, parts: Sequence[Part], side: str) -> list[Bytes]:
    """Return the bytes of each tensor; refuse tensors whose size differs from the plan's."""
    if isinstance(given, np.ndarray) or not isinstance(given, Sequence):
        raise TypeError(f"{name}={type(given).__name__} must be a sequence of tensors")
    sizes = [
        cache.tensor_nbytes
        for part in parts
        for cache in [getattr(part, side)]
        for _ in range(cache.num_tensors)
    ]
    if len(given) != len(sizes):
        raise invalid(f"{name} has {plural(len(given), 'tensor')}; the plan needs {len(sizes)}")
    found = []
    for position, (tensor, nbytes) in enumerate(zip(given, sizes, strict=True)):
        array = _bytes_of(f"{name}[{position}]", tensor, nbytes)
        if array.nbytes != nbytes:
            raise invalid(
                f"{name}[{position}] has {array.nbytes} bytes; the plan's tensors have {nbytes}"
            )
        found.append(array)
    return found


def _bytes_of(name: str, tensor: Any, nbytes: int) -> Bytes:
    """Return the bytes of a tensor, including the gaps between rows if `nbytes` counts them."""
    form = read_form(name, tensor)
    if form.device is not None:
        raise invalid(f"{name} is on {form.device.text}; copy it to the host first")
    if form.nbytes == 0:
        return np.empty(0, np.uint8)
    in_order = form.order == (*range(len(form.shape)),)
    if not (form.is_contiguous or (in_order and form.span_nbytes == nbytes)):
        if isinstance(tensor, np.ndarray):
            return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        raise invalid(f"{name} is not contiguous: strides {form.strides} of shape {form.shape}")
    memory: Any = (ctypes.c_uint8 * form.span_nbytes).from_address(form.address)
    memory.owner = form.owner  # the array keeps the memory alive
    array: Bytes = np.frombuffer(memory, np.uint8)
    return array


def _same_bits(a: Bytes, b: Bytes) -> NDArray[np.bool_]:
    word = f"u{math.gcd(a.shape[1], 8)}"  # a few words are faster than many bytes
    left, right = a.view(word), b.view(word)
    return np.asarray(left[:, 0] == right[:, 0] if left.shape[1] == 1 else (left == right).all(1))


def comparison(part: Part, unit: int, atol: float) -> Same:
    """Return a function that compares cells of shape (n, unit); its result has shape (n,)."""
    if not atol:
        return _same_bits
    data_type = part.dst.data_type
    if data_type not in _FLOATS:
        name = "opaque rows" if data_type is None else data_type.name
        allowed = ", ".join(dtype.name for dtype in _FLOATS)
        raise invalid(f"atol={atol} must be 0 for {name}; other values are for {allowed}")
    if unit * 8 % data_type.bits:
        raise invalid(f"atol={atol} must be 0: the plan moves, or rows begin at, parts of elements")

    def values(cells: Bytes) -> NDArray[np.float64]:
        raw = np.ascontiguousarray(cells).view(_FLOATS[data_type])
        if data_type is DataType.DT_BF16:
            raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return raw.astype(np.float64)

    def same(a: Bytes, b: Bytes) -> NDArray[np.bool_]:
        left, right = values(a), values(b)
        with np.errstate(invalid="ignore"):
            close = (left == right) | (np.abs(left - right) <= atol)
        return np.asarray((close | (np.isnan(left) & np.isnan(right))).all(axis=1))

    return same
