"""The prefill process: reads the prompt into its paged cache; is pulled from, and pushes."""

from __future__ import annotations

import gc

import numpy as np

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    DataType,
    LlmDataDist,
    LlmRole,
    Rows,
    Shard,
    Transfer,
)

from .by_layer import pushed_by_layer
from .device import described, options, tensors_of
from .generation import prefill, read_prompt
from .messages import DECODE_CLUSTER, PREFILL_CLUSTER, Handover, PushTarget, Settings
from .model import Llama
from .moving import moved
from .paged_cache import BlockPool, blocks_for
from .tokenizer import Tokenizer
from .weights import LlamaConfig, ModelFile
from .workers import Channel


def run(channel: Channel, settings: Settings) -> None:
    """Send a Handover; for every PushTarget that comes back, push and say what it cost."""
    model_file = ModelFile(settings.weights)
    room = model_file.config.context_length - settings.max_tokens
    prompt = read_prompt(settings.prompt, Tokenizer(model_file), room)
    channel.progress(f"prompt of {len(prompt)} tokens")
    model = Llama.from_file(model_file)
    channel.progress("weights loaded")
    gc.freeze()  # what was loaded stays: no collection need look through it, for 0.1 s each
    needed = blocks_for(len(prompt), settings.block_size)
    num_blocks = 2 * needed

    with LlmDataDist(PREFILL_CLUSTER, LlmRole.PROMPT) as datadist:
        listen = {"llm.ListenIpInfo": f"{settings.host.address}:0"}
        datadist.initialize(listen | settings.host.options() | options(settings.device, number=0))
        channel.progress(described(settings.device, datadist))
        cache = datadist.allocate_blocks_cache(
            cache_desc(model.config, num_blocks, settings.block_size),
            BlocksCacheKey(PREFILL_CLUSTER),
        )
        pool = BlockPool(num_blocks)
        pool.serve_others(seed=1)
        block_table = pool.allocate(needed)
        tensors = tensors_of(datadist, cache)
        first_token = prefill(model, prompt, tensors, block_table, channel.progress)
        channel.progress(f"listening on {datadist.listen_address}")
        channel.answer(Handover(prompt, first_token, datadist.listen_address, block_table.tolist()))
        # One-sided: while decode pulls, this process sleeps here.
        while True:
            target: PushTarget = channel.receive()
            if target.by_layer:
                tensors.fill(np.nan)
                by_layer = (datadist, cache, block_table, target, model, prompt)
                channel.answer(pushed_by_layer(*by_layer, channel.progress))
                continue
            there = CacheIndex(DECODE_CLUSTER, target.cache_id)
            push = Transfer(Rows(cache, block_table), Rows(there, target.block_table))
            channel.answer(moved(datadist, push))


def cache_desc(config: LlamaConfig, num_blocks: int, block_size: int) -> CacheDesc:
    """Describe the paged cache of a model: keys and values of each layer."""
    shape = (num_blocks, block_size, config.kv_heads, config.head_size)
    return CacheDesc(
        2 * config.layers,
        shape,
        DataType.DT_FLOAT16,
        kv_tensor_format="NHD",
        shard=Shard(num_layers=config.layers, num_heads=config.kv_heads),
    )
