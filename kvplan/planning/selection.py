"""What callers select of a cache: blocks as arrays of indices, and layers as ranges; checked."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.planning.layout import Side
from kvplan.status import LLMException, invalid
from kvplan.types import DEFAULT_TENSORS_PER_LAYER, KvCacheExtParam, LayerRange
from kvplan.validation import check_type, shown

Blocks = Sequence[int] | NDArray[np.integer]
Indices = NDArray[np.int64]

MAX_TENSORS_PER_LAYER = 255
"""The reference's field is a uint8."""

_TEXT = (str, bytes, bytearray)  # sequences too, and of int


def block_indices(name: str, blocks: Blocks, cache: Side) -> Indices:
    """Return `blocks` as int64 indices, each in [0, cache.count).

    Raises:
        TypeError: as for `block_table`.
        LLMException: as for `check_indices`.
    """
    return check_indices(name, block_table(name, blocks), cache)


def block_table(name: str, blocks: Blocks) -> NDArray[Any]:
    """Return `blocks` as a one-dimensional array of integers, of any width and perhaps empty.

    Raises:
        TypeError: not a one-dimensional sequence of integers (a bool or a float is none).
    """
    if isinstance(blocks, np.ndarray):
        table = np.asarray(blocks)  # a masked array would hide entries from the checks
    else:
        if isinstance(blocks, _TEXT) or not isinstance(blocks, Sequence):
            raise TypeError(f"{name} must be a sequence of int, not {type(blocks).__name__}")
        types = set(map(type, blocks))
        if types == {int}:
            try:  # a third of the time that np.array takes
                return np.frombuffer(struct.pack(f"{len(blocks)}q", *blocks), np.int64)
            except struct.error:  # beyond 64 bits: out of range, but of which?
                return np.array(blocks, dtype=object)
        # NumPy would take True for 1 and, beside an int, silently.
        if not types.isdisjoint((bool, np.bool_)):
            raise TypeError(f"{name} must hold int, not bool")
        try:
            table = np.array(blocks)
        except (ValueError, OverflowError) as error:
            raise TypeError(f"{name} must be a flat sequence of int: {error}") from None
        if table.dtype.kind not in "iu" and all(issubclass(t, int | np.integer) for t in types):
            # No one type of NumPy holds them all, so it took float or object: keep them exact.
            return np.array(blocks, dtype=object)
    if table.ndim != 1:
        raise TypeError(f"{name} must be one-dimensional, not of shape {table.shape}")
    if table.size and table.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {table.dtype}")
    return table


def check_indices(name: str, table: NDArray[Any], cache: Side) -> Indices:
    """Return `table` as int64 if every entry is in [0, cache.count).

    Raises:
        LLMException: LLM_PARAM_INVALID, empty or an index out of range; names its position.
    """
    if table.size == 0:
        raise invalid(f"{name} is empty; at least one block is needed")
    try:
        indices = table.astype(np.int64, copy=False)
    except OverflowError:  # one is beyond 64 bits
        raise _out_of_range(name, table, cache) from None
    unsigned = indices.view(np.uint64)  # what is negative is now beyond any count
    if (unsigned.item() if table.size == 1 else int(unsigned.max())) >= cache.count:
        raise _out_of_range(name, table, cache)
    return indices


def _out_of_range(name: str, table: NDArray[Any], cache: Side) -> LLMException:
    position = int(np.flatnonzero((table < 0) | (table >= cache.count))[0])
    return invalid(f"{name}[{position}]={int(table[position])} is out of range [0, {cache.count})")


def check_distinct(name: str, table: Indices, cache: Side) -> None:
    """Refuse a block that is named twice: which of its writes would win is not defined.

    Raises:
        LLMException: LLM_PARAM_INVALID naming the block and both positions.
    """
    if table.size == 1:
        return
    if cache.count <= 64 * table.size:
        # A bitmap is several times faster than sorting while it is not much larger than the table.
        seen = np.zeros(cache.count, dtype=np.bool_)
        seen[table] = True
        distinct = int(np.count_nonzero(seen))
    else:
        ordered = np.sort(table)  # not np.unique, whose first call imports numpy.ma: 8 ms
        distinct = 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
    if distinct == table.size:
        return
    order = np.argsort(table, kind="stable")
    repeat = int(np.flatnonzero(table[order][1:] == table[order][:-1])[0])
    first, second = int(order[repeat]), int(order[repeat + 1])
    raise invalid(
        f"{name}[{second}]={int(table[second])} is already {name}[{first}]; destination blocks "
        f"must be distinct"
    )


