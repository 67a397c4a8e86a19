"""Pull: decode fetches the KV cache of a prompt from prefill, whose Python takes no part in it.

Three pulls between two processes, each by one call, for all layers at once: blocks into blocks, a
slot into a slot, and a slot, cut up, into blocks. The first one is planned and printed before.
"""

from multiprocessing.connection import Connection

import numpy as np

from examples.harness import check, explain_yourself, numbered, peer, until_closed
from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
)

PREFILL, DECODE = 1, 2  # cluster ids: any numbers, but no two engines have the same

# Two layers, K and V of each. A block is 8 tokens; a slot is a whole request of 32.
PAGED = CacheDesc(num_tensors=4, shape=(16, 8, 2, 16), data_type=DataType.DT_FLOAT16)
SLOTS = CacheDesc(num_tensors=4, shape=(3, 32, 2, 16), data_type=DataType.DT_FLOAT16)


def prefill(pipe: Connection) -> None:
    """Have a paged cache and a contiguous one, and listen."""
    with LlmDataDist(PREFILL, LlmRole.PROMPT) as datadist:
        # Port 0: one that is free. The device matters where there is one.
        datadist.initialize({"llm.ListenIpInfo": "127.0.0.1:0", "llm.DeviceId": "0"})
        paged = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(PREFILL))
        slots = datadist.allocate_cache(SLOTS)
        for cache in (paged, slots):
            datadist.write_cache(cache, numbered(cache.cache_desc))  # as a model that computes
        pipe.send((datadist.listen_address, slots.cache_id))
        until_closed(pipe)


def main() -> None:
    """Decode."""
    explain_yourself(__doc__)
    with peer(prefill) as pipe, LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        address, slots_id = pipe.recv()
        datadist.initialize({"llm.DeviceId": "1"})
        datadist.link_clusters([ClusterInfo(PREFILL, address)]).raise_for_status()

        paged = datadist.allocate_blocks_cache(PAGED)
        theirs, mine = [4, 5, 9], [7, 8, 2]
        key = BlocksCacheKey(PREFILL)
        print(datadist.plan_pull_blocks(key, paged, theirs, mine).explain(), end="\n\n")
        datadist.pull_blocks(key, paged, theirs, mine)
        expected = np.zeros_like(numbered(PAGED))
        expected[:, mine] = numbered(PAGED)[:, theirs]
        check(f"blocks {theirs} of prefill, in blocks {mine}", datadist.read_cache(paged), expected)

        slots = datadist.allocate_cache(SLOTS)
        datadist.pull_cache(CacheIndex(PREFILL, slots_id, batch_index=2), slots, batch_index=0)
        arrived = np.stack(datadist.read_cache(slots))[:, :1]
        check("slot 2 of prefill, in slot 0", arrived, numbered(SLOTS)[:, 2:])

        # No source blocks: the source is a slot. Its 32 tokens are four blocks of 8.
        mine = [15, 0, 13, 3]
        datadist.pull_blocks(CacheIndex(PREFILL, slots_id, 1), paged, None, mine)
        arrived = np.stack(datadist.read_cache(paged))[:, mine].reshape(4, 1, 32, 2, 16)
        check(f"slot 1 of prefill, in blocks {mine}", arrived, numbered(SLOTS)[:, 1:2])


if __name__ == "__main__":
    main()
