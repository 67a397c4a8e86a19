"""The prefill process: reads the prompt into its paged cache, and offers that to be pulled."""

from __future__ import annotations

import numpy as np

from kvplan.transport.local import LocalTransport

from .generation import prefill, read_prompt
from .messages import Handover, Settings
from .model import Llama
from .paged_cache import BlockPool, PagedCache, blocks_for
from .tokenizer import Tokenizer
from .weights import LlamaConfig, ModelFile
from .workers import Channel

CACHE_DTYPE = np.dtype(np.float16)


def run(channel: Channel, settings: Settings) -> None:
    """Send a Handover, then keep the memory until told that it is not needed any more."""
    model_file = ModelFile(settings.weights)
    room = model_file.config.context_length - settings.max_tokens
    prompt = read_prompt(settings.prompt, Tokenizer(model_file), room)
    channel.progress(f"prompt of {len(prompt)} tokens")
    model = Llama.from_file(model_file)
    channel.progress("weights loaded")
    needed = blocks_for(len(prompt), settings.block_size)
    num_blocks = 2 * needed

    with LocalTransport() as transport:
        shape = cache_shape(model.config, num_blocks, settings.block_size)
        tensor_nbytes = int(np.prod(shape)) * CACHE_DTYPE.itemsize
        num_tensors = 2 * model.config.layers
        # One arena holds all tensors, one after the other. It is plain memory, which a process
        # that was given the transport's metadata can map.
        arena = transport.allocate(num_tensors * tensor_nbytes)
        transport.register(arena)
        whole = np.frombuffer(memoryview(arena), CACHE_DTYPE).reshape(num_tensors, *shape)
        cache = PagedCache(list(whole))

        pool = BlockPool(num_blocks)
        pool.serve_others(seed=1)
        block_table = pool.allocate(needed)
        first_token = prefill(model, prompt, cache, block_table, channel.progress)
        channel.answer(
            Handover(
                prompt=prompt,
                first_token=first_token,
                metadata=transport.metadata(),
                shape=shape,
                addresses=[arena.address + i * tensor_nbytes for i in range(num_tensors)],
                block_table=block_table.tolist(),
            )
        )
        # One-sided: from here on this process sleeps, while decode reads its memory.
        channel.receive()


def cache_shape(config: LlamaConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Shape of one tensor of a paged cache."""
    return (num_blocks, block_size, config.kv_heads, config.head_size)
