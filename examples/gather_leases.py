"""A gather with leases: two prefill engines hold one request, half of its heads each.

Each prefill engine leases the blocks of the request, and sends the lease to decode. Decode gathers
both halves into its own blocks by one transfer: one plan, one deadline, one outcome. Then one
engine releases its lease, because the request has ended there. The same gather fails from then on,
although its block table is still valid: the blocks may be another request's.
"""

import argparse
import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from kvplan import (
    BlockLease,
    CacheDesc,
    ClusterInfo,
    DataType,
    GatherError,
    LlmDataDist,
    LlmRole,
    LLMStatusCode,
    Options,
    Rows,
    Shard,
    Transfer,
)

DECODE, PREFILLS = 10, (1, 2)
TOKENS, HEADS = 28, 4  # the tokens of the request fill one block of 16, and most of a second one
MINE = [6, 2]


def shape(heads: range) -> CacheDesc:
    """Describe a cache that holds some heads of every layer: keys and values of two layers."""
    shard = Shard(heads=heads, num_heads=HEADS)
    return CacheDesc(
        4, (8, 16, len(heads), 8), DataType.DT_FLOAT16, kv_tensor_format="NHD", shard=shard
    )


def prefill(pipe: Connection, cluster_id: int) -> None:
    """Hold half of the heads, and lease the blocks of the request."""
    half = range(2 * (cluster_id - 1), 2 * cluster_id)
    blocks = [cluster_id, 5]  # each engine has its own block table
    with LlmDataDist(cluster_id, LlmRole.PROMPT) as datadist:
        datadist.initialize(Options(listen_ip_info="127.0.0.1:0", device_id=cluster_id))
        cache = datadist.allocate_blocks_cache(shape(half))
        contents = np.zeros((4, *cache.cache_desc.shape), np.float16)
        for position, block in enumerate(blocks):
            contents[:, block] = model()[:, position][:, :, half.start : half.stop]
        datadist.write_cache(cache, contents)
        lease = datadist.lease_blocks(cache, blocks, tokens=TOKENS, tag="request 4711")
        pipe.send((datadist.listen_address, lease.to_bytes()))
        pipe.recv()  # decode has the request
        if cluster_id == PREFILLS[1]:
            datadist.release(lease)  # the request has ended: its blocks go to another one
        pipe.send("released")
        pipe.recv()  # decode has tried again


def decode(pipes: list[Connection]) -> None:
    """Gather the request from both, then try it again with a lease that has ended."""
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize(Options(device_id=0))
        addresses, leases = zip(*(pipe.recv() for pipe in pipes), strict=True)
        clusters = [ClusterInfo(*pair) for pair in zip(PREFILLS, addresses, strict=True)]
        datadist.link_clusters(clusters).raise_for_status()

        cache = datadist.allocate_blocks_cache(shape(range(HEADS)))
        sources = [Rows(BlockLease.from_bytes(lease)) for lease in leases]
        request = Transfer(sources, Rows(cache, MINE))
        for part in datadist.plan(request).parts:
            print(f"{part.label}: {part.nbytes} bytes")
        datadist.run(request)
        check(datadist.arrays(cache, copy=True))

        for pipe in pipes:
            pipe.send("the request has arrived")
        for pipe in pipes:
            pipe.recv()
        try:
            datadist.run(request)
        except GatherError as error:
            if error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                raise
            print(f"again: {error}")
        else:
            sys.exit("FAILED: a lease that was released still gives its blocks")
        for pipe in pipes:
            pipe.send("done")


def model() -> NDArray[np.float16]:
    """Return the request by tensor, position, token and head: 100 * tensor + token + 400 * head."""
    tokens = np.arange(2 * 16).reshape(2, 16)
    rows = 100 * np.arange(4)[:, None, None] + np.where(tokens < TOKENS, tokens + 1, 0)
    rows = rows[..., None, None] + 400 * np.arange(HEADS)[:, None] * (rows[..., None, None] > 0)
    whole = np.broadcast_to(rows, (4, 2, 16, HEADS, 8)).astype(np.float16)
    whole[:, 1, TOKENS - 16 :] = 0
    return whole


def check(arrived: list[NDArray[np.float16]]) -> None:
    """Print a token of each tensor, or end the program: a byte is not what was sent."""
    for tensor, rows in enumerate(arrived):
        expected = np.zeros_like(rows)
        expected[MINE] = model()[tensor]
        print(f"  tensor {tensor}, token 20, by head:", *rows[MINE[1], 4, :, 0].astype(int))
        if not np.array_equal(rows, expected):
            sys.exit(f"FAILED: tensor {tensor} differs")


def main() -> None:
    """Run each prefill engine in a new process, decode in this one."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for cluster_id in PREFILLS:
        ours, theirs = context.Pipe()
        process = context.Process(target=prefill, args=(theirs, cluster_id), daemon=True)
        process.start()
        theirs.close()  # if that process ends early, we read the end of file
        pipes.append(ours)
        processes.append(process)
    decode(pipes)
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
