"""A prefill process of two: it keeps a part of the KV heads, in a layout of its own.

A tensor-parallel model computes only its heads in each process, and adds up what they attend to.
This model does not: each process computes the whole prompt in a cache of its own, and keeps its
heads. What decode pulls is the same.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import BlocksCacheKey, Cache, CacheDesc, DataType, LlmDataDist, LlmRole, Shard

from .device import described, options, store
from .generation import prefill, read_prompt
from .messages import OfferedHeads, Settings
from .model import Llama
from .paged_cache import BlockPool, BlockTable, PagedCache, blocks_for
from .prefill import cache_desc
from .tokenizer import Tokenizer
from .weights import LlamaConfig, ModelFile
from .workers import Channel

RIGHT, WRONG = 1, 2
"""Names (model ids) of the two caches that are offered."""


def run(channel: Channel, settings: Settings, cluster_id: int, rank: int) -> None:
    """Send OfferedHeads, and sleep: decode pulls."""
    model_file = ModelFile(settings.weights)
    config = model_file.config
    room = config.context_length - settings.max_tokens
    prompt = read_prompt(settings.prompt, Tokenizer(model_file), room)
    model = Llama.from_file(model_file)
    gc.freeze()  # what was loaded stays: no collection need look through it, for 0.1 s each
    heads = heads_of(rank, config.kv_heads)
    desc = shard_desc(config, 2 * settings.block_size, len(prompt), heads)
    channel.progress(f"weights loaded; computes the whole prompt, and keeps {desc.shard}")

    plain = cache_desc(config, blocks_for(len(prompt), settings.block_size), settings.block_size)
    computed = PagedCache([np.zeros(plain.shape, np.float16) for _ in range(plain.num_tensors)])
    in_order = np.arange(plain.shape[0])
    first_token = prefill(model, prompt, computed, in_order, lambda _: None)

    with LlmDataDist(cluster_id, LlmRole.PROMPT) as datadist:
        listen = {"llm.ListenIpInfo": f"{settings.host.address}:0"}
        datadist.initialize(listen | settings.host.options() | options(settings.device, number=0))
        channel.progress(described(settings.device, datadist))
        pool = BlockPool(desc.shape[0])
        pool.serve_others(seed=3 + rank)
        block_table = pool.allocate(blocks_for(len(prompt), desc.shape[2]))
        kept = [
            in_blocks(computed.gather(index, in_order, len(prompt))[:, heads], block_table, desc)
            for index in range(desc.num_tensors)
        ]
        offer(datadist, desc, RIGHT, kept)
        if heads.start > 0:  # the planted fault: these bytes, said to be of the heads before
            other = range(heads.start - 1, heads.stop - 1)
            offer(
                datadist, shard_desc(config, 2 * settings.block_size, len(prompt), other),
                WRONG, kept,
            )  # fmt: skip
        assert datadist.listen_address is not None  # as it is of an engine that does not listen
        channel.answer(
            OfferedHeads(
                cluster_id,
                datadist.listen_address,
                block_table.tolist(),
                len(prompt),
                first_token,
                (heads.start, heads.stop),
            )
        )
        channel.receive()


def heads_of(rank: int, kv_heads: int) -> range:
    """Return the KV heads of one of two processes: of three, the first has two."""
    half = -(-kv_heads // 2)
    return range(half) if rank == 0 else range(half, kv_heads)


def shard_desc(config: LlamaConfig, block_size: int, num_tokens: int, heads: range) -> CacheDesc:
    """Describe the paged cache of a process: tokens of a head together, room for two requests."""
    num_blocks = 2 * blocks_for(num_tokens, block_size)
    return CacheDesc(
        2 * config.layers,
        (num_blocks, len(heads), block_size, config.head_size),
        DataType.DT_FLOAT16,
        kv_tensor_format="HND",
        shard=Shard(range(config.layers), heads, config.layers, config.kv_heads),
    )


def in_blocks(
    rows: NDArray[np.float32], block_table: BlockTable, desc: CacheDesc
) -> NDArray[np.float16]:
    """Return a tensor with `rows` (tokens, heads, head_size) in its blocks, and NaN elsewhere."""
    tensor = np.full(desc.shape, np.nan, np.float16)
    positions = np.arange(len(rows))
    block_size = desc.shape[2]
    tensor[block_table[positions // block_size], :, positions % block_size] = rows
    return tensor


def offer(datadist: LlmDataDist, desc: CacheDesc, name: int, tensors: list[Any]) -> Cache:
    """Make a cache that peers know by `name`, and store the tensors there."""
    cache = datadist.allocate_blocks_cache(desc, BlocksCacheKey(0, name))
    for number, tensor in enumerate(tensors):
        store(datadist, cache, number, tensor)
    return cache
