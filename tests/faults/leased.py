"""Blocks that a peer has leased, and calls that move them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from kvplan import BlockLease, Cache, CacheDesc, DataType, LlmDataDist, LLMStatusCode
from tests.faults.contents import DESC, Tensor, own, pattern
from tests.faults.peer import Peer
from tests.faults.transfers import LONG_MS

NOT_EXIST: Final = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
RELEASED: Final = "lease 1 of cmpl-3 was released"
THEIRS, MINE = [2, 0], [1, 3]


def lease_at(peer: Peer, memory: str = "allocated", ttl_ms: float | None = None) -> BlockLease:
    """Return a lease of blocks THEIRS of a new cache of the peer.

    Its content, `arrays`, is pattern 1.
    """
    blob = peer.run(
        """
        if memory == "registered":
            arrays, given = own(1, pattern(1))
            cache = datadist.register_blocks_cache(DESC, given)
        else:
            cache = datadist.allocate_blocks_cache(DESC)
            arrays = datadist.arrays(cache)
            for array, tensor in zip(arrays, pattern(1)):
                array[:] = tensor
        lease = datadist.lease_blocks(cache, blocks, tag="cmpl-3", ttl_ms=ttl_ms)
        result = lease.to_bytes()
        """,
        memory=memory,
        blocks=THEIRS,
        ttl_ms=ttl_ms,
    )
    return BlockLease.from_bytes(blob)


LARGE: Final = CacheDesc(4, (4, 1 << 20), DataType.DT_UINT8)
"""16 MiB, which move in about 2 ms, in 32 pieces or more."""
PUSH: Final = """
from threading import Thread
desc = CacheDesc(4, (4, 1 << 20), DataType.DT_UINT8)
source = datadist.allocate_blocks_cache(desc)
for it in datadist.arrays(source):
    it[:] = 1
datadist.link_clusters([ClusterInfo(8, address)], 10_000).raise_for_status()

def push(lease):
    try:
        while True:
            datadist.push_blocks(source, lease, range(4), timeout_ms=60_000)
    except LLMException as error:
        why.append(error.status_code.name)
"""
"""Code that defines a peer's `push`, which repeats until a push fails;

`BEGIN` runs it in a thread.
"""
BEGIN: Final = """
lease, why = BlockLease.from_bytes(blob), []
thread = Thread(target=push, args=(lease,), daemon=True)
thread.start()
"""


def pushed_into(owner: LlmDataDist, machine: str, memory: str) -> tuple[list[Tensor], Cache]:
    """Return a cache of LARGE, all zero, and its arrays, which must live while it is registered."""
    if memory == "registered":
        empty = [np.zeros(LARGE.shape, np.uint8) for _ in range(LARGE.num_tensors)]
        arrays, memory_to_register = own(machine, 8, empty)
        return arrays, owner.register_blocks_cache(LARGE, memory_to_register)
    cache = owner.allocate_blocks_cache(LARGE)
    return owner.arrays(cache), cache


def make_local_cache(user: LlmDataDist, seed: int | None = None) -> tuple[Cache, list[Tensor]]:
    cache = user.allocate_blocks_cache(DESC)
    arrays = user.arrays(cache)
    for array, tensor in zip(arrays, pattern(seed or 0), strict=True):
        array[:] = 0 if seed is None else tensor
    return cache, arrays


def mover(user: LlmDataDist, direction: str, lease: BlockLease, cache: Cache) -> Callable[[], None]:
    if direction == "pull":
        return lambda: user.pull_blocks(lease, cache, None, MINE, timeout_ms=LONG_MS)
    return lambda: user.push_blocks(cache, lease, MINE, timeout_ms=LONG_MS)


def their_arrays(peer: Peer) -> list[list[list[int]]]:
    return list(peer.run("result = [it.tolist() for it in arrays]"))
