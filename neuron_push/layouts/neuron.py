"""Planes of NxD Inference's caches, and of fp8 keys that the Neuron plugin packs."""

from __future__ import annotations

from typing import Literal

from neuron_push.geometry import GeometryError, Plane
from neuron_push.layouts.view import Place, View

__all__ = ["fp8_packed_key", "single"]


def single(view: View, place: Place, kind: Literal["k", "v"], axes: str) -> Plane:
    """K or V alone in a tensor, its axes named by letters: B page, H head, N token, D channel.

    NxD Inference: contiguous "BHND", K transposed "BHDN", tiled "BHNND" and "BHDNN", block
    "BNHD", tiled block "BNNHD", chunked prefill "BHND". A page of the contiguous caches is a
    sequence of the batch. Two N are tiles of one token axis, outer before inner.

    Raises:
        GeometryError: the axes do not fit the tensor, or its tiles do not step evenly.
    """
    if len(axes) != len(view.shape) or sorted(set(axes)) != sorted("BHND"):
        raise GeometryError(f"axes {axes!r} do not name the axes of shape {view.shape}")
    token = axes.rindex("N")
    if axes.count("N") == 2:
        outer = axes.index("N")
        if view.strides[outer] != view.shape[token] * view.strides[token]:
            raise GeometryError(f"tiles of tokens do not follow each other in {view}")
    elif len(axes) != 4:
        raise GeometryError(f"axes {axes!r} name one of page, head and channel twice")
    return Plane(
        layer=place.layer,
        kind=kind,
        region=place.region,
        offset=view.address - place.base,
        page=view.bytes(axes.index("B")),
        head=view.bytes(axes.index("H")),
        token=view.bytes(token),
        channel=view.bytes(axes.index("D")),
        width=view.shape[axes.index("D")],
    )


def fp8_packed_key(view: View, place: Place) -> Plane:
    """K of the Neuron plugin with `fp8_packed_kv`: (B, H, N/2, D, 2).

    Token t lies at (t // 2) * 2D + t % 2, which no single stride expresses, so a head's page is
    opaque. V keeps the strides of `split_first`.
    """
    if len(view.shape) != 5 or view.shape[4] != 2:
        raise GeometryError(f"packed fp8 keys have shape (B, H, N/2, D, 2), not {view.shape}")
    pairs, width = view.shape[2:4]
    if view.strides[2:] != (2 * width, 2, 1):
        raise GeometryError(f"packed fp8 keys must be contiguous per head, got {view}")
    return Plane(
        layer=place.layer,
        kind="k",
        region=place.region,
        offset=view.address - place.base,
        page=view.bytes(0),
        head=view.bytes(1),
        token=0,
        channel=0,
        width=width,
        interior=f"neuron:fp8_packed:k:{2 * pairs}x{width}x{view.element}",
        page_bytes=2 * pairs * width * view.element,
    )
