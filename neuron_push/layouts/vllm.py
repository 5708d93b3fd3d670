"""Planes of vLLM's own attention backends and of the Neuron plugin."""

from __future__ import annotations

from typing import Literal

from neuron_push.geometry import GeometryError, Plane
from neuron_push.layouts.view import Place, View, beside, rank

__all__ = [
    "block_first",
    "cpu_attn_opaque",
    "cpu_attn_vec",
    "interleaved",
    "mla",
    "split_first",
]


def interleaved(view: View, place: Place, *, key_width: int | None = None) -> tuple[Plane, Plane]:
    """FLASH_ATTN and TRITON of vLLM 0.28 and later: (B, H, N, key_width + value_width).

    The axes are logical; their physical order is the tensor's strides. `key_width` defaults to
    half of the last axis.
    """
    rank(view, 4)
    width = view.shape[3] // 2 if key_width is None else key_width
    if not 0 < width < view.shape[3] or (key_width is None and view.shape[3] % 2):
        raise GeometryError(f"{view.shape[3]} channels do not split into K and V at {width}")
    offset = view.address - place.base
    key = Plane(
        layer=place.layer,
        kind="k",
        region=place.region,
        offset=offset,
        page=view.bytes(0),
        head=view.bytes(1),
        token=view.bytes(2),
        channel=view.bytes(3),
        width=width,
    )
    return key, beside(key, offset + width * view.bytes(3), view.shape[3] - width)


def split_first(
    view: View, place: Place, *, axes: Literal["HND", "NHD"] = "HND"
) -> tuple[Plane, Plane]:
    """Neuron and CUDA before vLLM 0.28: (2, B, H, N, D), or (2, B, N, H, D) with `axes` "NHD".

    `axes` names the order in the tensor's *shape*; a permuted view (the older CUDA HND caches are
    shaped NHD) keeps its own strides.
    """
    rank(view, 5)
    if view.shape[0] != 2:
        raise GeometryError(f"the first axis must hold K and V, not {view.shape[0]} arrays")
    head, token = (2, 3) if axes == "HND" else (3, 2)
    offset = view.address - place.base
    key = Plane(
        layer=place.layer,
        kind="k",
        region=place.region,
        offset=offset,
        page=view.bytes(1),
        head=view.bytes(head),
        token=view.bytes(token),
        channel=view.bytes(4),
        width=view.shape[4],
    )
    return key, beside(key, offset + view.bytes(0), view.shape[4])


def block_first(view: View, place: Place) -> tuple[Plane, Plane]:
    """(B, 2, H, N, D): what a Neuron plugin hands to vLLM 0.28 and later."""
    rank(view, 5)
    if view.shape[1] != 2:
        raise GeometryError(f"the second axis must hold K and V, not {view.shape[1]} arrays")
    offset = view.address - place.base
    key = Plane(
        layer=place.layer,
        kind="k",
        region=place.region,
        offset=offset,
        page=view.bytes(0),
        head=view.bytes(2),
        token=view.bytes(3),
        channel=view.bytes(4),
        width=view.shape[4],
    )
    return key, beside(key, offset + view.bytes(1), view.shape[4])


def cpu_attn_vec(view: View, place: Place) -> tuple[Plane, Plane]:
    """CPU_ATTN with ISA "vec" or "vec16", from its (B, H, N, 2D) tensor.

    The kernel uses the N*2D elements of each (page, head) as it likes: K transposed to (D, N),
    then V as (N, D).
    """
    tokens, width = _cpu_interior(view)
    offset, element = view.address - place.base, view.element
    key = Plane(
        layer=place.layer,
        kind="k",
        region=place.region,
        offset=offset,
        page=view.bytes(0),
        head=view.bytes(1),
        token=element,
        channel=tokens * element,
        width=width,
    )
    value = Plane(
        layer=place.layer,
        kind="v",
        region=place.region,
        offset=offset + tokens * width * element,
        page=view.bytes(0),
        head=view.bytes(1),
        token=width * element,
        channel=element,
        width=width,
    )
    return key, value


def cpu_attn_opaque(view: View, place: Place, *, isa: str) -> tuple[Plane, Plane]:
    """CPU_ATTN with a packing ISA ("amx", "vnni"), from its (B, H, N, 2D) tensor.

    The tag names everything that the packing depends on: ISA, page tokens, head size, element.
    """
    tokens, width = _cpu_interior(view)
    span = tokens * width * view.element
    offset = view.address - place.base
    key = Plane(
        layer=place.layer,
        kind="k",
        region=place.region,
        offset=offset,
        page=view.bytes(0),
        head=view.bytes(1),
        token=0,
        channel=0,
        width=width,
        interior=f"cpu_attn:{isa}:k:{tokens}x{width}x{view.element}",
        page_bytes=span,
    )
    value = Plane(
        layer=place.layer,
        kind="v",
        region=place.region,
        offset=offset + span,
        page=view.bytes(0),
        head=view.bytes(1),
        token=0,
        channel=0,
        width=width,
        interior=f"cpu_attn:{isa}:v:{tokens}x{width}x{view.element}",
        page_bytes=span,
    )
    return key, value


def mla(view: View, place: Place) -> tuple[Plane]:
    """Multi-head latent attention: (B, N, D) or (B, 1, N, D); the group lists one head."""
    if len(view.shape) == 4 and view.shape[1] == 1:
        view = View(
            (view.shape[0], *view.shape[2:]),
            (view.strides[0], *view.strides[2:]),
            view.address,
            view.element,
        )
    rank(view, 3)
    latent = Plane(
        layer=place.layer,
        kind="latent",
        region=place.region,
        offset=view.address - place.base,
        page=view.bytes(0),
        head=0,
        token=view.bytes(1),
        channel=view.bytes(2),
        width=view.shape[2],
    )
    return (latent,)


def _cpu_interior(view: View) -> tuple[int, int]:
    """Tokens and channels of one (page, head) that the kernel addresses as one flat run."""
    rank(view, 4)
    tokens, both = view.shape[2:]
    if both % 2 or view.strides[3] != 1 or view.strides[2] != both:
        raise GeometryError(f"CPU_ATTN needs contiguous (tokens, 2*channels), got {view}")
    return tokens, both // 2
