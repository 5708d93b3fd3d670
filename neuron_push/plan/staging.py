"""Setting up a staged pair: images of one side's pages, their places in a slab, the WRITE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from neuron_push.errors import IncompatiblePair
from neuron_push.geometry import Geometry, Group, Region
from neuron_push.plan.assign import Ask
from neuron_push.plan.group import GroupPlan
from neuron_push.plan.image import Image, image_of
from neuron_push.plan.pair import check_pair, pair
from neuron_push.plan.pieces import Pieces
from neuron_push.plan.rows import Rearrangement
from neuron_push.plan.staged import Stage, StagedPlan, Staging, Straight
from neuron_push.plan.stripe import WHOLE

__all__ = ["staged"]

# Beyond it a slab would have to hold an absurd number of tokens to be cut at all boundaries.
MOST_GRAIN: Final = 1 << 14


def staged(
    source: Geometry,
    destination: Geometry,
    ask: Ask,
    way: Staging,
    slab_bytes: int,
    *,
    min_run: int,
    straight: Straight | None = None,
) -> StagedPlan:
    """Plan for slabs of `slab_bytes` on the side that reorders, or on each.

    Raises:
        IncompatiblePair: no order of bytes would help, the other side's own runs are shorter than
            `min_run`, or a slab holds too few tokens.
    """
    check_pair(source, destination, ask)
    pairs = tuple(
        GroupPlan(mine, theirs, ())
        for mine, theirs in zip(source.groups, destination.groups, strict=True)
    )
    shown = source if way == "unpacked" else destination
    images = [
        _image(plan, heads, group, source.element_bytes)
        for plan, heads, group in zip(pairs, ask.heads, shown.groups, strict=True)
    ]
    if way == "both":
        images = [image and image.whole() for image in images]
    grain = _grain(images)
    tokens = slab_bytes // max(1, _bytes(images, grain)) * grain
    if not tokens:
        raise IncompatiblePair(
            f"a staging slab of {slab_bytes} bytes is less than the {_bytes(images, grain)} that "
            f"{grain} tokens take, the smallest piece; raise staging_slab_bytes there to as much"
        )
    sides = None if way == "unpacked" else source, None if way == "packed" else destination
    stages = _stages(images, sides, tokens)
    views = tuple(
        _with_images(own, shown, stages, _bytes(images, tokens), opaque=way == "both")
        if own
        else side
        for own, side in zip(sides, (source, destination), strict=True)
    )
    wanted = [
        stage.image.heads if stage and way == "both" else heads
        for stage, heads in zip(stages, ask.heads, strict=True)
    ]
    return StagedPlan(
        way=way,
        source=source,
        destination=destination,
        # It sees the squeezed axis alone.
        wire=pair(views[0], views[1], Ask(tuple(wanted), WHOLE), min_run=min_run),
        pairs=pairs,
        stages=stages,
        tokens=tokens,
        grain=grain,
        slab_bytes=_bytes(images, tokens),
        views=(views[0], views[1]),
        stripe=ask.stripe,
        straight=straight,
    )


def _image(plan: GroupPlan, heads: tuple[int, ...], shown: Group, element: int) -> Image | None:
    """The image of one group; None for state pages and for what the pair does not exchange."""
    if not heads or shown.kind == "state":
        return None
    pieces = Pieces(plan.source, plan.destination, heads, element)
    pieces.check()
    layers = frozenset(match.layer for _, match, _ in pieces.matches())
    return image_of(shown, heads, layers, element) if layers else None


def _stages(
    images: Sequence[Image | None], sides: tuple[Geometry | None, Geometry | None], tokens: int
) -> tuple[Stage | None, ...]:
    """Each group's stretch of a slab of so many tokens; `sides` are those that have slabs."""
    stages: list[Stage | None] = []
    offset = 0
    for index, image in enumerate(images):
        if image is None:
            stages.append(None)
            continue
        pages = tokens // image.page_tokens
        packing, unpacking = (
            Rearrangement(own, own.groups[index], image, pages) if own else None for own in sides
        )
        whole = any(plane.interior for plane in image.planes)
        stages.append(Stage(image, packing, unpacking, offset, pages, whole))
        offset += pages * image.page_bytes
    return tuple(stages)


def _grain(images: Sequence[Image | None]) -> int:
    """Tokens at which pieces are cut: wherever all groups begin a page of their image."""
    grain = math.lcm(*(image.page_tokens for image in images if image))
    if grain > MOST_GRAIN:
        raise IncompatiblePair(
            f"pages meet only every {grain} tokens, too many for a slab; choose block sizes with a "
            "smaller common multiple"
        )
    return grain


def _bytes(images: Sequence[Image | None], tokens: int) -> int:
    return sum(tokens // image.page_tokens * image.page_bytes for image in images if image)


def _with_images(
    own: Geometry, shown: Geometry, stages: Sequence[Stage | None], length: int, *, opaque: bool
) -> Geometry:
    """`own` with images of `shown`'s pages in place of its groups, in one more region.

    From slab to slab, whole pages of an image are `opaque`.
    """
    region = len(own.regions)
    slab = Region(0, length, own.regions[0].memory, own.regions[0].device)
    groups: list[Group] = []
    for stage, group, model in zip(stages, own.groups, shown.groups, strict=True):
        if stage is None:
            groups.append(group)
            continue
        image = stage.image
        # Block ids below `reserved_blocks` are holes: the first page has that number.
        planes = tuple(
            replace(
                plane,
                region=region,
                offset=stage.offset + plane.offset - own.reserved_blocks * plane.page,
            )
            for plane in ((image.opaque(),) if opaque else image.in_slab(stage.pages))
        )
        groups.append(
            replace(
                model,
                block_tokens=image.page_tokens,
                page_tokens=image.page_tokens,
                num_blocks=stage.pages + own.reserved_blocks,
                heads=image.heads,
                planes=planes,
            )
        )
    return replace(own, regions=(*own.regions, slab), groups=tuple(groups))
