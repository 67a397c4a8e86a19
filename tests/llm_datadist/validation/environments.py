"""Environments of the cases: a fresh engine, a shared one, and a linked one.

A process has one official engine, so only one environment exists at a time: a request for another
one finalizes it. Consecutive rows share an engine, and the caches of each row are freed after it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvplan.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from tests.datadist.peer import Peer
from tests.llm_datadist.validation.row import TYPE, observe

CLUSTER = 2
POOL = json.dumps({"memory_size": 1 << 20, "page_shift": 12})
CACHE_MANAGER = {"llm.EnableCacheManager": "1"}
REMOTE = {**CACHE_MANAGER, "llm.EnableRemoteCacheAccessible": "1"}
POOLS = {"llm.MemPoolConfig": POOL, "llm.HostMemPoolConfig": POOL}
SHAPE = [2, 8]
INT8, HOST, DEVICE = DataType.DT_INT8, Placement.HOST, Placement.DEVICE


class Ready(LayerSynchronizer):
    """A synchronizer for which every layer is ready at once."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class Fresh:
    """An LLMDataDist (`datadist`) that is not initialized yet."""

    def __init__(self) -> None:
        self.datadist = LLMDataDist(LLMRole.PROMPT, CLUSTER)

    def close(self) -> None:
        self.datadist.finalize()

    def init(self, options: dict[str, str]) -> list[str]:
        """Initialize the LLMDataDist, and return the modes that its calls show."""
        self.datadist.init(options)
        manager = self.datadist.cache_manager
        no_key = observe(lambda: manager.push_cache("no key", None))  # type: ignore[arg-type]
        return ["cache manager", *(["remote"] if no_key == TYPE else [])]


class Engine(Fresh):
    """An initialized engine in remote mode, with both pools and no link."""

    def __init__(self) -> None:
        super().__init__()
        self.init({**REMOTE, **POOLS})
        self.manager = self.datadist.cache_manager
        self.row = ExitStack()
        self.memory: list[npt.NDArray[np.int8]] = []

    @staticmethod
    def desc(
        num_tensors: int = 2,
        shape: Sequence[int] = SHAPE,
        placement: Placement = DEVICE,
    ) -> CacheDesc:
        return CacheDesc(num_tensors, list(shape), INT8, placement)

    def cache(self, num_tensors: int = 2, keys: Sequence[CacheKey] = ()) -> Cache:
        """Return a contiguous cache of 2 slots of 8 bytes, freed after the row with its keys."""
        cache = self.manager.allocate_cache(self.desc(num_tensors), list(keys))
        self.row.callback(self.manager.deallocate_cache, cache)
        for key in keys:
            self.row.callback(self.manager.remove_cache_key, key)
        return cache

    def blocks(self, key: BlocksCacheKey | None = None, placement: Placement = DEVICE) -> Cache:
        """Return a paged cache of 2 blocks with 8 bytes each, freed after the row."""
        cache = self.manager.allocate_blocks_cache(self.desc(placement=placement), key)
        self.row.callback(self.manager.deallocate_blocks_cache, cache)
        return cache

    def cpu_blocks(self, num_tensors: int = 2, shape: Sequence[int] = SHAPE) -> Cache:
        """Return a cache of the caller's own memory, as swaps take it."""
        return Cache.create_cpu_cache(
            self.desc(num_tensors, shape, HOST), self.addresses(num_tensors)
        )

    def addresses(self, count: int = 2) -> list[int]:
        """Return addresses of memory for tensors of SHAPE, held until the environment is closed."""
        tensors = [np.zeros(SHAPE, np.int8) for _ in range(count)]
        self.memory += tensors
        return [tensor.ctypes.data for tensor in tensors]

    def register_blocks(self, addresses: list[int], key: BlocksCacheKey | None = None) -> Cache:
        cache = self.manager.register_blocks_cache(self.desc(), addresses, key)
        self.row.callback(self.manager.unregister_cache, cache.cache_id)
        return cache

    def contents(self, cache: Cache) -> list[npt.NDArray[np.int8]]:
        """Return the memory of each tensor, as an array of SHAPE."""
        nbytes = int(np.prod(SHAPE))
        return [
            np.frombuffer((ctypes.c_int8 * nbytes).from_address(address), np.int8).reshape(SHAPE)
            for address in cache.tensor_addrs
        ]

    def after_row(self) -> None:
        self.row.close()

    def close(self) -> None:
        self.after_row()
        super().close()


class Linked(Engine):
    """The shared engine, linked with cluster 1: `peer`, an engine in another process."""

    def __init__(self) -> None:
        super().__init__()
        self.peer = Peer()
        self.clusters = [cluster(Peer.cluster_id, self.peer.address)]
        code, _ = self.datadist.link_clusters(self.clusters)
        assert code == LLMStatusCode.LLM_SUCCESS

    def close(self) -> None:
        self.datadist.unlink_clusters(self.clusters)
        super().close()
        self.peer.close()


def cluster(cluster_id: int, address: str) -> LLMClusterInfo:
    """Return the info of a cluster at "ip:port", with the required local address."""
    ip, port = address.split(":")
    given = LLMClusterInfo()
    given.remote_cluster_id = cluster_id
    given.append_local_ip_info("127.0.0.1", 0)
    given.append_remote_ip_info(ip, int(port))
    return given


KINDS: dict[str, Callable[[], Fresh]] = {"fresh": Fresh, "engine": Engine, "linked": Linked}


class Environments:
    """A maker of environments, which keeps at most one at a time."""

    def __init__(self) -> None:
        self._name = ""
        self._current: Fresh | None = None

    def get(self, name: str) -> Fresh:
        """Return the environment called `name`: a new one if it is "fresh" or not current."""
        if self._current is None or name != self._name or name == "fresh":
            self.close()
            self._name, self._current = name, KINDS[name]()
        return self._current

    def after_row(self) -> None:
        if isinstance(self._current, Engine):
            self._current.after_row()

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
        self._current = None
