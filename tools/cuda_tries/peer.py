"""The other process of a try: an engine that does what lines of its input say, one answer each.

- `make NAME PLACEMENT SEED`: allocate a cache of that name, full of `random_bytes(SEED)`
- `register NAME SEED`: the same in memory of cuMemAlloc, as a framework has it
- `free NAME`: end it
- `lease NAME BLOCK...`: answer with the lease in hexadecimal
- `release NAME`: the last lease of it
- `check NAME SEED`: whether it holds that
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as the parent does
    from kvplan import LlmDataDist  # the installed one goes before that of the checkout

    sys.path.append(str(Path(__file__).parents[2]))
    sys.path.append(str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.gpu_driver import Driver
from kvplan import BlocksCacheKey, Cache, CacheDesc, DataType, LlmRole, Placement
from tools.cuda_tries.notes import random_bytes
from tools.cuda_tries.process import dump_when_asked

CLUSTER = 1


def key_of(name: str) -> BlocksCacheKey:
    """Return the key of the cache of that name, which is a number."""
    return BlocksCacheKey(CLUSTER, int(name))


class Peer:
    """Its engine, and what it has."""

    def __init__(self, tensors: int, blocks: int, block: int, transport: str) -> None:
        self.tensors, self.shape = tensors, (blocks, block)
        self.datadist = LlmDataDist(CLUSTER, LlmRole.MIX)
        self.datadist.initialize(
            {
                "llm.ListenIpInfo": "127.0.0.1:0",
                "kvplan.accelerator": "cuda",
                "kvplan.transport": transport,
            }
        )
        self.caches: dict[str, tuple[Cache, list[int]]] = {}
        self.leases: dict[str, Any] = {}
        assert self.datadist.device is not None
        self.driver = Driver(self.datadist.device.native.library.path)

    def desc(self, placement: Placement) -> CacheDesc:
        return CacheDesc(self.tensors, self.shape, DataType.DT_UINT8, placement)

    def content(self, seed: str) -> list[Any]:
        return list(random_bytes(int(seed), self.tensors, *self.shape))

    def make(self, name: str, placement: str, seed: str) -> str:
        desc = self.desc(Placement[placement])
        cache = self.datadist.allocate_blocks_cache(desc, key_of(name))
        self.datadist.write_cache(cache, self.content(seed))
        self.caches[name] = cache, []
        return str(cache.tensor_addrs[0])

    def register(self, name: str, seed: str) -> str:
        desc = self.desc(Placement.DEVICE)
        addresses = [self.driver.allocate(desc.tensor_nbytes) for _ in range(self.tensors)]
        for address, array in zip(addresses, self.content(seed), strict=True):
            self.driver.write(address, array)
        cache = self.datadist.register_blocks_cache(desc, addresses, key_of(name))
        self.caches[name] = cache, addresses
        return str(addresses[0])

    def free(self, name: str) -> str:
        cache, addresses = self.caches.pop(name)
        if addresses:
            self.datadist.unregister_cache(cache.cache_id)
            for address in addresses:
                self.driver.free(address)
        else:
            self.datadist.deallocate_cache(cache)
        return "freed"

    def lease(self, name: str, *blocks: str) -> str:
        lease = self.datadist.lease_blocks(self.caches[name][0], [int(block) for block in blocks])
        self.leases[name] = lease
        return lease.to_bytes().hex()

    def release(self, name: str) -> str:
        self.datadist.release(self.leases.pop(name))
        return "released"

    def check(self, name: str, seed: str) -> str:
        found = np.stack(self.datadist.arrays(self.caches[name][0], copy=True))
        return str(np.array_equal(found, np.stack(self.content(seed))))


def main() -> None:
    dump_when_asked()
    tensors, blocks, block = map(int, sys.argv[1:4])
    peer = Peer(tensors, blocks, block, sys.argv[4])
    print(peer.datadist.listen_address, flush=True)
    for line in sys.stdin:
        what, *arguments = line.split()
        print(getattr(peer, what)(*arguments), flush=True)
    peer.datadist.finalize()


if __name__ == "__main__":
    main()
