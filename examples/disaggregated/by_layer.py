"""Pushing the prompt's cache while it is computed, each layer as soon as it is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvplan import Cache, CacheIndex, KvCacheExtParam, LayerTask, LlmDataDist, Rows, Transfer

from .device import tensors_of
from .generation import prefill
from .messages import DECODE_CLUSTER, MovedByLayer, PushTarget
from .model import Llama
from .moving import TIMEOUT_MS
from .paged_cache import BlockTable, blocks_for

KEYS_AND_VALUES = KvCacheExtParam(tensor_num_per_layer=2)
"""The two tensors of a layer become ready together."""


def pushed_by_layer(
    datadist: LlmDataDist,
    cache: Cache,
    block_table: BlockTable,
    target: PushTarget,
    model: Llama,
    prompt: Sequence[int],
    progress: Callable[[str], None],
) -> MovedByLayer:
    """Compute `prompt` into `cache`, pushing to `target` meanwhile.

    One task for each chunk of the prompt: it takes the blocks that the chunk completes, for no
    block may change while it moves.
    """
    there = CacheIndex(DECODE_CLUSTER, target.cache_id)
    tensors = tensors_of(datadist, cache)
    tasks: list[LayerTask] = []
    first = 0
    in_ready = []

    def begin(end: int) -> Callable[[int], None]:
        nonlocal first
        complete = end == len(prompt)
        last = blocks_for(end, tensors.block_size) if complete else end // tensors.block_size
        if first == last:
            return lambda layer: None
        task = datadist.layered(
            Transfer(
                Rows(cache, block_table[first:last]),
                Rows(there, target.block_table[first:last]),
                layers=KEYS_AND_VALUES,
            )
        )
        first = last
        tasks.append(task)

        def written(layer: int) -> None:
            started = time.perf_counter()
            task.ready(layer)
            in_ready.append(time.perf_counter() - started)

        return written

    started = time.perf_counter()
    prefill(model, prompt, tensors, block_table, progress, begin)
    computed = time.perf_counter()
    for task in tasks:
        task.wait(TIMEOUT_MS)
    return MovedByLayer(
        plans=[repr(task.plan) for task in tasks],
        nbytes=sum(task.plan.nbytes for task in tasks),
        compute_seconds=computed - started,
        ready_seconds=in_ready,
        visible_seconds=time.perf_counter() - computed,
    )
