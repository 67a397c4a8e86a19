"""Random transfers, and what the specification says they do: loops over rows, without a Plan.

`Transfer.apply` is the second, independent oracle. It never sees offsets into a tensor, segments or
coalescing: it moves bytes between rows of (rows, stride) arrays, as the reference describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvplan import (
    CacheDesc,
    Coalesce,
    DataType,
    KvCacheExtParam,
    LLMException,
    Placement,
    Plan,
    plan_copy_blocks,
    plan_copy_cache,
    plan_pull_blocks,
    plan_pull_cache,
    plan_push_blocks,
    plan_push_cache,
    plan_swap_blocks,
)

Tensors = list[np.ndarray[Any, np.dtype[np.uint8]]]


def has_width(data_type: DataType) -> bool:
    try:
        return data_type.bits > 0
    except LLMException:
        return False


DATA_TYPES = [data_type for data_type in DataType if has_width(data_type)]


@dataclass(frozen=True)
class Move:
    """Bytes [src_start, src_start + nbytes) of a source row to a place in a destination row."""

    src_row: int
    src_start: int
    dst_row: int
    dst_start: int
    nbytes: int


@dataclass(frozen=True)
class Transfer:
    """A call of a planning function, and the row moves that the specification asks for."""

    function: Callable[..., Plan]
    src: CacheDesc
    dst: CacheDesc
    arguments: Mapping[str, Any]
    moves: list[Move]
    tensor_pairs: list[tuple[int, int]]
    within: bool = False
    """Source and destination are one cache."""

    @property
    def reinterpret(self) -> bool:
        """Whether it copies bytes whatever they are: of other rows, or of a layer that is short."""
        pairs = len(self.tensor_pairs)
        per_layer = min(2, pairs)
        if (given := self.arguments.get("ext_param")) is not None:
            per_layer = given.tensor_num_per_layer
        of_rows = [
            (it.data_type, it.shape[it.batch_dim_index + 1 :]) for it in (self.src, self.dst)
        ]
        return pairs % per_layer != 0 or of_rows[0] != of_rows[1]

    def plan(self, coalesce: Coalesce | bool = True) -> Plan:
        if self.function is plan_copy_blocks:
            dst = None if self.within else self.dst
            return plan_copy_blocks(
                self.src,
                self.arguments["blocks"],
                dst,
                coalesce=coalesce,
                reinterpret=self.reinterpret,
            )
        return self.function(
            self.src, self.dst, coalesce=coalesce, reinterpret=self.reinterpret, **self.arguments
        )

    @property
    def nbytes(self) -> int:
        return len(self.tensor_pairs) * sum(move.nbytes for move in self.moves)

    def memory(self, seed: int = 0) -> tuple[Tensors, Tensors]:
        """Source and destination tensors of random bytes; the same arrays for one cache."""
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
        """Return what `dst` must be afterwards."""
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
    """A data type and the dimensions of a row of it that is whole bytes."""
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
    """Number of tensors on both sides, an ext_param, and the tensor pairs that it means."""
    per_layer = draw(st.integers(1, 3))
    if draw(st.booleans()):
        # No range: all tensors, of which a layer may lack some.
        num_tensors = draw(st.integers(per_layer, 3 * per_layer))
        spelled = draw(st.sampled_from([None, (-1, -1)]))
        ext_param = KvCacheExtParam(spelled, draw(st.sampled_from([None, (-1, -1)])), per_layer)
        return num_tensors, num_tensors, ext_param, [(i, i) for i in range(num_tensors)]

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

    ext_param = KvCacheExtParam(
        spell(src_first, src_layers), spell(dst_first, dst_layers), per_layer
    )
    return src_layers * per_layer, dst_layers * per_layer, ext_param, pairs


@st.composite
def slot_to_slot(draw: st.DrawFn) -> Transfer:
    function = draw(st.sampled_from([plan_pull_cache, plan_push_cache]))
    src_tensors, dst_tensors, ext_param, pairs = draw(layer_choices())
    src, dst = desc_of(draw, src_tensors, draw(rows())), desc_of(draw, dst_tensors, draw(rows()))
    src_row, dst_row = (draw(st.integers(0, desc.batch_size - 1)) for desc in (src, dst))
    local, remote = (dst, src) if function is plan_pull_cache else (src, dst)
    if local.stride <= remote.stride and draw(st.booleans()):
        # -1: the local row, from its offset on, has to find room or bytes in the remote one.
        size, src_offset, dst_offset = -1, 0, 0
        nbytes = local.stride
    else:
        nbytes = size = draw(st.integers(1, min(src.stride, dst.stride)))
        src_offset = draw(st.integers(0, src.stride - nbytes))
        dst_offset = draw(st.integers(0, dst.stride - nbytes))
    arguments = {
        "src_batch_index": src_row,
        "dst_batch_index": dst_row,
        "size": size,
        "src_offset": src_offset,
        "dst_offset": dst_offset,
        "ext_param": ext_param,
    }
    moves = [Move(src_row, src_offset, dst_row, dst_offset, nbytes)]
    return Transfer(function, src, dst, arguments, moves, pairs)


@st.composite
def copy_slot(draw: st.DrawFn) -> Transfer:
    num_tensors, row = draw(st.integers(1, 5)), draw(rows())
    src, dst = desc_of(draw, num_tensors, row), desc_of(draw, num_tensors, row)
    src_row, dst_row = (draw(st.integers(0, desc.batch_size - 1)) for desc in (src, dst))
    offset = draw(st.integers(0, src.stride - 1))
    size = draw(st.sampled_from([-1, draw(st.integers(1, src.stride - offset))]))
    arguments = {
        "src_batch_index": src_row,
        "dst_batch_index": dst_row,
        "offset": offset,
        "size": size,
    }
    nbytes = src.stride - offset if size == -1 else size
    return Transfer(
        plan_copy_cache,
        src,
        dst,
        arguments,
        [Move(src_row, offset, dst_row, offset, nbytes)],
        [(i, i) for i in range(num_tensors)],
    )


@st.composite
def block_to_block(draw: st.DrawFn) -> Transfer:
    function = draw(st.sampled_from([plan_pull_blocks, plan_push_blocks]))
    src_tensors, dst_tensors, ext_param, pairs = draw(layer_choices())
    row = draw(rows())
    src, dst = desc_of(draw, src_tensors, row), desc_of(draw, dst_tensors, row)
    dst_blocks = draw(
        st.lists(st.integers(0, dst.batch_size - 1), min_size=1, unique=True).map(tuple)
    )
    src_blocks = [draw(st.integers(0, src.batch_size - 1)) for _ in dst_blocks]
    return Transfer(
        function,
        src,
        dst,
        {"src_blocks": src_blocks, "dst_blocks": dst_blocks, "ext_param": ext_param},
        [Move(s, 0, d, 0, src.stride) for s, d in zip(src_blocks, dst_blocks, strict=True)],
        pairs,
    )


@st.composite
def slot_to_blocks(draw: st.DrawFn) -> Transfer:
    """The slot is cut into chunks of one block; the last one may be short."""
    function = draw(st.sampled_from([plan_pull_blocks, plan_push_blocks]))
    src_tensors, dst_tensors, ext_param, pairs = draw(layer_choices())
    src, dst = desc_of(draw, src_tensors, draw(rows())), desc_of(draw, dst_tensors, draw(rows()))
    slot = draw(st.integers(0, src.batch_size - 1))
    chunks = [
        (start, min(dst.stride, src.stride - start)) for start in range(0, src.stride, dst.stride)
    ]
    dst_blocks = draw(
        st.lists(st.integers(0, dst.batch_size - 1), min_size=1, max_size=len(chunks), unique=True)
    )
    return Transfer(
        function,
        src,
        dst,
        {
            "src_blocks": draw(st.sampled_from([None, (), []])),
            "dst_blocks": dst_blocks,
            "src_batch_index": slot,
            "ext_param": ext_param,
        },
        [
            Move(slot, start, block, 0, nbytes)
            for (start, nbytes), block in zip(chunks, dst_blocks, strict=False)
        ],
        pairs,
    )


@st.composite
def copy_blocks(draw: st.DrawFn) -> Transfer:
    num_tensors, row, within = draw(st.integers(1, 5)), draw(rows()), draw(st.booleans())
    src = desc_of(draw, num_tensors, row, min_rows=2)
    dst = src if within else desc_of(draw, num_tensors, row)
    order = draw(st.permutations(range(dst.batch_size)))
    # Inside one cache, what is read and what is written are two sets of blocks.
    written = order[: draw(st.integers(1, len(order) - within))]
    readable = order[len(written) :] if within else range(src.batch_size)
    blocks: dict[int, list[int]] = {}
    for block in written:
        blocks.setdefault(draw(st.sampled_from(readable)), []).append(block)
    return Transfer(
        plan_copy_blocks,
        src,
        dst,
        {"blocks": blocks},
        [Move(s, 0, d, 0, src.stride) for s, targets in blocks.items() for d in targets],
        [(i, i) for i in range(num_tensors)],
        within,
    )


@st.composite
def swap_blocks(draw: st.DrawFn) -> Transfer:
    num_tensors, row = draw(st.integers(1, 5)), draw(rows())
    placements = draw(st.permutations([Placement.HOST, Placement.DEVICE]))
    src, dst = (desc_of(draw, num_tensors, row, placement) for placement in placements)
    size = draw(st.integers(1, min(src.batch_size, dst.batch_size)))
    src_blocks = draw(st.permutations(range(src.batch_size)))[:size]
    dst_blocks = draw(st.permutations(range(dst.batch_size)))[:size]
    return Transfer(
        plan_swap_blocks,
        src,
        dst,
        {"src_to_dst": dict(zip(src_blocks, dst_blocks, strict=True))},
        [Move(s, 0, d, 0, src.stride) for s, d in zip(src_blocks, dst_blocks, strict=True)],
        [(i, i) for i in range(num_tensors)],
    )


def transfers() -> st.SearchStrategy[Transfer]:
    return st.one_of(
        slot_to_slot(),
        copy_slot(),
        block_to_block(),
        slot_to_blocks(),
        copy_blocks(),
        swap_blocks(),
    )
