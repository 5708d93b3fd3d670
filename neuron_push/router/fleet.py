"""All engines of a router: which of them pair up, and the choice of a pair."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from neuron_push.router.engines import Engine, Leg
from neuron_push.router.jobs import Job
from neuron_push.router.places import Place
from neuron_push.router.policies import Policy, PowerOfTwo
from neuron_push.router.quarantine import Quarantine

# Pairs that /pairs lists one by one; of a larger fleet it lists the unusable ones first.
MOST_LISTED: Final = 10_000
# Reasons that one error message repeats.
MOST_REASONS: Final = 20


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine that can serve a request together."""

    prefill: Engine
    decode: Engine


class NoPair(Exception):
    """No pair can serve a request now; the text says why."""


class NoRoom(NoPair):
    """Pairs would do, but not now: no KV blocks are free, or too much KV is on its way."""


@dataclass(frozen=True)
class Incast:
    """How many transfers of KV may meet at one engine; 0 is no limit.

    Many senders into one receiver overrun its links: each transfer takes longer than all of them
    one after another would. What is over the limit waits in the router.
    """

    into: int = 0
    out_of: int = 0

    def open(self, leg: Leg, engines: Sequence[Engine]) -> Sequence[Engine]:
        """Those that may take part in one more transfer; raises NoRoom."""
        limit = self.into if leg == "decode" else self.out_of
        if not limit:
            return engines
        found = [engine for engine in engines if engine.moving < limit]
        if not found:
            raise NoRoom(f"{limit} transfers are under way at every {leg} engine")
        return found


@dataclass(frozen=True)
class Kind:
    """Usable engines whose caches mean the same."""

    prefill: tuple[Engine, ...]
    decode: tuple[Engine, ...]


