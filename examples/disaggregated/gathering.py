"""Decode's part where prefill runs as two processes: one request from both, and one head wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvplan import (
    BlocksCacheKey,
    Cache,
    ClusterInfo,
    LlmDataDist,
    LLMException,
    Plan,
    Rows,
    Transfer,
)

from .messages import Moved, OfferedHeads, WrongHead
from .moving import EXPLAINED_ROWS, TIMEOUT_MS, timed
from .paged_cache import BlockTable
from .shard import RIGHT, WRONG


def gathered(
    datadist: LlmDataDist, cache: Cache, mine: BlockTable, offers: Sequence[OfferedHeads]
) -> Moved:
    """Link to each, and gather the request from all into the blocks `mine` of `cache`."""
    started = time.perf_counter()
    clusters = [ClusterInfo(it.cluster_id, it.listen_address) for it in offers]
    datadist.link_clusters(clusters).raise_for_status()
    link_seconds = time.perf_counter() - started
    keys = [BlocksCacheKey(it.cluster_id, RIGHT) for it in offers]
    tables = [it.block_table for it in offers]
    num_tokens = offers[0].num_tokens

    started = time.perf_counter()
    plans = datadist.plan(
        Transfer(
            [Rows(cache, blocks) for cache, blocks in zip(keys, tables, strict=True)],
            Rows(cache, mine),
            num_tokens=num_tokens,
        )
    )
    plan_seconds = time.perf_counter() - started
    taken = [it for it in plans if it is not None]
    first, repeated = timed(
        lambda: datadist.run(
            Transfer(
                [Rows(cache, blocks) for cache, blocks in zip(keys, tables, strict=True)],
                Rows(cache, mine),
                num_tokens=num_tokens,
            ),
            timeout_ms=TIMEOUT_MS,
        )
    )
    return Moved(
        explanation="\n\n".join(it.explain(limit=EXPLAINED_ROWS) for it in taken),
        nbytes=sum(it.nbytes for it in taken),
        num_slices=sum(it.num_slices * it.num_tensor_pairs for it in taken),
        num_descriptors=sum(it.num_descriptors for it in taken),
        plan_seconds=plan_seconds,
        transfer_seconds=first,
        repeated_seconds=repeated,
        link_seconds=link_seconds,
    )


def with_wrong_head(
    datadist: LlmDataDist, cache: Cache, mine: BlockTable, offers: Sequence[OfferedHeads]
) -> tuple[WrongHead, Plan]:
    """Pull the last one's heads as if they were the heads before; first, try to gather so.

    Returns the plan of that pull, too.
    """
    last = offers[-1]
    keys = [BlocksCacheKey(it.cluster_id, RIGHT) for it in offers]
    wrong = BlocksCacheKey(last.cluster_id, WRONG)
    tables = [it.block_table for it in offers]
    num_tokens = last.num_tokens
    try:
        datadist.run(
            Transfer(
                [
                    Rows(cache, blocks)
                    for cache, blocks in zip([*keys[:-1], wrong], tables, strict=True)
                ],
                Rows(cache, mine),
                num_tokens=num_tokens,
            )
        )
    except LLMException as error:
        refusal = str(error)
    else:
        raise AssertionError("a gather that lacks a head was not refused")
    plans = [
        datadist.plan(
            Transfer(Rows(it, last.block_table), Rows(cache, mine), num_tokens=num_tokens)
        )
        for it in (keys[-1], wrong)
    ]
    datadist.pull_blocks(
        wrong, cache, last.block_table, mine, num_tokens=num_tokens, timeout_ms=TIMEOUT_MS
    )
    return WrongHead(refusal, plans[0].diff(plans[1])), plans[1]
