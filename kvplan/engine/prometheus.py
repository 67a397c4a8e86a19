"""An engine's counters for Prometheus; needs the extra `kvplan[prometheus]`.

Use: `prometheus_client.REGISTRY.register(PrometheusCollector(datadist))`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist


class PrometheusCollector(Collector):
    """A collector that reads engines at each scrape, and holds them until it is unregistered.

    The label `cluster_id` distinguishes the engines of a process; register one collector for all.
    """

    def __init__(self, *engines: LlmDataDist) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        operations = CounterMetricFamily(
            "kvplan_operations",
            "Calls that have ended.",
            labels=("cluster_id", "operation", "status"),
        )
        nbytes = CounterMetricFamily(
            "kvplan_bytes",
            "Bytes moved by calls that succeeded.",
            labels=("cluster_id", "operation"),
        )
        seconds = HistogramMetricFamily(
            "kvplan_operation_seconds", "Duration of calls.", labels=("cluster_id", "operation")
        )
        in_flight = GaugeMetricFamily(
            "kvplan_in_flight", "Transfers and notifications in flight.", labels=("cluster_id",)
        )
        links = GaugeMetricFamily("kvplan_links", "Links.", labels=("cluster_id", "state"))
        cache_bytes = GaugeMetricFamily(
            "kvplan_cache_bytes", "Bytes of the caches.", labels=("cluster_id", "placement")
        )
        for engine in self._engines:
            name = str(engine.cluster_id)
            metrics = engine.metrics()
            in_flight.add_metric((name,), metrics["in_flight"])
            for operation, row in metrics["operations"].items():
                for status, count in row["statuses"].items():
                    operations.add_metric((name, operation, status), count)
                nbytes.add_metric((name, operation), row["nbytes"])
                histogram = row["seconds"]
                bounds = [
                    ("+Inf" if math.isinf(bound) else f"{bound:g}", count)
                    for bound, count in histogram["buckets"].items()
                ]
                seconds.add_metric((name, operation), bounds, histogram["sum"])
            for state, count in metrics["links"].items():
                links.add_metric((name, state), count)
            for placement, size in metrics["cache_bytes"].items():
                cache_bytes.add_metric((name, placement), size)
        yield from (operations, nbytes, seconds, in_flight, links, cache_bytes)
