"""Copies and comparisons of large arrays of bytes that take no new memory.

New pages cost more than writing to them, and several times as much with a sanitizer, which has a
shadow of each.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
from numpy.typing import NDArray

MAX_SPARE = 6  # arrays that are reused
CHUNK_NBYTES = 1 << 16  # compared at once

_spare: list[NDArray[np.uint8]] = []
_lock = threading.Lock()  # several threads of a test take arrays


def spare_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Return bytes to write, in memory of an earlier test that no array uses any more."""
    with _lock:
        for index in range(len(_spare)):
            if len(_spare[index]) >= nbytes and sys.getrefcount(_spare[index]) == 2:
                return _spare[index][:nbytes]
        _spare.append(np.empty(nbytes, np.uint8))
        del _spare[:-MAX_SPARE]
        return _spare[-1][:]


def copy_of(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a copy of an array of bytes."""
    copied = spare_bytes(len(array))
    copied[:] = array
    return copied


def is_same(found: NDArray[np.uint8], expected: NDArray[np.uint8]) -> bool:
    """Return True if two arrays have the same shape and bytes."""
    if found.shape != expected.shape:
        return False
    differs = np.empty(CHUNK_NBYTES, bool)
    for start in range(0, len(found), CHUNK_NBYTES):
        chunk = found[start : start + CHUNK_NBYTES]
        part = differs[: len(chunk)]
        if np.not_equal(chunk, expected[start : start + CHUNK_NBYTES], out=part).any():
            return False
    return True


def assert_same(found: NDArray[np.uint8], expected: NDArray[np.uint8]) -> None:
    """Compare, and search for the first difference only on failure: that takes 30 times as long."""
    if not is_same(found, expected):
        np.testing.assert_array_equal(found, expected)
