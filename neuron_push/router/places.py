"""Where engines are: what an operator, a file or Kubernetes says of them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from neuron_push.errors import ConfigError
from neuron_push.limits import LIMITS
from neuron_push.protocol import Address

# What may follow the # of a place.
OPTIONS: Final = ("side", "weight", "device", "ranks")


@dataclass(frozen=True)
class Place:
    """Where one engine (one data-parallel rank of it) is reached, and what is said of it."""

    url: str
    side: Address
    # Relative speed: an engine of weight 2 is given twice the work of one of weight 1.
    weight: float = 1.0
    # "trn2", "p5en" or the like, for preferred device pairs; empty: as the engine says.
    device: str = ""
    # Data-parallel ranks behind the URL, and which of them this is.
    ranks: int = 1
    rank: int = 0

    @classmethod
    def parse(cls, text: str, default_port: int) -> Place:
        """Read `http://host:port[#side=[host:]port][&weight=2][&device=trn2][&ranks=8]`.

        A comma may stand for the #, where a shell would take that for a comment.
        """
        url, _, words = text.replace(",", "#", 1).partition("#")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{text!r} is not a URL such as http://10.0.0.1:8100#side=5600")
        options = _options(words, text)
        host, port = parts.hostname, default_port
        if "side" in options:
            given, _, digits = options["side"].rpartition(":")
            host = given.strip("[]") or host
            port = _whole(digits, 65_535, "a port", text)
        return cls(
            url.rstrip("/"),
            Address(host, port),
            _weight(options.get("weight", "1"), text),
            options.get("device", ""),
            _whole(options.get("ranks", "1"), LIMITS.ranks, "a number of ranks", text),
        )

    def each_rank(self) -> list[Place]:
        """One place per data-parallel rank; their side channels have consecutive ports."""
        host, port = self.side.host, self.side.port
        return [replace(self, side=Address(host, port + i), rank=i) for i in range(self.ranks)]


@dataclass(frozen=True)
class Listing:
    """All places that a source knows at one moment."""

    prefill: Sequence[Place] = ()
    decode: Sequence[Place] = ()

    @classmethod
    def parse(cls, prefill: Iterable[str], decode: Iterable[str], default_port: int) -> Listing:
        """Read both legs' places; raises ConfigError."""
        legs = (
            tuple(place for text in texts for place in Place.parse(text, default_port).each_rank())
            for texts in (prefill, decode)
        )
        return cls(*legs)


def _options(words: str, text: str) -> dict[str, str]:
    options = dict(word.partition("=")[::2] for word in words.split("&")) if words else {}
    for name, value in options.items():
        if name not in OPTIONS or not value:
            known = ", ".join(f"{option}=" for option in OPTIONS)
            raise ConfigError(f"{text!r}: {name!r} is not understood after #; known are {known}")
    return options


def _whole(digits: str, most: int, what: str, text: str) -> int:
    if not digits.isdecimal() or not 0 < int(digits) <= most:
        raise ConfigError(f"{text!r}: {digits!r} is not {what}")
    return int(digits)


def _weight(digits: str, text: str) -> float:
    try:
        weight = float(digits)
    except ValueError:
        weight = 0.0
    if not 0.001 <= weight <= 1000:
        raise ConfigError(f"{text!r}: {digits!r} is not a weight from 0.001 to 1000")
    return weight
