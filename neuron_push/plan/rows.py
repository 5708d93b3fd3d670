"""Rows between the pages of a layout and their image in a staging slab.

A *table* lists, once per pair, every row of one image page: where it lies in the image and where
in the layout's page 0. The rows of a token range are that table crossed with the pages, so a
request costs a few NumPy operations, whatever the number of layers, heads and blocks.

Both sides cut tokens into *chunks* that never cross a page of either: rows are runs of a chunk, as
long as both sides step through channels, and then tokens, contiguously.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from neuron_push.geometry import Geometry, Group, Plane
from neuron_push.plan.grids import Bundle, Lattice, fold, grids_of
from neuron_push.plan.image import Image
from neuron_push.transform import Axis, Rows

__all__ = ["Rearrangement"]

Ints = npt.NDArray[np.int64]


class Lane(NamedTuple):
    """One head of one plane on both sides; `layout` is an address, `image` counts from the slab."""

    image: int
    layout: int
    image_plane: Plane
    layout_plane: Plane


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Rows of `unit` bytes of one image page, (parts, rows of a part), in the order of the image.

    `column` picks the class of page and token steps, and the chunk within the page; `chunk` is
    the chunk alone. Both are the same for all parts, or there is one part.
    """

    unit: int
    align: int
    step: int  # from page to page of a part
    image: Ints  # from the slab's first byte, page 0
    layout: Ints  # address, page 0
    column: Ints
    chunk: Ints
    dense: bool  # the rows of all pages are all of the slab
    bundles: tuple[Bundle, ...]  # the same rows, by what steps alike


