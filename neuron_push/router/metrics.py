"""What the router counts, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Seconds; prefill of a long prompt takes tens of them.
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# Seconds; what the router itself adds lies far below an engine's times.
_FINE = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1, 10)
PREFIX = "neuron_push_router_"


class Metrics:
    """The router's metrics. Names are part of its interface."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests()
        self._legs()
        self._fleet()

    def _requests(self) -> None:
        self.requests = self._counter(
            "requests",
            "Requests by outcome: ok, prefill_failed, decode_failed, decode_broke_off,"
            " client_left, no_pair, no_room, late, bad_request, unauthorized, limited.",
            "outcome",
        )
        self.modes = self._counter(
            "modes",
            "Requests answered, by how their KV came to the decode engine: disagg (pushed),"
            " pull (read by it), local (computed by it).",
            "mode",
        )
        self.in_flight = self._gauge("in_flight", "Requests being served.")
        self.first_byte = self._histogram(
            "first_byte_seconds",
            "From a request's arrival to the first byte of the decode leg's answer, by mode.",
            _BUCKETS,
            "mode",
        )
        self.overhead = self._histogram(
            "overhead_seconds",
            "From a request's arrival to both its legs having been sent, waiting for room"
            " included.",
            _FINE,
        )
        self.limited = self._counter(
            "limited", "Requests turned away, by limit: in_flight, tenant.", "limit"
        )
        self.waiting = self._gauge("waiting_for_room", "Requests that wait for free KV blocks.")

    def _legs(self) -> None:
        self.leg_failures = self._counter(
            "leg_failures", "Legs that ended in an error, by leg and server.", "leg", "url"
        )
        self.retries = self._counter(
            "retries", "Requests dispatched again, by the leg that had failed.", "leg"
        )
        self.cancellations = self._counter(
            "cancellations",
            "Dispatches given up, by how far they were: prefill (not answered yet), transfer"
            " (prefill done, no token yet), decode (tokens flow).",
            "phase",
        )
        self.drain = self._histogram(
            "drain_seconds",
            "From giving a dispatch up to its decode engine holding no block for it.",
            _BUCKETS,
        )
        self.undrained = self._counter(
            "undrained", "Dispatches given up whose decode engine never confirmed the drain."
        )

    def _fleet(self) -> None:
        self.engines_ready = self._gauge("engines_ready", "Engines that can be used.", "leg")
        self.engines_known = self._gauge("engines_known", "Engines that are listed.", "leg")
        self.pairs_usable = self._gauge("pairs_usable", "Pairs that could serve a request.")
        self.pairs_resting = self._gauge("pairs_quarantined", "Pairs left out after failures.")
        self.quarantines = self._counter("quarantines", "Times that a pair was left out.")
        self.restarts = self._counter(
            "engine_restarts", "Engines seen to have been replaced by another process.", "leg"
        )
        self.canaries = self._counter(
            "canaries", "One-token requests sent through pairs as a test: ok, failed.", "outcome"
        )
        self.listings = self._counter(
            "listings", "Lists of engines read from discovery: ok, failed.", "outcome"
        )

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)
