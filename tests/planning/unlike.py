"""Caches of one model with different layouts in memory, and an oracle of their transfers.

The oracle knows axis names only: a view of each layer's keys or values is transposed into (row,
token, head, dim) and indexed by NumPy. It shares no arithmetic with planning.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kvplan import CacheDesc, DataType
from kvplan.layout import Interleaved, Shard

DTYPES = {
    DataType.DT_INT8: np.uint8,
    DataType.DT_FLOAT16: np.uint16,
    DataType.DT_BF16: np.uint16,
    DataType.DT_FLOAT: np.uint32,
}


@dataclass(frozen=True)
class Model:
    layers: int
    kv: int
    heads: int
    dim: int
    data_type: DataType


@dataclass(frozen=True)
class Cache:
    """The part of a model's cache that one process keeps."""

    model: Model
    axes: tuple[str, ...]
    rows: int
    tokens: int
    layers: range
    heads: range
    held: Interleaved | range | None = None  # tokens of each request; None: all
    gap: int = 0  # foreign elements after each row

    @property
    def row(self) -> str:
        """The axis of rows: block, or slot of a contiguous cache."""
        return "slot" if "slot" in self.axes else "block"

    @property
    def desc(self) -> CacheDesc:
        lengths = {
            self.row: self.rows,
            "token": self.tokens,
            "layer": len(self.layers),
            "kv": self.model.kv,
            "head": len(self.heads),
            "dim": self.model.dim,
        }
        apart = [lengths[axis] for axis in ("layer", "kv") if axis not in self.axes]
        return CacheDesc(
            int(np.prod(apart)),
            tuple(lengths[axis] for axis in self.axes),
            self.model.data_type,
            kv_tensor_format=" ".join(self.axes),
            shard=Shard(
                self.layers,
                self.heads if "head" in self.axes else None,
                self.model.layers,
                self.model.heads if "head" in self.axes else None,
                self.held,
            ),
            row_stride=self._row_stride if self.gap else None,
        )

    @property
    def _row_stride(self) -> int:
        """Distance of rows in bytes; with packed elements at least their number."""
        return -(-self._strides(self.axes.index(self.row)) * self.model.data_type.bits // 8)

    @property
    def _itemsize(self) -> int:
        return np.dtype(DTYPES[self.model.data_type]).itemsize

    def _strides(self, axis: int) -> int:
        """Return the number of elements from one index of an axis to the next."""
        lengths = {
            self.row: self.rows,
            "token": self.tokens,
            "layer": len(self.layers),
            "kv": self.model.kv,
            "head": len(self.heads),
            "dim": self.model.dim,
        }
        step = 1
        for name in reversed(self.axes[axis:]):
            if name == self.row:
                step += self.gap
            if name == self.axes[axis]:
                break
            step *= lengths[name]
        return step

    def tensors(self, seed: int) -> list[np.ndarray]:
        """Return arrays of the shape of the cache, or with a gap flat arrays of all bytes."""
        desc = self.desc
        dtype = DTYPES[desc.data_type]
        random = np.random.default_rng(seed)
        steps = [self._strides(axis) for axis in range(len(self.axes))]
        span = 1 + sum((item - 1) * step for item, step in zip(desc.shape, steps, strict=True))
        shape = span if self.gap else desc.shape
        return [
            random.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
            for _ in range(desc.num_tensors)
        ]

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Return the array in a tensor with the shape of the cache."""
        if not self.gap:
            return tensor
        steps = [self._strides(axis) * self._itemsize for axis in range(len(self.axes))]
        return np.lib.stride_tricks.as_strided(tensor, self.desc.shape, steps)

    def named(self, tensors: list[np.ndarray], layer: int, kv: int) -> np.ndarray:
        """Return a writable view (row, token, head, dim) of a layer of the model."""
        apart = [axis for axis in ("layer", "kv") if axis not in self.axes]
        at = {"layer": layer - self.layers.start, "kv": kv}
        counts = {"layer": len(self.layers), "kv": self.model.kv}
        index = 0
        for axis in apart:
            index = index * counts[axis] + at[axis]
        view = self.view(tensors[index])
        names = [*self.axes]
        for axis in ("layer", "kv"):
            if axis in names:
                view = np.moveaxis(view, names.index(axis), 0)[at[axis]]
                names.remove(axis)
        if "head" not in names:
            view = view[..., None]
            names.append("head")
        return view.transpose([names.index(axis) for axis in (self.row, "token", "head", "dim")])


def expected(
    src: Cache,
    dst: Cache,
    src_tensors: list[np.ndarray],
    dst_tensors: list[np.ndarray],
    src_blocks: list[int],
    dst_blocks: list[int],
    src_token: int,
    dst_token: int,
    num_tokens: int,
) -> list[np.ndarray]:
    """Return the destination after the transfer."""
    result = [tensor.copy() for tensor in dst_tensors]
    positions = np.arange(num_tokens)
    read_rows = np.repeat(src_blocks, src.tokens)[positions + src_token]
    read_tokens = np.tile(np.arange(src.tokens), len(src_blocks))[positions + src_token]
    write_rows = np.repeat(dst_blocks, dst.tokens)[positions + dst_token]
    write_tokens = np.tile(np.arange(dst.tokens), len(dst_blocks))[positions + dst_token]
    for layer, kv in itertools.product(
        [item for item in src.layers if item in dst.layers], range(src.model.kv)
    ):
        source, target = src.named(src_tensors, layer, kv), dst.named(result, layer, kv)
        for head in (item for item in src.heads if item in dst.heads):
            target[write_rows, write_tokens, head - dst.heads.start] = source[
                read_rows, read_tokens, head - src.heads.start
            ]
    return result


def of_one_request(
    src: Cache, dst: Cache, src_blocks: list[int], dst_blocks: list[int], src_token: int,
    dst_token: int,
) -> tuple[list[int], list[int], int]:  # fmt: skip
    """Cut the longer table to the last token of the shorter one, and count the tokens."""
    last = min(len(src_blocks) * src.tokens - src_token, len(dst_blocks) * dst.tokens - dst_token)
    return (
        src_blocks[: -(-(src_token + last) // src.tokens)],
        dst_blocks[: -(-(dst_token + last) // dst.tokens)],
        last,
    )


def parts(total: int) -> st.SearchStrategy[range]:
    """Return a strategy of non-empty ranges within [0, total)."""
    return st.tuples(st.integers(0, total - 1), st.integers(1, total)).map(
        lambda value: range(value[0], min(total, value[0] + value[1]))
    )


@st.composite
def caches(draw: st.DrawFn, model: Model, row: str = "block") -> Cache:
    inside = [row, "token", "dim"]
    if model.heads > 1 or draw(st.booleans()):
        inside.append("head")
    if draw(st.booleans()):
        inside.append("kv")
    if draw(st.booleans()):
        inside.append("layer")
    axes = draw(st.permutations(inside))
    whole = draw(st.booleans())
    return Cache(
        model,
        tuple(axes),
        draw(st.integers(1, 7)),
        draw(st.integers(1, 6)),
        range(model.layers) if whole else draw(parts(model.layers)),
        range(model.heads) if whole else draw(parts(model.heads)),
        gap=draw(st.sampled_from([0, 0, 1, 5])),
    )


models = st.builds(
    Model,
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([*DTYPES]),
)
