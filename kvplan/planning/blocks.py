"""Block tables: from the arguments of callers to checked arrays of block indices."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.side import Side
from kvplan.status import LLMException, invalid
from kvplan.validation import shown

Blocks = Sequence[int] | NDArray[np.integer]
BlockPairs = Sequence[Sequence[int]] | NDArray[np.integer]
"""Pairs of a source and a destination block, or an array of two such columns."""
Indices = NDArray[np.int64]

_MIN_MAPPED = 512
"""Minimum number of blocks of a table to sort by a map of the cache's blocks."""

_MAX_SPARSITY = 64
"""Maximum blocks of a cache per block of a table; above, sorting is faster than a map."""

_MAX_MAPPED = 1 << 21
"""Maximum blocks of a cache for a map, which takes 9 bytes a block."""

_TEXT = (str, bytes, bytearray)  # sequences, but not block tables


class RequestBlocks(tuple[int, ...]):
    """All blocks of a request, from a lease; a transfer of fewer tokens takes the first blocks."""

    __slots__ = ()


def is_empty(blocks: object) -> bool:
    """Return whether `blocks` is an empty block table."""
    return isinstance(blocks, Sized) and len(blocks) == 0


def block_indices(name: str, blocks: Blocks, cache: Side) -> Indices:
    """Return `blocks` as int64 indices, each in [0, cache.count)."""
    return check_indices(name, block_table(name, blocks), cache)


def block_table(name: str, blocks: Any) -> NDArray[Any]:
    """Return `blocks` as a flat array of integers (not of bool or float), perhaps empty."""
    if isinstance(blocks, np.ndarray):
        # A copy: a plan keeps it. A masked array would hide entries from the checks.
        table = np.array(blocks)
        if table.ndim != 1:
            raise TypeError(f"{name} must be one-dimensional, not of shape {table.shape}")
        if table.size and table.dtype.kind not in "iu":
            raise TypeError(f"{name} must hold integers, not {table.dtype}")
        return table
    if not isinstance(blocks, Sequence) and hasattr(blocks, "__array__"):  # a tensor
        return block_table(name, as_array(name, blocks))
    if isinstance(blocks, _TEXT) or not isinstance(blocks, Sequence):
        raise TypeError(f"{name} must be a sequence of int, not {type(blocks).__name__}")
    held = tuple(blocks)  # a copy: another thread may change them
    try:  # several times as fast as np.array, or as a check of each type
        table = np.frombuffer(struct.Struct(f"{len(held)}q").pack(*held), np.int64)
    except (struct.error, TypeError):  # an entry is not an int, or exceeds 64 bits
        return _mixed_table(name, held)
    # Packing also accepts True and False, as 1 and 0.
    for position in np.flatnonzero(table.view(np.uint64) <= 1).tolist():
        if type(value := held[position]) is not int and np.asarray(value).dtype.kind == "b":
            raise TypeError(f"{name} must hold int, not bool")
    return table


def check_table(name: str, blocks: object) -> None:
    """Refuse a single block in place of a block table."""
    if isinstance(blocks, int | np.integer):
        raise TypeError(
            f"{name}={blocks} must be a block table, a sequence of int such as [{blocks}]"
        )


def as_array(name: str, given: object) -> NDArray[Any]:
    """Return a host tensor of another library as an array."""
    try:
        return np.asarray(given)
    except Exception as error:  # libraries raise anything
        raise TypeError(
            f"{name} is a {type(given).__name__} that cannot be read as an array of the host; copy "
            f"it to the host, or give a list: {error}"
        ) from error


def pair_tables(name: str, given: object) -> tuple[list[int], list[int]]:
    """Return the source and destination blocks of a copy, as two tables of equal length.

    Args:
        given: a mapping from source block to destination block or blocks, pairs of both, or an
            array or tensor of two such columns.
    """
    if isinstance(given, Mapping):
        pairs = [
            (src, dst)
            for src, to in given.items()
            for dst in (to if isinstance(to, Sequence | np.ndarray) else [to])
        ]
    elif not isinstance(given, Sequence) and hasattr(given, "__array__"):
        array = as_array(name, given)
        if array.ndim != 2 or array.shape[1] != 2 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(
                f"{name} of shape {array.shape} and {array.dtype} must have two columns of "
                "integers, the source and the destination block"
            )
        return array[:, 0].tolist(), array[:, 1].tolist()
    elif isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise TypeError(
            f"{name}={shown(given)} must be a mapping, or pairs of a source and a destination "
            f"block, not {type(given).__name__}"
        )
    else:
        for position, pair in enumerate(given):
            if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise TypeError(
                    f"{name}[{position}]={shown(pair)} must be a pair of a source and a "
                    "destination block"
                )
        pairs = [(src, dst) for src, dst in given]
    return [src for src, _ in pairs], [dst for _, dst in pairs]


