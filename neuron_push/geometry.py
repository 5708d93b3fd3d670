"""What one worker's KV memory looks like, as data that travels in a handshake.

A cache is described as *planes*. A plane is a strided array over (page, head, token, channel)
inside a registered region; the element (p, h, t, c) lies at

    region.base + offset + p*page + h*head + t*token + c*channel        (all in bytes)

with h an index into `Group.heads`, t the token inside the page and c the channel. Any layout of
any framework that keeps whole elements is such a plane, so layouts are never compared by name.

Units: `Group.block_tokens` is what the scheduler counts blocks in. A plane's page axis may be
finer (a kernel block); page = block * (block_tokens // page_tokens) + j.

This module is pure data plus `check`, which judges what a peer sent. `layouts` builds planes from
tensors, `plan` turns two geometries into copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from neuron_push.errors import IncompatiblePair, PlanError
from neuron_push.limits import LIMITS, Limits

__all__ = [
    "Geometry",
    "GeometryError",
    "Group",
    "IncompatiblePair",
    "Plane",
    "Region",
    "Semantics",
    "check",
]

Memory = Literal["DRAM", "VRAM"]
PlaneKind = Literal["k", "v", "latent", "state"]
GroupKind = Literal["full", "sliding", "mla", "state"]

# Numbers of layers; nothing is allocated by one.
MAX_LAYERS: Final = 4096
# Block and page numbers are int32 in every engine.
MAX_PAGES: Final = 2**31 - 1
# A block may be a whole sequence (NxD Inference without paging).
MAX_BLOCK_TOKENS: Final = 1 << 24
# Offsets, strides and sums of them are computed in int64.
MAX_ADDRESS: Final = 2**63 - 1
# Two tags of this length still make a readable refusal.
MAX_TAG: Final = 128
ELEMENT_SIZES: Final = (1, 2, 4, 8)


class GeometryError(PlanError):
    """A geometry contradicts itself or exceeds a limit; the text names the part."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One registered allocation: `length` bytes from address `base`."""

    base: int
    length: int
    memory: Memory
    device: int  # the device number that NIXL is told; 0 for host memory


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """K, V, latent or state of one layer. Offset and strides are in bytes.

    A strided plane has an empty `interior` and `page_bytes` 0. An opaque one carries a tag: its
    bytes mean something only to a plane with the same tag, so it is copied in spans of
    `page_bytes` at offset + page*p + head*h and never taken apart; with `head` 0 one span holds
    all heads. `token` and `channel` of an opaque plane are 0.
    """

    layer: int  # global number, whatever the pipeline stage
    kind: PlaneKind
    region: int  # index into Geometry.regions
    offset: int
    page: int
    head: int
    token: int
    channel: int
    width: int  # channels per (token, head)
    interior: str = ""
    page_bytes: int = 0


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share block lists: one KV cache group of the scheduler.

    `heads` lists the *global* KV heads along the head axis, in storage order; other ranks may hold
    replicas of them. `page_tokens` divides `block_tokens`.
    """

    kind: GroupKind
    block_tokens: int
    page_tokens: int
    num_blocks: int
    heads: tuple[int, ...]
    planes: tuple[Plane, ...]
    window: int = 0  # tokens a sliding layer looks back on; 0 otherwise


class Geometry(msgspec.Struct, frozen=True, array_like=True):
    """All KV memory of one worker rank."""

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    element_bytes: int
    # Block ids below this are placeholders: they own no token (vLLM's block 0 is the null block).
    reserved_blocks: int = 1


class Semantics(msgspec.Struct, frozen=True, array_like=True):
    """What two engines must agree on before any byte moves.

    Engine version, attention backend and block size are not part of it.
    """

    model: str
    layers: int
    kv_heads: int
    head_size: int
    dtype: str
    groups: tuple[str, ...]
    # Tokens that P stops short of the prompt's end, because D recomputes them over state pages.
    backoff: int = 0
    # Whatever else must match: RoPE form, KV scales, draft layers.
    extra: tuple[tuple[str, str], ...] = ()

    def differences(self, other: Semantics) -> list[str]:
        """One line per field that differs; `self` is the prefill side, `other` the decode side."""
        found = [
            f"{name}: prefill {mine}, decode {theirs}"
            for name in self.__struct_fields__
            if name != "extra"
            and (mine := _show(getattr(self, name))) != (theirs := _show(getattr(other, name)))
        ]
        ours, others = dict(self.extra), dict(other.extra)
        found += [
            f"{name}: prefill {ours.get(name, 'unset')}, decode {others.get(name, 'unset')}"
            for name in sorted(ours.keys() | others.keys())
            if ours.get(name) != others.get(name)
        ]
        return found


def _show(value: object) -> str:
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)


class Axis(NamedTuple):
    """One axis of a plane: `size` steps of `stride` bytes."""

    name: str
    size: int
    stride: int


def axes(plane: Plane, group: Group) -> tuple[Axis, ...]:
    """The page, head, token and channel axis of a plane; opaque planes have the first two."""
    pages = group.num_blocks * (group.block_tokens // group.page_tokens)
    outer = Axis("page", pages, plane.page), Axis("head", len(group.heads), plane.head)
    if plane.interior:
        return outer
    inner = (
        Axis("token", group.page_tokens, plane.token),
        Axis("channel", plane.width, plane.channel),
    )
    return outer + inner


def check(geometry: Geometry, limits: Limits = LIMITS) -> None:
    """Judge a geometry that a peer sent, before anything is computed or allocated from it.

    Guarantees: every count lies within `limits`; every byte that a plane can address lies in its
    region; elements are aligned and no two of a plane overlap; heads and planes are unique.

    Raises:
        GeometryError: naming the part and what is wrong with it.
    """
    _require(geometry.element_bytes in ELEMENT_SIZES, f"element_bytes is {geometry.element_bytes}")
    planes = sum(len(group.planes) for group in geometry.groups)
    heads = max((len(group.heads) for group in geometry.groups), default=0)
    counts = {
        "regions": len(geometry.regions), "groups": len(geometry.groups),
        "planes": planes, "heads": heads,
    }  # fmt: skip
    for name, count in counts.items():
        most = getattr(limits, name)
        _require(count <= most, f"{count} {name}, where limits.{name} is {most}")
    _require(geometry.reserved_blocks >= 0, "reserved_blocks is negative")
    for index, region in enumerate(geometry.regions):
        _check_region(f"region {index}", region)
    # A NIXL descriptor list carries one memory type.
    _require(len({r.memory for r in geometry.regions}) <= 1, "regions mix DRAM and VRAM")
    for index, group in enumerate(geometry.groups):
        _check_group(f"group {index}", group, geometry)


def _require(held: bool, complaint: str) -> None:
    if not held:
        raise GeometryError(complaint)


def _check_region(name: str, region: Region) -> None:
    _require(region.base > 0 and region.length > 0, f"{name}: base and length must be positive")
    _require(region.base + region.length <= MAX_ADDRESS, f"{name} ends beyond the address space")
    _require(region.device >= 0, f"{name}: device is negative")


def _check_group(name: str, group: Group, geometry: Geometry) -> None:
    _require(1 <= group.page_tokens <= group.block_tokens, f"{name}: page_tokens out of range")
    _require(group.block_tokens <= MAX_BLOCK_TOKENS, f"{name}: block_tokens out of range")
    _require(
        group.block_tokens % group.page_tokens == 0,
        f"{name}: blocks of {group.block_tokens} tokens are no multiple of pages of "
        f"{group.page_tokens}",
    )
    pages = group.num_blocks * (group.block_tokens // group.page_tokens)
    _require(group.num_blocks >= 1 and pages <= MAX_PAGES, f"{name}: num_blocks out of range")
    _require(geometry.reserved_blocks <= group.num_blocks, f"{name}: all blocks are reserved")
    _require(group.window >= 0, f"{name}: window is negative")
    _require(bool(group.heads) or not group.planes, f"{name}: planes without heads")
    _require(all(head >= 0 for head in group.heads), f"{name}: a head number is negative")
    _require(len(set(group.heads)) == len(group.heads), f"{name}: a head is listed twice")
    keys = {(plane.layer, plane.kind) for plane in group.planes}
    _require(len(keys) == len(group.planes), f"{name}: two planes of one layer and kind")
    for plane in group.planes:
        label = f"{name}, layer {plane.layer} {plane.kind}"
        _require(0 <= plane.layer < MAX_LAYERS, f"{label}: layer out of range")
        _require(0 <= plane.region < len(geometry.regions), f"{label}: no region {plane.region}")
        _check_plane(label, plane, group, geometry.element_bytes)
        _check_extent(label, plane, group, geometry)


def _check_plane(label: str, plane: Plane, group: Group, element: int) -> None:
    _require(plane.width >= 1, f"{label}: width must be positive")
    _require(len(plane.interior) <= MAX_TAG, f"{label}: interior tag is too long")
    _require(bool(plane.interior) == (plane.page_bytes > 0), f"{label}: page_bytes and interior")
    is_state = group.kind == "state"
    _require(
        is_state == (plane.kind == "state"), f"{label}: does not belong in a {group.kind} group"
    )
    _require(bool(plane.interior) or not is_state, f"{label}: state pages are opaque")
    numbers = (plane.offset, plane.page, plane.head, plane.token, plane.channel, plane.page_bytes)
    _require(all(n >= 0 for n in numbers), f"{label}: an offset or stride is negative")
    if plane.interior:
        _require(plane.token == plane.channel == 0, f"{label}: opaque planes have no inner strides")
    _require(all(n % element == 0 for n in numbers), f"{label}: not aligned to its elements")


def _check_extent(label: str, plane: Plane, group: Group, geometry: Geometry) -> None:
    """Walk the axes from the innermost out: each must step over all that lies within it."""
    extent = plane.page_bytes or geometry.element_bytes
    for axis in sorted(_moving(plane, group), key=lambda a: (a.stride, a.size)):
        _require(axis.stride >= extent, f"{label}: the {axis.name} stride makes elements overlap")
        extent += (axis.size - 1) * axis.stride
    available = geometry.regions[plane.region].length - plane.offset
    _require(
        extent <= available,
        f"{label}: ends {extent - available} bytes beyond region {plane.region}",
    )


def _moving(plane: Plane, group: Group) -> Iterator[Axis]:
    """Axes along which addresses must differ: longer than one, and heads only if spans split."""
    for axis in axes(plane, group):
        one_span_for_all_heads = bool(plane.interior) and axis.name == "head" and axis.stride == 0
        if axis.size > 1 and not one_span_for_all_heads:
            yield axis
