"""What the router counts, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Seconds; prefill of a long prompt takes tens of them.
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The router's metrics. Names are part of its interface."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "neuron_push_router_"
        self.requests = Counter(
            prefix + "requests",
            "Requests by outcome: ok, prefill_failed, decode_failed, decode_broke_off,"
            " client_left, no_pair, bad_request.",
            ["outcome"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            prefix + "in_flight", "Requests being served.", registry=self.registry
        )
        self.first_byte = Histogram(
            prefix + "first_byte_seconds",
            "From dispatch to the first byte of the decode leg's answer.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.leg_failures = Counter(
            prefix + "leg_failures",
            "Legs that ended in an error, by leg and server.",
            ["leg", "url"],
            registry=self.registry,
        )
        self.engines_ready = Gauge(
            prefix + "engines_ready", "Engines that can be used.", ["leg"], registry=self.registry
        )
        self.restarts = Counter(
            prefix + "engine_restarts",
            "Engines seen to have been replaced by another process.",
            ["leg"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)
