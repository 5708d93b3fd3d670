"""From two groups to lanes: what can be computed before any request is known.

A *lane* is a pair of byte positions (source, destination) that the same arithmetic serves for
every fragment of tokens: position + page * page_step + token * token_step. A copy is one fragment
on one lane. Fewer and longer copies come from joining lanes, as an array library joins the axes
that both operands step through contiguously:

1. One token. (layer, plane, head, channel) positions that are neighbours on both sides become one
   run: K|V interleaved per token, all heads of a token-major page.
2. Many tokens. If a run's length is the token step on both sides, tokens follow each other and n
   of them are one copy (`all`). If also a page is exactly its tokens, neighbouring pages join.
   Otherwise each token is a copy (`each`), refused when shorter than the minimum run.
3. One page, if both sides cut pages alike. Spans of whole pages that are neighbours become one
   (`whole`); fragments that are not whole pages fall back to 2 (`part`). Interiors in which tokens
   are not contiguous (K transposed, opaque tiles) exist only as spans; their partial last page is
   copied whole (`widened`, or `cover` for spans that need no other treatment).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from neuron_push.errors import NeedsStaging
from neuron_push.geometry import Group
from neuron_push.plan.pieces import Pieces, Run, Steps

__all__ = ["Lanes", "Take", "lanes_of"]

Ints = npt.NDArray[np.int64]
Take = Literal["all", "each", "whole", "part", "widened", "cover"]


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """All lanes of one group that share steps and unit; the arrays have one entry per lane."""

    take: Take
    # Bytes per token for `all`, `each` and `part`, per page otherwise.
    unit: int
    steps: Steps
    # Whether the last unit of page p and the first of page p + 1 are neighbours.
    source_joins: bool
    destination_joins: bool
    source_region: Ints
    source: Ints
    destination_region: Ints
    destination: Ints


def lanes_of(
    source: Group, destination: Group, heads: tuple[int, ...], element: int, min_run: int
) -> tuple[Lanes, ...]:
    """Lanes for every layer that both groups hold and the given global heads.

    Raises:
        IncompatiblePair: the bytes of some plane mean different things on the two sides.
        NeedsStaging: their common runs are shorter than `min_run` bytes.
    """
    pieces = Pieces(source, destination, heads, element)
    runs = _joined(run for run in pieces.runs() if not run.whole_page)
    spans = [run for run in pieces.runs() if run.whole_page]
    grids = source.page_tokens, destination.page_tokens
    found: list[tuple[Take, Run]] = []
    for run in runs:
        if not _token_contiguous(run, *grids):
            found.append(("each", _long_enough(run, min_run)))
        elif grids[0] != grids[1] or _page_is_tokens(run, *grids):
            found.append(("all", run))
        else:
            spans.append(_span(run, grids[0]))
    found.extend(_page_lanes(spans, {_span(run, grids[0]): run for run in runs}))
    return tuple(_classes(found, *grids))


def _chains(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Runs grouped so that each follows the previous one on both sides."""
    chain: list[Run] = []
    for run in sorted(runs):
        if chain and chain[-1][:3] == run[:3] and _follows(chain[-1], run):
            chain.append(run)
            continue
        if chain:
            yield chain
        chain = [run]
    if chain:
        yield chain


def _follows(run: Run, other: Run) -> bool:
    ends = run.source + run.length, run.destination + run.length
    return ends == (other.source, other.destination)


def _join(chain: list[Run]) -> Run:
    return chain[0]._replace(length=sum(run.length for run in chain))


def _joined(runs: Iterable[Run]) -> list[Run]:
    return [_join(chain) for chain in _chains(runs)]


def _token_contiguous(run: Run, source_tokens: int, destination_tokens: int) -> bool:
    """A page of one token has no second token to step to."""
    return (source_tokens == 1 or run.steps.source_token == run.length) and (
        destination_tokens == 1 or run.steps.destination_token == run.length
    )


def _page_is_tokens(run: Run, source_tokens: int, destination_tokens: int) -> bool:
    return (
        run.steps.source_page == source_tokens * run.length
        and run.steps.destination_page == destination_tokens * run.length
    )


def _long_enough(run: Run, min_run: int) -> Run:
    if run.length < min_run:
        raise NeedsStaging(
            f"{run.name}: the longest run common to both sides is {run.length} bytes, less than "
            f"{min_run} (a token is {run.steps.source_token} bytes after the previous one on "
            f"prefill and {run.steps.destination_token} on decode)"
        )
    return run


def _span(run: Run, tokens: int) -> Run:
    """A token-contiguous run over a whole page."""
    steps = run.steps._replace(source_token=0, destination_token=0)
    return run._replace(steps=steps, length=run.length * tokens)


def _page_lanes(spans: list[Run], by_span: dict[Run, Run]) -> Iterator[tuple[Take, Run]]:
    """Lanes for spans of whole pages, and for the partial pages beside them."""
    for chain in _chains(spans):
        uncut = [span for span in chain if span.whole_page]
        if len(uncut) == len(chain):
            yield "cover", _join(chain)
        elif len(chain) == 1:
            yield "all", by_span[chain[0]]
        else:
            yield "whole", _join(chain)
            yield from (("part", by_span[span]) for span in chain if not span.whole_page)
            yield from (("widened", span) for span in _joined(uncut))


def _classes(
    found: list[tuple[Take, Run]], source_tokens: int, destination_tokens: int
) -> Iterator[Lanes]:
    def key(item: tuple[Take, Run]) -> tuple[Take, int, Steps]:
        return item[0], item[1].length, item[1].steps

    for (take, unit, steps), members in groupby(sorted(found, key=key), key):
        by_token = take in ("all", "each", "part")
        runs = np.array([run[1:5] for _, run in members], dtype=np.int64)
        yield Lanes(
            take=take,
            unit=unit,
            steps=steps,
            source_joins=steps.source_page == unit * (source_tokens if by_token else 1),
            destination_joins=steps.destination_page
            == unit * (destination_tokens if by_token else 1),
            source_region=runs[:, 0].copy(),
            destination_region=runs[:, 1].copy(),
            source=runs[:, 2].copy(),
            destination=runs[:, 3].copy(),
        )
