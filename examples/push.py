"""Push: prefill writes the KV cache of a prompt into decode's memory, whose Python takes no part.

Here decode listens and prefill links, the other way round than in examples.pull: who listens has
nothing to do with the direction of the bytes. Prefill pushes blocks, and then a slot layer by
layer, as if it sent each when it is computed. Decode's engine is not notified when bytes have
arrived: prefill says so, over a channel of its own.
"""

from multiprocessing.connection import Connection

import numpy as np

from examples.harness import check, explain_yourself, numbered, peer
from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
)

PREFILL, DECODE = 1, 2
PAGED = CacheDesc(num_tensors=4, shape=(16, 8, 2, 16), data_type=DataType.DT_FLOAT16)
SLOTS = CacheDesc(num_tensors=4, shape=(3, 32, 2, 16), data_type=DataType.DT_FLOAT16)
MINE, THEIRS = [4, 5, 9], [7, 8, 2]  # blocks, as prefill sees it


def prefill(pipe: Connection, address: str, slots_id: int) -> None:
    """Link to decode, and push."""
    with LlmDataDist(PREFILL, LlmRole.PROMPT) as datadist:
        datadist.initialize({"llm.DeviceId": "0"})
        datadist.link_clusters([ClusterInfo(DECODE, address)]).raise_for_status()
        paged = datadist.allocate_blocks_cache(PAGED)
        slots = datadist.allocate_cache(SLOTS)
        for cache in (paged, slots):
            datadist.write_cache(cache, numbered(cache.cache_desc))

        key = BlocksCacheKey(DECODE)
        pipe.send(datadist.plan_push_blocks(paged, key, MINE, THEIRS).explain())
        datadist.push_blocks(paged, key, MINE, THEIRS)

        slot = CacheIndex(DECODE, slots_id, batch_index=2)
        for layer in range(2):
            this = range(layer, layer + 1)
            only = KvCacheExtParam(src_layer_range=this, dst_layer_range=this)
            datadist.push_cache(slots, slot, src_batch_index=1, ext_param=only)
        pipe.send("pushed")


def main() -> None:
    """Decode."""
    explain_yourself(__doc__)
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize({"llm.ListenIpInfo": "127.0.0.1:0", "llm.DeviceId": "1"})
        paged = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(DECODE))
        slots = datadist.allocate_cache(SLOTS)
        with peer(prefill, datadist.listen_address, slots.cache_id) as pipe:
            print(pipe.recv(), end="\n\n")
            pipe.recv()

        expected = np.zeros_like(numbered(PAGED))
        expected[:, THEIRS] = numbered(PAGED)[:, MINE]
        check(f"blocks {MINE} of prefill, in blocks {THEIRS}", datadist.read_cache(paged), expected)
        arrived = np.stack(datadist.read_cache(slots))[:, 2:]
        check("slot 1 of prefill, in slot 2", arrived, numbered(SLOTS)[:, 1:2])


if __name__ == "__main__":
    main()
