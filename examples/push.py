"""Push: prefill writes the KV cache of a prompt into decode's memory, whose Python takes no part.

Here decode listens and prefill links, the other way round than in pull.py: who listens has nothing
to do with the direction of the bytes. Prefill pushes blocks, and then a slot layer by layer, as if
it sent each when it is computed. Decode's engine is not notified when bytes have arrived: prefill
says so, over a channel of its own.
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
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
)

PREFILL, DECODE = 1, 2
PAGED = CacheDesc(num_tensors=4, shape=(16, 8, 2, 16), data_type=DataType.DT_FLOAT16)
SLOTS = CacheDesc(num_tensors=4, shape=(3, 32, 2, 16), data_type=DataType.DT_FLOAT16)
MINE, THEIRS = [4, 5, 9], [7, 8, 2]  # blocks, as prefill sees it


def prefill(pipe: Connection) -> None:
    """Link to decode, and push."""
    with LlmDataDist(PREFILL, LlmRole.PROMPT) as datadist:
        datadist.initialize({"llm.DeviceId": "0"})
        address, slots_id = pipe.recv()
        datadist.link_clusters([ClusterInfo(DECODE, address)]).raise_for_status()
        paged = datadist.allocate_blocks_cache(PAGED)
        slots = datadist.allocate_cache(SLOTS)
        for cache in (paged, slots):
            datadist.write_cache(cache, numbered(cache.cache_desc))

        key = BlocksCacheKey(DECODE)
        transfer = Transfer(Rows(paged, MINE), Rows(key, THEIRS))
        print(datadist.plan(transfer).explain(), end="\n\n", flush=True)
        datadist.run(transfer)

        there = CacheIndex(DECODE, slots_id, batch_index=2)
        pairs = KvCacheExtParam(tensor_num_per_layer=2)  # K and V of a layer are ready together
        task = datadist.layered(Transfer(Rows(slots, slot=1), Rows(there), layers=pairs))
        for layer in task.layers:
            task.ready(layer)  # here a model would have computed the layer before
        task.wait()
        pipe.send("pushed")


def decode(pipe: Connection) -> None:
    """Have two empty caches, listen, and look at what has arrived."""
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize({"llm.ListenIpInfo": "127.0.0.1:0", "llm.DeviceId": "1"})
        paged = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(DECODE))
        slots = datadist.allocate_cache(SLOTS)
        pipe.send((datadist.listen_address, slots.cache_id))
        pipe.recv()  # prefill has pushed everything

        expected = np.zeros_like(numbered(PAGED))
        expected[:, THEIRS] = numbered(PAGED)[:, MINE]
        check(
            f"blocks {MINE} of prefill, in blocks {THEIRS}",
            datadist.arrays(paged, copy=True),
            expected,
        )
        expected = np.zeros_like(numbered(SLOTS))
        expected[:, 2] = numbered(SLOTS)[:, 1]
        check("slot 1 of prefill, in slot 2", datadist.arrays(slots, copy=True), expected)


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
