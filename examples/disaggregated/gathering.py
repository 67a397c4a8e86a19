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
    clusters = [
        ClusterInfo(notification.cluster_id, notification.listen_address) for notification in offers
    ]
    datadist.link_clusters(clusters).raise_for_status()
    link_seconds = time.perf_counter() - started
    sources = [offered_rows(offer, RIGHT) for offer in offers]
    gather = Transfer(sources, Rows(cache, mine), num_tokens=offers[0].num_tokens)

    started = time.perf_counter()
    plans = datadist.plan(gather).by_part().values()
    plan_seconds = time.perf_counter() - started
    first, repeated = timed(lambda: datadist.run(gather, timeout_ms=TIMEOUT_MS))
    return Moved(
        explanation="\n\n".join(plan.explain(limit=EXPLAINED_ROWS) for plan in plans),
        nbytes=sum(plan.nbytes for plan in plans),
        num_slices=sum(plan.part.num_slices * plan.num_tensor_pairs for plan in plans),
        num_descriptors=sum(plan.num_descriptors for plan in plans),
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
    num_tokens = last.num_tokens
    right, wrong = offered_rows(last, RIGHT), offered_rows(last, WRONG)
    others = [offered_rows(offer, RIGHT) for offer in offers[:-1]]
    target = Rows(cache, mine)
    try:
        datadist.run(Transfer([*others, wrong], target, num_tokens=num_tokens))
    except LLMException as error:
        refusal = str(error)
    else:
        raise AssertionError("a gather that lacks a head was not refused")
    pull = Transfer(wrong, target, num_tokens=num_tokens)
    expected = datadist.plan(Transfer(right, target, num_tokens=num_tokens))
    planned = datadist.plan(pull)
    datadist.run(pull, timeout_ms=TIMEOUT_MS)
    return WrongHead(refusal, expected.diff(planned)), planned


def offered_rows(offer: OfferedHeads, model_id: int) -> Rows:
    """Return the blocks of the request at one prefill process."""
    return Rows(BlocksCacheKey(offer.cluster_id, model_id), offer.block_table)
