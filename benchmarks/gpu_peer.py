"""An engine with a cache on the first GPU, in another process, until stdin ends."""

from __future__ import annotations

import faulthandler
import signal
import sys

from kvplan import BlocksCacheKey, CacheDesc, DataType, LlmDataDist, LlmRole, Placement

CLUSTER = 1
KEY = BlocksCacheKey(CLUSTER)
"""The key of the peer's cache."""


def cache_of(tensors: int, blocks: int, block: int) -> CacheDesc:
    """Return the description of a paged cache with blocks of `block` bytes."""
    return CacheDesc(tensors, (blocks, block), DataType.DT_UINT8, Placement.DEVICE)


def serve(tensors: int, blocks: int, block: int, transport: str) -> None:
    """Print the address, and serve. The cache holds zeros: peers push before they pull."""
    options = {
        "llm.ListenIpInfo": "127.0.0.1:0",
        "kvplan.accelerator": "cuda",
        "kvplan.transport": transport,
    }
    with LlmDataDist(CLUSTER, LlmRole.MIX) as datadist:
        datadist.initialize(options)
        datadist.allocate_blocks_cache(cache_of(tensors, blocks, block), KEY)
        print(datadist.listen_address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # tools/try_cuda.py asks where it hangs
    tensors, blocks, block = map(int, sys.argv[1:4])
    serve(tensors, blocks, block, sys.argv[4])
