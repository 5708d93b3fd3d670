"""Planes of state groups: one opaque page per request."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_push.geometry import GeometryError, Plane
from neuron_push.layouts.view import Place, View

__all__ = ["state"]


def state(views: Sequence[View], place: Place, *, name: str = "mamba") -> Plane:
    """The tensors that make up one layer's state, (B, ...) each, inside one page per request.

    vLLM cuts them out of one raw allocation: equal page steps, different offsets. The page as a
    whole is copied, with the gaps between its tensors, and never taken apart; the tag names every
    shape and element size in it.

    Raises:
        GeometryError: there are no tensors, their pages step differently, or one leaves its page.
    """
    if not views:
        raise GeometryError("a state page without tensors")
    page = views[0].bytes(0)
    first = min(view.address for view in views)
    if any(view.bytes(0) != page for view in views):
        raise GeometryError("tensors of one state have pages of different sizes")
    ends = [view.address + _extent(view) for view in views]
    if max(ends) - first > page:
        raise GeometryError("tensors of one state do not lie in the same page")
    shapes = [f"{'x'.join(map(str, view.shape[1:]))}x{view.element}" for view in views]
    return Plane(
        layer=place.layer,
        kind="state",
        region=place.region,
        offset=first - place.base,
        page=page,
        head=0,
        token=0,
        channel=0,
        width=1,
        interior=f"{name}:{'+'.join(shapes)}",
        page_bytes=max(ends) - first,
    )


def _extent(view: View) -> int:
    """Bytes from a page's first element to the end of its last."""
    steps = zip(view.shape[1:], view.strides[1:], strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * view.element
