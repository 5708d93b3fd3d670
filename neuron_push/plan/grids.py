"""Rows of a piece as few regular grids, where places on both sides step evenly.

Layers of one allocation, K and V, heads, pages that follow each other, tokens of a page: each is
an axis with one step per side. `fold` finds such axes in lists of places, so that a whole piece
becomes a handful of strided copies, which the host carries out several times faster than rows
that are named one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from neuron_push.transform import Axis, Grid

__all__ = ["Bundle", "Lattice", "fold", "grids_of"]

Ints = npt.NDArray[np.int64]

# A strided copy costs about as much to start as this many bytes cost to move; smaller grids
# are not worth it. Measured with NumPy 2 on one core.
LEAST_GRID: Final = 24 << 10


class Lattice(NamedTuple):
    """Places that step evenly: the first one on both sides, and the axes, outermost first."""

    image: int
    layout: int
    axes: tuple[Axis, ...]  # steps of the image, then of the layout


class Bundle(NamedTuple):
    """Lanes that step alike through pages and tokens."""

    unit: int
    step: int  # tokens of a chunk
    image_page: int
    image_token: int
    layout_page: int
    layout_token: int
    inner: tuple[Axis, ...]  # within a chunk
    lanes: tuple[Lattice, ...]


def fold(items: Sequence[Lattice]) -> list[Lattice]:
    """The same places with as many even steps as there are, in the same order."""
    folded = list(items)
    while True:
        shorter = list(_folded_once(folded))
        if len(shorter) == len(folded):
            return folded
        folded = shorter


def _folded_once(items: list[Lattice]) -> Iterator[Lattice]:
    start = 0
    while start < len(items):
        first, count = items[start], 1
        steps = (0, 0)
        while start + count < len(items) and items[start + count].axes == first.axes:
            before, after = items[start + count - 1], items[start + count]
            found = after.image - before.image, after.layout - before.layout
            if count > 1 and found != steps:
                break
            steps, count = found, count + 1
        axes = (Axis(count, *steps), *first.axes) if count > 1 else first.axes
        yield Lattice(first.image, first.layout, axes)
        start += count


def grids_of(
    bundles: Sequence[Bundle], images: Ints, span: tuple[int, int], pages: tuple[Ints, int],
    sizes: tuple[int, int], slab: int, nbytes: int, *, pack: bool,
) -> tuple[Grid, ...]:  # fmt: skip
    """Grids for the tokens `span` of every image page of `images`; none if they would be small.

    `pages` are the layout's page numbers and the position of the first, `sizes` the tokens of a
    page of the image and of the layout, `slab` the address of image page 0, and `nbytes` what all
    move together.
    """
    walks = [_stepping(*_chunks(bundle, images, span, pages, sizes)) for bundle in bundles]
    count = sum(len(each) * len(one.lanes) for each, one in zip(walks, bundles, strict=True))
    if count * LEAST_GRID > nbytes:
        return ()
    grids = (
        Grid(
            bundle.unit, slab + lane.image + walk.image, lane.layout + walk.layout,
            (*lane.axes, *walk.axes, *bundle.inner),
        )
        for bundle, each in zip(bundles, walks, strict=True)
        for lane in bundle.lanes
        for walk in each
    )  # fmt: skip
    return tuple(grid.turned() if pack else grid for grid in grids)


def _stepping(image: Ints, layout: Ints) -> list[Lattice]:
    """`fold` of these places; blocks that all follow each other take no look at each."""
    steps = [np.diff(places) for places in (image, layout)]
    if len(image) > 1 and all((step == step[0]).all() for step in steps):
        axis = Axis(len(image), int(steps[0][0]), int(steps[1][0]))
        return [Lattice(int(image[0]), int(layout[0]), (axis,))]
    places = zip(image.tolist(), layout.tolist(), strict=True)
    return fold([Lattice(*place, ()) for place in places])


def _chunks(
    bundle: Bundle, images: Ints, span: tuple[int, int], pages: tuple[Ints, int],
    sizes: tuple[int, int],
) -> tuple[Ints, Ints]:  # fmt: skip
    """What page and chunk add to the place of a lane, in token order: of the image, the layout."""
    inside = np.arange(span[0], span[1], bundle.step, dtype=np.int64)
    tokens = (images[:, None] * sizes[0] + inside).ravel()
    index, within = np.divmod(tokens, sizes[1])
    numbers, first = pages
    layout = numbers[index - first] * bundle.layout_page + within * bundle.layout_token
    image = images[:, None] * bundle.image_page + inside * bundle.image_token
    return image.ravel(), layout
