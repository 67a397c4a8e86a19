"""The decode process: plans the pull of a prompt's KV cache, executes it, and generates."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from kvplan import CacheDesc, DataType, HostMemory, Placement, Transfers, plan_pull_blocks
from kvplan.transport.local import LocalTransport

from .generation import decode
from .messages import Arrival, Generated, Handover, Settings, WrongBlock
from .model import Llama
from .paged_cache import BlockPool, PagedCache, blocks_for
from .prefill import CACHE_DTYPE, cache_shape
from .tokenizer import Tokenizer
from .weights import ModelFile
from .workers import Channel

TRANSFER_TIMEOUT_MS = 10_000
REPETITIONS = 9
EXPLAINED_ROWS = 6
"""Segments, and layers, that `explain` shows before it counts the rest."""


def run(channel: Channel, settings: Settings) -> None:
    """Wait for a Handover, then pull and generate; again for every WrongBlock that follows."""
    model_file = ModelFile(settings.weights)
    model, tokenizer = Llama.from_file(model_file), Tokenizer(model_file)
    channel.progress("weights loaded; waiting for the prompt's KV cache")
    handover: Handover = channel.receive()
    num_tokens, num_pulled = len(handover.prompt), len(handover.block_table)

    # A cache of this process's own, of another size, whose blocks fell free in another order.
    needed = blocks_for(num_tokens + settings.max_tokens, settings.block_size)
    shape = cache_shape(model.config, 3 * needed, settings.block_size)
    num_tensors = 2 * model.config.layers
    # Written once, as the cache of a running engine is: its pages exist.
    tensors = [np.full(shape, np.nan, CACHE_DTYPE) for _ in range(num_tensors)]
    pool = BlockPool(3 * needed)
    pool.serve_others(seed=2)
    block_table = pool.allocate(needed)

    # The plan needs no address and no peer: only what the two caches look like, and block ids.
    theirs = CacheDesc(num_tensors, handover.shape, DataType.DT_FLOAT16, Placement.HOST)
    ours = CacheDesc(num_tensors, shape, DataType.DT_FLOAT16, Placement.HOST)
    started = time.perf_counter()
    plan = plan_pull_blocks(theirs, ours, handover.block_table, block_table[:num_pulled])
    plan_seconds = time.perf_counter() - started

    with LocalTransport() as transport, Transfers() as transfers:
        started = time.perf_counter()
        with transport.connect(handover.metadata, prefault=True) as link:
            source = link.memory(handover.addresses, theirs.tensor_nbytes)
            target = HostMemory.from_arrays(tensors)
            link_seconds = time.perf_counter() - started

            pulled = plan
            while True:
                times = []
                # The first one counts. More of them say what it costs when nothing is new to the
                # processor and its caches; the same bytes go to the same place.
                for _ in range(1 + REPETITIONS):
                    started = time.perf_counter()
                    transfers.execute(pulled, source, target, timeout_ms=TRANSFER_TIMEOUT_MS)
                    times.append(time.perf_counter() - started)
                channel.answer(
                    Arrival(
                        explanation=pulled.explain(limit=EXPLAINED_ROWS),
                        difference=plan.diff(pulled),
                        nbytes=pulled.nbytes,
                        num_slices=pulled.num_slices * pulled.num_tensor_pairs,
                        num_descriptors=pulled.num_descriptors,
                        plan_seconds=plan_seconds,
                        link_seconds=link_seconds,
                        transfer_seconds=times[0],
                        repeated_seconds=median(times[1:]),
                    )
                )
                started = time.perf_counter()
                ids = decode(
                    model,
                    tokenizer,
                    PagedCache(tensors),
                    block_table,
                    num_tokens,
                    handover.first_token,
                    settings.max_tokens,
                    channel.piece,
                )
                seconds = time.perf_counter() - started
                channel.answer(Generated(ids, tokenizer.decode(ids), seconds))

                wrong: WrongBlock = channel.receive()
                broken = list(handover.block_table)
                entry = wrong.position // settings.block_size
                broken[entry] = broken[(entry + 1) % num_pulled]
                pulled = plan_pull_blocks(theirs, ours, broken, block_table[:num_pulled])
