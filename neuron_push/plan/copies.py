"""From fragments of tokens to copies, and from copies to addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from neuron_push.errors import PlanError
from neuron_push.geometry import Geometry
from neuron_push.plan.lanes import Lanes

__all__ = ["Copies", "Fragments", "bind", "spread"]

Ints = npt.NDArray[np.int64]
Descriptors = npt.NDArray[np.uint64]


class Fragments(NamedTuple):
    """Ranges of tokens that lie in one page on either side; one entry per range."""

    source_page: Ints
    source_token: Ints  # of the range's first token inside its page
    destination_page: Ints
    destination_token: Ints
    tokens: Ints

    def where(self, mask: npt.NDArray[np.bool_]) -> Fragments:
        return self if mask.all() else Fragments(*(field[mask] for field in self))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Every lane crossed with every entry: copy (l, f) is `lanes[l]` plus the f-th offsets."""

    lanes: Lanes
    source: Ints
    destination: Ints
    length: Ints

    @property
    def count(self) -> int:
        return len(self.lanes.source) * len(self.length)


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies of one token range, without addresses.

    The arrays are lane-major: all copies of one lane (a layer's K heads, say) follow each other
    in token order. They are made on first use; `bind` does not need them. Offsets are in bytes
    from the base of the region, lengths in bytes.
    """

    parts: tuple[Part, ...]

    @cached_property
    def count(self) -> int:
        """Number of copies."""
        return sum(part.count for part in self.parts)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that all copies move together."""
        return sum(len(part.lanes.source) * int(part.length.sum()) for part in self.parts)

    @cached_property
    def source_region(self) -> Ints:
        return self._lane_major(lambda part: part.lanes.source_region[:, None])

    @cached_property
    def source_offset(self) -> Ints:
        return self._lane_major(lambda part: part.lanes.source[:, None] + part.source)

    @cached_property
    def destination_region(self) -> Ints:
        return self._lane_major(lambda part: part.lanes.destination_region[:, None])

    @cached_property
    def destination_offset(self) -> Ints:
        return self._lane_major(lambda part: part.lanes.destination[:, None] + part.destination)

    @cached_property
    def length(self) -> Ints:
        return self._lane_major(lambda part: part.length)

    def _lane_major(self, values: Callable[[Part], Ints]) -> Ints:
        shapes = ((part, (len(part.lanes.source), len(part.length))) for part in self.parts)
        pieces = [np.broadcast_to(values(part), shape).ravel() for part, shape in shapes]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def spread(lanes: Lanes, fragments: Fragments, page_tokens: int) -> Part:
    """The offsets that one class of lanes adds for the given fragments.

    `page_tokens` is the page size of both sides for lanes that work by page. Fragments of lanes
    that widen start at token 0 of their page.
    """
    take, steps = lanes.take, lanes.steps
    if take in ("whole", "part", "widened"):
        full = fragments.tokens == page_tokens
        fragments = fragments.where(full if take == "whole" else ~full)
    if take == "each":
        fragments = _single_tokens(fragments)
    source = fragments.source_page * steps.source_page
    destination = fragments.destination_page * steps.destination_page
    if take in ("whole", "widened", "cover"):
        length = np.full(len(source), lanes.unit)
    else:
        source += fragments.source_token * steps.source_token
        destination += fragments.destination_token * steps.destination_token
        length = fragments.tokens * lanes.unit
    if take != "each" and (lanes.source_joins or lanes.destination_joins):
        source, destination, length = _join(source, destination, length)
    return Part(lanes, source, destination, length)


def _single_tokens(fragments: Fragments) -> Fragments:
    tokens = fragments.tokens
    within = np.arange(int(tokens.sum())) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    source_page, source_token, destination_page, destination_token = (
        np.repeat(field, tokens) for field in fragments[:4]
    )
    return Fragments(
        source_page,
        source_token + within,
        destination_page,
        destination_token + within,
        np.ones(len(within), np.int64),
    )


def _join(source: Ints, destination: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """Merge entries that continue the previous one on both sides, upwards or downwards.

    vLLM hands out blocks last freed first, so every second prompt has its blocks in falling
    order. Ranges do not overlap, so a run never turns round.
    """
    up = (source[1:] == source[:-1] + length[:-1]) & (
        destination[1:] == destination[:-1] + length[:-1]
    )
    down = (source[1:] + length[1:] == source[:-1]) & (
        destination[1:] + length[1:] == destination[:-1]
    )
    continues = up | down
    if not continues.any():
        return source, destination, length
    starts = np.concatenate(([0], np.flatnonzero(~continues) + 1))
    lowest = np.minimum.reduceat
    return lowest(source, starts), lowest(destination, starts), np.add.reduceat(length, starts)


def bind(
    copies: Copies, source: Geometry, destination: Geometry
) -> tuple[Descriptors, Descriptors]:
    """Addresses for the copies: two (count, 3) arrays of address, length in bytes, device.

    Row i of the first is read and row i of the second is written.

    Raises:
        PlanError: a copy would leave its region. Every range is covered by the check.
    """
    # One allocation for both: freed and asked for again in one piece, it stays in malloc's heap,
    # where two of 1.5 MB go back to the kernel each time and cost 1.5 ms of page faults.
    ours, theirs = np.empty((2, copies.count, 3), np.uint64)
    tables = _table(source), _table(destination)
    row = 0
    for part in copies.parts:
        lanes, rows = part.lanes, slice(row, row + part.count)
        row = rows.stop
        if not part.count:
            continue
        _fill(ours[rows], tables[0], lanes.source_region, lanes.source, part.source, part.length)
        _fill(
            theirs[rows],
            tables[1],
            lanes.destination_region,
            lanes.destination,
            part.destination,
            part.length,
        )
    return ours, theirs


def _table(geometry: Geometry) -> Ints:
    """One row per region: base address, length, device."""
    rows = [(region.base, region.length, region.device) for region in geometry.regions]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _fill(
    out: Descriptors, table: Ints, regions: Ints, lanes: Ints, offsets: Ints, lengths: Ints
) -> None:
    """Write address, length and device of lanes x offsets.

    All offsets of a lane lie between the lowest start and the highest end of the fragments, and
    both extremes occur, so checking these two per lane checks every copy.
    """
    if regions.max() >= len(table):
        raise PlanError("a copy names a region that the geometry does not have")
    base, limit, device = table[regions].T
    low, high = int(offsets.min()), int((offsets + lengths).max())
    if (lanes + low).min() < 0 or (lanes + high > limit).any():
        bad = int(np.flatnonzero((lanes + low < 0) | (lanes + high > limit))[0])
        raise PlanError(
            f"a copy covers bytes {lanes[bad] + low} to {lanes[bad] + high} of region "
            f"{regions[bad]}, which has {limit[bad]}"
        )
    cells = out.view(np.int64).reshape(len(lanes), len(offsets), 3)
    # Through a dense temporary: adding straight into every third word is four times slower.
    cells[:, :, 0] = (base + lanes)[:, None] + offsets
    cells[:, :, 1] = lengths
    cells[:, :, 2] = device[:, None]


def total(parts: Sequence[Part]) -> Copies:
    """The copies of several groups as one."""
    return Copies(tuple(part for part in parts if len(part.length)))
