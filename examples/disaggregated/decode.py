"""The decode process: links to prefill, pulls the prompt's KV cache, and goes on generating."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan import BlocksCacheKey, ClusterInfo, LlmDataDist, LlmRole, Plan, Rows, Transfer
from kvplan.debug import locate

from .device import described, options, tensors_of
from .gathering import gathered, with_wrong_head
from .generation import decode
from .messages import (
    DECODE_CLUSTER,
    PREFILL_CLUSTER,
    AwaitPush,
    Gather,
    Generated,
    Handover,
    Located,
    OfferedHeads,
    PlantWrongHead,
    Pushed,
    PushTarget,
    Settings,
    WrongBlock,
)
from .model import Llama
from .moving import moved
from .paged_cache import BlockPool, PagedCache, blocks_for
from .prefill import cache_desc
from .tokenizer import Tokenizer
from .weights import ModelFile
from .workers import Channel


def located(expected: list[NDArray[Any]], tensors: PagedCache, plan: Plan) -> Located:
    """Return what is wrong with the cache, as far as its bytes and the plan say."""
    found = locate(expected, tensors.snapshot(), plan)
    return Located(str(found), found.first)


def run(channel: Channel, settings: Settings) -> None:
    """Wait for a Handover, pull and generate; then again, as the demo asks."""
    model_file = ModelFile(settings.weights)
    model, tokenizer = Llama.from_file(model_file), Tokenizer(model_file)
    gc.freeze()  # what was loaded stays: no collection need look through it, for 0.1 s each
    channel.progress("weights loaded; waiting for the prompt's KV cache")
    handover: Handover = channel.receive()
    num_tokens, num_pulled = len(handover.prompt), len(handover.block_table)

    with LlmDataDist(DECODE_CLUSTER, LlmRole.DECODER) as datadist:
        datadist.initialize(settings.host.options() | options(settings.device, number=1))
        channel.progress(described(settings.device, datadist))
        # A cache of another size, whose blocks fell free in another order.
        needed = blocks_for(num_tokens + settings.max_tokens, settings.block_size)
        cache = datadist.allocate_blocks_cache(
            cache_desc(model.config, 3 * needed, settings.block_size)
        )
        tensors = tensors_of(datadist, cache)
        tensors.fill(np.nan)  # as a running engine's: its pages exist, and hold something else
        pool = BlockPool(3 * needed)
        pool.serve_others(seed=2)
        block_table = pool.allocate(needed)
        mine = block_table[:num_pulled]

        def generate() -> None:
            started = time.perf_counter()
            ids = decode(
                model,
                tokenizer,
                tensors,
                block_table,
                num_tokens,
                handover.first_token,
                settings.max_tokens,
                channel.piece,
            )
            seconds = time.perf_counter() - started
            channel.answer(Generated(ids, tokenizer.decode(ids), seconds))

        started = time.perf_counter()
        prefill = ClusterInfo(PREFILL_CLUSTER, handover.listen_address)
        datadist.link_clusters([prefill]).raise_for_status()
        link_seconds = time.perf_counter() - started
        (link,) = datadist.links()
        channel.progress(f"linked over {link.transport}: {link.way}")

        key = BlocksCacheKey(PREFILL_CLUSTER)
        pull = Transfer(Rows(key, handover.block_table), Rows(cache, mine))
        channel.answer(moved(datadist, pull, link_seconds))
        pulled = tensors.snapshot()
        generate()
        right = datadist.plan(pull)
        offers: list[OfferedHeads] = []

        while True:
            match channel.receive():
                case AwaitPush():
                    tensors.fill(np.nan)
                    channel.answer(PushTarget(cache.cache_id, mine.tolist()))
                case Pushed():
                    generate()
                case Gather(offers):
                    tensors.fill(np.nan)
                    channel.answer(gathered(datadist, cache, mine, offers))
                    pulled = tensors.snapshot()
                    generate()
                case PlantWrongHead():
                    planted, plan = with_wrong_head(datadist, cache, mine, offers)
                    channel.answer(planted)
                    channel.answer(located(pulled, tensors, plan))
                    generate()
                case WrongBlock(position):
                    broken = list(handover.block_table)
                    entry = position // settings.block_size
                    broken[entry] = broken[(entry + 1) % num_pulled]
                    wrong = Transfer(Rows(key, broken), Rows(cache, mine))
                    channel.answer(moved(datadist, wrong, right=right))
                    channel.answer(located(pulled, tensors, datadist.plan(wrong)))
                    generate()
