"""One pair of ranks: what is computed once, and the copies of a token range from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

import numpy as np
import numpy.typing as npt

from neuron_push.errors import IncompatiblePair, PlanError
from neuron_push.geometry import Geometry, Group
from neuron_push.plan.assign import Ask
from neuron_push.plan.blocks import Blocks, Ints, pages
from neuron_push.plan.copies import Copies, Fragments, Part, spread, total
from neuron_push.plan.lanes import Lanes, lanes_of

__all__ = ["MIN_RUN", "Description", "PairPlan", "pair"]

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
class GroupPlan:
    """One group of a pair; no lanes if this prefill rank sends nothing of it."""

    source: Group
    destination: Group
    lanes: tuple[Lanes, ...]

    @property
    def granularity(self) -> int:
        """Tokens that a range start must be a multiple of."""
        cut_by_page = any(lanes.take in ("widened", "cover") for lanes in self.lanes)
        return self.destination.page_tokens if cut_by_page else 1

    def require_start(self, start: int) -> None:
        """A page is written whole only if nothing valid can lie in it before the range."""
        if inside := start % self.granularity:
            raise PlanError(
                f"the range starts at token {start}, inside a page of {self.granularity} tokens "
                f"that cannot be cut; start at the page boundary, token {start - inside}"
            )

    def fragments(self, start: int, stop: int, source: _Table, destination: _Table) -> Fragments:
        """Tokens [start, stop), cut where either side changes page, less what is not wanted."""
        edges = _edges(start, stop, source.tokens, destination.tokens)
        tokens = np.diff(edges, append=stop)
        source_index, source_token = np.divmod(edges, source.tokens)
        destination_index, destination_token = np.divmod(edges, destination.tokens)
        self._require_cover(start, stop, destination)
        read, written = source.at(source_index), destination.at(destination_index)
        self._require_source(edges, (read < 0) & (written >= 0), destination)
        every = Fragments(read, source_token, written, destination_token, tokens)
        return every.where((read >= 0) & (written >= 0))

    def _require_cover(self, start: int, stop: int, destination: _Table) -> None:
        """Decode lists blocks up to the end, and from the start unless a window slides."""
        first, end = destination.first * destination.tokens, destination.end * destination.tokens
        if end < stop or (first > start and self.destination.kind != "sliding"):
            raise PlanError(
                f"decode lists blocks for tokens {first} to {end}, not for {start} to {stop}"
            )

    def _require_source(
        self, edges: Ints, missing: npt.NDArray[np.bool_], destination: _Table
    ) -> None:
        """Prefill must have what decode wants.

        With a sliding window the two engines may round the window's begin differently, so decode's
        oldest block alone may start before prefill's oldest token.
        """
        if not missing.any():
            return
        last = int(edges[np.flatnonzero(missing)[-1]])
        block = self.destination.block_tokens
        oldest = destination.oldest() * destination.tokens // block
        if self.destination.kind != "sliding" or last // block > oldest:
            raise PlanError(f"decode wants token {last}, whose block prefill does not hold")


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Pages of one request on one side: `pages[i]` is page number `first + i` in token order."""

    first: int
    pages: Ints
    tokens: int  # per page

    @classmethod
    def of(cls, blocks: Blocks, group: Group, reserved: int, who: str) -> _Table:
        per_block = group.block_tokens // group.page_tokens
        numbers = pages(blocks, group, reserved, who)
        return cls(blocks.first * per_block, numbers, group.page_tokens)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def at(self, index: Ints) -> Ints:
        """Page numbers at these positions, -1 for holes and beyond the list."""
        place = index - self.first
        if not len(self.pages):
            return np.full(len(place), -1)
        if len(place) and place[0] >= 0 and place[-1] < len(self.pages):
            return self.pages[place]
        inside = (place >= 0) & (place < len(self.pages))
        return np.where(inside, self.pages[np.where(inside, place, 0)], -1)

    def oldest(self) -> int:
        """Position of the first page that is not a hole."""
        return self.first + int(np.argmax(self.pages >= 0))


def _edges(start: int, stop: int, source_tokens: int, destination_tokens: int) -> Ints:
    """Sorted starts of the fragments of [start, stop)."""

    def boundaries(tokens: int) -> Ints:
        return np.arange((start // tokens + 1) * tokens, stop, tokens, dtype=np.int64)

    inner = boundaries(source_tokens)
    if destination_tokens != source_tokens:
        inner = np.union1d(inner, boundaries(destination_tokens))
    return np.concatenate((np.array([start], np.int64), inner))


@dataclass(frozen=True, slots=True, eq=False)
class PairPlan:
    """Everything about one (prefill rank, decode rank) pair that no request changes."""

    groups: tuple[GroupPlan, ...]
    # Block ids below these are holes.
    source_reserved: int
    destination_reserved: int

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
        self, start: int, stop: int, source: Sequence[Blocks], destination: Sequence[Blocks]
    ) -> Copies:
        """Copies for the tokens [start, stop), given each group's blocks on both sides.

        Destination holes are not written. Nothing outside the range is written, except the tail of
        a widened page (see `start_granularity`).

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
        parts: list[Part] = []
        for plan, read, written in zip(self.groups, source, destination, strict=True):
            if not plan.lanes or start == stop:
                continue
            plan.require_start(start)
            theirs = _Table.of(written, plan.destination, self.destination_reserved, "decode")
            ours = _Table.of(read, plan.source, self.source_reserved, "prefill")
            fragments = plan.fragments(start, stop, ours, theirs)
            parts += (spread(lanes, fragments, theirs.tokens) for lanes in plan.lanes)
        return total(parts)

    def describe(self) -> Description:
        """Way, copies and bytes for a long prompt in scattered blocks."""
        copies = volume = 0.0
        for plan in self.groups:
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
            "way": "direct",
            "run_bytes": round(volume / copies) if copies else 0,
            "copies_per_1000_tokens": round(copies),
            "bytes_per_1000_tokens": round(volume),
        }


def pair(source: Geometry, destination: Geometry, ask: Ask, *, min_run: int = MIN_RUN) -> PairPlan:
    """Plan what `source` (prefill) writes into `destination` (decode) for `ask`.

    Both geometries must have passed `geometry.check`. `min_run` is the shortest copy in bytes that
    a strided interior may produce.

    Raises:
        IncompatiblePair: the two cannot exchange bytes directly; the text says what differs.
    """
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
    plans = []
    for index, heads in enumerate(ask.heads):
        groups = source.groups[index], destination.groups[index]
        _check_ask(index, groups, heads)
        lanes = lanes_of(*groups, heads, source.element_bytes, min_run) if heads else ()
        plans.append(GroupPlan(*groups, lanes))
    return PairPlan(tuple(plans), source.reserved_blocks, destination.reserved_blocks)


def _check_ask(index: int, groups: tuple[Group, Group], heads: tuple[int, ...]) -> None:
    for side, group in zip(("prefill", "decode"), groups, strict=True):
        absent = sorted(set(heads) - set(group.heads))
        if absent:
            raise IncompatiblePair(f"group {index}: {side} does not hold head {absent[0]}")
    if len(set(heads)) != len(heads):
        raise IncompatiblePair(f"group {index}: a head is asked for twice")
    if heads and groups[0].kind == "state":
        raise IncompatiblePair(f"group {index} holds state pages, which this version does not move")
