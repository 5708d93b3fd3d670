"""Parts of the layers: what a prompt's tokens can travel as while a step still computes them.

A prefill rank divides its layers, in the order of their numbers, into a few parts. The plan of a
part is that of the pair with the other layers left out of prefill's geometry. Tokens travel either
whole or part by part, and have landed when every part of them has.
"""

from __future__ import annotations

from itertools import pairwise

from msgspec.structs import replace

from neuron_push.errors import PlanError
from neuron_push.geometry import Geometry
from neuron_push.plan import Ask, Means, Plan, decide
from neuron_push.rendezvous.ranges import RangeSet

# More parts leave less to send when the last layer is computed, and make smaller WRITEs.
MOST_PARTS = 8


def parts_of(geometry: Geometry) -> list[frozenset[int]]:
    """Layers of a rank in parts of equal size, in ascending order."""
    layers = sorted({plane.layer for group in geometry.groups for plane in group.planes})
    count = min(MOST_PARTS, len(layers))
    edges = [len(layers) * index // count for index in range(count + 1)] if count else []
    return [frozenset(layers[low:high]) for low, high in pairwise(edges)]


def part_plans(source: Geometry, destination: Geometry, ask: Ask, min_run: int) -> tuple[Plan, ...]:
    """A direct plan per part of prefill's layers; none if there is only one, or no direct way."""
    parts = parts_of(source)
    if len(parts) < 2:
        return ()
    try:
        plans = tuple(
            decide(_only(source, part), destination, ask, Means(min_run=min_run)) for part in parts
        )
    except PlanError:
        return ()
    return plans if all(plan.way == "direct" for plan in plans) else ()


def _only(geometry: Geometry, layers: frozenset[int]) -> Geometry:
    groups = [
        replace(group, planes=tuple(plane for plane in group.planes if plane.layer in layers))
        for group in geometry.groups
    ]
    return replace(geometry, groups=tuple(groups))


class Parted:
    """Ranges of tokens, known part by part."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[int, RangeSet] = {}

    def of(self, part: int) -> RangeSet:
        """What is known of one part."""
        return self._parts.setdefault(part, RangeSet())

    def add(self, part: int, parts: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of a part; returns the ranges of them that are complete now."""
        self.of(part).add(start, stop)
        if len(self._parts) < parts:
            return []
        ranges = [(start, stop)]
        for other in self._parts.values():
            ranges = [piece for low, high in ranges for piece in other.within(low, high)]
        return ranges
