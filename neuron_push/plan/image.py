"""Images: one group's pages as they lie in a staging slab, without gaps.

An image page holds what a layout's page holds of the wanted layers and heads, in the same order:
what is contiguous in the page stays contiguous in the image, so that the WRITE between the two is
a direct one with runs as long as the layout allows. What lies apart in the layout (K and V, the
tensors of two layers) is a *part* of the image: a slab holds all pages of a part in a row, so that
pages that are neighbours in the layout can be neighbours in the slab, and packing reads memory in
order. Image pages may be shorter than the layout's,
which keeps a page of a whole sequence (NxD Inference without paging) from filling the slab.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from msgspec.structs import replace

from neuron_push.geometry import Group, Plane

__all__ = ["Image", "image_of"]

# Longer pages are cut, if they can be: 512 tokens of one head are runs of 64 KiB and more.
LONGEST_PAGE: Final = 512

Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Image:
    """Planes of one page of an image.

    `offset` of a plane counts from the first byte of its part of the page, `page` is the size of
    that part, and `starts` tells where each plane's part begins if parts follow each other.
    """

    planes: tuple[Plane, ...]
    starts: tuple[int, ...]
    heads: tuple[int, ...]
    page_tokens: int
    page_bytes: int  # all parts together

    def in_slab(self, pages: int) -> tuple[Plane, ...]:
        """The planes over a slab of so many pages: offsets from its first byte."""
        return tuple(
            replace(plane, offset=start * pages + plane.offset)
            for plane, start in zip(self.planes, self.starts, strict=True)
        )

    def whole(self) -> Image:
        """The same page as one part, so that any number of pages is one stretch of a slab."""
        planes = tuple(
            replace(plane, offset=start + plane.offset, page=self.page_bytes)
            for plane, start in zip(self.planes, self.starts, strict=True)
        )
        return Image(planes, (0,) * len(planes), self.heads, self.page_tokens, self.page_bytes)

    def opaque(self) -> Plane:
        """A page of a `whole` image as it travels between two slabs: bytes and nothing else."""
        return Plane(
            self.planes[0].layer, self.planes[0].kind, 0, 0, self.page_bytes, 0, 0, 0, 1,
            interior="image", page_bytes=self.page_bytes,
        )  # fmt: skip


class Spot(NamedTuple):
    """Where one head of one plane lies in a page of the image."""

    offset: int
    token: int
    channel: int


class Item(NamedTuple):
    """One head of one plane in page 0; sorts by place."""

    region: int
    page: int
    start: int
    stop: int
    token: int
    channel: int
    size: int  # bytes without gaps
    key: Key
    head: int


def image_of(group: Group, heads: tuple[int, ...], layers: frozenset[int], element: int) -> Image:
    """The image of a group's pages, for some of its heads and layers."""
    tokens = _page_tokens(group, element)
    stored = tuple(head for head in group.heads if head in heads)
    planes = [plane for plane in group.planes if plane.layer in layers]
    items = sorted(
        item for plane in planes for item in _items(plane, group, stored, tokens, element)
    )
    placed: dict[tuple[Key, int], Spot] = {}
    ends = [0]
    for cluster in _clusters(items):
        ends.append(ends[-1] + _place(cluster, ends[-1], tokens, element, placed))
    if not _even(planes, stored, placed):
        placed, ends = {}, [0]
        for item in sorted(items, key=lambda item: (item.key, stored.index(item.head))):
            ends.append(ends[-1] + _alone(item, ends[-1], tokens, element, placed))
    parts = _parts(placed, ends)
    images = [_plane(plane, stored, placed, parts) for plane in planes]
    starts = tuple(start for start, _ in images)
    return Image(tuple(plane for _, plane in images), starts, stored, tokens, ends[-1])


def _parts(placed: dict[tuple[Key, int], Spot], ends: list[int]) -> list[tuple[int, int]]:
    """Stretches of the page that hold whole planes, as short as they can be."""
    spans: dict[Key, tuple[int, int]] = {}
    for (key, _), spot in placed.items():
        low, high = spans.get(key, (spot.offset, spot.offset))
        spans[key] = min(low, spot.offset), max(high, spot.offset)
    # A part may end nowhere within what one plane covers.
    inner = set(ends)
    for low, high in spans.values():
        if low < high:
            inner -= {end for end in inner if low < end <= high}
    return list(pairwise(sorted(inner)))


