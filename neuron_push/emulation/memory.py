"""Host tensors in a device's layout, and views that reach every slot by plain indexing.

S cache layers that share blocks, B blocks, H heads, N tokens per block, W words per row:

    interleaved    (B, H, N, 2D) per layer     all layers in one allocation
    split_first    (2, B, H, N, D) per layer   an allocation per layer
    cpu_vec        (B, H, N, 2D) per layer     K as (D, N), then V as (N, D), inside each (B, H)
    latent         (B, N, D) per layer         MLA, on every device
    state          (B, 1, 1, bytes)            Mamba: all state of a layer side by side, on p5en

Each view starts with the axes (block, token), so that `view[blocks, tokens]` is all of a slot.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from neuron_push.emulation import pattern
from neuron_push.emulation.devices import Device
from neuron_push.errors import ConfigError

WORD: Final = 8


@dataclass(frozen=True)
class GroupShape:
    """Cache group of one rank: its layers share a block table."""

    names: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    """Global numbers of the heads that this rank holds."""
    block_tokens: int
    row_bytes: int
    """Bytes of one head's K (or V, or latent) of one token."""
    element: int
    dtype: torch.dtype
    latent: bool
    window: int
    """Tokens that attention looks back over; 0: all."""
    state: bool = False
    """Whether blocks hold a state and no tokens. Then a row is a whole state, `heads` is the
    number of the rank and `block_tokens` is 1."""
    padded: int = 0
    """Bytes of a page, if more than its content."""

    @property
    def kinds(self) -> int:
        return 1 if self.latent or self.state else 2

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.padded or self.slot_bytes * self.block_tokens

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.kinds * len(self.heads) * self.row_bytes


@dataclass(frozen=True)
class View:
    """`tensor` has axes (block, token, *order); `base` has axes `order`.

    Letters of `order`: l layer, k K|V, h head, w word or element. `kind` is for views that hold
    K or V alone.
    """

    tensor: torch.Tensor
    base: torch.Tensor
    order: str
    kind: int
    words: torch.dtype


@dataclass(frozen=True)
class Cache:
    """A rank's KV memory: tensors by layer name for the connector, views per group."""

    tensors: dict[str, torch.Tensor]
    views: tuple[tuple[View, ...], ...]
    shapes: tuple[GroupShape, ...]


def allocate(
    device: Device, shapes: tuple[GroupShape, ...], blocks: int, *, touched: bool = False,
    huge: bool = False,
) -> Cache:  # fmt: skip
    """All groups over one pool of blocks: layer i of every group shares raw memory i.

    `touched`: every page of memory is a real one from the start; else those that are written.
    `huge`: pages of 2 MiB, where the kernel has them.

    Raises ConfigError for state groups on a device whose blocks are not each in one piece.
    """
    if device.layout == "split_first" and any(shape.state for shape in shapes):
        raise ConfigError(
            "this device keeps K and V in two halves of an allocation, where no page of a state "
            "fits between blocks: emulate models with state layers (Mamba) on p5en"
        )
    page = shapes[0].page_bytes
    assert all(shape.page_bytes == page for shape in shapes)
    depth = max(len(shape.layers) for shape in shapes)
    raw = pages(depth * blocks * page, huge=huge)
    if touched:
        raw.fill(1)
    rows = raw[: depth * blocks * page].reshape(depth, blocks * page)
    whole = torch.from_numpy(rows)
    tensors: dict[str, torch.Tensor] = {}
    views = []
    for shape in shapes:
        for slot, name in enumerate(shape.names):
            row = torch.from_numpy(rows[slot]) if device.own_allocations else whole[slot]
            tensors[name] = _layer_tensor(device, shape, row.view(shape.dtype), blocks)
        views.append(_views(device, shape, whole[: len(shape.layers)], blocks))
    return Cache(tensors, tuple(views), shapes)


def pages(nbytes: int, *, huge: bool = False) -> npt.NDArray[np.uint8]:
    """Memory of this process alone, page-aligned as a driver's allocation is."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, nbytes), flags=private)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _layer_tensor(
    device: Device, shape: GroupShape, flat: torch.Tensor, blocks: int
) -> torch.Tensor:
    """What this device's runner registers for one layer."""
    if shape.state:
        pages = flat.view(torch.int8).view(blocks, 1, 1, -1)
        return pages[..., : shape.row_bytes]
    tokens, width = shape.block_tokens, shape.row_bytes // shape.element
    if shape.latent:
        return flat.view(blocks, tokens, width)
    if device.layout == "split_first":
        return flat.view(2, blocks, len(shape.heads), tokens, width)
    return flat.view(blocks, len(shape.heads), tokens, 2 * width)


def _views(device: Device, shape: GroupShape, raw: torch.Tensor, blocks: int) -> tuple[View, ...]:
    layers, heads, tokens = len(shape.layers), len(shape.heads), shape.block_tokens
    words = shape.row_bytes // WORD
    array = pattern.bases(shape.layers, shape.kinds, shape.heads, words)
    base = torch.from_numpy(array.view(np.int64))  # l k h w
    wide = raw.view(torch.int64)
    if shape.state:
        tensor = wide.view(layers, blocks, 1, -1)[..., :words].permute(1, 2, 0, 3)
        return (View(tensor, base[:, 0, 0], "lw", 0, torch.int64),)
    if shape.latent:
        tensor = wide.view(layers, blocks, tokens, words).permute(1, 2, 0, 3)
        return (View(tensor, base[:, 0, 0], "lw", 0, torch.int64),)
    if device.layout == "split_first":
        tensor = wide.view(layers, 2, blocks, heads, tokens, words).permute(2, 4, 0, 1, 3, 5)
        return (View(tensor, base, "lkhw", 0, torch.int64),)
    if device.layout == "interleaved":
        tensor = wide.view(layers, blocks, heads, tokens, 2, words).permute(1, 3, 0, 2, 4, 5)
        return (View(tensor, base.transpose(1, 2).contiguous(), "lhkw", 0, torch.int64),)
    return _cpu_views(shape, raw, base, blocks)


def _cpu_views(
    shape: GroupShape, raw: torch.Tensor, base: torch.Tensor, blocks: int
) -> tuple[View, ...]:
    """K and V apart, in elements: a channel of K is a column."""
    layers, heads, tokens = len(shape.layers), len(shape.heads), shape.block_tokens
    width = shape.row_bytes // shape.element
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32}[shape.element]
    pages = raw.view(words).view(layers, blocks, heads, 2, tokens * width)
    key = pages[:, :, :, 0].view(layers, blocks, heads, width, tokens).permute(1, 4, 0, 2, 3)
    value = pages[:, :, :, 1].view(layers, blocks, heads, tokens, width).permute(1, 3, 0, 2, 4)
    return (
        View(key, base[:, 0].contiguous(), "lhw", 0, words),
        View(value, base[:, 1].contiguous(), "lhw", 1, words),
    )
