"""Cache descriptions of the tests."""

from __future__ import annotations

from typing import Any

from kvplan.llm_datadist import CacheDesc, DataType, Placement

HOST = Placement.HOST
DEVICE = Placement.DEVICE


def desc(num_tensors: int = 4, rows: int = 4, nbytes: int = 32, **more: Any) -> CacheDesc:
    """Return a description of `rows` slots or blocks of `nbytes` bytes."""
    return CacheDesc(num_tensors, [rows, nbytes], DataType.DT_UINT8, **more)
