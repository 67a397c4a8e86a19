"""An engine as it is now, as plain values: counters, links, caches, leases, what is in flight."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.engine.telemetry import EngineMetrics, Metrics

_LONGEST: Final = 100
"""Transfers in flight that are listed, the oldest first."""


def metrics_of(cluster_id: int, metrics: Metrics, engine: Engine | None) -> EngineMetrics:
    """See `LlmDataDist.metrics`."""
    cache_bytes: Counter[str] = Counter()
    links: Counter[str] = Counter()
    if engine is not None:
        engine.check_process()
        links.update(it.state.name for it in engine.links.status())
        for it, _ in engine.registry.entries():
            cache_bytes[it.cache.cache_desc.placement.name] += it.cache.cache_desc.nbytes
    return {
        "cluster_id": cluster_id,
        "in_flight": 0 if engine is None else len(engine.in_flight),
        "links": dict(links),
        "cache_bytes": dict(cache_bytes),
        "operations": metrics.snapshot(),
    }


def describe(engine: Engine) -> dict[str, Any]:
    """Everything, as values that JSON has; what `kvplan top` is told.

    Raises:
        LLMException: LLM_ENGINE_FINALIZED.
    """
    from kvplan import __version__  # it imports this room

    operations = metrics_of(engine.cluster_id, engine.metrics, engine)["operations"]
    return {
        "kvplan": __version__,
        "pid": os.getpid(),
        "command": sys.argv,
        "cluster_id": engine.cluster_id,
        "role": engine.role.name,
        "listen_address": engine.listen_address,
        "transports": list(engine.transport_names),
        "seconds": time.monotonic(),
        "operations": {
            name: {
                "statuses": row["statuses"],
                "nbytes": row["nbytes"],
                "count": row["seconds"]["count"],
                "seconds": row["seconds"]["sum"],
                "buckets": [
                    [None if math.isinf(bound) else bound, count]
                    for bound, count in row["seconds"]["buckets"].items()
                ],
            }
            for name, row in operations.items()
        },
        "links": [
            asdict(it) | {"role": it.role and it.role.name, "state": it.state.name}
            for it in engine.links.status()
        ],
        "caches": [
            {
                "cache_id": it.cache.cache_id,
                "nbytes": it.cache.cache_desc.nbytes,
                "num_tensors": it.cache.cache_desc.num_tensors,
                "placement": it.cache.cache_desc.placement.name,
                "allocated": is_allocated,
            }
            for it, is_allocated in engine.registry.entries()
        ],
        "pages": {
            "option": engine.options.pages,
            "prefault": engine.options.prefault,
            "numa_node": engine.options.numa_node,
            "populate": engine.options.populate,
            "mapped_arenas": len(mapped := engine.links.mapped()),
            "mapped_bytes": sum(arena.nbytes for _, arena in mapped),
        },
        "leases": len(engine.leases.live()),
        "in_flight": _in_flight(engine),
    }


def _in_flight(engine: Engine) -> list[dict[str, Any]]:
    now = perf_counter()
    found = sorted(engine.in_flight.operations(), key=lambda it: it.started)
    rows = []
    for it in found[:_LONGEST]:
        plan = it.plan
        rows.append(
            {
                "operation": it.name,
                "tag": it.tag,
                "peer": it.cluster_id,
                "cache_id": None if it.cache_id < 0 else it.cache_id,
                "nbytes": None if plan is None else plan.nbytes,
                "age_s": now - it.started,
            }
        )
    return rows
