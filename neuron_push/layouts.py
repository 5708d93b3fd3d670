"""Planes from tensors: one builder per way a framework arranges K and V.

Who knows the attention backend picks the builder; a builder takes strides from the tensor it is
given and never guesses an arrangement from a shape. All results are in bytes.

B pages, H heads on the rank, N tokens per page, D channels:

    interleaved        (B, H, N, 2D)      K row and V row side by side per token
    split_first        (2, B, H, N, D)    V is a second array behind K; or tokens before heads
    cpu_attn_vec       (B, H, N, 2D)      per (page, head) K as (D, N), then V as (N, D)
    cpu_attn_opaque    (B, H, N, 2D)      per (page, head) K tiles, then V tiles
    mla                (B, N, D)          one latent row per token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from neuron_push.geometry import GeometryError, Plane

__all__ = [
    "Place",
    "TensorLike",
    "View",
    "cpu_attn_opaque",
    "cpu_attn_vec",
    "interleaved",
    "mla",
    "split_first",
]


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


def interleaved(view: View, place: Place, *, key_width: int | None = None) -> tuple[Plane, Plane]:
    """FLASH_ATTN and TRITON of vLLM 0.28 and later: (B, H, N, key_width + value_width).

    The axes are logical; their physical order is the tensor's strides. `key_width` defaults to
    half of the last axis.
    """
    _rank(view, 4)
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
    return key, _value(key, offset + width * view.bytes(3), view.shape[3] - width)


def split_first(
    view: View, place: Place, *, axes: Literal["HND", "NHD"] = "HND"
) -> tuple[Plane, Plane]:
    """Neuron and CUDA before vLLM 0.28: (2, B, H, N, D), or (2, B, N, H, D) with `axes` "NHD".

    `axes` names the order in the tensor's *shape*; a permuted view (the older CUDA HND caches are
    shaped NHD) keeps its own strides.
    """
    _rank(view, 5)
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
    return key, _value(key, offset + view.bytes(0), view.shape[4])


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
    _rank(view, 3)
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


def _rank(view: View, axes: int) -> None:
    if len(view.shape) != axes:
        raise GeometryError(f"expected {axes} axes, got shape {view.shape}")


def _value(key: Plane, offset: int, width: int) -> Plane:
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


def _cpu_interior(view: View) -> tuple[int, int]:
    """Tokens and channels of one (page, head) that the kernel addresses as one flat run."""
    _rank(view, 4)
    tokens, both = view.shape[2:]
    if both % 2 or view.strides[3] != 1 or view.strides[2] != both:
        raise GeometryError(f"CPU_ATTN needs contiguous (tokens, 2*channels), got {view}")
    return tokens, both // 2
