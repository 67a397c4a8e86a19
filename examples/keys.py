"""Keys: slots that are pulled by the request or prefix whose KV they hold, not by their index.

Prefill names slot 0 by a request, leaves slot 1 unnamed (a padding key), and names slot 2 by a
prefix that many requests share. It then frees the cache, which lives on by its keys. A request's
key is consumed by the pull that has brought all of it: the second pull finds nothing. A prefix's
key stays until it is removed. With the last key the memory goes back to the pool.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

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
PADDING = CacheKey(PREFILL)  # neither request nor prefix
PREFIX = CacheKey(PREFILL, prefix_id=7)


def prefill(pipe: Connection) -> None:
    """Offer slots by their keys only; then free everything."""
    room_for_one = PoolConfig(memory_size=SLOTS.nbytes, page_shift=12)
    options = Options(listen_ip_info="127.0.0.1:0", mem_pool_config=room_for_one)
    with LlmDataDist(PREFILL, LlmRole.PROMPT) as datadist:
        datadist.initialize(options)
        slots = datadist.allocate_cache(SLOTS, [REQUEST, PADDING, PREFIX])
        datadist.write_cache(slots, numbered(SLOTS))
        datadist.deallocate_cache(slots)
        pipe.send(datadist.listen_address)
        pipe.recv()  # decode has pulled
        datadist.remove_cache_key(PREFIX)
        pipe.send(datadist.allocate_cache(SLOTS).cache_id)  # in the same memory
        pipe.recv()


def decode(pipe: Connection) -> None:
    """Pull by both keys, and by those that are gone."""
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize(Options(device_id=1))
        datadist.link_clusters([ClusterInfo(PREFILL, pipe.recv())]).raise_for_status()
        slots = datadist.allocate_cache(SLOTS)

        datadist.pull_cache(REQUEST, slots, dst_batch_index=0)
        expected = np.zeros_like(numbered(SLOTS))
        expected[:, 0] = numbered(SLOTS)[:, 0]
        check("the request's slot", datadist.arrays(slots, copy=True), expected)
        expect_none(datadist, REQUEST)

        for slot in (1, 2):
            datadist.pull_cache(PREFIX, slots, dst_batch_index=slot)
            expected[:, slot] = numbered(SLOTS)[:, 2]
        check("and the prefix's slot, twice", datadist.arrays(slots, copy=True), expected)

        pipe.send("remove the prefix")
        print(f"prefill has room again: its cache {pipe.recv()} is where the first one was")
        expect_none(datadist, PREFIX)
        pipe.send("done")


def expect_none(datadist: LlmDataDist, key: CacheKey) -> None:
    """Pull by a key that is gone."""
    slots = datadist.allocate_cache(SLOTS)
    try:
        datadist.pull_cache(key, slots)
    except LLMException as error:
        if error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            raise
        print(f"again: {error}")
    else:
        sys.exit(f"FAILED: {key} can still be pulled by")


def numbered(desc: CacheDesc) -> NDArray[np.float16]:
    """Return all tensors of a cache; each row holds its own number, 100 * tensor + row."""
    rows = 100 * np.arange(desc.num_tensors)[:, None] + np.arange(desc.batch_size)
    return np.full((desc.num_tensors, *desc.shape), rows[:, :, None, None, None], np.float16)


def check(what: str, arrived: Sequence[NDArray[np.float16]], sent: NDArray[np.float16]) -> None:
    """Print the rows of each tensor, or end the program: they are not what was sent."""
    print(f"{what}:")
    for tensor, rows in enumerate(arrived):
        print(f"  tensor {tensor}:", *rows[:, 0, 0, 0].astype(int))
        if not np.array_equal(rows, sent[tensor]):
            sys.exit(f"FAILED: tensor {tensor} should hold {sent[tensor, :, 0, 0, 0]}")


def main() -> None:
    """Prefill in a new process, decode in this one."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # if that process ends early, we read the end of file
    decode(ours)
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
