"""One pair of ranks that needs a staging slab: a direct plan to or from an image of one side.

    packed     prefill rearranges its pages into an image of decode's in its own slab, then WRITEs
               that image into decode's pages
    unpacked   prefill WRITEs its pages into an image of them in decode's slab, which decode then
               rearranges into its own pages
    both       prefill packs an image of decode's pages, WRITEs it into decode's slab in one
               stretch, and decode brings it into its pages

So the WRITE is a direct plan between a geometry and one in which groups are replaced by images,
in one more region, the slab. State pages have no image: they go straight from page to page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec.structs import replace

from neuron_push.errors import PlanError
from neuron_push.geometry import Geometry, Region
from neuron_push.plan.blocks import Blocks
from neuron_push.plan.copies import Copies, total
from neuron_push.plan.group import GroupPlan, Table, squeezed
from neuron_push.plan.image import Image
from neuron_push.plan.pair import Description, PairPlan
from neuron_push.plan.rows import Rearrangement
from neuron_push.plan.stripe import Stripe
from neuron_push.transform import Rows

__all__ = ["Stage", "StagedPlan", "Staging", "Straight"]


Staging = Literal["packed", "unpacked", "both"]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One group's image in the slab; `offset` counts from the slab's first byte."""

    image: Image
    packing: Rearrangement | None  # of prefill's pages
    unpacking: Rearrangement | None  # into decode's pages
    offset: int
    pages: int  # that the slab has room for
    whole: bool  # whether a page of the image cannot be cut


@dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """How a piece goes by a pair that stages on both sides, if its blocks lie well together."""

    plan: PairPlan | StagedPlan  # without a slab of decode's
    min_run: int  # on average
    most_copies: float  # per token
    few_copies: int  # whatever their length

    @property
    def too_many(self) -> bool:
        """Whether a long prompt in scattered blocks takes more copies than it may."""
        return self.plan.describe()["copies_per_1000_tokens"] > 1000 * self.most_copies


