"""Sides of whole rows with their memory, and the types that a block table may have."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvnative._lower import Descriptors
from kvplan import CacheDesc, DataType, HostMemory
from kvplan.planning.side import Side, side

ROW = 8


def cache(rows: int, tensors: int = 2, *, paged: bool = True, **changes: Any) -> tuple[Side, Any]:
    """Return a side of a plan, and its memory."""
    desc = CacheDesc(tensors, (rows, ROW), DataType.DT_INT8, **changes)
    arrays = [np.arange(rows * ROW, dtype=np.int8).reshape(rows, ROW) for _ in range(tensors)]
    return side("it", desc, paged=paged), HostMemory.from_arrays(arrays)


def columns(descriptors: Descriptors) -> list[list[int]]:
    return [getattr(descriptors, name).tolist() for name in ("src", "dst", "nbytes")]


def unaligned(table: list[int]) -> NDArray[np.int64]:
    held = np.zeros(8 * len(table) + 1, np.uint8)[1:].view(np.int64)
    held[:] = table
    return held


forms = st.sampled_from(
    [list, tuple, np.array, lambda item: np.array(item, np.int64)[::-1][::-1], unaligned]
)
