"""How long an emulated step takes. Seconds, as floats, never rounded.

    step = base + prefill tokens * per_prefill_token + (per_decode_step if anything decodes)
    transfer = latency + bytes / bandwidth

A request that computes one token decodes, also the last token of a prompt whose KV came from
elsewhere. A decode step costs the same for one request and for a full batch, as memory-bound
decoding nearly does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from neuron_push.errors import ConfigError


class Latencies(Protocol):
    """Durations of what is not really done."""

    def step(self, prefill_tokens: int, decodes: int) -> float:
        """Seconds of a step that computes so many prompt tokens and decodes so many requests."""

    def transfer(self, nbytes: int) -> float:
        """Seconds that so many bytes take between two engines; 0 without a modelled link."""


class Clock(Protocol):
    """Real time in fleets, a number in unit tests."""

    def now(self) -> float: ...
    def sleep_until(self, moment: float) -> None: ...


class RealClock:
    """The monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        left = moment - time.monotonic()
        if left > 0:
            time.sleep(left)


@dataclass
class VirtualClock:
    """Time that passes only by sleeping."""

    time: float = 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, moment: float) -> None:
        self.time = max(self.time, moment)


@dataclass(frozen=True)
class Link:
    """A network between two ranks."""

    bandwidth: float
    """Bytes per second."""
    latency: float
    """Seconds until the first byte arrives."""


@dataclass(frozen=True)
class Profile:
    """One model on one device; `source` says where the numbers come from."""

    source: str
    per_prefill_token: float = 0.0
    per_decode_step: float = 0.0
    base: float = 0.0
    link: Link | None = None

    def step(self, prefill_tokens: int, decodes: int) -> float:
        decoding = self.per_decode_step if decodes else 0.0
        return self.base + prefill_tokens * self.per_prefill_token + decoding

    def transfer(self, nbytes: int) -> float:
        return self.link.latency + nbytes / self.link.bandwidth if self.link else 0.0


PROFILES: dict[str, Profile] = {
    "instant": Profile("no modelled time: as fast as the machine allows"),
    "quick": Profile(
        "invented, for tests that need bytes to appear noticeably after their launch",
        per_prefill_token=20e-6, per_decode_step=1e-3, base=0.5e-3,
    ),
    "qwen3-32b-tp8-p5en": Profile(
        "decode: published TPOT of Qwen3-32B (TP 8, BF16) on p5en at light load, 5.6 to 5.8 ms; "
        "25 us per prefill token: this project's own choice, the one its emulated pairs were "
        "measured with, neither published nor measured on a p5en; link: two 200 Gbit/s EFA "
        "devices per GPU by specification, its latency assumed",
        per_prefill_token=25e-6, per_decode_step=5.6e-3,
        link=Link(bandwidth=50e9, latency=15e-6),
    ),
    "fast-prefill": Profile(
        "the p5en profile's decode with prefill 2.5 times as fast: invented, for loads that "
        "profile cannot follow",
        per_prefill_token=10e-6, per_decode_step=5.6e-3,
        link=Link(bandwidth=50e9, latency=15e-6),
    ),
    "qwen3-32b-tp8-trn2": Profile(
        "estimated from the p5en profile, no public run of this model on trn2: prefill scaled by "
        "dense BF16 peak (8 H200 at 989 TFLOPS over 8 logical cores at 167 TFLOPS), decode by "
        "memory bandwidth (4.8 TB/s over 0.72 TB/s per logical core); 100 Gbit/s of EFA per core, "
        "latency assumed",
        per_prefill_token=148e-6, per_decode_step=37e-3,
        link=Link(bandwidth=12.5e9, latency=20e-6),
    ),
}  # fmt: skip


def profile(name: str) -> Profile:
    """A profile by name; ConfigError names the known ones."""
    if name not in PROFILES:
        raise ConfigError(f"no cost profile {name!r}; known: {', '.join(PROFILES)}")
    return PROFILES[name]