def _page_tokens(group: Group, element: int) -> int:
    """The layout's own page, unless it is long and every plane can be cut by token."""
    by_token = all(not plane.interior and plane.channel == element for plane in group.planes)
    if group.page_tokens <= LONGEST_PAGE or not by_token:
        return group.page_tokens
    divisors = (n for n in range(LONGEST_PAGE, 0, -1) if group.page_tokens % n == 0)
    return next(divisors)


def _items(
    plane: Plane, group: Group, heads: tuple[int, ...], tokens: int, element: int
) -> Iterator[Item]:
    size = plane.page_bytes or plane.width * tokens * element
    extent = plane.page_bytes or (
        (tokens - 1) * plane.token + (plane.width - 1) * plane.channel + element
    )
    if plane.interior and not plane.head:
        heads = heads[:1]  # one span for all of them
    for head in heads:
        start = plane.offset + group.heads.index(head) * plane.head
        key = (plane.layer, plane.kind)
        yield Item(
            plane.region,
            plane.page,
            start,
            start + extent,
            plane.token,
            plane.channel,
            size,
            key,
            head,
        )


def _clusters(items: list[Item]) -> Iterator[list[Item]]:
    """Items whose bytes touch or interleave, together."""
    cluster: list[Item] = []
    end = 0
    for item in items:
        if cluster and (item[:2] != cluster[0][:2] or item.start > end):
            yield cluster
            cluster = []
        end = max(end, item.stop) if cluster else item.stop
        cluster.append(item)
    if cluster:
        yield cluster


def _place(
    cluster: list[Item],
    at: int,
    tokens: int,
    element: int,
    placed: dict[tuple[Key, int], Spot],
) -> int:
    """Give a cluster its place from byte `at` of the page; returns its size."""
    first, end = cluster[0], max(item.stop for item in cluster)
    size = sum(item.size for item in cluster)
    if size == end - first.start:
        for item in cluster:
            spot = Spot(at + item.start - first.start, item.token, item.channel)
            placed[item.key, item.head] = spot
    elif all(
        item.token == first.token
        and item.channel in (0, element)
        and item.start < first.start + first.token
        for item in cluster
    ):
        # Rows of one token with gaps between them: keep the rows, drop the gaps.
        row, step = at, size // tokens
        for item in cluster:
            placed[item.key, item.head] = Spot(row, step, item.channel)
            row += item.size // tokens
    else:
        for item in cluster:
            at += _alone(item, at, tokens, element, placed)
    return size


def _alone(
    item: Item,
    at: int,
    tokens: int,
    element: int,
    placed: dict[tuple[Key, int], Spot],
) -> int:
    """An item without its gaps, its axes in the same order; returns its size."""
    if not item.token and not item.channel:
        steps = 0, 0
    elif item.channel > item.token:
        steps = element, tokens * element
    else:
        steps = item.size // tokens, element
    placed[item.key, item.head] = Spot(at, *steps)
    return item.size


def _even(
    planes: list[Plane],
    heads: tuple[int, ...],
    placed: dict[tuple[Key, int], Spot],
) -> bool:
    """Whether the heads of every plane lie evenly spaced and alike, as one plane needs."""
    for plane in planes:
        spots = [placed[key] for head in heads if (key := (_key(plane), head)) in placed]
        steps = {after.offset - before.offset for before, after in pairwise(spots)}
        if len(steps) > 1 or len({spot[1:] for spot in spots}) > 1 or min(steps, default=0) < 0:
            return False
    return True


def _plane(
    plane: Plane,
    heads: tuple[int, ...],
    placed: dict[tuple[Key, int], Spot],
    parts: list[tuple[int, int]],
) -> tuple[int, Plane]:
    """Where a plane's part begins, and the plane within it."""
    spots = [placed[key] for head in heads if (key := (_key(plane), head)) in placed]
    first = spots[0]
    head = plane.page_bytes if plane.head else 0
    if len(spots) > 1:
        head = spots[1].offset - first.offset
    start, end = parts[bisect_right(parts, (first.offset, sys.maxsize)) - 1]
    return start, replace(
        plane,
        offset=first.offset - start,
        page=end - start,
        head=head,
        token=first.token,
        channel=first.channel,
    )


def _key(plane: Plane) -> Key:
    return plane.layer, plane.kind
