"""Block tables as vLLM's own KVCacheManager gives them, without a model, a GPU or an engine.

Two managers, as in the scheduler of a prefill and of a decode engine. Others' requests have come
and gone, the decode engine has the first blocks of the prompt in its prefix cache, and both
allocate what one request needs. `python -m examples.vllm.block_tables` prints the tables that
docs/how-to/testing.md has; it needs vLLM.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK_TOKENS = 16
PREFILL_BLOCKS, DECODE_BLOCKS = 20, 28
PROMPT = range(1000, 1150)
"""Tokens of the request: 9 blocks and 6 tokens."""


class Tables(NamedTuple):
    """Tables of one request: the blocks of both engines, and the tokens that the decoder has."""

    prefill: list[int]
    decode: list[int]
    num_cached: int


def manager(num_blocks: int) -> KVCacheManager:
    """Return a manager of one pool, which two layers share."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.float16
    )
    groups = [KVCacheGroupSpec(["layers.0.attn", "layers.1.attn"], spec)]
    return KVCacheManager(
        KVCacheConfig(num_blocks, [], groups),
        max_model_len=8192,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


def request(name: str, tokens: range | list[int]) -> Request:
    """Return a request that has only its prompt."""
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    return Request(name, [*tokens], SamplingParams(max_tokens=1), None, block_hasher=hasher)


def admit(pool: KVCacheManager, item: Request) -> int:
    """Give a request its blocks, as the scheduler does; returns how many tokens were cached."""
    cached, num_cached, *_ = pool.get_computed_blocks(item)
    given = pool.allocate_slots(item, item.num_tokens - num_cached, num_cached, cached)
    assert given is not None, "the pool is full"
    return num_cached


def tables() -> Tables:
    """Return one request's tables, after others have come and gone."""
    init_none_hash(sha256)
    prefill, decode = manager(PREFILL_BLOCKS), manager(DECODE_BLOCKS)
    for pool, lengths in ((prefill, (70, 40, 100)), (decode, (50, 120, 30, 90))):
        others = [request(f"other {at}", range(at, at + n)) for at, n in enumerate(lengths)]
        for other in others:
            admit(pool, other)
        for other in others[::2]:
            pool.free(other)
    # The decode engine has served a request that began like this one.
    before = request("before", [*PROMPT[:40], 7])
    admit(decode, before)
    decode.free(before)
    mine = [request("mine", PROMPT) for _ in range(2)]
    admit(prefill, mine[0])
    num_cached = admit(decode, mine[1])
    theirs, ours = (pool.get_block_ids("mine")[0] for pool in (prefill, decode))
    return Tables(theirs, ours, num_cached)


if __name__ == "__main__":
    print(tables())
