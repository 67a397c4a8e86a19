"""Layers and block tables as the original takes them, as the engine does."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvplan.llm_datadist.utils.utils import check_isinstance, check_uint32
from kvplan.status import invalid
from kvplan.types import KvCacheExtParam
from kvplan.validation import UINT64_MAX, shown

TENSORS_PER_LAYER = 2

Indices = list[int] | tuple[int, ...]
Table = list[int] | NDArray[np.int64]

_LONG = 64  # blocks from which on an array is faster


def layers_of(
    src_layer_range: range | None, dst_layer_range: range | None, tensor_num_per_layer: int
) -> KvCacheExtParam:
    """Check which layers go where.

    Raises:
        TypeError: an argument of another type.
        ValueError: tensor_num_per_layer or a layer is no uint32.
        LLMException: LLM_PARAM_INVALID: tensor_num_per_layer is 0, a step other than 1, no layer,
            or a negative one.
    """
    check_uint32("tensor_num_per_layer", tensor_num_per_layer)
    if tensor_num_per_layer == 0:
        raise invalid("tensor_num_per_layer=0 is out of range [1, num_tensors]")
    _check_range("src_layer_range", src_layer_range)
    _check_range("dst_layer_range", dst_layer_range)
    return KvCacheExtParam(src_layer_range, dst_layer_range, int(tensor_num_per_layer))


def pushed_layers_of(
    src_layer_range: range | None,
    dst_layer_range: range | None,
    tensor_num_per_layer: int,
    num_tensors: int,
) -> KvCacheExtParam:
    """As `layers_of`, where a range that is not given means the layers of the local cache.

    Raises:
        LLMException: also LLM_PARAM_INVALID for ranges of unequal length.
    """
    layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
    whole = range(num_tensors // layers.tensor_num_per_layer)
    src, dst = (whole if it is None else it for it in (src_layer_range, dst_layer_range))
    if len(src) != len(dst):
        raise invalid(f"src_layer_range={src} and dst_layer_range={dst} must be of equal length")
    if src_layer_range is None and num_tensors % layers.tensor_num_per_layer:
        return layers  # no range names the tensors of the last layer
    return KvCacheExtParam(src, dst, layers.tensor_num_per_layer)


def _check_range(name: str, layers: range | None) -> None:
    check_isinstance(name, layers, range)
    if layers is None:
        return
    if layers.step != 1 or not 0 <= layers.start < layers.stop:
        raise invalid(f"{name}={layers} must be range(first, end) of step 1, 0 <= first < end")
    check_uint32(f"{name}.stop - 1", layers.stop - 1)


def indices_of(
    name: str, blocks: Indices | None, refusal: type[Exception] = TypeError
) -> list[int]:
    """Return block indices as a list; None: none.

    Args:
        name: of the argument.
        blocks: its value.
        refusal: of an index that is no uint64.

    Raises:
        TypeError: another type.
    """
    check_isinstance(name, blocks, [list, tuple])
    if not blocks:
        return []
    # Almost always; several times faster for long tables.
    if set(map(type, blocks)) == {int} and min(blocks) >= 0 and max(blocks) <= UINT64_MAX:
        return list(blocks)
    check_isinstance(name, blocks, [list, tuple], int)
    return [_index(name, it, refusal) for it in blocks]


def table_of(name: str, blocks: Indices | None) -> Table:
    """As `indices_of`; a long table comes as an array, which nobody checks element by element."""
    check_isinstance(name, blocks, [list, tuple])
    if blocks and len(blocks) >= _LONG and set(map(type, blocks)) == {int}:
        with suppress(struct.error):  # beyond int64
            table = np.frombuffer(struct.pack(f"{len(blocks)}q", *blocks), np.int64)
            if table.min() >= 0:
                return table
    return indices_of(name, blocks)


@overload
def last_wins(src_blocks: list[int], dst_blocks: list[int]) -> tuple[list[int], list[int]]: ...
@overload
def last_wins(src_blocks: Table, dst_blocks: Table) -> tuple[Table, Table]: ...
def last_wins(src_blocks: Table, dst_blocks: Table) -> tuple[Table, Table]:
    """Drop the pairs whose destination comes again later: the last one counts.

    Tables of unequal length come back as they are.
    """
    if len(src_blocks) != len(dst_blocks) or _are_distinct(dst_blocks):
        return src_blocks, dst_blocks
    source_of = dict(zip(_listed(dst_blocks), _listed(src_blocks), strict=True))
    return list(source_of.values()), list(source_of)


def _are_distinct(blocks: Table) -> bool:
    if isinstance(blocks, list) or (end := int(blocks.max()) + 1) > 64 * len(blocks):
        return len(set(_listed(blocks))) == len(blocks)
    seen = np.zeros(end, np.bool_)
    seen[blocks] = True
    return int(np.count_nonzero(seen)) == len(blocks)


def _listed(blocks: Table) -> list[int]:
    return blocks if isinstance(blocks, list) else blocks.tolist()


def copies_of(copy_block_info: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return the copies as `each_once` does.

    Raises:
        TypeError: an index that is no uint64.
    """
    return each_once(
        (_index("copy_block_info", src), _index("copy_block_info", dst))
        for src, targets in copy_block_info.items()
        for dst in targets
    )


def each_once(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Return {src: [dst, ...]} for copies inside one cache; of a destination the last one counts.

    A copy of a block to itself changes nothing, so it does not count where there is another.
    """
    source_of: dict[int, int] = {}
    for src, dst in pairs:
        if src != dst or dst not in source_of:
            source_of[dst] = src
    copies: dict[int, list[int]] = {}
    for dst, src in source_of.items():
        copies.setdefault(src, []).append(dst)
    return copies


def _index(name: str, value: int, refusal: type[Exception] = TypeError) -> int:
    if not 0 <= value <= UINT64_MAX:
        raise refusal(f"{name} holds {shown(value)}; a block index is in [0, 2**64)")
    return int(value)
