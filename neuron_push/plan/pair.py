"""One pair of ranks that talk directly: what is computed once, and the copies of a range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypedDict

from neuron_push.errors import IncompatiblePair, PlanError
from neuron_push.geometry import Geometry, Group
from neuron_push.plan.assign import Ask
from neuron_push.plan.blocks import Blocks
from neuron_push.plan.copies import Copies, Part, total
from neuron_push.plan.group import GroupPlan, squeezed
from neuron_push.plan.lanes import lanes_of
from neuron_push.plan.stripe import WHOLE, Stripe, check_stripe

__all__ = ["MIN_RUN", "Description", "PairPlan", "Way", "pair"]

# How bytes get into decode's order: they have it, prefill packs, decode unpacks, or each does.
Way = Literal["direct", "packed", "unpacked", "both"]

# Shortest copy, in bytes, that strided interiors may produce. 2 KiB take 160 ns on a 100 Gbit/s
# link, about what one more descriptor costs to plan and post; below it the link idles.
MIN_RUN: Final = 2048


class Description(TypedDict):
    """How a pair moves bytes; counts assume that no two blocks are neighbours."""

    way: str
    run_bytes: int  # mean length of a copy
    copies_per_1000_tokens: int
    bytes_per_1000_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class PairPlan:
    """Everything about one (prefill rank, decode rank) pair that no request changes."""

    groups: tuple[GroupPlan, ...]
    # Block ids below these are holes.
    source_reserved: int
    destination_reserved: int
    # Which tokens this prefill rank sends; ranges and lists are those of the whole prompt.
    stripe: Stripe = WHOLE

    @property
    def way(self) -> Way:
        """Nobody reorders anything."""
        return "direct"

    @property
    def grain(self) -> int:
        """Ranges cut at multiples of this many tokens carry every block whole, in one range."""
        sides = [side for plan in self.groups for side in (plan.source, plan.destination)]
        return math.lcm(*(group.block_tokens for group in sides if group.kind != "state"))

    def start_granularity(self, group: int) -> int:
        """Token ranges of this group may start at multiples of this; 1 if they may start anywhere.

        Above 1 the last page of a range is *widened*: pages whose interior cannot be cut by token
        are written whole, the tokens after `stop` with whatever prefill's page holds there. This
        is safe because decode owns each listed block for this attempt, and of a page that holds
        `stop - 1` only the tokens before `stop` mean anything until decode itself computes the
        later ones, which it does after the transfer. It would not be safe in front: a page
        may begin with tokens of a prefix hit, so such a start raises PlanError.

        A caller that sends a prompt in several ranges must end every range but the last at a
        multiple of this too: WRITEs may land in any order, and a widened page could land after the
        range that fills its tail.
        """
        return self.groups[group].granularity

    def copies(
        self,
        start: int,
        stop: int,
        source: Sequence[Blocks],
        destination: Sequence[Blocks],
        *,
        last: bool = False,
    ) -> Copies:
        """Copies for this rank's share of [start, stop), given each group's blocks on both sides.

        Destination holes are not written. Nothing outside the range is written, except the tail of
        a widened page (see `start_granularity`). State pages, which every step overwrites, travel
        only with the `last` range of a prompt.

        Raises:
            PlanError: the range is malformed or starts inside a page that cannot be cut; a list
                names blocks outside its cache, does not reach, or lacks what decode wants.
        """
        if not 0 <= start <= stop:
            raise PlanError(f"token range {start} to {stop} is malformed")
        if not len(source) == len(destination) == len(self.groups):
            raise PlanError(
                f"block lists for {len(source)} and {len(destination)} groups, not "
                f"{len(self.groups)}"
            )
        reserved = self.source_reserved, self.destination_reserved
        sent = [plan if plan.lanes else None for plan in self.groups]
        span, lists = squeezed(sent, self.stripe, (start, stop), (source, destination), reserved)
        parts: list[Part] = []
        for plan, read, written in zip(self.groups, *lists, strict=True):
            if plan.source.kind != "state":
                parts += plan.parts(*span, read, written, reserved)
            elif last:
                parts += plan.state_parts(read, written, reserved)
        return total(parts)

    def describe(self) -> Description:
        """Way, copies and bytes of this rank for a long prompt in scattered blocks."""
        copies = volume = 0.0
        for plan in self.groups:
            if plan.source.kind == "state":
                continue  # once per request
            grids = plan.source.page_tokens, plan.destination.page_tokens
            # Both page grids repeat together after this many tokens.
            period = math.lcm(*grids)
            cuts = period // grids[0] + period // grids[1] - 1 if grids[0] != grids[1] else 1
            for lanes in plan.lanes:
                if lanes.take in ("part", "widened"):
                    continue  # only at the ends of a prompt
                by_token = lanes.take in ("all", "each")
                count = len(lanes.source)
                copies += 1000 * count * (1 if lanes.take == "each" else cuts / period)
                volume += 1000 * count * lanes.unit / (1 if by_token else period)
        return {
            "way": self.way,
            "run_bytes": round(volume / copies) if copies else 0,
            "copies_per_1000_tokens": round(copies / self.stripe.count),
            "bytes_per_1000_tokens": round(volume / self.stripe.count),
        }


def pair(source: Geometry, destination: Geometry, ask: Ask, *, min_run: int = MIN_RUN) -> PairPlan:
    """Plan what `source` (prefill) writes into `destination` (decode) for `ask`.

    Both geometries must have passed `geometry.check`. `min_run` is the shortest copy in bytes that
    a strided interior may produce.

    Raises:
        NeedsStaging: the two hold the same elements, but in orders with short common runs.
        IncompatiblePair: the two cannot exchange bytes; the text says what differs.
    """
    check_pair(source, destination, ask)
    plans = []
    for index, heads in enumerate(ask.heads):
        groups = source.groups[index], destination.groups[index]
        lanes = lanes_of(*groups, heads, source.element_bytes, min_run) if heads else ()
        plans.append(GroupPlan(*groups, lanes))
    reserved = source.reserved_blocks, destination.reserved_blocks
    return PairPlan(tuple(plans), *reserved, ask.stripe)


def check_pair(source: Geometry, destination: Geometry, ask: Ask) -> None:
    """Raise IncompatiblePair unless elements, groups, heads and blocks of the two correspond."""
    if source.element_bytes != destination.element_bytes:
        raise IncompatiblePair(
            f"elements have {source.element_bytes} bytes on prefill and "
            f"{destination.element_bytes} on decode"
        )
    kinds = [tuple(group.kind for group in side.groups) for side in (source, destination)]
    if kinds[0] != kinds[1] or len(ask.heads) != len(kinds[0]):
        raise IncompatiblePair(
            f"KV groups: prefill has {kinds[0]}, decode has {kinds[1]} and asks for "
            f"{len(ask.heads)}"
        )
    check_stripe(ask.stripe, source, destination)
    for index, heads in enumerate(ask.heads):
        _check_ask(index, (source.groups[index], destination.groups[index]), heads)


def _check_ask(index: int, groups: tuple[Group, Group], heads: tuple[int, ...]) -> None:
    for side, group in zip(("prefill", "decode"), groups, strict=True):
        absent = sorted(set(heads) - set(group.heads))
        if absent:
            raise IncompatiblePair(f"group {index}: {side} does not hold head {absent[0]}")
    if len(set(heads)) != len(heads):
        raise IncompatiblePair(f"group {index}: a head is asked for twice")
