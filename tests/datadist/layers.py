"""Helpers for tests of pushes by layers: caches of thirty layers, here and in another process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import Cache, CacheDesc, DataType, LayerTask, LlmDataDist, Shard
from tests.datadist.peer import Peer

NUM_LAYERS = 30
ALL = Shard(num_layers=NUM_LAYERS)  # so a layer is two tensors
SLOTS = CacheDesc(2 * NUM_LAYERS, (4, 64), DataType.DT_INT32, shard=ALL)  # 4 slots of 256 bytes
BLOCKS = CacheDesc(2 * NUM_LAYERS, (8, 16), DataType.DT_INT32, shard=ALL)  # 8 blocks of 64 bytes
SLOTS_THERE, BLOCKS_THERE = 1, 2  # the ids at the peer
DEADLINE_S = 30.0

OFFER = """
slots, blocks = (
    CacheDesc(60, shape, DataType.DT_INT32, shard=Shard(num_layers=30))
    for shape in ((4, 64), (8, 16))
)
cache = datadist.allocate_cache(slots)
paged = datadist.allocate_blocks_cache(blocks, BlocksCacheKey(0, 5))
"""


def fill(user: LlmDataDist, cache: Cache) -> list[NDArray[Any]]:
    """Fill each tensor of a cache with its own values, and return the arrays."""
    arrays = user.arrays(cache)
    for number, array in enumerate(arrays):
        array[:] = np.arange(1, array.size + 1).reshape(array.shape) + 10_000 * number
    return arrays


def there(peer: Peer, name: str) -> NDArray[Any]:
    """Return the tensors of a cache of the peer, which has this name there."""
    code = f"result = [array.tolist() for array in datadist.arrays({name})]"
    return np.array(peer.run(code))


def ready(task: LayerTask, layers: Iterable[int] | None = None) -> None:
    for layer in task.layers if layers is None else layers:
        task.ready(layer)


def wait_until(reached: Callable[[], bool]) -> None:
    """Wait until `reached()` is true, which another thread soon makes."""
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)
