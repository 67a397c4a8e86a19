"""The caches that a peer offers to tests of transfers: one of slots and one of blocks."""

from __future__ import annotations

from kvplan import CacheDesc, DataType

SLOTS = CacheDesc(4, (4, 64), DataType.DT_INT32)  # 2 layers, 4 slots of 256 bytes
BLOCKS = CacheDesc(4, (8, 16), DataType.DT_INT32)  # 2 layers, 8 blocks of 64 bytes
# The peer's tensor t holds t * 10000, t * 10000 + 1, ...
OFFER = """
slots, blocks = (CacheDesc(4, shape, DataType.DT_INT32) for shape in ((4, 64), (8, 16)))
cache = datadist.allocate_cache(slots, [CacheKey(0, 70 + row) for row in range(4)])
paged = datadist.allocate_blocks_cache(blocks, BlocksCacheKey(0, 5))
for held in (cache, paged):
    for number, array in enumerate(datadist.arrays(held)):
        array[:] = np.arange(array.size).reshape(array.shape) + 10000 * number
"""
CACHE, PAGED = 1, 2  # the ids there
