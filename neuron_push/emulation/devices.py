"""The devices that can be emulated, and how each keeps its KV cache.

A new device is one entry here, and a layout in `memory` if its pages look like none there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from neuron_push.emulation.options import DeviceName

Layout = Literal["split_first", "interleaved", "cpu_vec"]


@dataclass(frozen=True)
class Device:
    """Facts about one accelerator's vLLM worker."""

    block_tokens: int
    """Tokens per block unless the user says otherwise."""
    layout: Layout
    """Axes of one layer's tensor, see `memory`."""
    backend: str
    """What its attention backend calls itself."""
    layer_name: str
    """What its runner calls layer {index}."""
    can_reorder: bool
    """Whether strided bytes can be gathered while the engine runs."""
    own_allocations: bool
    """Each layer in an allocation of its own, rather than all in one."""


DEVICES: dict[DeviceName, Device] = {
    # vLLM Neuron: one tensor (2, blocks, heads, tokens, channels) per layer. A compiled NEFF owns
    # the cores, so nothing else moves bytes.
    "trn2": Device(
        32, "split_first", "NEURON_EMULATED", "layers.{index}.self_attn", False, True,
    ),
    # vLLM 0.28 and later with FLASH_ATTN: views (blocks, heads, tokens, 2 * channels) of one
    # allocation.
    "p5en": Device(
        16, "interleaved", "FLASH_ATTN", "model.layers.{index}.self_attn.attn", True, False,
    ),
    # vLLM's CPU attention with ISA "vec": K transposed inside each page.
    "cpu": Device(
        32, "cpu_vec", "CPU_ATTN", "model.layers.{index}.self_attn.attn", True, False,
    ),
}  # fmt: skip
