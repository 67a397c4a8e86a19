"""Contents of caches, reached by their addresses, as clients of the official package do."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = list[NDArray[np.uint8]]


def views(cache: Any) -> Arrays:
    """Return the bytes of each tensor of a Cache, of shape (rows, bytes of a row)."""
    desc = cache.cache_desc
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * desc.size).from_address(address)).reshape(
            desc.shape[0], -1
        )
        for address in cache.tensor_addrs
    ]


def pattern(seed: int, tensor: int, rows: int, nbytes: int) -> NDArray[np.uint8]:
    """Return bytes of one tensor, of shape (rows, nbytes), different for each row and tensor."""
    generator = np.random.default_rng([seed, tensor])
    return generator.integers(1, 256, (rows, nbytes), dtype=np.uint8)


def fill(cache: Any, seed: int) -> Arrays:
    """Give each tensor its pattern; return its views."""
    arrays = views(cache)
    for tensor, array in enumerate(arrays):
        array[:] = pattern(seed, tensor, *array.shape)
    return arrays


def clear(cache: Any) -> Arrays:
    """Zero each tensor; return its views."""
    arrays = views(cache)
    for array in arrays:
        array[:] = 0
    return arrays
