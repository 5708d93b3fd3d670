"""The engines that a router knows: where they are, who they say they are, and which pair up."""

from __future__ import annotations

import itertools
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from neuron_push.errors import ConfigError
from neuron_push.protocol import Address, EngineInfo

Leg = Literal["prefill", "decode"]

ROLES = {
    "prefill": ("kv_producer", "producer", "kv_both", "both"),
    "decode": ("kv_consumer", "consumer", "kv_both", "both"),
}


@dataclass(frozen=True)
class Place:
    """Where one engine is reached: its OpenAI server and its side channel."""

    url: str
    side: Address

    @classmethod
    def parse(cls, text: str, default_port: int) -> Place:
        """Read `http://host:port[#side=[host:]port]`; a comma may stand for the #."""
        url, _, options = text.replace(",", "#", 1).partition("#")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{text!r} is not a URL such as http://10.0.0.1:8100#side=5600")
        host, port = parts.hostname, default_port
        if options:
            name, _, value = options.partition("=")
            if name != "side" or not value:
                raise ConfigError(f"{text!r}: after # only side=[host:]port is understood")
            given, _, digits = value.rpartition(":")
            host = given.strip("[]") or host
            port = _port(digits, text)
        return cls(url.rstrip("/"), Address(host, port))


def _port(digits: str, text: str) -> int:
    if not digits.isdecimal() or not 0 < int(digits) < 65_536:
        raise ConfigError(f"{text!r}: {digits!r} is not a port")
    return int(digits)


@dataclass
class Engine:
    """One engine as last seen. Only the event loop's thread touches it."""

    leg: Leg
    place: Place
    # What it last said of itself; None until it has answered once.
    info: EngineInfo | None = None
    # Why it cannot be used at the moment; empty when it can.
    trouble: str = "not asked yet"
    in_flight: int = 0
    restarts: int = 0
    # Position in the order of dispatches, for the least recently used one among equals.
    last_used: int = 0

    @property
    def name(self) -> str:
        """For messages: the engine id when known, and the URL."""
        return f"{self.info.engine} at {self.place.url}" if self.info else self.place.url

    def seen(self, info: EngineInfo) -> bool:
        """Record an answer; True if another process answers than the last time."""
        restarted = self.info is not None and (
            (self.info.engine, self.info.incarnation) != (info.engine, info.incarnation)
        )
        self.restarts += restarted
        self.info = info
        self.trouble = self._objection(info)
        return restarted

    def lost(self, reason: str) -> None:
        """Record that it does not answer. What it said before is kept, to notice a restart."""
        self.trouble = reason

    def _objection(self, info: EngineInfo) -> str:
        if info.role not in ROLES[self.leg]:
            return f"its kv_role is {info.role!r}, which cannot serve as {self.leg}"
        if "push" not in info.modes:
            return f"it does not serve push, only: {', '.join(info.modes) or 'nothing'}"
        if len(info.ranks) < info.world:
            return f"starting: {len(info.ranks)} of {info.world} worker ranks have announced"
        return ""

    def report(self) -> dict[str, Any]:
        """For people and scripts."""
        info = self.info
        return {
            "url": self.place.url,
            "side_channel": f"{self.place.side.host}:{self.place.side.port}",
            "engine": info.engine if info else None,
            "ready": not self.trouble,
            "trouble": self.trouble or None,
            "in_flight": self.in_flight,
            "restarts": self.restarts,
            "free_blocks": info.free_blocks if info else -1,
            "total_blocks": info.total_blocks if info else -1,
        }


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine that can serve a request together."""

    prefill: Engine
    decode: Engine


class NoPair(Exception):
    """No pair can serve a request now; the text says why for each."""


@dataclass
class Fleet:
    """All engines of one router."""

    prefill: Sequence[Engine]
    decode: Sequence[Engine]
    _dispatches: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    def pairs(self) -> Iterator[tuple[Pair, list[str]]]:
        """Every pair with the reasons against it; none when it is usable."""
        for prefill, decode in itertools.product(self.prefill, self.decode):
            yield Pair(prefill, decode), objections(prefill, decode)

    def choose(self) -> Pair:
        """The least loaded usable pair; raises NoPair with every reason."""
        candidates, reasons = [], []
        for pair, against in self.pairs():
            if against:
                names = f"{pair.prefill.name} -> {pair.decode.name}"
                reasons.append(f"{names}: {'; '.join(against)}")
            else:
                candidates.append(pair)
        if not candidates:
            raise NoPair("no prefill/decode pair is usable: " + " | ".join(reasons))
        pair = min(candidates, key=_load)
        pair.prefill.last_used = pair.decode.last_used = next(self._dispatches)
        return pair

    def report(self) -> dict[str, Any]:
        """The fleet as JSON: engines, and every pair with the reasons against it."""
        return {
            "prefill": [engine.report() for engine in self.prefill],
            "decode": [engine.report() for engine in self.decode],
            "pairs": [
                {
                    "prefill": pair.prefill.place.url,
                    "decode": pair.decode.place.url,
                    "usable": not against,
                    "reasons": against,
                }
                for pair, against in self.pairs()
            ],
        }


def objections(prefill: Engine, decode: Engine) -> list[str]:
    """Why the two cannot serve a request together now, one line each."""
    found = [
        f"{engine.leg} engine {engine.name}: {engine.trouble}"
        for engine in (prefill, decode)
        if engine.trouble
    ]
    if found or prefill.info is None or decode.info is None:
        return found
    return prefill.info.semantics.differences(decode.info.semantics)


def _load(pair: Pair) -> tuple[int, int, int, int]:
    """Fewest requests in flight, then most free KV blocks, then longest unused."""
    infos = [engine.info for engine in (pair.decode, pair.prefill) if engine.info]
    free = sum(info.free_blocks for info in infos)
    in_flight = pair.prefill.in_flight + pair.decode.in_flight
    return (in_flight, -free, pair.decode.last_used, pair.prefill.last_used)