def sorted_pairs(src_table: Indices, dst_table: Indices) -> tuple[Indices, Indices]:
    """Return the pairs of both tables in ascending order of source, then destination block."""
    if bool(np.all(src_table[1:] > src_table[:-1])):
        return src_table, dst_table
    if max(int(src_table.max()), int(dst_table.max())) >= 2**31:
        order = np.lexsort((dst_table, src_table))
        return src_table[order], dst_table[order]
    # A pair in one number: NumPy sorts numbers several times faster than it finds their order.
    pairs = np.sort((src_table << 32) | dst_table)
    return pairs >> 32, pairs & 0xFFFFFFFF


def tensor_ranges(src: Side, dst: Side, ext_param: KvCacheExtParam) -> tuple[range, range]:
    """Return the src and dst tensors of a transfer: two ranges of one length.

    Layer range i..j selects tensors i*t up to (j+1)*t, t = `tensor_num_per_layer`. With no range,
    all tensors are taken, and t only groups them (the last layer may then be short). A range on
    one side goes with all tensors of the other, if their numbers agree.

    Raises:
        TypeError: ext_param, a range or tensor_num_per_layer of another type.
        LLMException: LLM_PARAM_INVALID for a step other than 1, an empty range, layers that a
            cache does not have, ranges of unequal length, tensor_num_per_layer outside
            [1, num_tensors] or, where a range is given, not dividing the number of tensors.
    """
    if type(ext_param) is not KvCacheExtParam:
        check_type("ext_param", ext_param, KvCacheExtParam)
    per_layer = ext_param.tensor_num_per_layer
    if type(per_layer) is not int:
        check_type("tensor_num_per_layer", per_layer, int)
    src_given, dst_given = ext_param.src_layer_range, ext_param.dst_layer_range
    src_layers = None if src_given is None else _layers("src_layer_range", src_given)
    dst_layers = None if dst_given is None else _layers("dst_layer_range", dst_given)
    ranged = src_layers is not None or dst_layers is not None
    for name, cache in (("src", src), ("dst", dst)):
        # The default passes on a cache of one tensor: nobody asked for it.
        most = cache.num_tensors if cache.num_tensors > 1 else DEFAULT_TENSORS_PER_LAYER
        if not 1 <= per_layer <= most or per_layer > MAX_TENSORS_PER_LAYER:
            raise invalid(
                f"tensor_num_per_layer={per_layer} is out of range "
                f"[1, {min(cache.num_tensors, MAX_TENSORS_PER_LAYER)}] of the {name} cache"
            )
        if ranged and cache.num_tensors % per_layer:
            raise invalid(
                f"tensor_num_per_layer={per_layer} must divide the {cache.num_tensors} tensors of "
                f"the {name} cache where a layer range is given"
            )
    if not ranged:
        if src.num_tensors != dst.num_tensors:
            raise invalid(
                f"src num_tensors={src.num_tensors} and dst num_tensors={dst.num_tensors} must be "
                "equal where no layer range is given"
            )
        return range(src.num_tensors), range(dst.num_tensors)
    src_tensors = _tensors("src_layer_range", src_layers, src, per_layer)
    dst_tensors = _tensors("dst_layer_range", dst_layers, dst, per_layer)
    if len(src_tensors) != len(dst_tensors):
        raise invalid(
            f"src_layer_range={_show(src_layers, src, per_layer)} and "
            f"dst_layer_range={_show(dst_layers, dst, per_layer)} must be of equal length"
        )
    return src_tensors, dst_tensors


def source_tensors(src: Side, ext_param: KvCacheExtParam) -> range:
    """Return the src tensors of a transfer; arguments and errors as for `tensor_ranges`."""
    check_type("ext_param", ext_param, KvCacheExtParam)
    alike = replace(ext_param, dst_layer_range=ext_param.src_layer_range)
    return tensor_ranges(src, src, alike)[0]


def _layers(name: str, given: LayerRange) -> range | None:
    """The half-open range that `given` means, or None for all layers."""
    match given:
        case range():
            if given.step != 1:
                raise invalid(f"{name}={given} has step {given.step}; the step must be 1")
            return given
        case (first, last):
            check_type(f"{name}[0]", first, int)
            check_type(f"{name}[1]", last, int)
            if first == last == -1:
                return None
            return range(first, last + 1)
        case _:
            raise TypeError(f"{name}={shown(given)} must be a range, a pair (first, last) or None")


def _tensors(name: str, layers: range | None, cache: Side, per_layer: int) -> range:
    if layers is None:
        return range(cache.num_tensors)
    num_layers = cache.num_tensors // per_layer
    if not layers or layers.start < 0 or layers.stop > num_layers:
        raise invalid(
            f"{name}={layers} is {'out of range' if layers else 'empty; it must hold a layer of'} "
            f"[0, {num_layers}): {cache.num_tensors} tensors, {per_layer} a layer"
        )
    return range(layers.start * per_layer, layers.stop * per_layer)


def _show(layers: range | None, cache: Side, per_layer: int) -> range:
    return range(cache.num_tensors // per_layer) if layers is None else layers
