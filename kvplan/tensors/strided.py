"""Strided descriptors, as NIXL lists them, as caches or as ranges of addresses.

A descriptor is a run of `count` pieces of `length` bytes, whose starts lie `stride` bytes apart:
the rows of a tensor with `CacheDesc.row_stride`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvplan.status import invalid
from kvplan.types import CacheDesc, DataType, Placement
from kvplan.validation import INT64_MAX, shown

_Numbers = NDArray[np.uint64]


class StridedCache(NamedTuple):
    """A cache of descriptors of equal length, stride, count and device.

    Attributes:
        desc: the description: each descriptor is a tensor, each piece a block.
        addresses: the address of each tensor.
        descriptors: the place of each tensor in the list.
        device: the number of the device.
    """

    desc: CacheDesc
    addresses: list[int]
    descriptors: list[int]
    device: int


def strided_caches(
    descriptors: ArrayLike, *, placement: Placement = Placement.HOST
) -> list[StridedCache]:
    """Return the caches whose blocks are the pieces of strided descriptors.

    Args:
        descriptors: rows of (address, length, device, stride, count).
        placement: the kind of memory of the descriptors.

    Raises:
        TypeError: rows that are not integers; a number of 2**63 or more in a list.
        ValueError: rows of unequal length.
        LLMException: LLM_PARAM_INVALID: rows that do not have 5 numbers, an address, length or
            count below 1, a device below 0, overlapping pieces, or an end of 2**63 or more.
    """
    rows = _checked(descriptors)
    kinds, kind_of = np.unique(rows[:, 1:], axis=0, return_inverse=True)
    caches = []
    for number, (length, device, stride, count) in enumerate(kinds.tolist()):
        places = np.flatnonzero(kind_of.ravel() == number)
        desc = CacheDesc(
            len(places), (count, length), DataType.DT_UINT8, placement, row_stride=stride
        )
        caches.append(StridedCache(desc, rows[places, 0].tolist(), places.tolist(), device))
    return caches


def strided_ranges(descriptors: ArrayLike) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return the address, length and device of each piece of strided descriptors, as columns.

    `AddressRanges` takes such columns for both sides.

    Args:
        descriptors: rows of (address, length, device, stride, count).

    Raises:
        TypeError, ValueError, LLMException: see `strided_caches`.
    """
    pieces = pieces_of(_checked(descriptors))
    return pieces[:, 0].copy(), pieces[:, 1].copy(), pieces[:, 2].copy()


def pieces_of(rows: _Numbers) -> _Numbers:
    """Return a row (address, length, device) for each piece; rows of 3 numbers already are pieces.

    Rows of 5 numbers, with stride and count, are not checked.
    """
    if rows.shape[1] == 3:
        return rows
    counts = rows[:, 4].astype(np.int64)
    pieces = np.repeat(rows, counts, axis=0)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    inside = (np.arange(len(pieces)) - first).astype(np.uint64)
    pieces[:, 0] += inside * pieces[:, 3]
    return pieces[:, :3].copy()


def _checked(descriptors: ArrayLike) -> _Numbers:
    given = np.asarray(descriptors)
    if (dtype := given.dtype).kind not in "iu" and given.size:  # float64: a list with 2**63
        raise TypeError(f"descriptors={shown(descriptors)} must hold int below 2**63, not {dtype}")
    if given.size == 0:
        return np.zeros((0, 5), np.uint64)
    if given.ndim != 2 or given.shape[1] != 5:
        raise invalid(
            f"descriptors has shape {given.shape}; rows of (address, length, device, stride, "
            "count) are needed"
        )
    for number, row in enumerate(given.tolist()):
        address, length, device, stride, count = row
        if min(address, length, count) < 1 or device < 0:
            raise invalid(
                f"descriptors[{number}]={row}: address, length and count must be > 0, device >= 0"
            )
        if stride < length and count > 1:
            raise invalid(
                f"descriptors[{number}]={row}: stride={stride} is out of range "
                f"[length={length}, 2**63), as pieces would overlap"
            )
        if address + max(stride, 0) * (count - 1) + length > INT64_MAX:
            raise invalid(f"descriptors[{number}]={row} ends beyond 2**63")
    rows = given.astype(np.uint64)
    single = rows[:, 4] == 1
    rows[single, 3] = rows[single, 1]  # the stride of a single piece has no meaning
    return rows
