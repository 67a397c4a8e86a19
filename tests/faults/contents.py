"""Contents of caches in any process, and the usual description of a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import Cache, CacheDesc, DataType, LlmDataDist

DESC = CacheDesc(8, (4, 64), DataType.DT_INT32)
"""A slot is eight descriptors of 256 bytes."""

Tensor = NDArray[np.int32]


def pattern(seed: int, desc: CacheDesc = DESC) -> list[Tensor]:
    """Return tensors whose bytes at one place differ for any two small seeds."""
    return [
        (np.arange(desc.tensor_nbytes // 4, dtype=np.int32) * 16 + tensor * 100_000 + seed).reshape(
            desc.shape
        )
        for tensor in range(desc.num_tensors)
    ]


def own(machine: str, cluster_id: int, arrays: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Return memory of the program with this content, and what registers it (arrays or addresses).

    On a device the arrays are views, and addresses are registered.
    """
    if machine not in ("ascend", "cuda"):
        return arrays, arrays
    from tests.datadist.machine import machine_of

    device = machine_of(machine, cluster_id)
    views = [device.zeros(array.shape, array.dtype) for array in arrays]
    for view, array in zip(views, arrays, strict=True):
        view[:] = array
    return views, device.addresses(views)


def make_cache(
    datadist: LlmDataDist, memory: str, seed: int | None, desc: CacheDesc = DESC
) -> tuple[Cache, list[Tensor]]:
    """Return a cache, "allocated" or "registered", and its arrays.

    Without a seed they are zero, else a pattern.
    """
    given = [np.zeros(desc.shape, np.int32) for _ in range(desc.num_tensors)]
    if seed is not None:
        given = pattern(seed, desc)
    if memory == "registered":
        return datadist.register_cache(desc, given), given
    cache = datadist.allocate_cache(desc)
    arrays = datadist.arrays(cache)
    for array, tensor in zip(arrays, given, strict=True):
        array[:] = tensor
    return cache, arrays
