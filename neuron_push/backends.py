"""How attention backends arrange KV pages, by the name that the backend gives itself.

vLLM gives caches of unlike backends the same shape and the same layout name, so only the backend's
name (and, for CPU_ATTN, the instruction set it packs for) tells where K and V lie. Accelerators
pick from these tables; a backend that is in none is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from neuron_push import layouts
from neuron_push.errors import ConfigError
from neuron_push.geometry import GeometryError, Plane
from neuron_push.layouts import Place, View

__all__ = ["GPU", "HOST", "NEURON", "Attention", "arrange"]


@dataclass(frozen=True)
class Attention:
    """What a runner knows of one layer's attention backend."""

    backend: str  # its get_name(); empty if the engine keeps no layer of that name
    kind: str = "full"  # of the layer's KV group
    isa: str = ""  # CPU_ATTN: the instruction set that its pages are packed for
    # vLLM Neuron's option `fp8_packed_kv`: K of two neighbouring tokens lies channel by channel.
    packed_keys: bool = False


Arrangement = Callable[[View, Place, Attention], tuple[Plane, ...]]


def _interleaved(view: View, place: Place, attention: Attention) -> tuple[Plane, ...]:
    return layouts.interleaved(view, place)


def _split_first(view: View, place: Place, attention: Attention) -> tuple[Plane, ...]:
    key, value = layouts.split_first(view, place)
    return (layouts.fp8_packed_key(_pairs(view), place) if attention.packed_keys else key), value


def _pairs(view: View) -> View:
    """K of a (2, B, H, N, D) tensor as vLLM Neuron packs it: (B, H, N / 2, D, 2)."""
    pages, heads, tokens, width = view.shape[1:]
    if tokens % 2 or view.strides[3:] != (width, 1):
        raise GeometryError(f"packed keys need pages of contiguous token pairs, got {view}")
    strides = (*view.strides[1:3], 2 * width, 2, 1)
    return View((pages, heads, tokens // 2, width, 2), strides, view.address, view.element)


def _cpu_attn(view: View, place: Place, attention: Attention) -> tuple[Plane, ...]:
    if attention.isa in ("vec", "vec16"):
        return layouts.cpu_attn_vec(view, place)
    return layouts.cpu_attn_opaque(view, place, isa=attention.isa or "unknown")


# A K row and a V row side by side per token (vLLM 0.28 and later).
GPU: Final[Mapping[str, Arrangement]] = {
    "FLASH_ATTN": _interleaved,
    "TRITON_ATTN": _interleaved,
}
# vLLM Neuron has one backend, which calls itself CUSTOM; its models' layers need not be in vLLM's
# table. Only its accelerator reads this, since other platforms use that name too.
NEURON: Final[Mapping[str, Arrangement]] = {"CUSTOM": _split_first, "": _split_first}
# Emulated devices keep their pages in host memory, in their own arrangement.
HOST: Final[Mapping[str, Arrangement]] = {
    "CPU_ATTN": _cpu_attn,
    "NEURON_EMULATED": _split_first,
    **GPU,
}


def arrange(
    table: Mapping[str, Arrangement], view: View, place: Place, attention: Attention
) -> tuple[Plane, ...]:
    """Planes of one layer's tensor; ConfigError for a backend that the table does not have."""
    if attention.kind == "mla":
        return layouts.mla(view, place)
    arrangement = table.get(attention.backend)
    if arrangement is None:
        raise ConfigError(
            f"attention backend {attention.backend!r} arranges KV pages in a way that is not known "
            f"here; use one of {', '.join(sorted(filter(None, table)))}"
        )
    return arrangement(view, place, attention)
