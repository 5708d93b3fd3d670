"""Where a transfer may be cut into pieces, whoever moves them."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_push.geometry import Geometry
from neuron_push.plan import Plan, StagedPlan
from neuron_push.rendezvous.ranges import RangeSet

# Largest grain at which a transfer is cut: the least common multiple of all block sizes,
# unless that is absurd; then a prompt travels in one piece.
MOST_GRAIN = 1 << 14
ONE_PIECE = 1 << 40


@dataclass(frozen=True, slots=True)
class Cut:
    """Pieces end at multiples of `grain` tokens and hold `most` tokens at most.

    Less than `least` tokens wait for more, if more are to come.
    """

    grain: int
    most: int
    least: int = 0

    def next(self, taken: RangeSet, start: int, stop: int, settled: int) -> tuple[int, int] | None:
        """The next piece of [start, stop) that is settled and not taken; None if there is none.

        Cut at multiples of the grain, so that every block travels whole and in one operation,
        except at the transfer's own ends.
        """
        begin, bound = taken.first_gap(start, min(stop, settled))
        if bound == settled < stop and bound - begin < self.least:
            return None
        begin, end = self.shorter(begin, bound)
        if end < stop:
            end = end // self.grain * self.grain
        return (begin, end) if begin < end else None

    def shorter(self, begin: int, end: int) -> tuple[int, int]:
        """As much of [begin, end) as one piece may hold."""
        return begin, min(end, (begin + self.most) // self.grain * self.grain)


def cut_of(plan: Plan, geometry: Geometry, slice_bytes: int, least: int = 0) -> Cut:
    """How transfers by a plan are cut; `geometry` is the decode rank's.

    `least` is what pieces should hold; no more of it is asked than they may hold.
    """
    span = plan.stripe.span
    if isinstance(plan, StagedPlan):
        most = span(plan.tokens)
        return Cut(plan.grain, most, min(least, most))
    if plan.grain > MOST_GRAIN:
        return Cut(ONE_PIECE, ONE_PIECE)
    most = span(slice_bytes // max(1, _bytes_per_token(geometry)))
    most = max(plan.grain, most // plan.grain * plan.grain)
    return Cut(plan.grain, most, min(least, most))


def _bytes_per_token(geometry: Geometry) -> int:
    """Bytes that one token takes on one rank, over all groups and layers."""
    total = 0
    for group in geometry.groups:
        for plane in group.planes:
            if plane.page_bytes:
                total += plane.page_bytes // group.page_tokens
            else:
                total += plane.width * geometry.element_bytes * max(1, len(group.heads))
    return total
