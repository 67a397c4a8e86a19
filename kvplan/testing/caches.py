"""Caches of usual shapes, block tables as allocators make them, and plans executed on arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.layout import CacheLayout, Shard
from kvplan.planning import reference
from kvplan.planning.plan import Plan
from kvplan.planning.side import Side
from kvplan.status import invalid
from kvplan.types import CacheDesc, DataType, Placement
from kvplan.validation import check_type, check_width, shown

_OF_WIDTH: dict[int, type[np.unsignedinteger[Any]]] = {
    8: np.uint8,
    16: np.uint16,
    32: np.uint32,
    64: np.uint64,
}


def make_desc(
    layout: str = "NHD",
    *,
    blocks: int = 64,
    tokens: int = 16,
    layers: int = 2,
    heads: int = 8,
    dim: int = 128,
    data_type: DataType = DataType.DT_FLOAT16,
    placement: Placement = Placement.DEVICE,
    shard: Shard | None = None,
) -> CacheDesc:
    """Describe a cache of a usual shape.

    Args:
        layout: axes as in `CacheDesc.kv_tensor_format`: "NHD", "HND", "MLA" for "block token dim"
            (a latent), or any list of axes. Without an axis for them, layers, keys and values are
            separate tensors.
        blocks: number of blocks, or slots of a contiguous cache.
        tokens: tokens of a block.
        layers, heads, dim: of the model; with a `shard`, of this shard.
        data_type, placement, shard: see `CacheDesc`.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number outside its C type.
        LLMException: LLM_PARAM_INVALID: an unknown layout, or axes of other models ("group",
            "state").
    """
    axes_text = "block token dim" if layout == "MLA" else check_type("layout", layout, str)
    axes = CacheLayout(axes_text).axes
    lengths = {
        "block": blocks, "slot": blocks, "token": tokens, "layer": layers, "head": heads,
        "dim": dim, "kv": 2,
    }  # fmt: skip
    if unknown := [axis for axis in axes if axis not in lengths]:
        raise invalid(f"layout={shown(layout)}: no length is known for {', '.join(unknown)}")
    apart = [1 if "layer" in axes else layers, 1 if "kv" in axes or "head" not in axes else 2]
    shape = tuple(lengths[axis] for axis in axes)
    return CacheDesc(
        prod(apart), shape, data_type, placement, kv_tensor_format=axes_text, shard=shard
    )


@dataclass
class BlockTables:
    """Random block tables, as from a pool after some use; equal for equal seeds.

    Attributes:
        seed: of the random numbers.
        made: each call and its tables, printed if a test fails.
    """

    seed: int = 0
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def __call__(
        self,
        num_blocks: int | CacheDesc,
        *lengths: int,
        fragmentation: float = 0.5,
        reserved: Sequence[int] = (),
    ) -> Any:
        """Return a block table of each length; no block occurs twice, even in different tables.

        Args:
            num_blocks: number of blocks in the pool, or the cache.
            lengths: one length: the result is its table, a list; several: a tuple of tables.
            fragmentation: 0: runs that end only at a used block; 1: two blocks are adjacent only by
                chance; in between, some runs descend.
            reserved: blocks that are never used (vLLM's null block: `[0]`).

        Raises:
            TypeError, ValueError: `num_blocks` is neither a description nor in [1, 2**32].
            LLMException: LLM_PARAM_INVALID: no length, too many blocks, or a wrong `fragmentation`.
        """
        total = num_blocks.batch_size if isinstance(num_blocks, CacheDesc) else num_blocks
        check_width("num_blocks", total, 1, 2**32)
        if not 0 <= fragmentation <= 1:
            raise invalid(f"fragmentation={fragmentation} is out of range [0, 1]")
        free = set(range(total)) - set(reserved)
        if not lengths or min(lengths) < 1 or sum(lengths) > len(free):
            raise invalid(
                f"lengths={lengths} must be >= 1 each, and {len(free)} in all: of num_blocks="
                f"{total}, {total - len(free)} are reserved"
            )
        order = sorted(free)
        self._random.shuffle(order)
        tables = [self._table(length, free, order, fragmentation) for length in lengths]
        self.made.append(f"{total} blocks, lengths {lengths}: {tables}")
        return tables[0] if len(tables) == 1 else tuple(tables)

    def _table(
        self, length: int, free: set[int], order: list[int], fragmentation: float
    ) -> list[int]:
        table: list[int] = []
        step = 1
        while len(table) < length:
            block = table[-1] + step if table else -1
            if block not in free or self._random.random() < fragmentation:
                block = order.pop()
                while block not in free:
                    block = order.pop()
                # Freed blocks often come back in reverse order.
                step = -1 if fragmentation and self._random.random() < 0.3 else 1
            free.remove(block)
            table.append(block)
        return table


@dataclass(frozen=True)
class Executed:
    """The arrays after the execution of a plan.

    Attributes:
        src, dst: the given tensors, or new ones in the shape of the cache: unsigned integers as
            wide as the data type (or bytes), so that contents can be compared exactly.
        parts: the arrays of each part of the plan, by its label.
    """

    src: list[NDArray[Any]]
    dst: list[NDArray[Any]]
    parts: Mapping[str, Executed] = field(default_factory=dict)


def run_reference(
    plan: Plan,
    src: list[NDArray[Any]] | None = None,
    dst: list[NDArray[Any]] | None = None,
    *,
    seed: int = 0,
) -> Executed:
    """Execute `plan` with the NumPy reference, and return the arrays of both sides.

    Args:
        src: one array for each tensor; None: random elements, none of them 0.
        dst: the same; None: zeros, so that a value other than 0 was written. For a copy inside
            one cache, give the arrays of `src`.
        seed: seed of the random elements.

    Raises:
        TypeError, LLMException: see `kvplan.reference.execute`.
    """
    random = np.random.default_rng(seed)
    flat: list[list[NDArray[Any]]] = []
    shown: list[list[NDArray[Any]]] = []
    for given, name, numbers in ((src, "src", random), (dst, "dst", None)):
        if given is None:
            sides = [getattr(part, name) for part in plan.parts]
            made = [tensor for side in sides for tensor in _tensors(side, numbers)]
            flat.append([memory for memory, _ in made])
            shown.append([tensor for _, tensor in made])
        else:
            flat.append(given)
            shown.append(given)
    reference.execute(plan, *flat)
    src, dst = shown
    return Executed(
        src,
        dst,
        {
            placed.part.label: Executed(
                src[placed.src_tensor : placed.src_tensor + placed.part.src.num_tensors],
                dst[placed.dst_tensor : placed.dst_tensor + placed.part.dst.num_tensors],
            )
            for placed in plan.placed()
        },
    )


def _tensors(
    side: Side, random: np.random.Generator | None
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return the memory of each tensor, and the tensor as a view of this memory."""
    width = 8 if side.data_type is None else side.data_type.bits
    # Elements of 4 or 128 bits, for which NumPy has no unsigned integer, become bytes.
    dtype = np.dtype(_OF_WIDTH.get(width, np.uint8))
    shape = side.shape if side.shape and width in _OF_WIDTH else (side.count, -1)
    if side.stride % dtype.itemsize:
        dtype, shape = np.dtype(np.uint8), (side.count, -1)
    rows = side.rows_nbytes // side.row_nbytes
    tensors = []
    for _ in range(side.num_tensors):
        if random is None:
            flat = np.zeros(rows * side.stride // dtype.itemsize, dtype)
        else:
            flat = random.integers(
                1, np.iinfo(dtype).max, rows * side.stride // dtype.itemsize, dtype, endpoint=True
            )
        # Bytes between rows are in the memory, but not in the tensor.
        inside = flat.reshape(rows, -1)[:, : side.row_nbytes // dtype.itemsize]
        memory = flat[: side.tensor_nbytes // dtype.itemsize]
        tensors.append((memory, inside.reshape(shape)))
    return tensors


def request_tokens(
    desc: CacheDesc, tensors: Sequence[NDArray[Any]], blocks: Sequence[int]
) -> NDArray[Any]:
    """Return the contents of a request: (token, layer, K or V, head, dim), in the request's order.

    Requests in caches of different layouts and block sizes compare equal if their tokens do. An
    axis that the layout lacks has length 1. Layouts of other models have other last axes.

    Args:
        desc: the cache; its layout has an axis of tokens.
        tensors: its tensors, in its shape: of an `Executed`, or of `LlmDataDist.arrays`.
        blocks: the block table of the request; of a contiguous cache `[slot]`.

    Raises:
        LLMException: LLM_PARAM_INVALID: the layout is unknown or lacks an axis of tokens, or a
            wrong number of tensors.
        IndexError: a block is negative or past the last one.
    """
    if len(blocks) and min(blocks) < 0:  # NumPy would count from the end
        raise IndexError(f"blocks={shown(blocks)} must not be negative")
    layout = desc.layout
    if layout is None or "token" not in layout.axes:
        raise invalid(f"desc={desc} must have a layout with an axis of tokens")
    if len(tensors) != desc.num_tensors:
        raise invalid(f"tensors has {len(tensors)} arrays; desc has {desc.num_tensors}")
    # Without an axis for them, layers, keys and values are separate tensors.
    apart = 1 if "kv" in layout.axes or "head" not in layout.axes else 2
    whole = np.stack(tensors).reshape(-1, apart, *desc.shape)
    names = ["tensor", "part", *layout.axes]
    row = layout.axes[layout.row_axis]
    whole = np.take(whole, blocks, axis=names.index(row))
    for name in ("layer", "kv", "head"):
        if name not in names:
            names.append(name)
            whole = whole[..., None]
    order = [row, "token", "tensor", "layer", "part", "kv", "head"]
    order += [name for name in names if name not in order]
    whole = whole.transpose([names.index(name) for name in order])
    merged = zip(whole.shape[:6:2], whole.shape[1:6:2], strict=True)
    return whole.reshape(*(first * second for first, second in merged), *whole.shape[6:])
