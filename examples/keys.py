"""Keys: slots that are pulled by the request or prefix whose KV they hold, not by their index.

Prefill names slot 0 by a request, leaves slot 1 unnamed (a padding key), and names slot 2 by a
prefix that many requests share. It then frees the cache, which lives on by its keys. A request's
key is consumed by the pull that has brought all of it: the second pull finds nothing. A prefix's
key stays until it is removed. With the last key the memory goes back to the pool.
"""

import sys
from multiprocessing.connection import Connection

import numpy as np

from examples.harness import check, explain_yourself, numbered, peer, until_closed
from kvplan import (
    CacheDesc,
    CacheKey,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Options,
    PoolConfig,
)

PREFILL, DECODE = 1, 2
SLOTS = CacheDesc(num_tensors=4, shape=(3, 32, 2, 16), data_type=DataType.DT_FLOAT16)
REQUEST = CacheKey(PREFILL, req_id=4711)
NOBODY = CacheKey(PREFILL)  # neither request nor prefix
PREFIX = CacheKey(PREFILL, prefix_id=7)


def prefill(pipe: Connection) -> None:
    """Offer slots by their keys only; then free everything."""
    room_for_one = PoolConfig(memory_size=SLOTS.nbytes, page_shift=12)
    options = Options(listen_ip_info="127.0.0.1:0", mem_pool_config=room_for_one)
    with LlmDataDist(PREFILL, LlmRole.PROMPT) as datadist:
        datadist.initialize(options)
        slots = datadist.allocate_cache(SLOTS, [REQUEST, NOBODY, PREFIX])
        datadist.write_cache(slots, numbered(SLOTS))
        datadist.deallocate_cache(slots)
        pipe.send(datadist.listen_address)
        pipe.recv()
        datadist.remove_cache_key(PREFIX)
        pipe.send(datadist.allocate_cache(SLOTS).cache_id)  # in the same memory
        until_closed(pipe)


def expect_none(datadist: LlmDataDist, key: CacheKey) -> None:
    """Pull by a key that is gone."""
    slots = datadist.allocate_cache(SLOTS)
    try:
        datadist.pull_cache(key, slots)
    except LLMException as error:
        if error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            raise
        print(f"once more: {error}")
    else:
        sys.exit(f"FAILED: {key} can still be pulled by")


def main() -> None:
    """Decode."""
    explain_yourself(__doc__)
    with peer(prefill) as pipe, LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize(Options(device_id=1))
        datadist.link_clusters([ClusterInfo(PREFILL, pipe.recv())]).raise_for_status()
        slots = datadist.allocate_cache(SLOTS)

        datadist.pull_cache(REQUEST, slots, batch_index=0)
        arrived = np.stack(datadist.read_cache(slots))[:, :1]
        check("the request's slot", arrived, numbered(SLOTS)[:, :1])
        expect_none(datadist, REQUEST)

        for slot in (1, 2):
            datadist.pull_cache(PREFIX, slots, batch_index=slot)
        arrived = np.stack(datadist.read_cache(slots))[:, 1:]
        check("the prefix's slot, twice", arrived, numbered(SLOTS)[:, [2, 2]])

        pipe.send("remove the prefix")
        print(f"prefill has room again: its cache {pipe.recv()} is where the first one was")
        expect_none(datadist, PREFIX)


if __name__ == "__main__":
    main()
