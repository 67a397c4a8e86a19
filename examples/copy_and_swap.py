"""Copy and swap: bytes that stay inside one process, planned and moved like all others.

copy_cache copies a slot, or a part of it, to another; copy_blocks copies one block to many (a
prompt that several answers go on from); swap_blocks moves blocks between the DEVICE cache that a
model reads and a larger HOST cache. On a machine without accelerator both are host memory.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvplan import CacheDesc, DataType, LlmDataDist, LlmRole, Placement, Rows, Transfer

SLOTS = CacheDesc(num_tensors=4, shape=(3, 32, 2, 16), data_type=DataType.DT_FLOAT16)
DEVICE = CacheDesc(num_tensors=4, shape=(8, 8, 2, 16), data_type=DataType.DT_FLOAT16)
HOST = CacheDesc(4, (16, 8, 2, 16), DataType.DT_FLOAT16, placement=Placement.HOST)


def copy(datadist: LlmDataDist) -> None:
    """Copy a slot to another; then only its first 8 tokens."""
    src, dst = datadist.allocate_cache(SLOTS), datadist.allocate_cache(SLOTS)
    datadist.write_cache(src, numbered(SLOTS))
    datadist.copy_cache(src, dst, src_batch_index=1, dst_batch_index=0)
    eight_tokens = SLOTS.stride * 8 // 32  # bytes
    datadist.copy_cache(src, dst, src_batch_index=0, dst_batch_index=2, size=eight_tokens)
    was, expected = numbered(SLOTS), np.zeros_like(numbered(SLOTS))
    expected[:, 0], expected[:, 2, :8] = was[:, 1], was[:, 0, :8]
    check(
        "slot 1 in slot 0, 8 tokens of slot 0 in slot 2", datadist.arrays(dst, copy=True), expected
    )


def copy_blocks(datadist: LlmDataDist) -> None:
    """Copy one block to two others, another to one."""
    cache = datadist.allocate_blocks_cache(DEVICE)
    datadist.write_cache(cache, numbered(DEVICE))
    transfer = Transfer(Rows(cache, [1, 1, 2]), Rows(cache, [4, 6, 5]))
    print(datadist.plan(transfer).explain(), end="\n\n")
    datadist.copy_blocks(cache, {1: [4, 6], 2: [5]})  # the same copy, by the short name
    expected = numbered(DEVICE)
    expected[:, [4, 6]], expected[:, 5] = expected[:, [1, 1]], expected[:, 2]
    check("block 1 in 4 and 6, block 2 in 5", datadist.arrays(cache, copy=True), expected)


def swap(datadist: LlmDataDist) -> None:
    """Swap blocks out to the host; and back, to other places."""
    device, host = datadist.allocate_blocks_cache(DEVICE), datadist.allocate_blocks_cache(HOST)
    datadist.write_cache(device, numbered(DEVICE))
    datadist.swap_blocks(device, host, {0: 12, 1: 13, 7: 2})
    # The device serves other requests meanwhile.
    datadist.write_cache(device, np.zeros_like(numbered(DEVICE)))
    datadist.swap_blocks(host, device, {12: 5, 13: 6, 2: 0})
    expected = np.zeros_like(numbered(DEVICE))
    expected[:, [5, 6, 0]] = numbered(DEVICE)[:, [0, 1, 7]]
    check("blocks 0, 1, 7 back in 5, 6, 0", datadist.arrays(device, copy=True), expected)


def numbered(desc: CacheDesc) -> NDArray[np.float16]:
    """Return all tensors of a cache; each row holds its own number, 100 * tensor + row."""
    rows = 100 * np.arange(desc.num_tensors)[:, None] + np.arange(desc.batch_size)
    return np.full((desc.num_tensors, *desc.shape), rows[:, :, None, None, None], np.float16)


def check(what: str, found: Sequence[NDArray[np.float16]], expected: NDArray[np.float16]) -> None:
    """Print what is in each row, or end the program: one is wrong."""
    print(f"{what}:")
    for tensor, rows in enumerate(found):
        ends = rows[:, [0, -1], 0, 0].astype(int).tolist()  # of the first and the last token
        print(f"  tensor {tensor}:", *(a if a == b else f"{a}..{b}" for a, b in ends))
        if not np.array_equal(rows, expected[tensor]):
            sys.exit(f"FAILED: tensor {tensor} should hold {expected[tensor, :, 0, 0, 0]}")


def main() -> None:
    """Run all three, with an engine that has no link."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    with LlmDataDist(1, LlmRole.MIX) as datadist:
        datadist.initialize()
        copy(datadist)
        copy_blocks(datadist)
        swap(datadist)


if __name__ == "__main__":
    main()
