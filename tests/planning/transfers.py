"""Random transfers, and their specified result: loops over rows, without a Plan.

`Example.apply` is the second, independent oracle. It never sees offsets into a tensor, segments or
coalescing: it moves bytes between rows of (rows, stride) arrays, as the reference describes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

import kvplan
from kvplan import (
    CacheDesc,
    Coalesce,
    DataType,
    KvCacheExtParam,
    LLMException,
    Placement,
    Plan,
    Rows,
    Transfer,
)
from kvplan.planning.planner import Local

Tensors = list[np.ndarray[Any, np.dtype[np.uint8]]]
LOCALS: list[Local] = ["dst", "src", "both"]


def has_width(data_type: DataType) -> bool:
    try:
        return data_type.bits > 0
    except LLMException:
        return False


DATA_TYPES = [data_type for data_type in DataType if has_width(data_type)]


@dataclass(frozen=True)
class Move:
    """Bytes from `src_start` on of a source row, and their place in a destination row."""

    src_row: int
    src_start: int
    dst_row: int
    dst_start: int
    nbytes: int


@dataclass(frozen=True)
class Example:
    """A transfer between two `CacheDesc`, and the moves that the specification asks for."""

    local: Local
    transfer: Transfer
    moves: list[Move]
    tensor_pairs: list[tuple[int, int]]

    @property
    def src(self) -> CacheDesc:
        assert isinstance(self.transfer.src, Rows)
        assert isinstance(self.transfer.src.cache, CacheDesc)
        return self.transfer.src.cache

    @property
    def dst(self) -> CacheDesc:
        assert isinstance(self.transfer.dst.cache, CacheDesc)
        return self.transfer.dst.cache

    @property
    def within(self) -> bool:
        """True if source and destination are one cache."""
        return self.src is self.dst

    @property
    def reinterpret(self) -> bool:
        """True if bytes of any meaning are copied: of unequal rows, or of a short layer."""
        of_rows = [
            (desc.data_type, desc.shape[desc.batch_dim_index + 1 :])
            for desc in (self.src, self.dst)
        ]
        per_layer = min(self.transfer.layers.tensor_num_per_layer or 2, len(self.tensor_pairs))
        return len(self.tensor_pairs) % per_layer != 0 or of_rows[0] != of_rows[1]

    def plan(self, coalesce: Coalesce | bool = True) -> Plan:
        transfer = msgspec.structs.replace(
            self.transfer, coalesce=coalesce, reinterpret=self.reinterpret
        )
        plan = kvplan.plan(transfer, local=self.local)
        assert isinstance(plan, Plan)
        return plan

    @property
    def nbytes(self) -> int:
        return len(self.tensor_pairs) * sum(move.nbytes for move in self.moves)

    def memory(self, seed: int = 0) -> tuple[Tensors, Tensors]:
        """Return source and destination tensors of random bytes; the same arrays for one cache."""
        rng = np.random.default_rng(seed)
        src, dst = (
            [
                rng.integers(0, 256, (desc.batch_size, desc.stride), dtype=np.uint8)
                for _ in range(desc.num_tensors)
            ]
            for desc in (self.src, self.dst)
        )
        return (src, src) if self.within else (src, dst)

    def apply(self, src: Tensors, dst: Tensors) -> Tensors:
        """Return `dst` after the transfer."""
        before = [tensor.copy() for tensor in src]
        after = [tensor.copy() for tensor in dst]
        for src_tensor, dst_tensor in self.tensor_pairs:
            for move in self.moves:
                for byte in range(move.nbytes):
                    value = before[src_tensor][move.src_row, move.src_start + byte]
                    after[dst_tensor][move.dst_row, move.dst_start + byte] = value
        return after


@st.composite
def rows(draw: st.DrawFn) -> tuple[DataType, tuple[int, ...]]:
    """Draw a data type, and the dimensions of a row of whole bytes."""
    data_type = draw(st.sampled_from(DATA_TYPES))
    dims = draw(st.lists(st.integers(1, 3), max_size=2))
    whole = 8 // np.gcd(8, data_type.bits * int(np.prod(dims, dtype=int)))
    return data_type, (*dims, int(whole) * draw(st.integers(1, 2)))


def desc_of(
    draw: st.DrawFn,
    num_tensors: int,
    row: tuple[DataType, tuple[int, ...]],
    placement: Placement = Placement.DEVICE,
    min_rows: int = 1,
    max_rows: int = 7,
) -> CacheDesc:
    data_type, dims = row
    leading = draw(st.integers(0, 2))
    return CacheDesc(
        num_tensors,
        (1,) * leading + (draw(st.integers(min_rows, max_rows)), *dims),
        data_type,
        placement,
        batch_dim_index=leading,
    )


@st.composite
def layer_choices(draw: st.DrawFn) -> tuple[int, int, KvCacheExtParam, list[tuple[int, int]]]:
    """Draw numbers of tensors of both sides, layers, and the tensor pairs that they stand for."""
    per_layer = draw(st.integers(1, 3))
    if draw(st.booleans()):
        # Without a range: all tensors, of which the last layer may lack some.
        num_tensors = draw(st.integers(per_layer, 3 * per_layer))
        spelled = draw(st.sampled_from([None, (-1, -1)]))
        layers = KvCacheExtParam(spelled, draw(st.sampled_from([None, (-1, -1)])), per_layer)
        return num_tensors, num_tensors, layers, [(i, i) for i in range(num_tensors)]

    src_layers, dst_layers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    length = draw(st.integers(1, min(src_layers, dst_layers)))
    src_first = draw(st.integers(0, src_layers - length))
    dst_first = draw(st.integers(0, dst_layers - length))
    pairs = [
        ((src_first + layer) * per_layer + tensor, (dst_first + layer) * per_layer + tensor)
        for layer in range(length)
        for tensor in range(per_layer)
    ]

    def spell(first: int, of: int) -> range | tuple[int, int] | None:
        ways: list[range | tuple[int, int] | None] = [
            range(first, first + length),
            (first, first + length - 1),
        ]
        return draw(st.sampled_from([*ways, None] if length == of else ways))

    layers = KvCacheExtParam(spell(src_first, src_layers), spell(dst_first, dst_layers), per_layer)
    return src_layers * per_layer, dst_layers * per_layer, layers, pairs


@st.composite
def slot_to_slot(draw: st.DrawFn) -> Example:
    local = draw(st.sampled_from(LOCALS))
    src_tensors, dst_tensors, layers, pairs = draw(layer_choices())
    src, dst = desc_of(draw, src_tensors, draw(rows())), desc_of(draw, dst_tensors, draw(rows()))
    src_row, dst_row = (draw(st.integers(0, desc.batch_size - 1)) for desc in (src, dst))
    src_offset, dst_offset = (draw(st.integers(0, desc.stride - 1)) for desc in (src, dst))
    room = [src.stride - src_offset, dst.stride - dst_offset]
    # None stands for the local row from its offset on, which must fit the other one.
    whole = room[1] if local == "dst" else room[0]
    if whole == min(room) and draw(st.booleans()):
        nbytes, given = whole, None
    else:
        nbytes = given = draw(st.integers(1, min(room)))
    return Example(
        local,
        Transfer(
            Rows(src, slot=src_row, offset=src_offset),
            Rows(dst, slot=dst_row, offset=dst_offset),
            nbytes=given,
            layers=layers,
        ),
        [Move(src_row, src_offset, dst_row, dst_offset, nbytes)],
        pairs,
    )


@st.composite
def block_to_block(draw: st.DrawFn) -> Example:
    local = draw(st.sampled_from(LOCALS))
    src_tensors, dst_tensors, layers, pairs = draw(layer_choices())
    row = draw(rows())
    src, dst = (
        desc_of(draw, num_tensors, row, draw(st.sampled_from(Placement)))
        for num_tensors in (src_tensors, dst_tensors)
    )
    dst_blocks = draw(
        st.lists(st.integers(0, dst.batch_size - 1), min_size=1, unique=True).map(tuple)
    )
    src_blocks = [draw(st.integers(0, src.batch_size - 1)) for _ in dst_blocks]
    return Example(
        local,
        Transfer(Rows(src, src_blocks), Rows(dst, dst_blocks), layers=layers),
        [Move(s, 0, d, 0, src.stride) for s, d in zip(src_blocks, dst_blocks, strict=True)],
        pairs,
    )


@st.composite
def slot_to_blocks(draw: st.DrawFn) -> Example:
    """Draw a slot that is cut into chunks of one block; the last chunk may be short."""
    local = draw(st.sampled_from(LOCALS))
    src_tensors, dst_tensors, layers, pairs = draw(layer_choices())
    src, dst = desc_of(draw, src_tensors, draw(rows())), desc_of(draw, dst_tensors, draw(rows()))
    slot = draw(st.integers(0, src.batch_size - 1))
    chunks = [
        (start, min(dst.stride, src.stride - start)) for start in range(0, src.stride, dst.stride)
    ]
    dst_blocks = draw(
        st.lists(st.integers(0, dst.batch_size - 1), min_size=1, max_size=len(chunks), unique=True)
    )
    return Example(
        local,
        Transfer(
            Rows(src, draw(st.sampled_from([None, (), []])), slot=slot),
            Rows(dst, dst_blocks),
            layers=layers,
        ),
        [
            Move(slot, start, block, 0, nbytes)
            for (start, nbytes), block in zip(chunks, dst_blocks, strict=False)
        ],
        pairs,
    )


@st.composite
def inside_one_cache(draw: st.DrawFn) -> Example:
    """Draw two disjoint sets of blocks of one cache: one to read, and one to write."""
    num_tensors = draw(st.integers(1, 5))
    desc = desc_of(draw, num_tensors, draw(rows()), min_rows=2)
    order = draw(st.permutations(range(desc.batch_size)))
    written = order[: draw(st.integers(1, len(order) - 1))]
    read = [draw(st.sampled_from(order[len(written) :])) for _ in written]
    return Example(
        "both",
        Transfer(Rows(desc, read), Rows(desc, written)),
        [Move(s, 0, d, 0, desc.stride) for s, d in zip(read, written, strict=True)],
        [(i, i) for i in range(num_tensors)],
    )


def transfers() -> st.SearchStrategy[Example]:
    return st.one_of(slot_to_slot(), block_to_block(), slot_to_blocks(), inside_one_cache())
