"""Who provides what: every (layer, head, token) of a decode rank gets exactly one prefill rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from neuron_push.errors import IncompatiblePair
from neuron_push.geometry import Geometry, Group
from neuron_push.plan.stripe import WHOLE, Stripe, unit_of

__all__ = ["Ask", "assign"]


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What one decode rank wants of one prefill rank.

    `heads` holds, per group of the decode rank, the global KV heads to send, and `stripe` which
    tokens of them. Layers are not listed: the prefill rank sends every layer that both hold (its
    pipeline stage).
    """

    heads: tuple[tuple[int, ...], ...]
    stripe: Stripe = WHOLE


def assign(destinations: Sequence[Geometry], sources: Sequence[Geometry]) -> list[list[Ask | None]]:
    """Divide what every decode rank holds among the prefill ranks.

    Pure and deterministic. Where several prefill ranks hold replicas of a head, all of them work:
    as many decode ranks as hold replicas too share them out, and each has its tokens striped over
    those that fall to it. Heads whose replicas meet only in part (ranks in an order of their own)
    are not striped, nor is anything beside state pages: one replica then provides them whole.

    Returns:
        For each decode rank one entry per prefill rank, None where that rank is not needed.

    Raises:
        IncompatiblePair: groups do not correspond, stages overlap, or nobody holds some head of
            some layer; one line per reason.
    """
    for destination in destinations:
        _match_groups(destination, sources)
    decode, prefill = (
        tuple(tuple(map(Holding.of, rank.groups)) for rank in side)
        for side in (destinations, sources)
    )
    division = Division(decode, prefill, unit_of((*destinations, *sources)))
    return [division.of_rank(seat) for seat in range(len(destinations))]


class Holding(NamedTuple):
    """What one rank holds of one group."""

    layers: frozenset[int]
    heads: tuple[int, ...]

    @classmethod
    def of(cls, group: Group) -> Holding:
        """The layers and heads of a group."""
        return cls(frozenset(plane.layer for plane in group.planes), group.heads)


class Part(NamedTuple):
    """One head of one group from one prefill rank: its whole prompt, or one share of several."""

    rank: int
    group: int
    head: int
    share: int
    shares: int


@dataclass(frozen=True, slots=True)
class Division:
    """Both engines' ranks, by rank and group."""

    decode: tuple[tuple[Holding, ...], ...]
    prefill: tuple[tuple[Holding, ...], ...]
    unit: int

    def of_rank(self, seat: int) -> list[Ask | None]:
        """What one decode rank asks of each prefill rank."""
        parts = list(self._parts(seat, striped=bool(self.unit)))
        kinds = {(part.rank, part.share, part.shares) for part in parts}
        if len(kinds) > len({part.rank for part in parts}):
            # An Ask has one stripe for all its heads.
            parts = list(self._parts(seat, striped=False))
        asks: list[Ask | None] = [None] * len(self.prefill)
        for rank in {part.rank for part in parts}:
            own = [part for part in parts if part.rank == rank]
            share, shares = own[0].share, own[0].shares
            stripe = Stripe(share, shares, self.unit) if shares > 1 else WHOLE
            asks[rank] = Ask(self._heads(seat, own), stripe)
        return asks

    def _heads(self, seat: int, parts: Sequence[Part]) -> tuple[tuple[int, ...], ...]:
        """Heads in the order in which the decode rank stores them."""
        wanted = {(part.group, part.head) for part in parts}
        return tuple(
            tuple(head for head in holding.heads if (index, head) in wanted)
            for index, holding in enumerate(self.decode[seat])
        )

    def _parts(self, seat: int, *, striped: bool) -> Iterator[Part]:
        missing: list[str] = []
        for index, holding in enumerate(self.decode[seat]):
            stages = self._stages(index, holding.layers)
            uncovered = holding.layers.difference(*stages)
            if uncovered:
                missing.append(f"group {index}: no prefill rank holds {_name('layer', uncovered)}")
            for stage, ranks in stages.items():
                replicas = {head: self._holders(index, head, ranks) for head in holding.heads}
                lost = {head for head, found in replicas.items() if not found}
                if lost:
                    missing.append(
                        f"group {index}: no prefill rank holds {_name('head', lost)} of "
                        f"{_name('layer', stage)}"
                    )
                for head in holding.heads if not missing else ():
                    chosen = [replicas[head][seat % len(replicas[head])]]
                    if striped:
                        chosen = _share(replicas[head], *self._place(seat, index, head))
                    for number, rank in enumerate(chosen):
                        yield Part(rank, index, head, number, len(chosen))
        if missing:
            raise IncompatiblePair(
                "prefill ranks do not hold what decode needs", differences=missing
            )

    def _stages(self, index: int, layers: frozenset[int]) -> dict[frozenset[int], list[int]]:
        """Prefill ranks by the part of `layers` that they hold; parts are disjoint."""
        stages: dict[frozenset[int], list[int]] = {}
        for rank, groups in enumerate(self.prefill):
            if stage := layers & groups[index].layers:
                stages.setdefault(stage, []).append(rank)
        if sum(map(len, stages)) > len(frozenset[int]().union(*stages)):
            # An Ask names heads only, so two such ranks could not tell their layers apart.
            raise IncompatiblePair(f"group {index}: prefill ranks hold layers that overlap in part")
        return stages

    def _holders(self, index: int, head: int, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if head in self.prefill[rank][index].heads]

    def _place(self, seat: int, index: int, head: int) -> tuple[int, int]:
        """A decode rank's place among those with the same layers of a head, and their number."""
        layers = self.decode[seat][index].layers
        seats = [
            other
            for other, groups in enumerate(self.decode)
            if groups[index].layers == layers and head in groups[index].heads
        ]
        return seats.index(seat), len(seats)


def _share(replicas: list[int], place: int, places: int) -> list[int]:
    """The replicas that serve one of `places` decode ranks; all are in use, evenly."""
    first, end = (at * len(replicas) // places for at in (place, place + 1))
    return replicas[first : max(end, first + 1)]


def _match_groups(destination: Geometry, sources: Sequence[Geometry]) -> None:
    decode = tuple(group.kind for group in destination.groups)
    for rank, source in enumerate(sources):
        prefill = tuple(group.kind for group in source.groups)
        if prefill != decode:
            raise IncompatiblePair(
                f"KV groups: prefill rank {rank} has {prefill}, decode has {decode}"
            )


def _name(noun: str, numbers: frozenset[int] | set[int]) -> str:
    """Numbers as ranges: "layers 0-3, 7"."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"{noun}{'s' if len(ordered) > 1 else ''} {text}"
