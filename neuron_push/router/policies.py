"""How one engine is chosen among several that could serve. A policy is a class of one method.

Policies never see an engine that is in trouble or lacks room: the fleet leaves those out.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import count
from typing import Final, Protocol

from neuron_push.errors import ConfigError
from neuron_push.router.engines import Engine
from neuron_push.router.jobs import Job, point

# Points of one engine on the ring: shares of the ring then differ by some ten percent.
POINTS: Final = 64
# A hashed engine may carry this many times the load of one chosen by load, plus one prompt,
# before hashing gives way; the consistent-hashing literature uses 1.25 to 2.
BOUND: Final = 1.5
SLACK: Final = 4096.0


class Policy(Protocol):
    """Chooses an engine."""

    def choose(self, job: Job, engines: Sequence[Engine]) -> Engine:
        """One of `engines`, which is not empty."""


class RoundRobin:
    """Each in its turn, whatever it has to do. The baseline of the simulations."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, job: Job, engines: Sequence[Engine]) -> Engine:
        """The next one."""
        return engines[next(self._turns) % len(engines)]


class PowerOfTwo:
    """The less loaded of two drawn at random: nearly as even as looking at all, and no herd."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self._draw = draw or random.Random()

    def choose(self, job: Job, engines: Sequence[Engine]) -> Engine:
        """The less loaded of two."""
        size = len(engines)
        if size == 1:
            return engines[0]
        first = int(self._draw.random() * size)
        second = int(self._draw.random() * (size - 1))
        one, two = engines[first], engines[second + (second >= first)]
        return min(one, two, key=lambda engine: engine.rank_key)


class Ring:
    """Engines on a ring of numbers. Whoever leaves takes only its own arcs along."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.members = frozenset(engines)
        owned = sorted(
            (point(f"{engine.place.url} {engine.place.side.port} {number}"), index)
            for index, engine in enumerate(engines)
            for number in range(max(1, round(POINTS * engine.place.weight)))
        )
        self._points = [place for place, _ in owned]
        self._owners = [index for _, index in owned]

    def at(self, place: int, among: Sequence[Engine]) -> Engine:
        """The engine of `among` whose point comes next."""
        first = bisect_right(self._points, place)
        allowed = self.members if among is self.engines else frozenset(among)
        for step in range(len(self._owners)):
            engine = self.engines[self._owners[(first + step) % len(self._owners)]]
            if engine in allowed:
                return engine
        raise AssertionError("no engine of `among` is on the ring")


class Hashed:
    """Consistent hashing with a bound on load; `inner` chooses when there is nothing to hash.

    Looked up on a ring that is made anew only when the engines change.
    """

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self._ring = Ring(())

    def choose(self, job: Job, engines: Sequence[Engine]) -> Engine:
        """The engine of the job's place on the ring, unless that one has too much to do."""
        place = self.place(job)
        alternative = self._inner.choose(job, engines)
        if place is None:
            return alternative
        # Fewer engines than on the ring are some that failed the job or lack room: their arcs
        # fall to the next ones, and making rings for them would cost more than it brings.
        if self._ring.engines is not engines and not self._ring.members.issuperset(engines):
            self._ring = Ring(engines)
        hashed = self._ring.at(place, engines)
        limit = BOUND * alternative.load + SLACK / hashed.place.weight
        return hashed if hashed.load <= limit else alternative

    def place(self, job: Job) -> int | None:
        """Where the job lies on the ring; None: nowhere."""
        raise NotImplementedError


class PrefixHash(Hashed):
    """Equal beginnings of prompts meet the same engine, and its prefix cache."""

    def place(self, job: Job) -> int | None:
        """By the beginning of the prompt."""
        return job.prefix


class Affinity(Hashed):
    """Requests of one session meet the same engine."""

    def place(self, job: Job) -> int | None:
        """By the session, where there is one."""
        return point(job.session) if job.session else None


class Preferred:
    """Of the engines, only those on the device that goes best with the other leg's.

    `pairs` lists (prefill device, decode device), the best first; what it does not list comes
    last. `spill` is how many times the load of the best other choice is borne before that one
    is taken: a preferred device is not worth any queue.
    """

    def __init__(self, inner: Policy, pairs: Sequence[tuple[str, str]], spill: float = 4.0) -> None:
        self._inner = inner
        self._rank = {pair: index for index, pair in reversed(list(enumerate(pairs)))}
        self._spill = spill

    def choose(self, job: Job, engines: Sequence[Engine]) -> Engine:
        """The inner policy's choice among the best ranked engines."""
        if job.partner is None or not self._rank:
            return self._inner.choose(job, engines)
        groups: dict[int, list[Engine]] = {}
        for engine in engines:
            groups.setdefault(self._of(engine, job.partner), []).append(engine)
        ordered = [groups[rank] for rank in sorted(groups)]
        chosen = self._inner.choose(job, ordered[0])
        for group in ordered[1:]:
            other = self._inner.choose(job, group)
            if chosen.load > self._spill * other.load + SLACK / chosen.place.weight:
                chosen = other
        return chosen

    def _of(self, engine: Engine, partner: Engine) -> int:
        one, two = (engine, partner) if engine.leg == "prefill" else (partner, engine)
        return self._rank.get((one.device, two.device), len(self._rank))


NAMES: Final = ("power_of_two", "prefix", "round_robin")


def make(
    name: str, pairs: Sequence[tuple[str, str]] = (), draw: random.Random | None = None
) -> Policy:
    """The policy of that name, with session affinity and preferred pairs around it."""
    if name not in NAMES:
        raise ConfigError(f"policy {name!r} is not one of: {', '.join(NAMES)}")
    inner: Policy = RoundRobin() if name == "round_robin" else PowerOfTwo(draw)
    if name == "prefix":
        inner = PrefixHash(inner)
    if name != "round_robin":
        inner = Affinity(inner)
    return Preferred(inner, pairs) if pairs else inner
