"""Figures of workers, for vLLM's log and for /metrics of a server."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvplan.vllm.step import Figures

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class KvplanStats(KVConnectorStats):
    """Figures of one or more workers for a period."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.reset()
        if data:
            self._figures.add(data)

    def reset(self) -> None:
        """Discard all figures."""
        self._figures = Figures()
        self.data = self._figures.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add figures of another worker, or of a later period."""
        self._figures.add(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return names and values for a line of the log."""
        return self._figures.summary()

    def is_empty(self) -> bool:
        """Return True if nothing was counted."""
        return self._figures.is_empty


class KvplanMetrics(KVConnectorPromMetrics):
    """Counters and histograms of all workers of an engine.

    Their names begin with "vllm:", by which vLLM finds and removes metrics of an earlier engine.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        add = self._counter
        self._fetched = add("requests_fetched", "Requests whose KV cache was fetched.")
        self._failed = add("requests_failed", "Requests that could not be fetched.", "reason")
        self._tokens = add("tokens_fetched", "Tokens whose KV cache was fetched.")
        self._nbytes = add("bytes_fetched", "Bytes of KV cache that were fetched.")
        self._counts = {
            "offered": add("requests_offered", "Finished requests whose blocks were kept."),
            "freed": add("requests_freed", "Requests whose kept blocks are free again."),
            "expired": add("requests_expired", "Requests that were not fetched in time."),
            "pushed": add("tokens_pushed", "Fetched tokens that were pushed."),
        }
        self._transfer = self._histogram("transfer_seconds", "Duration of a transfer.")
        self._wait = self._histogram("wait_seconds", "Time until the transfer of a request.")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the figures of a period."""
        data, labels = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        self._fetched.labels(*labels).inc(len(data["tokens"]))
        self._tokens.labels(*labels).inc(sum(data["tokens"]))
        self._nbytes.labels(*labels).inc(sum(data["nbytes"]))
        for name, counter in self._counts.items():
            counter.labels(*labels).inc(data[name])
        for reason, number in data["failed"].items():
            self._failed.labels(*labels, reason).inc(number)
        for histogram, name in ((self._transfer, "transfer_s"), (self._wait, "wait_s")):
            for value in data[name]:
                histogram.labels(*labels).observe(value)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        made = self._counter_cls(
            name=f"vllm:kvplan_{name}", documentation=text, labelnames=[*self._labelnames, *labels]
        )
        if not labels:
            self._show(made)
        return made

    def _histogram(self, name: str, text: str) -> Any:
        made = self._histogram_cls(
            name=f"vllm:kvplan_{name}",
            documentation=text,
            buckets=_SECONDS,
            labelnames=self._labelnames,
        )
        self._show(made)
        return made

    def _show(self, metric: Any) -> None:
        """Show a metric as 0 in /metrics before its first event."""
        for values in self.per_engine_labelvalues.values():
            metric.labels(*values)
