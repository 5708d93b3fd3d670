"""Where a tensor's elements lie, and small steps that all builders share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from neuron_push.geometry import GeometryError, Plane

__all__ = ["Place", "TensorLike", "View", "beside", "rank"]


class TensorLike(Protocol):
    """The part of torch.Tensor that is needed; keeps torch out of this module."""

    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class View:
    """Where a tensor's elements lie: `strides` in elements, `address` and `element` in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    element: int

    @classmethod
    def of(cls, tensor: TensorLike, element: int | None = None) -> View:
        """The facts of a tensor; `element` reads a raw byte tensor as wider elements.

        Raises:
            GeometryError: the last axis of the byte tensor does not hold whole elements.
        """
        size = tensor.element_size()
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if element is None or element == size:
            return cls(shape, strides, tensor.data_ptr(), size)
        outer = strides[:-1]
        whole = strides[-1] == 1 and all(n * size % element == 0 for n in (*outer, shape[-1]))
        if not whole:
            raise GeometryError(f"a tensor of shape {shape} holds no whole {element}-byte elements")
        wide = tuple(n * size // element for n in outer)
        return cls(
            (*shape[:-1], shape[-1] * size // element), (*wide, 1), tensor.data_ptr(), element
        )

    def bytes(self, axis: int) -> int:
        """Stride of an axis in bytes."""
        return self.strides[axis] * self.element


@dataclass(frozen=True, slots=True)
class Place:
    """Which layer a tensor belongs to, and which region (its index and base address) holds it."""

    layer: int
    region: int
    base: int


def rank(view: View, axes: int) -> None:
    """Refuse a tensor with another number of axes."""
    if len(view.shape) != axes:
        raise GeometryError(f"expected {axes} axes, got shape {view.shape}")


def beside(key: Plane, offset: int, width: int) -> Plane:
    """V beside or behind K: the same strides from another offset."""
    return Plane(
        layer=key.layer,
        kind="v",
        region=key.region,
        offset=offset,
        page=key.page,
        head=key.head,
        token=key.token,
        channel=key.channel,
        width=width,
    )
