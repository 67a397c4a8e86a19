"""What tests of device caches share: engines on a device, descriptions, contents."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import CacheDesc, DataType, LlmDataDist, LlmRole, Options, Placement, Shard
from tests.ascend.simulator import Controls

ROWS, ROW = 8, 96
NUM_TENSORS = 3


def desc(placement: Placement = Placement.DEVICE, rows: int = ROWS) -> CacheDesc:
    shard = Shard(num_layers=NUM_TENSORS)  # one tensor a layer
    return CacheDesc(NUM_TENSORS, (rows, ROW), DataType.DT_UINT16, placement, shard=shard)


DEVICE, HOST = desc(), desc(Placement.HOST)


def contents(seed: int, of: CacheDesc = DEVICE) -> list[NDArray[Any]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 2**16, of.shape, np.uint16) for _ in range(of.num_tensors)]


def same(found: list[NDArray[Any]], expected: list[NDArray[Any]]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@contextmanager
def engine_on(
    simulator: Controls, device_id: int = 3, cluster_id: int = 2, **options: Any
) -> Iterator[LlmDataDist]:
    """An engine on a device, of which nothing may be left when it is finalized and collected.

    Without other options it uses the device for nothing but caches.
    """
    given = {"transport": "local", "device_id": device_id, **options}
    with LlmDataDist(cluster_id, LlmRole.MIX) as datadist:
        datadist.initialize(Options(accelerator="ascend", **given))
        yield datadist
    del datadist
    gc.collect()
    assert simulator.left() == {}