class Fleet:
    """The engines of one router. Only the event loop's thread touches it."""

    def __init__(
        self,
        prefill: Iterable[Engine] = (),
        decode: Iterable[Engine] = (),
        *,
        prefill_policy: Policy | None = None,
        decode_policy: Policy | None = None,
        incast: Incast | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.prefill: list[Engine] = []
        self.decode: list[Engine] = []
        self.quarantine = Quarantine()
        self._policies: dict[Leg, Policy] = {
            "prefill": prefill_policy or PowerOfTwo(),
            "decode": decode_policy or PowerOfTwo(),
        }
        self._incast = incast or Incast()
        self._clock = clock
        self._dispatches = itertools.count(1)
        self._kinds: list[Kind] | None = None
        # Every usable decode engine that pairs with some prefill engine.
        self._decodes: tuple[Engine, ...] = ()
        self._kind_of: dict[Engine, Kind] = {}
        for engine in (*prefill, *decode):
            self.add(engine)

    # ------------------------------------------------------------------ members

    @property
    def engines(self) -> list[Engine]:
        """All of them, usable or not."""
        return [*self.prefill, *self.decode]

    def add(self, engine: Engine) -> None:
        """Take an engine in."""
        engine.changed = self._forget_kinds
        self._of(engine.leg).append(engine)
        self._forget_kinds()

    def remove(self, engine: Engine) -> None:
        """Give an engine no more work; what it has goes on."""
        self._of(engine.leg).remove(engine)
        self.quarantine.forget(engine)
        self._forget_kinds()

    def compare(self, leg: Leg, places: Sequence[Place]) -> tuple[list[Place], list[Engine]]:
        """(places that are new, engines whose place is gone)."""
        here = {engine.place for engine in self._of(leg)}
        there = set(places)
        gone = [engine for engine in self._of(leg) if engine.place not in there]
        return [place for place in dict.fromkeys(places) if place not in here], gone

    def _of(self, leg: Leg) -> list[Engine]:
        return self.prefill if leg == "prefill" else self.decode

    def _forget_kinds(self) -> None:
        self._kinds = None

    # ------------------------------------------------------------------ choice

    def choose(self, job: Job | None = None) -> Pair:
        """A pair for the job: decode first, as its room is scarce; raises NoPair or NoRoom."""
        job = job or Job()
        self.kinds()
        if not self._decodes:
            raise NoPair("no prefill/decode pair is usable: " + self._reasons())
        job.partner = None
        decode = self._decode_for(job)
        job.partner = decode
        partners = self._partners(self._kind_of[decode], decode, job)
        prefill = self._policies["prefill"].choose(job, partners)
        return self._chosen(Pair(prefill, decode))

    def choose_prefill(self, job: Job) -> Engine:
        """A prefill engine, for a request whose decode engine is chosen late."""
        kinds = self.kinds()
        engines = [engine for kind in kinds if kind.decode for engine in kind.prefill]
        if not engines:
            raise NoPair("no prefill/decode pair is usable: " + self._reasons())
        job.partner = None
        free = self._incast.open("prefill", _without(tuple(engines), job))
        return self._policies["prefill"].choose(job, free)

    def choose_decode(self, job: Job, prefill: Engine) -> Pair:
        """The decode engine for a prompt that `prefill` holds; raises NoPair or NoRoom."""
        self.kinds()
        kind = self._kind_of.get(prefill)
        if kind is None or not kind.decode:
            raise NoPair(f"no decode engine goes with {prefill.name}: " + self._reasons())
        job.partner = prefill
        engines = self._rested(
            _without(kind.decode, job), lambda decode: Pair(prefill, decode), job
        )
        engines = self._incast.open("decode", engines)
        return self._chosen(Pair(prefill, self._with_room(job, engines)))

    def choose_local(self, job: Job) -> Engine:
        """A decode engine that serves a request alone; raises NoPair or NoRoom."""
        engines = tuple(engine for engine in self.decode if not engine.trouble)
        if not engines:
            raise NoPair("no decode engine is usable: " + self._reasons())
        job.partner = None
        decode = self._with_room(job, _without(engines, job))
        decode.last_used = next(self._dispatches)
        return decode

    def _decode_for(self, job: Job) -> Engine:
        """A decode engine with room, one that some prefill engine may push to if there is any."""
        engines = _without(self._decodes, job)
        if self.quarantine:
            resting = self.quarantine.resting_by_decode(self._clock())
            paired = [
                engine for engine in engines if resting[engine] < len(self._kind_of[engine].prefill)
            ]
            engines = paired or engines
        return self._with_room(job, self._incast.open("decode", engines))

    def _with_room(self, job: Job, engines: Sequence[Engine]) -> Engine:
        """The policy's choice, and where that has no room, its choice among those that have."""
        policy = self._policies["decode"]
        engine = policy.choose(job, engines)
        if engine.admits(job):
            return engine
        roomy = [engine for engine in engines if engine.admits(job)]
        if not roomy:
            raise NoRoom(
                f"no decode engine has KV blocks free for about {job.tokens} tokens; the most is"
                f" {max(engine.free_blocks for engine in engines):g} blocks"
            )
        return policy.choose(job, roomy)

    def _partners(self, kind: Kind, decode: Engine, job: Job) -> Sequence[Engine]:
        engines = self._incast.open("prefill", _without(kind.prefill, job))
        return self._rested(engines, lambda prefill: Pair(prefill, decode), job)

    def _rested(
        self, engines: Sequence[Engine], pair: Callable[[Engine], Pair], job: Job
    ) -> Sequence[Engine]:
        """Those whose pair does not rest; if all do, the one that is due first."""
        if not self.quarantine:
            return engines
        now = self._clock()

        def until(engine: Engine) -> float:
            both = pair(engine)
            return self.quarantine.until((both.prefill, both.decode))

        rested = [engine for engine in engines if until(engine) <= now]
        return rested or [min(engines, key=until)]

    def _chosen(self, pair: Pair) -> Pair:
        pair.prefill.last_used = pair.decode.last_used = next(self._dispatches)
        return pair

    # ------------------------------------------------------------------ what pairs up

    def kinds(self) -> list[Kind]:
        """Usable engines by what their caches mean; made anew when an engine has changed."""
        if self._kinds is None:
            found: dict[Hashable, tuple[list[Engine], list[Engine]]] = {}
            for engine in self.engines:
                if engine.info is not None and not engine.trouble:
                    same = engine.info.semantics
                    same = replace(same, extra=tuple(sorted(same.extra)))
                    sides = found.setdefault(same, ([], []))
                    sides[engine.leg == "decode"].append(engine)
            self._kinds = [Kind(tuple(p), tuple(d)) for p, d in found.values()]
            self._kind_of = {e: kind for kind in self._kinds for e in (*kind.prefill, *kind.decode)}
            self._decodes = tuple(d for kind in self._kinds if kind.prefill for d in kind.decode)
        return self._kinds

    def usable_pairs(self) -> int:
        """How many pairs could serve a request now, but for those in quarantine."""
        pairs = sum(len(kind.prefill) * len(kind.decode) for kind in self.kinds())
        return max(0, pairs - self.quarantine.resting(self._clock()))

    def pairs(self) -> Iterator[tuple[Pair, list[str]]]:
        """Every pair with the reasons against it; none when it is usable."""
        now = self._clock()
        for prefill, decode in itertools.product(self.prefill, self.decode):
            against = objections(prefill, decode)
            if not against and (rests := self.quarantine.objection((prefill, decode), now)):
                against = [rests]
            yield Pair(prefill, decode), against

    def reasons(self) -> list[str]:
        """What stands against engines and pairs, without repeats."""
        lines = dict.fromkeys(
            f"{engine.leg} engine {engine.name}: {engine.trouble}"
            for engine in self.engines
            if engine.trouble
        )
        if len(self.prefill) * len(self.decode) <= MOST_LISTED:
            lines.update(dict.fromkeys(line for _, against in self.pairs() for line in against))
        for leg in ("prefill", "decode"):
            if not self._of(leg):
                lines[f"no {leg} engine is known"] = None
        return list(lines)

    def _reasons(self) -> str:
        lines = self.reasons()
        more = f" | and {len(lines) - MOST_REASONS} more" if len(lines) > MOST_REASONS else ""
        return " | ".join(lines[:MOST_REASONS]) + more

    def report(self) -> dict[str, Any]:
        """The fleet as JSON: engines, and every pair with the reasons against it."""
        rows = itertools.islice(self.pairs(), MOST_LISTED)
        return {
            "prefill": [engine.report() for engine in self.prefill],
            "decode": [engine.report() for engine in self.decode],
            "usable_pairs": self.usable_pairs(),
            "pairs": [
                {
                    "prefill": pair.prefill.place.url,
                    "decode": pair.decode.place.url,
                    "usable": not against,
                    "reasons": against,
                }
                for pair, against in rows
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


def _without(engines: tuple[Engine, ...], job: Job) -> Sequence[Engine]:
    """Engines that have not failed this job; all of them if all have."""
    if not job.excluded:
        return engines
    return [engine for engine in engines if engine not in job.excluded] or engines


__all__ = ["Fleet", "Incast", "Kind", "NoPair", "NoRoom", "Pair", "objections"]
