"""Requests on their way through the router: what is known of each, for itself and for people."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from neuron_push.router import bodies
from neuron_push.router.engines import Engine
from neuron_push.router.jobs import Job
from neuron_push.tracing import Ring, TraceContext

Kind = Literal["push", "pull", "local"]
# What the response header and the counter call each.
SHOWN: Final[Mapping[Kind, str]] = {"push": "disagg", "pull": "pull", "local": "local"}

# What travels on from the client. The rest is either about its own connection or would steer
# the engine (data-parallel rank, session affinity).
FORWARDED: Final = ("Authorization", "traceparent", "tracestate", "baggage")
# A request counts as slow from this many seconds to its first byte; the newest are kept.
SLOW: Final = 1.0
MOST_SLOW: Final = 50


@dataclass
class Route:
    """One attempt: its engines, and the name under which they meet."""

    kind: Kind
    prefill: Engine | None
    # Chosen late in pull mode.
    decode: Engine | None
    transfer: str = field(default_factory=bodies.new_transfer_id)


@dataclass(eq=False)
class Flight:
    """One client's request."""

    path: str
    body: bodies.Body
    job: Job
    request: str
    headers: dict[str, str]
    arrived: float
    tenant: str = ""
    # When the first byte must have come, on the monotonic clock; None: whenever.
    deadline: float | None = None
    route: Route | None = None
    attempts: int = 0
    # waiting, prefill, transfer, decode
    phase: str = "waiting"
    first_byte: float | None = None
    # Engines between which its KV moves, until its first byte comes.
    moving: list[Engine] = field(default_factory=list)
    # The client's span and ours below it, while this router traces; engines' lie below ours.
    parent: TraceContext | None = None
    span: TraceContext | None = None

    @property
    def chat(self) -> bool:
        """Whether it is a chat completion."""
        return self.path.endswith("/chat/completions")

    def budget(self, kv: float | None) -> float | None:
        """Seconds that the KV may take: the setting `kv`, or what is left if that is less."""
        if self.deadline is None:
            return kv
        left = max(0.001, self.deadline - time.monotonic())
        return left if kv is None else min(kv, left)

    def moves(self, engine: Engine | None) -> None:
        """Its KV leaves this engine, or comes to it."""
        if engine is not None:
            engine.moving += 1
            self.moving.append(engine)

    def moved(self) -> None:
        """Its KV is where it belongs, or will never be. Idempotent."""
        for engine in self.moving:
            engine.moving -= 1
        self.moving.clear()

    def report(self, now: float) -> dict[str, Any]:
        """For people and scripts."""
        route = self.route
        return {
            "request": self.request,
            "transfer": route.transfer if route else None,
            "tenant": self.tenant,
            "mode": SHOWN[route.kind] if route else None,
            "prefill": route.prefill.place.url if route and route.prefill else None,
            "decode": route.decode.place.url if route and route.decode else None,
            "phase": self.phase,
            "prompt_tokens": self.job.prompt_tokens,
            "attempts": self.attempts,
            "age": round(now - self.arrived, 4),
            "first_byte": None if self.first_byte is None else round(self.first_byte, 4),
        }


class Flights:
    """All requests in the router, the newest slow ones, and the trace of both."""

    def __init__(self, ring: Ring | None = None) -> None:
        self.ring = ring
        self._flights: set[Flight] = set()
        self._slow: deque[dict[str, Any]] = deque(maxlen=MOST_SLOW)

    def begin(self, flight: Flight) -> None:
        """A request has come; while tracing, engines hear of a span of ours."""
        self._flights.add(flight)
        if self.ring is not None:
            flight.parent = TraceContext.parse(flight.headers.get("traceparent", ""))
            flight.span = TraceContext.below(flight.parent)
            flight.headers["traceparent"] = str(flight.span)

    def end(self, flight: Flight) -> None:
        """It has been answered, well or not. Idempotent."""
        self._flights.discard(flight)
        if flight.first_byte is not None and flight.first_byte >= SLOW:
            self._slow.append(flight.report(time.monotonic()))
        self.mark(flight, "ended")

    def mark(self, flight: Flight, name: str, detail: str = "") -> None:
        """Record a trace event of the flight's present attempt."""
        if self.ring is not None and flight.route is not None:
            self.ring.add(name, flight.route.transfer, detail)

    def chosen(self, flight: Flight) -> None:
        """An attempt begins: its events carry the transfer's name from here on."""
        route = flight.route
        if self.ring is None or route is None:
            return
        engines = [e.info.engine for e in (route.prefill, route.decode) if e and e.info]
        self.ring.add("arrived", route.transfer, flight.request, at=flight.arrived)
        self.ring.add("chosen", route.transfer, f"{route.kind} {' '.join(engines)}")
        if flight.span is not None:
            # A later attempt gets a span of its own, below that of the request.
            first = flight.attempts == 1
            above = flight.parent if first else flight.span
            own = flight.span if first else TraceContext.below(flight.span)
            self.ring.add("trace context", route.transfer, f"{own} {above or ''}")

    def report(self) -> dict[str, Any]:
        """Everything under way, the oldest first, and what was slow."""
        now = time.monotonic()
        oldest = sorted(self._flights, key=lambda flight: flight.arrived)
        return {
            "in_flight": [flight.report(now) for flight in oldest[:1000]],
            "slow": list(self._slow),
        }
