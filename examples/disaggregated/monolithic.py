"""The monolithic process: the same model alone, prompt and generation in one place.

Its cache is its own too, and its blocks lie in order: nothing of what it says went through kvplan.
"""

from __future__ import annotations

import time

import numpy as np

from .generation import decode, prefill, read_prompt
from .messages import Generated, Settings
from .model import Llama
from .paged_cache import PagedCache, blocks_for
from .prefill import cache_desc
from .tokenizer import Tokenizer
from .weights import ModelFile
from .workers import Channel


def run(channel: Channel, settings: Settings) -> None:
    """Send a Generated."""
    model_file = ModelFile(settings.weights)
    tokenizer = Tokenizer(model_file)
    room = model_file.config.context_length - settings.max_tokens
    prompt = read_prompt(settings.prompt, tokenizer, room)
    model = Llama.from_file(model_file)
    channel.progress("weights loaded")
    num_blocks = blocks_for(len(prompt) + settings.max_tokens, settings.block_size)
    desc = cache_desc(model.config, num_blocks, settings.block_size)
    cache = PagedCache([np.zeros(desc.shape, np.float16) for _ in range(desc.num_tensors)])
    block_table = np.arange(num_blocks)

    first_token = prefill(model, prompt, cache, block_table, channel.progress)
    started = time.perf_counter()
    ids = decode(
        model,
        tokenizer,
        cache,
        block_table,
        len(prompt),
        first_token,
        settings.max_tokens,
        channel.piece,
    )
    seconds = time.perf_counter() - started
    channel.answer(Generated(ids, tokenizer.decode(ids), seconds))
