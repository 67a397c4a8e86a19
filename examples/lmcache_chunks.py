"""LMCache's chunks into vLLM's blocks: found by the hashes of their tokens, pulled as one request.

Prefill keeps what it has computed in a pool of LMCache's chunks (its format KV_2LTD: one tensor of
keys and values, layers, tokens, heads x dim). Decode has a paged cache in the shape of vLLM's
FlashAttention, with smaller blocks and a tensor for each layer. A lookup finds the chunks of a
prompt's longest known prefix and pins them, here by a lease. One transfer then moves the tokens
from chunks to blocks, whatever the order of axes and the sizes. The same pull fails once prefill
has evicted the chunks. LMCache itself is not needed, and has not run with this.
"""

import argparse
import multiprocessing
import sys
from hashlib import sha256
from itertools import takewhile
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from kvplan import (
    BlockLease,
    CacheDesc,
    ClusterInfo,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Options,
    Rows,
    Shard,
    Transfer,
)

PREFILL, DECODE = 1, 2
LAYERS, HEADS, DIM = 2, 4, 8
MODEL = Shard(num_layers=LAYERS, num_heads=HEADS)
CHUNK, BLOCK = 32, 8  # tokens; LMCache's default is 256, vLLM's 16
PROMPT = list(range(1000, 1075))  # 75 tokens: two chunks, and 11 tokens that are in none
MINE = [7, 3, 4, 20, 1, 2, 30, 12]  # blocks for the two chunks


def hashes(tokens: list[int]) -> list[bytes]:
    """Return the hash of each full chunk, which covers all tokens before it too."""
    found, before = [], b""
    for chunk in zip(*[iter(tokens)] * CHUNK, strict=False):
        before = sha256(before + np.array(chunk).tobytes()).digest()
        found.append(before)
    return found


def computed() -> NDArray[np.float16]:
    """Return what the model computes: (K or V, layer, token, head, dim)."""
    shape = (2, LAYERS, len(PROMPT), HEADS, DIM)
    return np.random.default_rng(7).standard_normal(shape).astype(np.float16)


def prefill(pipe: Connection) -> None:
    """Keep a prompt's chunks, and answer lookups."""
    pool = np.zeros((16, 2, LAYERS, CHUNK, HEADS * DIM), np.float16)
    slots = dict(zip(hashes(PROMPT), [9, 2], strict=True))
    whole = computed().reshape(2, LAYERS, len(PROMPT), HEADS * DIM)
    for position, slot in enumerate(slots.values()):
        pool[slot] = whole[:, :, position * CHUNK : (position + 1) * CHUNK]
    tensor = pool.reshape(*pool.shape[:4], HEADS, DIM)  # the same memory
    desc = CacheDesc.from_tensors([tensor], "block kv layer token head dim", shard=MODEL)
    with LlmDataDist(PREFILL, LlmRole.PROMPT) as datadist:
        datadist.initialize(Options(listen_ip_info="127.0.0.1:0"))
        cache = datadist.register_blocks_cache(desc, [tensor])
        pipe.send(datadist.listen_address)
        known = [slots[name] for name in takewhile(lambda name: name in slots, pipe.recv())]
        lease = datadist.lease_blocks(cache, known, tokens=len(known) * CHUNK, tag="prompt 1")
        pipe.send(lease.to_bytes())
        pipe.recv()  # decode has the tokens
        datadist.release(lease)  # now the chunks may be evicted
        pipe.send("released")
        pipe.recv()


def decode(pipe: Connection) -> None:
    """Look a prompt up, pull what is known of it, and compare every byte."""
    tensors = [np.zeros((2, 32, BLOCK, HEADS, DIM), np.float16) for _ in range(LAYERS)]
    desc = CacheDesc.from_tensors(tensors, "kv block token head dim", shard=MODEL)
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize()
        cache = datadist.register_blocks_cache(desc, tensors)
        datadist.link_clusters([ClusterInfo(PREFILL, pipe.recv())]).raise_for_status()

        pipe.send(hashes([*PROMPT, 1, 2, 3]))  # a longer prompt with the same beginning
        lease = BlockLease.from_bytes(pipe.recv())
        request = Transfer(Rows(lease), Rows(cache, MINE))
        print(datadist.plan(request).explain(limit=4))
        datadist.run(request)
        check(tensors)

        pipe.send("pulled")
        pipe.recv()
        try:
            datadist.run(request)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                raise
            print(f"after the eviction: {error}")
        else:
            sys.exit("FAILED: chunks that were evicted are still read")
        pipe.send("done")


def check(tensors: list[NDArray[np.float16]]) -> None:
    """End the program unless exactly the tokens of the chunks have arrived."""
    count = BLOCK * len(MINE)
    for layer, tensor in enumerate(tensors):
        expected = np.zeros_like(tensor)
        tokens = computed()[:, layer, :count]
        expected[:, MINE] = tokens.reshape(2, len(MINE), BLOCK, HEADS, DIM)
        if not np.array_equal(tensor, expected):
            sys.exit(f"FAILED: layer {layer} differs")
        print(f"layer {layer}: {count} of {len(PROMPT)} tokens in {len(MINE)} blocks")


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