@dataclass(eq=False)
class Rearrangement:
    """One group's way between the layout of `geometry` and its image over a slab of `pages`."""

    geometry: Geometry
    group: Group
    image: Image
    pages: int
    _tables: dict[int, list[RowTable]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        planes = {(plane.layer, plane.kind): plane for plane in self.group.planes}
        self._lanes = [
            lane
            for plane in self.image.in_slab(self.pages)
            for lane in self._of_plane(plane, planes[plane.layer, plane.kind])
        ]
        steps = {(lane.layout_plane.page, lane.layout_plane.token) for lane in self._lanes}
        self._classes = {step: index for index, step in enumerate(sorted(steps))}

    def _of_plane(self, image: Plane, layout: Plane) -> Iterator[Lane]:
        base = self.geometry.regions[layout.region].base + layout.offset
        for index, head in enumerate(self.image.heads):
            if index and layout.interior and not layout.head:
                break  # one span for all heads
            at = self.group.heads.index(head) * layout.head
            yield Lane(image.offset + index * image.head, base + at, image, layout)

    def rows(
        self, start: int, stop: int, pages: Ints, first: int, slab: int, origin: int, *, pack: bool
    ) -> list[Rows]:
        """Rows of tokens [start, stop), all present.

        `pages[i]` is the layout's page number `first + i` in token order; the image page that
        holds token `origin` lies at address `slab`. `pack` copies into the image, else out of it.
        """
        tokens = self.image.page_tokens
        found: list[Rows] = []
        for low, high, begin, end in _segments(start, stop, tokens):
            step = math.gcd(tokens, self.group.page_tokens, begin, end)
            images = np.arange(low, high, dtype=np.int64)
            sizes = tokens, self.group.page_tokens
            for table in self._table(step):
                chosen: slice | Ints = slice(None)
                if end - begin < tokens:
                    inside = (table.chunk >= begin // step) & (table.chunk < end // step)
                    chosen = np.flatnonzero(inside)
                count = table.layout[:, chosen].size * len(images)
                grids = grids_of(
                    table.bundles, images, (begin, end), (pages, first), sizes,
                    slab - origin // tokens * table.step, table.unit * count, pack=pack,
                )  # fmt: skip
                layout = partial(self._layout, table, images, (pages, first), step, chosen)
                image: Callable[[], Ints] | int = slab
                if not (end - begin == tokens and high - low == self.pages and table.dense):
                    places = slab + (images - origin // tokens) * table.step
                    image = partial(_image, table, places, chosen)
                source, destination = (layout, image) if pack else (image, layout)
                found.append(Rows(table.unit, table.align, count, source, destination, grids))
        return found

    def _layout(
        self,
        table: RowTable,
        images: Ints,
        pages: tuple[Ints, int],
        step: int,
        chosen: slice | Ints,
    ) -> Ints:
        """Addresses of rows in the layout: part by part, page by page."""
        shifts = self._shifts(images, *pages, step)
        places = table.layout[:, None, chosen] + shifts[:, table.column[chosen]]
        return places.ravel()

    def _shifts(self, images: Ints, pages: Ints, first: int, step: int) -> Ints:
        """What page and chunk add to a lane's address: (image pages, classes x chunks)."""
        chunks = np.arange(0, self.image.page_tokens, step, dtype=np.int64)
        tokens = images[:, None] * self.image.page_tokens + chunks
        index, inside = np.divmod(tokens, self.group.page_tokens)
        # Chunks outside the range have no page and are not looked at.
        numbers = pages[np.clip(index - first, 0, len(pages) - 1)]
        return np.hstack([numbers * page + inside * token for page, token in self._classes])

    def _table(self, step: int) -> list[RowTable]:
        if step not in self._tables:
            self._tables[step] = list(self._make_tables(step))
        return self._tables[step]

    def _make_tables(self, step: int) -> Iterator[RowTable]:
        """One table per length of row and place of the layout's allocation in units of it."""
        chunks = self.image.page_tokens // step
        steps = [number for page, token in self._classes for number in (page, step * token)]
        found: dict[tuple[int, int, int, int], list[tuple[Ints, Ints, Ints, Ints]]] = {}
        lanes: dict[tuple[int, int, int, int], list[Lane]] = {}
        for lane in self._lanes:
            unit, image, layout, chunk = self._of_lane(lane, step)
            plane = lane.layout_plane
            column = self._classes[plane.page, plane.token] * chunks + chunk
            # Allocations begin where they like: rows that differ by whole units are faster.
            align = math.gcd(unit, *steps, *np.diff(layout).tolist())
            key = unit, align, int(layout[0]) % align, lane.image_plane.page
            found.setdefault(key, []).append((image, layout, column, chunk))
            lanes.setdefault(key, []).append(lane)
        for key, members in found.items():
            unit, align, _, part = key
            arrays = [np.concatenate(each) for each in zip(*members, strict=True)]
            order = np.argsort(arrays[0])
            arrays = [each[order] for each in arrays]
            span = part * self.pages
            bundles = tuple(
                _bundles(lanes[key], step, self.image.page_tokens, self.geometry.element_bytes)
            )
            if len(bundles) == 1 and (rows := _run(unit, *arrays)) > 1:
                unit, arrays = unit * rows, [each[::rows] for each in arrays]
                align = math.gcd(unit, *steps, *np.diff(arrays[1]).tolist())
                bundles = (_joined(bundles[0], unit, arrays),)
            image, layout, column, chunk = _by_part(arrays, span)
            # Parts that are unlike are walked page by page, which is not the order of the slab.
            in_order = len(image) == len(np.unique(image // span))
            dense = in_order and unit * image.size == self.image.page_bytes
            yield RowTable(unit, align, part, image, layout, column, chunk, dense, bundles)

    def _of_lane(self, lane: Lane, step: int) -> tuple[int, Ints, Ints, Ints]:
        """Row length of a lane, and its rows in one image page: image, layout, chunk."""
        image, layout, element = lane.image_plane, lane.layout_plane, self.geometry.element_bytes
        if layout.interior:
            spot = np.array([lane.image]), np.array([lane.layout]), np.zeros(1, np.int64)
            return layout.page_bytes, *spot
        unit, inner = _inner(image, layout, step, element)
        chunks = np.arange(self.image.page_tokens // step, dtype=np.int64)
        at = lane.image + chunks[:, None] * (step * image.token) + _starts(inner, 1)
        spots = np.broadcast_to(lane.layout + _starts(inner, 2), at.shape)
        chunk = np.broadcast_to(chunks[:, None], at.shape)
        return unit, at.ravel(), spots.ravel(), chunk.ravel()


def _run(unit: int, image: Ints, layout: Ints, column: Ints, chunk: Ints) -> int:
    """How many rows continue each other on both sides everywhere: K beside V, head after head."""
    follows = (np.diff(image) == unit) & (np.diff(layout) == unit)
    follows &= (np.diff(column) == 0) & (np.diff(chunk) == 0)
    lengths = np.diff(np.flatnonzero(np.concatenate(([True], ~follows, [True]))))
    return int(lengths[0]) if (lengths == lengths[0]).all() else 1


def _joined(bundle: Bundle, unit: int, arrays: Sequence[Ints]) -> Bundle:
    """The bundle of rows that were joined to `unit` bytes."""
    image, layout, _, chunk = arrays
    first = chunk == 0
    places = zip(image[first].tolist(), layout[first].tolist(), strict=True)
    lanes = fold([Lattice(*place, ()) for place in places])
    return bundle._replace(unit=unit, inner=(), lanes=tuple(lanes))


def _by_part(arrays: list[Ints], span: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Image and layout as (parts, rows), if all parts of `span` slab bytes are built alike."""
    image, layout, column, chunk = arrays
    _, counts = np.unique(image // span, return_counts=True)
    parts = len(counts)
    if (counts == counts[0]).all():
        columns, chunks = column.reshape(parts, -1), chunk.reshape(parts, -1)
        if (columns == columns[0]).all() and (chunks == chunks[0]).all():
            shape = parts, -1
            return image.reshape(shape), layout.reshape(shape), columns[0], chunks[0]
    return image[None], layout[None], column, chunk


def _inner(image: Plane, layout: Plane, step: int, element: int) -> tuple[int, tuple[Axis, ...]]:
    """Row length within a chunk, and the axes on which its rows lie in image and layout."""
    sizes = {"token": step, "channel": image.width}
    unit = element
    for axis in ("channel", "token", "channel"):
        strides = getattr(image, axis), getattr(layout, axis)
        if axis in sizes and (sizes[axis] == 1 or strides == (unit, unit)):
            unit *= sizes.pop(axis)
    axes = (Axis(n, getattr(image, name), getattr(layout, name)) for name, n in sizes.items())
    return unit, tuple(axes)


def _starts(axes: Sequence[Axis], side: int) -> Ints:
    """Where rows start on one side, the last axis fastest."""
    starts = np.zeros(1, np.int64)
    for axis in axes:
        along = np.arange(axis.size, dtype=np.int64) * axis[side]
        starts = (starts[:, None] + along).ravel()
    return starts


def _image(table: RowTable, places: Ints, chosen: slice | Ints) -> Ints:
    """Addresses of rows in the slab, in the order of `Rearrangement._layout`."""
    found: Ints = (table.image[:, None, chosen] + places[:, None]).ravel()
    return found


def _bundles(lanes: Sequence[Lane], step: int, page_tokens: int, element: int) -> Iterator[Bundle]:
    """Lanes in the order of the image, those together that step alike."""
    alike: dict[Bundle, list[Lattice]] = {}
    for lane in sorted(lanes, key=lambda lane: lane.image):
        image, layout = lane.image_plane, lane.layout_plane
        # A page that is opaque goes once, however many chunks of it are wanted.
        chunk, unit, inner = page_tokens, layout.page_bytes, tuple[Axis, ...]()
        if not layout.interior:
            chunk, (unit, inner) = step, _inner(image, layout, step, element)
        steps = image.page, image.token, layout.page, layout.token
        bundle = Bundle(unit, chunk, *steps, inner, ())
        alike.setdefault(bundle, []).append(Lattice(lane.image, lane.layout, ()))
    for bundle, places in alike.items():
        yield bundle._replace(lanes=tuple(fold(places)))


def _segments(start: int, stop: int, tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """[start, stop) as (first page, end page, first token, end token) with equal cuts per page."""
    low, high = -(-start // tokens), stop // tokens
    if low > high:  # within one page
        yield high, low, start - high * tokens, stop - high * tokens
        return
    if start < low * tokens:
        yield low - 1, low, start - (low - 1) * tokens, tokens
    if low < high:
        yield low, high, 0, tokens
    if high * tokens < stop:
        yield high, high + 1, 0, stop - high * tokens
