"""Measurements on their way from the workers and the scheduler half to Prometheus.

Every metric is listed once, in `COUNTERS`, `HISTOGRAMS` and `GAUGES`; the same names serve the
prefill and the decode side, each filling what happens there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from neuron_push.transfer import Snapshot

PREFIX = "neuron_push_"
# Least seconds between two tellings while transfers go on: vLLM's main loop works on each.
TOLD = 0.5

# name -> (help, label or "")
COUNTERS: dict[str, tuple[str, str]] = {
    "registrations": ("Registrations sent (decode) or accepted (prefill).", ""),
    "bytes": ("Bytes of KV posted in WRITEs (prefill).", ""),
    "copies": ("Copies (descriptors) posted in WRITEs (prefill).", ""),
    "received_bytes": ("Bytes of KV that were notified or READ (decode).", ""),
    "sends": ("Transfers that ended on the prefill side.", "outcome"),
    "receives": ("Transfers that ended on the decode side.", "outcome"),
    "cancellations": ("Transfers given up, by who or what gave them up.", "reason"),
    "handshake_failures": ("Hellos refused or unanswered.", ""),
    "links_lost": ("Peers taken for lost.", ""),
    "rotations": ("Agent generations begun to fence lost peers.", ""),
    "stale_messages": ("Messages of ended attempts or unknown peers, by kind.", "kind"),
    "rejected_messages": ("Malformed or impossible messages.", "kind"),
    "defects": ("Internal errors that failed one transfer.", ""),
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "match_seconds": (
        "From a registration's arrival to its prompt being known (prefill).",
        (0.0001, 0.001, 0.01, 0.1, 0.5, 1, 5, 30, 120),
    ),
    "handshake_seconds": (
        "From first need to all links to a prefill engine (decode).",
        (0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1, 5),
    ),
    "transfer_seconds": (
        "From the first WRITE posted to the last one landed (prefill).",
        (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
    ),
    "receive_seconds": (
        "From registration to the last byte notified (decode).",
        (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
    ),
    "transfer_copies_size": ("Copies per WRITE (prefill).", (1, 4, 16, 64, 256, 1024, 8192, 65536)),
}
GAUGES: dict[str, str] = {
    "pinned_blocks": "KV blocks held for transfers.",
    "pinned_age_seconds": "Age of the oldest hold on KV blocks.",
}


@dataclass
class PushStats(KVConnectorStats):
    """`data`: {"counters": {name: {label: total}}, "samples": {name: [...]}, "gauges": {...}}."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> PushStats:
        counters, samples = snapshot
        return cls({"counters": counters, "samples": samples, "gauges": {}})

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "samples": {}, "gauges": {}}

    def is_empty(self) -> bool:
        return not any(self.data.get(kind) for kind in ("counters", "samples", "gauges"))

    def aggregate(self, other: KVConnectorStats) -> PushStats:
        """Add another rank's or the scheduler half's measurements; gauges: the newest wins."""
        for name, labels in other.data.get("counters", {}).items():
            mine = self.data.setdefault("counters", {}).setdefault(name, {})
            for label, value in labels.items():
                mine[label] = mine.get(label, 0.0) + value
        for name, values in other.data.get("samples", {}).items():
            self.data.setdefault("samples", {}).setdefault(name, []).extend(values)
        self.data.setdefault("gauges", {}).update(other.data.get("gauges", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """A line for vLLM's periodic log."""
        counters, samples = self.data.get("counters", {}), self.data.get("samples", {})
        line: dict[str, int | float] = {
            name: round(sum(labels.values())) for name, labels in counters.items()
        }
        for name, values in samples.items():
            if values and name.endswith("_seconds"):
                line[f"{name}_p50"] = round(sorted(values)[len(values) // 2], 4)
        line.update(self.data.get("gauges", {}))
        return line


class PushPromMetrics(KVConnectorPromMetrics):
    """Registers every metric per engine with the classes vLLM passes (Ray swaps them)."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        histogram = metric_types[Histogram]
        self._counters = {
            name: counter(PREFIX + name, text, [*labelnames, label] if label else labelnames)
            for name, (text, label) in COUNTERS.items()
        }
        self._histograms = {
            name: histogram(PREFIX + name, text, labelnames, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._gauges = {
            name: gauge(PREFIX + name, text, labelnames) for name, text in GAUGES.items()
        }
        for values in per_engine_labelvalues.values():
            for name, metric in self._counters.items():
                if not COUNTERS[name][1]:
                    metric.labels(*values)
            for metric in (*self._gauges.values(), *self._histograms.values()):
                metric.labels(*values)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Record what `PushStats.data` holds for one engine."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, labels in transfer_stats_data.get("counters", {}).items():
            if name not in COUNTERS:
                continue
            for label, total in labels.items():
                where = [*values, label] if COUNTERS[name][1] else values
                self._counters[name].labels(*where).inc(total)
        for name, samples in transfer_stats_data.get("samples", {}).items():
            if name in HISTOGRAMS:
                metric = self._histograms[name].labels(*values)
                for sample in samples:
                    metric.observe(sample)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            if name in GAUGES:
                self._gauges[name].labels(*values).set(value)
