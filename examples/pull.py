"""Pull: decode fetches the KV cache of a prompt from prefill, whose Python takes no part in it.

Three pulls between two processes, each by one call, for all layers at once: blocks into blocks, a
slot into a slot, and a slot, cut up, into blocks. The first one is planned and printed before. It
is a `Transfer`, a value that can be planned, run, submitted and moved by layers; the others use
the short names of whole pulls, which build the same value.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
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
        pipe.recv()  # decode has everything


def decode(pipe: Connection) -> None:
    """Pull, and look at what arrived."""
    address, slots_id = pipe.recv()
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize({"llm.DeviceId": "1"})
        datadist.link_clusters([ClusterInfo(PREFILL, address)]).raise_for_status()

        paged = datadist.allocate_blocks_cache(PAGED)
        theirs, mine = [4, 5, 9], [7, 8, 2]
        key = BlocksCacheKey(PREFILL)
        transfer = Transfer(Rows(key, theirs), Rows(paged, mine))
        print(datadist.plan(transfer).explain(), end="\n\n")
        datadist.run(transfer)
        expected = np.zeros_like(numbered(PAGED))
        expected[:, mine] = numbered(PAGED)[:, theirs]
        check(
            f"blocks {theirs} of prefill, in blocks {mine}",
            datadist.arrays(paged, copy=True),
            expected,
        )

        slots = datadist.allocate_cache(SLOTS)
        datadist.pull_cache(CacheIndex(PREFILL, slots_id, batch_index=2), slots, dst_batch_index=0)
        expected = np.zeros_like(numbered(SLOTS))
        expected[:, 0] = numbered(SLOTS)[:, 2]
        check("slot 2 of prefill, in slot 0", datadist.arrays(slots, copy=True), expected)

        # No source blocks: the source is a slot. Its 32 tokens are four blocks of 8.
        mine = [15, 0, 13, 3]
        datadist.pull_blocks(CacheIndex(PREFILL, slots_id, 1), paged, None, mine)
        arrived = np.stack(datadist.arrays(paged, copy=True))[:, mine].reshape(4, 1, 32, 2, 16)
        check(f"slot 1 of prefill, in blocks {mine}", list(arrived), numbered(SLOTS)[:, 1:2])
        pipe.send("done")


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
