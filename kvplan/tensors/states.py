"""States of recurrent layers (Mamba, linear attention) on the ranks of tensor parallelism.

A rank has the state of its heads. A convolution state has columns of several projections, such as
x, B and C of Mamba2. Projections may differ in their number of heads, so each one is a cache:
views of the engine's tensors, with the heads as an axis of the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvplan.layout import Shard
from kvplan.status import invalid
from kvplan.types import CacheDesc, DataType
from kvplan.validation import as_int, check_type, shown


class Columns(NamedTuple):
    """Columns of one projection in a convolution state.

    Attributes:
        num_heads: heads of the projection in the model; for B and C of Mamba2, the groups.
        dim: columns of a head.
    """

    num_heads: int
    dim: int


class StateCache(NamedTuple):
    """A cache of states: the arguments of `LlmDataDist.register_blocks_cache`.

    Attributes:
        desc: the description of the tensors.
        tensors: views of the engine's tensors; nothing is copied.
    """

    desc: CacheDesc
    tensors: list[Any]


def rank_heads(num_heads: int, rank: int, ranks: int) -> range:
    """Return the heads of one rank: an equal share, or one head that several ranks share.

    Raises:
        TypeError: a number that is not an int.
        LLMException: LLM_PARAM_INVALID: a rank out of range, or neither of `num_heads` and `ranks`
            divides the other.
    """
    num_heads, rank, ranks = (
        as_int("num_heads", num_heads),
        as_int("rank", rank),
        as_int("ranks", ranks),
    )
    if not 0 <= rank < ranks:
        raise invalid(f"rank={rank} is out of range [0, ranks={ranks})")
    if num_heads >= 1 and num_heads % ranks == 0:
        share = num_heads // ranks
        return range(rank * share, (rank + 1) * share)
    if num_heads < 1 or ranks % num_heads:
        raise invalid(f"num_heads={num_heads} and ranks={ranks}: one must divide the other")
    head = rank * num_heads // ranks
    return range(head, head + 1)


def convolution_caches(
    tensors: Sequence[Any],
    columns: Mapping[str, Columns],
    rank: int,
    ranks: int,
    *,
    columns_first: bool = False,
    data_type: DataType | None = None,
    shard: Shard | None = None,
) -> dict[str, StateCache]:
    """Describe the projections of convolution states, each as a cache.

    Args:
        tensors: the state of each layer: (blocks, positions, columns), which may be a view of
            larger pages; positions are the earlier tokens that the convolution reads.
        columns: the projections by name, in the order of the columns.
        rank: the rank of tensor parallelism that owns the tensors.
        ranks: the number of ranks.
        columns_first: True: the tensors are (blocks, columns, positions).
        data_type: type of the elements; None: the type of the tensors.
        shard: the layers of the model that the states belong to.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number outside its C type.
        LLMException: LLM_PARAM_INVALID: tensors of another shape, or that cannot be described; see
            also `rank_heads`.
    """
    check_type("columns", columns, Mapping)  # type: ignore[type-abstract]
    for name, of in columns.items():
        check_type(f"columns[{shown(name)}]", of, Columns)
    heads = {name: rank_heads(of.num_heads, rank, ranks) for name, of in columns.items()}
    width = sum(len(heads[name]) * of.dim for name, of in columns.items())
    axis = 1 if columns_first else 2
    for number, tensor in enumerate(tensors):
        if not hasattr(tensor, "shape"):
            raise TypeError(f"tensors[{number}]={shown(tensor)} must be a tensor")
        if len(tensor.shape) != 3 or tensor.shape[axis] != width:
            parts = ", ".join(
                f"{name} {len(heads[name])} x {of.dim}" for name, of in columns.items()
            )
            raise invalid(
                f"tensors[{number}] has shape {shown(tuple(tensor.shape))}; rank {rank} of {ranks} "
                f"has {width} columns ({parts}) in dimension {axis} of 3"
            )
    made, first = {}, 0
    for name, of in columns.items():
        share = len(heads[name])
        last = first + share * of.dim
        if columns_first:
            layout = "block head dim state"
            views = [
                tensor[:, first:last].reshape(len(tensor), share, of.dim, -1) for tensor in tensors
            ]
        else:  # one tensor for each position: other projections lie between positions
            layout = "block state head dim"
            views = [
                tensor[:, position, first:last].reshape(len(tensor), 1, share, of.dim)
                for tensor in tensors
                for position in range(tensor.shape[1])
            ]
        made[name] = _described(views, layout, heads[name], of.num_heads, data_type, shard)
        first = last
    return made


def recurrent_cache(
    tensors: Sequence[Any],
    num_heads: int,
    rank: int,
    ranks: int,
    *,
    layout: str = "block head dim state",
    data_type: DataType | None = None,
    shard: Shard | None = None,
) -> StateCache:
    """Describe states that have an axis of heads: of an SSM, or of linear attention.

    Args:
        tensors: the state of each layer, which may be a view of larger pages.
        num_heads: heads of the model.
        rank, ranks, data_type, shard: as for `convolution_caches`.
        layout: the dimensions of each tensor.

    Raises:
        TypeError, ValueError, LLMException: see `convolution_caches`.
    """
    heads = rank_heads(num_heads, rank, ranks)
    return _described(list(tensors), layout, heads, num_heads, data_type, shard)


def _described(
    views: list[Any],
    layout: str,
    heads: range,
    num_heads: int,
    data_type: DataType | None,
    shard: Shard | None,
) -> StateCache:
    held = replace(shard or Shard(), heads=heads, num_heads=num_heads)
    return StateCache(CacheDesc.from_tensors(views, layout, data_type=data_type, shard=held), views)