@dataclass(frozen=True, slots=True, eq=False)
class StagedPlan:
    """Everything about one staged pair that no request changes.

    A range travels in pieces that hold at most `tokens` of this rank's own, cut at multiples of
    `grain`; each uses one slab of `slab_bytes`. `rows` and `copies` of a piece take the same
    arguments: ranges and lists are those of the whole prompt.
    """

    way: Staging
    source: Geometry
    destination: Geometry
    wire: PairPlan
    pairs: tuple[GroupPlan, ...]  # the true groups, for what is present on both sides
    stages: tuple[Stage | None, ...]
    tokens: int
    grain: int
    slab_bytes: int
    # Prefill and decode as the WRITE sees them: the last region of a side with a slab is the slab,
    # at address 0.
    views: tuple[Geometry, Geometry]
    stripe: Stripe  # which tokens this prefill rank sends
    straight: Straight | None = None

    @property
    def packs(self) -> bool:
        """Whether prefill needs a slab of its own."""
        return self.way != "unpacked"

    @property
    def unpacks(self) -> bool:
        """Whether decode needs one."""
        return self.way != "packed"

    def plan_of(
        self, start: int, stop: int, source: Sequence[Blocks], destination: Sequence[Blocks]
    ) -> PairPlan | StagedPlan:
        """How a piece is to go: by this, or straight if that takes few enough and long copies.

        What cannot be planned goes straight too, and fails there.
        """
        if self.straight is None:
            return self
        plan = self.straight.plan
        try:
            copies = plan.copies(start, stop, source, destination)
        except PlanError:
            return plan
        long = copies.nbytes / max(1, self.straight.min_run)
        most = min(long, (stop - start) * self.straight.most_copies)
        return plan if copies.count <= max(most, self.straight.few_copies) else self

    def start_granularity(self, group: int) -> int:
        """Token ranges of this group may start at multiples of this (see PairPlan)."""
        stage = self.stages[group]
        if stage is None:
            return self.wire.start_granularity(group)
        if stage.whole:
            return stage.image.page_tokens
        # What lands in a slab before the range is not looked at.
        return self.wire.start_granularity(group) if self.way == "packed" else 1

    def ends(self, packing: Region | None, unpacking: Region | None) -> tuple[Geometry, Geometry]:
        """Prefill and decode, for `bind`, with the slabs that a piece uses there.

        Raises:
            PlanError: one that is needed is missing or too small.
        """
        prefill, decode = self.source, self.destination
        if self.packs:
            prefill = self._with_slab(self.views[0], packing)
        return prefill, self.landing(unpacking) if self.unpacks else decode

    def landing(self, slab: Region | None) -> Geometry:
        """Decode with the slab that a piece lands in there; raises PlanError as `ends`."""
        return self._with_slab(self.views[1], slab)

    def _with_slab(self, view: Geometry, slab: Region | None) -> Geometry:
        if slab is None or slab.length < self.slab_bytes:
            raise PlanError("a staged piece without a slab that holds it")
        return replace(view, regions=(*view.regions[:-1], slab))

    def copies(
        self,
        start: int,
        stop: int,
        source: Sequence[Blocks],
        destination: Sequence[Blocks],
        *,
        last: bool = False,
    ) -> Copies:
        """The WRITE of one piece, between a slab that holds it and the other side's pages.

        Raises:
            PlanError: as PairPlan.copies, or the piece does not fit into a slab.
        """
        (start, stop), (source, destination) = self._own(start, stop, source, destination)
        wire = self.wire
        reserved = wire.source_reserved, wire.destination_reserved
        parts = []
        for index, (read, written) in enumerate(zip(source, destination, strict=True)):
            plan, stage = wire.groups[index], self.stages[index]
            if stage is None:
                if last and plan.source.kind == "state":
                    parts += plan.state_parts(read, written, reserved)
                continue
            step = plan.granularity
            ranges = self._present(index, start, stop, read, written)
            if self.way == "both":
                # One stretch: nobody looks at what it holds of tokens that are not there.
                ranges = [(ranges[0][0], ranges[-1][1])] if ranges else []
            for low, high in ranges:
                # Pages that cannot be cut go whole: into a slab, or where a window begins and
                # nobody looks at what lies before.
                low -= low % step
                lists = self._lists(stage, start, low, high, read, written)
                parts += plan.parts(low, high, *lists, reserved)
        return total(parts)

    def rows(
        self,
        start: int,
        stop: int,
        source: Sequence[Blocks],
        destination: Sequence[Blocks],
        slab: int,
        *,
        pack: bool,
    ) -> list[Rows]:
        """What packing (before the WRITE) or unpacking (after it) copies; `slab` is an address."""
        (start, stop), (source, destination) = self._own(start, stop, source, destination)
        side, who = (self.source, "prefill") if pack else (self.destination, "decode")
        found: list[Rows] = []
        for index, stage in enumerate(self.stages):
            if stage is None:
                continue
            way = stage.packing if pack else stage.unpacking
            assert way is not None
            lists = source[index], destination[index]
            own = lists[0] if pack else lists[1]
            table = Table.of(own, side.groups[index], side.reserved_blocks, who)
            for low, high in self._present(index, start, stop, *lists):
                place = slab + stage.offset
                found += way.rows(low, high, table.pages, table.first, place, start, pack=pack)
        return found

    def unpack_rows(
        self, start: int, stop: int, destination: Sequence[Blocks], slab: int
    ) -> list[Rows]:
        """`rows` for decode, which does not know which blocks prefill holds.

        Of a sliding window's oldest block more may be copied than was sent: nobody reads tokens
        that lie before the window.
        """
        held = []
        for group in self.source.groups:
            first, end = start // group.block_tokens, -(-stop // group.block_tokens)
            ids = np.full(end - first, self.source.reserved_blocks, np.int32)
            held.append(Blocks(first, ids))
        return self.rows(start, stop, held, destination, slab, pack=False)

    def describe(self) -> Description:
        """Way, copies and bytes of the WRITEs for a long prompt in scattered blocks."""
        whole, count = self.wire.describe(), self.stripe.count
        run, copies = whole["run_bytes"], float(whole["copies_per_1000_tokens"])
        if self.way == "both":  # one per group and slab
            groups = sum(stage is not None for stage in self.stages)
            run, copies = self.slab_bytes // max(1, groups), 1000 * groups / self.tokens
        return {
            "way": self.way,
            "run_bytes": run,
            "copies_per_1000_tokens": math.ceil(copies / count),
            "bytes_per_1000_tokens": round(whole["bytes_per_1000_tokens"] / count),
        }

    def _own(
        self, start: int, stop: int, source: Sequence[Blocks], destination: Sequence[Blocks]
    ) -> tuple[tuple[int, int], tuple[Sequence[Blocks], Sequence[Blocks]]]:
        """A piece on the axis of this rank's own tokens, if it is one that fits into a slab."""
        if not 0 <= start <= stop:
            raise PlanError(f"token range {start} to {stop} is malformed")
        if not len(source) == len(destination) == len(self.stages):
            raise PlanError(
                f"block lists for {len(source)} and {len(destination)} groups, not "
                f"{len(self.stages)}"
            )
        reserved = self.source.reserved_blocks, self.destination.reserved_blocks
        sent = [
            plan if stage else None for plan, stage in zip(self.pairs, self.stages, strict=True)
        ]
        span, lists = squeezed(sent, self.stripe, (start, stop), (source, destination), reserved)
        self._require_room(*span)
        return span, lists

    def _require_room(self, start: int, stop: int) -> None:
        for index, stage in enumerate(self.stages):
            if stage is None:
                continue
            tokens = stage.image.page_tokens
            if -(-stop // tokens) - start // tokens > stage.pages:
                raise PlanError(f"tokens {start} to {stop} do not fit into a slab")
            if inside := start % self.start_granularity(index):
                raise PlanError(
                    f"the range starts at token {start}, inside a page that cannot be cut; start "
                    f"at the page boundary, token {start - inside}"
                )

    def _present(
        self, index: int, start: int, stop: int, read: Blocks, written: Blocks
    ) -> list[tuple[int, int]]:
        """Ranges of [start, stop) that both sides hold."""
        if start == stop:
            return []
        reserved = self.source.reserved_blocks, self.destination.reserved_blocks
        fragments, _ = self.pairs[index].present(start, stop, read, written, reserved)
        if int(fragments.tokens.sum()) == stop - start:
            return [(start, stop)]
        return _ranges(start, stop, read, written, self.pairs[index], reserved)

    def _lists(
        self, stage: Stage, start: int, low: int, high: int, read: Blocks, written: Blocks
    ) -> tuple[Blocks, Blocks]:
        """Block lists for the WRITE of [low, high): the image's pages lie in the slab in order."""
        tokens = stage.image.page_tokens
        first, end = low // tokens, -(-high // tokens)
        places = np.arange(first, end, dtype=np.int32) - start // tokens
        if self.packs:
            read = Blocks(first, places + self.source.reserved_blocks)
        if self.unpacks:
            written = Blocks(first, places + self.destination.reserved_blocks)
        return read, written


def _ranges(
    start: int,
    stop: int,
    read: Blocks,
    written: Blocks,
    plan: GroupPlan,
    reserved: tuple[int, int],
) -> list[tuple[int, int]]:
    """Maximal ranges of tokens whose pages are no holes on either side."""
    tables = (
        Table.of(read, plan.source, reserved[0], "prefill"),
        Table.of(written, plan.destination, reserved[1], "decode"),
    )
    step = math.gcd(tables[0].tokens, tables[1].tokens)
    chunks = np.arange(start // step, -(-stop // step), dtype=np.int64)
    held = np.ones(len(chunks) + 2, bool)
    held[0] = held[-1] = False
    for table in tables:
        held[1:-1] &= table.at(chunks * step // table.tokens) >= 0
    edges = np.flatnonzero(held[1:] != held[:-1]) + start // step
    return [
        (max(start, int(low) * step), min(stop, int(high) * step))
        for low, high in edges.reshape(-1, 2)
    ]
