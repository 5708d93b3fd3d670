"""One group of a pair: where its tokens lie on both sides, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuron_push.errors import PlanError
from neuron_push.geometry import Group
from neuron_push.plan.blocks import Blocks, Ints, pages
from neuron_push.plan.copies import Fragments, Part, spread
from neuron_push.plan.lanes import Lanes
from neuron_push.plan.stripe import Stripe

__all__ = ["GroupPlan", "Table", "squeezed"]


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """One group of a pair; no lanes if this prefill rank sends nothing of it."""

    source: Group
    destination: Group
    lanes: tuple[Lanes, ...]

    @property
    def granularity(self) -> int:
        """Tokens that a range start must be a multiple of; state pages do not count tokens."""
        if self.source.kind == "state":
            return 1
        cut_by_page = any(lanes.take in ("widened", "cover") for lanes in self.lanes)
        return self.destination.page_tokens if cut_by_page else 1

    def parts(
        self, start: int, stop: int, read: Blocks, written: Blocks, reserved: tuple[int, int]
    ) -> list[Part]:
        """What to copy for [start, stop); `reserved` are the first real blocks of both sides."""
        if not self.lanes or start == stop:
            return []
        self.require_start(start)
        fragments, page_tokens = self.present(start, stop, read, written, reserved)
        return [spread(lanes, fragments, page_tokens) for lanes in self.lanes]

    def state_parts(self, read: Blocks, written: Blocks, reserved: tuple[int, int]) -> list[Part]:
        """The one page of a state group: the last block that each side lists."""
        if not self.lanes:
            return []
        ours = pages(read, self.source, reserved[0], "prefill")[-1:]
        theirs = pages(written, self.destination, reserved[1], "decode")[-1:]
        for who, page in (("prefill", ours), ("decode", theirs)):
            if not len(page) or page[0] < 0:
                raise PlanError(f"{who} lists no block for the state of the request")
        none, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        return [spread(lanes, Fragments(ours, none, theirs, none, one), 1) for lanes in self.lanes]

    def present(
        self, start: int, stop: int, read: Blocks, written: Blocks, reserved: tuple[int, int]
    ) -> tuple[Fragments, int]:
        """Fragments of [start, stop) that both sides hold, and decode's tokens per page.

        Raises:
            PlanError: a list does not reach, or prefill lacks what decode wants.
        """
        theirs = Table.of(written, self.destination, reserved[1], "decode")
        ours = Table.of(read, self.source, reserved[0], "prefill")
        return self.fragments(start, stop, ours, theirs), theirs.tokens

    def require_start(self, start: int) -> None:
        """A page is written whole only if nothing valid can lie in it before the range."""
        if inside := start % self.granularity:
            raise PlanError(
                f"the range starts at token {start}, inside a page of {self.granularity} tokens "
                f"that cannot be cut; start at the page boundary, token {start - inside}"
            )

    def fragments(self, start: int, stop: int, source: Table, destination: Table) -> Fragments:
        """Tokens [start, stop), cut where either side changes page, less what is not wanted."""
        edges = edges_of(start, stop, source.tokens, destination.tokens)
        tokens = np.diff(edges, append=stop)
        source_index, source_token = np.divmod(edges, source.tokens)
        destination_index, destination_token = np.divmod(edges, destination.tokens)
        self._require_cover(start, stop, destination)
        read, written = source.at(source_index), destination.at(destination_index)
        self._require_source(edges, (read < 0) & (written >= 0), destination)
        every = Fragments(read, source_token, written, destination_token, tokens)
        return every.where((read >= 0) & (written >= 0))

    def _require_cover(self, start: int, stop: int, destination: Table) -> None:
        """Decode lists blocks up to the end, and from the start unless a window slides."""
        first, end = destination.first * destination.tokens, destination.end * destination.tokens
        if end < stop or (first > start and self.destination.kind != "sliding"):
            raise PlanError(
                f"decode lists blocks for tokens {first} to {end}, not for {start} to {stop}"
            )

    def _require_source(
        self, edges: Ints, missing: npt.NDArray[np.bool_], destination: Table
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
class Table:
    """Pages of one request on one side: `pages[i]` is page number `first + i` in token order."""

    first: int
    pages: Ints
    tokens: int  # per page

    @classmethod
    def of(cls, blocks: Blocks, group: Group, reserved: int, who: str) -> Table:
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


def edges_of(start: int, stop: int, source_tokens: int, destination_tokens: int) -> Ints:
    """Sorted starts of the fragments of [start, stop)."""

    def boundaries(tokens: int) -> Ints:
        return np.arange((start // tokens + 1) * tokens, stop, tokens, dtype=np.int64)

    inner = boundaries(source_tokens)
    if destination_tokens != source_tokens:
        inner = np.union1d(inner, boundaries(destination_tokens))
    return np.concatenate((np.array([start], np.int64), inner))


def squeezed(
    groups: Sequence[GroupPlan | None],
    stripe: Stripe,
    span: tuple[int, int],
    lists: tuple[Sequence[Blocks], Sequence[Blocks]],
    reserved: tuple[int, int],
) -> tuple[tuple[int, int], tuple[Sequence[Blocks], Sequence[Blocks]]]:
    """A range and the block lists of both sides, on the axis of a stripe's own tokens.

    `groups` holds None where nothing is sent.

    Raises:
        PlanError: a list does not reach, or prefill lacks what decode wants; in the prompt's own
            numbers, and whoever sends those tokens.
    """
    if stripe.count == 1:
        return span, lists
    ours, theirs = map(list, lists)
    for index, plan in enumerate(groups):
        if plan is not None:
            read, written = ours[index], theirs[index]
            if span[0] < span[1]:
                plan.present(*span, read, written, reserved)
            ours[index] = stripe.blocks(read, plan.source.block_tokens)
            theirs[index] = stripe.blocks(written, plan.destination.block_tokens)
    return (stripe.before(span[0]), stripe.before(span[1])), (ours, theirs)
