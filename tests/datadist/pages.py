"""Pages that layers of different width share, as in hybrid allocators of serving engines.

A page holds three layers of attention, two of latents, and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import BlocksCacheKey, Cache, CacheDesc, LlmDataDist

Pages = NDArray[np.uint16]
COUNT = 8
TOKENS = 4
_GROUPS = ((3, (2, 8), "block token head dim"), (2, (5,), "block token dim"))


def pages_of(seed: int) -> Pages:
    elements = sum(count * TOKENS * int(np.prod(row)) for count, row, _ in _GROUPS) + 3
    return np.random.default_rng(seed).integers(0, 2**16, (COUNT, elements), np.uint16)


def views(pages: Pages) -> list[list[Any]]:
    """Return, for each group, a view of (block, token, ...) for each layer."""
    groups, first = [], 0
    for count, row, _ in _GROUPS:
        size = TOKENS * int(np.prod(row))
        ends = range(first, first + count * size, size)
        groups.append([pages[:, at : at + size].reshape(COUNT, TOKENS, *row) for at in ends])
        first += count * size
    return groups


def register(datadist: LlmDataDist, pages: Pages, cluster_id: int = 0) -> list[Cache]:
    """Register both groups. With a cluster id each has a key, whose model id is the group."""
    return [
        datadist.register_blocks_cache(
            CacheDesc.from_tensors(tensors, layout),
            tensors,
            BlocksCacheKey(cluster_id, number) if cluster_id else None,
        )
        for number, (tensors, (*_, layout)) in enumerate(zip(views(pages), _GROUPS, strict=True))
    ]


def moved(
    source: Pages, target: Pages, src: Sequence[int], dst: Sequence[int], num_tokens: int
) -> Pages:
    """Return the target's expected content after a transfer, copied token by token."""
    result = target.copy()
    for here, there in zip(views(source), views(result), strict=True):
        for read, written in zip(here, there, strict=True):
            assert np.shares_memory(written, result)
            for token in range(num_tokens):
                at = divmod(token, TOKENS)
                written[dst[at[0]], at[1]] = read[src[at[0]], at[1]]
    return result