def _mixed_table(name: str, blocks: tuple[int, ...]) -> NDArray[Any]:
    """Return a table with entries that are not int or exceed 64 bits; refuse invalid types."""
    types = {*map(type, blocks)}
    if not {bool, np.bool_}.isdisjoint(types):  # NumPy would convert them to 1
        raise TypeError(f"{name} must hold int, not bool")
    try:
        table = np.array(blocks)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be a flat sequence of int: {error}") from None
    if table.dtype.kind not in "iu" and all(issubclass(kind, int | np.integer) for kind in types):
        # NumPy chose float or object because no integer type holds all values: keep them exact.
        return np.array(blocks, dtype=object)
    return block_table(name, table)


def check_indices(name: str, table: NDArray[Any], cache: Side) -> Indices:
    """Return `table` as int64 if every entry is in [0, cache.count)."""
    if table.size == 0:
        return np.empty(0, np.int64)
    try:
        indices = table.astype(np.int64, copy=False)
    except OverflowError:  # an entry exceeds 64 bits
        raise _out_of_range(name, table, cache) from None
    unsigned = indices.view(np.uint64)  # negative numbers become larger than any count
    if (unsigned.item() if table.size == 1 else np.maximum.reduce(unsigned)) >= cache.count:
        raise _out_of_range(name, table, cache)
    return indices


def _out_of_range(name: str, table: NDArray[Any], cache: Side) -> LLMException:
    position = int(np.flatnonzero((table < 0) | (table >= cache.count))[0])
    return invalid(f"{name}[{position}]={int(table[position])} is out of range [0, {cache.count})")


def check_distinct(name: str, table: Indices, cache: Side) -> None:
    """Refuse a block that occurs twice, since the order of its two writes is undefined."""
    if table.size <= 1:
        return
    if cache.count <= _MAX_SPARSITY * table.size:
        seen = np.zeros(cache.count, np.bool_)
        seen[table] = True
        distinct = int(np.count_nonzero(seen))
    else:
        ordered = np.sort(table)  # not np.unique, whose first call imports numpy.ma
        distinct = 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
    if distinct == table.size:
        return
    order = np.argsort(table, kind="stable")
    repeat = int(np.flatnonzero(table[order][1:] == table[order][:-1])[0])
    first, second = int(order[repeat]), int(order[repeat + 1])
    raise invalid(
        f"{name}[{second}]={int(table[second])} is already {name}[{first}]; name each block once"
    )


def sorted_pairs(src_table: Indices, dst_table: Indices, count: int) -> tuple[Indices, Indices]:
    """Return the pairs of two tables in ascending order of source, then destination block.

    All blocks are below `count`; there is at least one pair.
    """
    middle = src_table.item(len(src_table) // 2)  # detects most unordered tables
    if (
        src_table.item(0) <= middle <= src_table.item(-1)
        and np.count_nonzero(src_table[1:] > src_table[:-1]) == len(src_table) - 1
    ):
        return src_table, dst_table
    if len(src_table) >= _MIN_MAPPED and count <= min(_MAX_SPARSITY * len(src_table), _MAX_MAPPED):
        dst_of = np.full(count, -1)  # a lookup takes half the time of sorting
        dst_of[src_table] = dst_table
        ordered = (dst_of >= 0).nonzero()[0]
        if len(ordered) == len(src_table):  # no source occurs twice
            return ordered, dst_of.take(ordered)
    if count > 2**31:
        order = np.lexsort((dst_table, src_table))
        return src_table[order], dst_table[order]
    # Each pair as one number: sorting numbers is several times faster than argsort.
    pairs = (src_table << 32) | dst_table
    pairs.sort()
    return pairs >> 32, pairs & 0xFFFFFFFF
