"""Every setting of a router, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from ssl import SSLContext

from neuron_push.router.dispatch import Rules
from neuron_push.router.fleet import Incast
from neuron_push.router.ingress import Keys
from neuron_push.router.legs import Limits
from neuron_push.router.places import Place


@dataclass(frozen=True)
class Settings:
    """Settings of one router. Durations are seconds, sizes are bytes, 0 is no limit."""

    prefill: Sequence[Place] = ()
    decode: Sequence[Place] = ()
    limits: Limits = field(default_factory=Limits)
    rules: Rules = field(default_factory=Rules)
    prefill_policy: str = "power_of_two"
    decode_policy: str = "power_of_two"
    preferred: Sequence[tuple[str, str]] = ()
    """Device pairs (prefill, decode), the best first; others are used when these are full."""
    incast: Incast = field(default_factory=Incast)
    most_body: int = 64 << 20
    """Longest request body; longer ones are answered 413."""
    most_in_flight: int = 0
    most_per_tenant: int = 0
    keys: Keys = field(default_factory=Keys)
    engine_key: str = ""
    """Bearer token for engines; empty: the client's own is passed on, if keys are not checked."""
    engine_tls: SSLContext | None = None
    session_header: str = "X-Session-Id"
    refresh: float = 2.0
    """How often engines are asked who they are; failures are asked about sooner."""
    ask_timeout: float = 5.0
    """How long an engine's side channel and its /health may take to answer."""
    canary_period: float = 0.0
    """How often each engine gets a one-token request through a pair; 0: only /ready does so."""
    canary_fresh: float = 30.0
    """How long a request served through a pair counts as proof of readiness."""
    canary_timeout: float = 30.0
    trace_events: int = 0
    """Trace events kept; 0 turns tracing off."""
