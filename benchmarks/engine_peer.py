"""Peer engines in another process: each listens and holds a cache until stdin ends."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import numpy as np

from kvplan import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType, LlmDataDist, LlmRole

LAYERS, BLOCKS, BLOCK = 64, 96, 32 << 10
PAGED = CacheDesc(2 * LAYERS, (BLOCKS, BLOCK), DataType.DT_UINT8)
SMALL = CacheDesc(1, (1, 4096), DataType.DT_UINT8)
MODEL_LAYERS, MODEL_BLOCKS, MODEL_BLOCK_SIZE = 30, 256, 16
MODEL = CacheDesc(2 * MODEL_LAYERS, (MODEL_BLOCKS, MODEL_BLOCK_SIZE, 3, 64), DataType.DT_FLOAT16)
"""Keys and values of the demo's model."""
LEASED = CacheDesc(1, (8, 4096), DataType.DT_UINT8)
LEASES = 64  # more than any side caches: each pull uses another one
RAGGED = CacheDesc(32, (128, 16, 2, 64), DataType.DT_FLOAT16, kv_tensor_format="NHD")
RAGGED_BLOCKS = 64  # of one request, the last block not full
LISTEN = {"llm.ListenIpInfo": "127.0.0.1:0"}


def paged_key(cluster_id: int) -> BlocksCacheKey:
    """Return the key of a peer's paged cache."""
    return BlocksCacheKey(cluster_id)


def model_key(cluster_id: int) -> BlocksCacheKey:
    """Return the key of the model's cache at a peer with paged caches."""
    return BlocksCacheKey(cluster_id, model_id=1)


def leased_key(cluster_id: int) -> BlocksCacheKey:
    """Return the key of the cache whose blocks a peer with paged caches leases."""
    return BlocksCacheKey(cluster_id, model_id=2)


def small_key(cluster_id: int) -> CacheKeyByIdAndIndex:
    """Return the key of the small cache that every peer has."""
    return CacheKeyByIdAndIndex(cluster_id, 1)


def serve(first_cluster_id: int, engines: int, with_paged: bool, transport: str) -> None:
    """Print the addresses of `engines` engines, one a line; the first may have paged caches too.

    Its address is followed by its leases, in hexadecimal: those of a block, and one of a request.
    """
    with ExitStack() as opened:
        for cluster_id in range(first_cluster_id, first_cluster_id + engines):
            datadist = opened.enter_context(LlmDataDist(cluster_id, LlmRole.PROMPT))
            datadist.initialize({**LISTEN, "kvplan.transport": transport})
            small = datadist.allocate_cache(SMALL)
            datadist.arrays(small)[0][:] = cluster_id % 256
            leases = []
            if with_paged and cluster_id == first_cluster_id:
                paged = datadist.allocate_blocks_cache(PAGED, paged_key(cluster_id))
                for number, tensor in enumerate(datadist.arrays(paged)):
                    tensor[:] = number
                model = datadist.allocate_blocks_cache(MODEL, model_key(cluster_id))
                for tensor in datadist.arrays(model):
                    tensor[:] = 0
                leased = datadist.allocate_blocks_cache(LEASED, leased_key(cluster_id))
                datadist.arrays(leased)[0][5] = 5
                leases = [datadist.lease_blocks(leased, [5]) for _ in range(LEASES)]
                ragged = datadist.allocate_blocks_cache(RAGGED)
                for tensor in datadist.arrays(ragged):
                    tensor[:] = 0
                table = np.random.default_rng(4).permutation(RAGGED.batch_size)[:RAGGED_BLOCKS]
                tokens = RAGGED_BLOCKS * RAGGED.shape[1] - 5
                leases.append(datadist.lease_blocks(ragged, table.tolist(), tokens=tokens))
            blobs = (lease.to_bytes().hex() for lease in leases)
            print(cluster_id, datadist.listen_address, *blobs, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    first, count, paged = map(int, sys.argv[1:4])
    serve(first, count, bool(paged), sys.argv[4])
