"""Helpers of tests of transfer_cache_async: a model that computes layers, and destinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.llm_datadist.contents import pattern, views
from tests.llm_datadist.peer import Peer

NBYTES = 32  # of a slot and of a block; a block of `small` has 12
ROW = 3  # the row of the destination's slots

OFFER = """
cache = manager.allocate_cache(desc(2 * layers, 4))
paged = manager.allocate_blocks_cache(desc(2 * layers, 8), BlocksCacheKey(99))
small = manager.allocate_blocks_cache(desc(2 * layers, 8, 12), BlocksCacheKey(99, 1))
clear(cache), clear(paged), clear(small)
result = {name: globals()[name].tensor_addrs for name in ("cache", "paged", "small")}
"""


class Destinations:
    """The destination caches of a peer: `cache`, `paged` and `small`.

    Args:
        peer: A peer without caches.
        remote: True in remote mode.
        layers: Number of layers of each cache.
    """

    def __init__(self, peer: Peer, *, remote: bool, layers: int) -> None:
        self.peer = peer
        self._remote = remote
        self._layers = layers
        self._addresses: dict[str, list[int]] = peer.run(OFFER, layers=layers)

    def slot(self, src: range | None = None, dst: range | None = None, row: int = 0) -> Any:
        """Return the config that moves slot `row` of the source to slot ROW of `cache`."""
        key = CacheKeyByIdAndIndex(self.peer.cluster_id, 1, ROW)
        return self._config(key, "cache", ROW * NBYTES, src, dst, row)

    def blocks(
        self,
        src: range | None = None,
        dst: range | None = None,
        row: int = 0,
        *,
        small: bool = False,
    ) -> Any:
        """Return the config that moves a slot to the blocks of `paged`, or of `small`."""
        key = BlocksCacheKey(self.peer.cluster_id, int(small))
        return self._config(key, "small" if small else "paged", 0, src, dst, row)

    def bytes_of(self, cache: str) -> NDArray[np.uint8]:
        """Return the current bytes of a cache, of shape (tensors, rows, bytes of a row)."""
        return self.peer.bytes_of(cache)

    def _config(
        self, key: Any, name: str, offset: int, src: range | None, dst: range | None, row: int
    ) -> Any:
        whole = range(self._layers)
        if self._remote:
            return TransferWithCacheKeyConfig(key, src or whole, dst or src or whole, row)
        layers = dst or src or whole
        addresses = self._addresses[name][2 * layers.start : 2 * layers.stop]
        return TransferConfig(
            self.peer.cluster_id, [item + offset for item in addresses], src, src_batch_index=row
        )


class Computing(LayerSynchronizer):
    """A synchronizer that computes each requested layer of a cache, and returns True.

    Args:
        cache: The cache whose rows are all computed.
        at: Functions by layer, whose result is returned instead of True.
    """

    def __init__(self, cache: Cache, at: dict[int, Callable[[], Any]] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._arrays = views(cache)
        self._at = at or {}

    @property
    def layers(self) -> list[int]:
        """The requested layers, in their order."""
        return [layer for layer, _ in self.calls]

    def synchronize_layer(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        layer, timeout = arguments
        assert timeout is None
        for tensor in (2 * layer, 2 * layer + 1):
            array = self._arrays[tensor]
            array[:] = pattern(7, tensor, *array.shape)
        return self._at[layer]() if layer in self._at else True

    def expected(self, row: int | Sequence[int] = 0) -> NDArray[np.uint8]:
        """Return the current bytes of a row, or of several, of all tensors."""
        return np.stack([array[row] for array in self._arrays])
