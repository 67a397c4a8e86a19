"""Torch tensors in vLLM's shapes: two engines that keep the KV cache of one model in other orders.

Prefill has the tensors of vLLM's FlashAttention for each layer: (2, blocks, block size, heads,
dim). Decode has those of FlashInfer in the order HND, which are views of (blocks, 2, heads, block
size, dim), and blocks of half the size. Both register their tensors as they are, without a copy.
Decode pulls one request by its tokens, and compares them, and everything else, with torch.equal.
Needs torch, of which any build will do (pip install torch); nothing runs on a GPU.
"""

import argparse
import multiprocessing
import sys
from multiprocessing.connection import Connection

try:
    import torch
except ModuleNotFoundError:
    sys.exit("this example needs torch: pip install torch")

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    LlmDataDist,
    LlmRole,
    Rows,
    Shard,
    Transfer,
)

PREFILL, DECODE = 1, 2
LAYERS, HEADS, DIM = 4, 8, 64
MODEL = Shard(num_layers=LAYERS, num_heads=HEADS)
TOKENS = 75  # of the request, whose last block is not full at either end

# Blocks of the request: 5 of 16 tokens at prefill, 10 of 8 at decode.
THEIRS, MINE = [9, 4, 5, 6, 20], [3, 30, 31, 32, 12, 11, 10, 7, 8, 25]


def flash_attention(blocks: int, block_size: int) -> list[torch.Tensor]:
    """Return the tensors of all layers, empty."""
    shape = (2, blocks, block_size, HEADS, DIM)
    return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]


def flash_infer(blocks: int, block_size: int) -> list[torch.Tensor]:
    """Return the same with blocks outermost, and in memory heads before tokens (HND)."""
    shape = (blocks, 2, HEADS, block_size, DIM)
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
    return [tensor.permute(0, 1, 3, 2, 4) for tensor in tensors]


def computed() -> torch.Tensor:
    """Return what the model computes for the request: (layer, K or V, token, head, dim)."""
    torch.manual_seed(7)
    return torch.randn(LAYERS, 2, TOKENS, HEADS, DIM).to(torch.bfloat16)


def prefill(pipe: Connection) -> None:
    """Have computed a request, and listen."""
    tensors = flash_attention(blocks=32, block_size=16)
    desc = CacheDesc.from_tensors(tensors, "kv block token head dim", shard=MODEL)
    for layer, values in zip(tensors, computed(), strict=True):
        for token in range(TOKENS):
            layer[:, THEIRS[token // 16], token % 16] = values[:, token]
    with LlmDataDist(PREFILL, LlmRole.PROMPT) as datadist:
        # Where Linux restricts tracing (Yama), peers may read registered memory only if told so.
        datadist.initialize({"llm.ListenIpInfo": "127.0.0.1:0", "kvplan.permit_any_peer": "1"})
        datadist.register_blocks_cache(desc, tensors, BlocksCacheKey(PREFILL))
        pipe.send(datadist.listen_address)
        pipe.recv()  # decode has everything


def decode(pipe: Connection) -> None:
    """Pull the request, and look at what arrived."""
    tensors = flash_infer(blocks=40, block_size=8)
    desc = CacheDesc.from_tensors(tensors, "block kv token head dim", shard=MODEL)
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize()
        datadist.link_clusters([ClusterInfo(PREFILL, pipe.recv())]).raise_for_status()
        cache = datadist.register_blocks_cache(desc, tensors)
        key = BlocksCacheKey(PREFILL)
        transfer = Transfer(Rows(key, THEIRS), Rows(cache, MINE), num_tokens=TOKENS)
        plan = datadist.plan(transfer)
        print(f"prefill: {plan.part.src}\ndecode:  {plan.part.dst}\n{plan!r}")
        datadist.run(transfer)
        pipe.send("done")

    expected = flash_infer(blocks=40, block_size=8)
    for layer, values in zip(expected, computed(), strict=True):
        for token in range(TOKENS):
            layer[MINE[token // 8], :, token % 8] = values[:, token]
    for number, (found, right) in enumerate(zip(tensors, expected, strict=True)):
        if not torch.equal(found, right):
            sys.exit(f"FAILED: layer {number} holds other values than those that were computed")
        print(f"layer {number}: {TOKENS} tokens in {len(MINE)} blocks, and nothing else is written")


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
