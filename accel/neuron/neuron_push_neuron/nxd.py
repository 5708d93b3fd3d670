"""Geometry of NxD Inference: one process for all ranks, KV in the compiled model's state.

Read from neuronx-distributed-inference 4bcdc54: modules/kvcache (shapes), modules/attention/gqa.py
(how heads are replicated) and attention/utils.py (how context parallelism permutes ranks). What
depends on ranks is asked from that library rather than computed again.

That stack ends at vLLM 0.16, below what the connector supports: this module describes its memory,
and no engine of ours runs on it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from neuron_push import layouts
from neuron_push.accelerator import Tensor
from neuron_push.errors import ConfigError
from neuron_push.geometry import Plane
from neuron_push.layouts import View

__all__ = ["Axes", "Caches", "Heads", "axes", "caches", "held_heads", "planes"]

T = TypeVar("T")
_KEY: Final = re.compile(r"(?:.*\.)?kv_mgr\.past_key_values\.(\d+)$")
_UTILS: Final = "neuronx_distributed_inference.modules.attention.utils"


@dataclass(frozen=True)
class Heads:
    """KV heads of a model and how they are spread, as `InferenceConfig` says."""

    kv_heads: int
    attention_heads: int
    ranks: int  # neuron_config.tp_degree
    context_ranks: int = 1  # neuron_config.cp_degree
    data_ranks: int = 1  # neuron_config.attention_dp_degree
    switch: bool = False  # neuron_config.switch_cc


class Axes(NamedTuple):
    """Axes of the K and the V tensors, in the letters of `layouts.single`."""

    key: str
    value: str


class Caches(NamedTuple):
    """K and V tensor of one layer of one rank."""

    key: Tensor
    value: Tensor


def caches(state: Sequence[Mapping[str, Tensor]]) -> list[dict[int, Caches]]:
    """Per rank, the caches by layer, from a compiled model's state.

    Raises ConfigError if a rank has no caches or a layer lacks one of its two.
    """
    ranks = []
    for rank, tensors in enumerate(state):
        numbered = {
            int(match[1]): tensor for name, tensor in tensors.items() if (match := _KEY.match(name))
        }
        layers = len(numbered) // 2
        if not numbered or sorted(numbered) != list(range(2 * layers)):
            raise ConfigError(
                f"rank {rank} holds {len(numbered)} tensors kv_mgr.past_key_values.*, which are "
                "not K and V of each layer"
            )
        ranks.append({n: Caches(numbered[2 * n], numbered[2 * n + 1]) for n in range(layers)})
    return ranks


def axes(neuron_config: Any) -> Axes:
    """How the caches are arranged; `neuron_config` is the model's NeuronConfig."""

    def on(name: str) -> bool:
        return bool(getattr(neuron_config, name, False))

    if on("flash_decoding_enabled"):
        raise ConfigError("flash decoding spreads one head's tokens over ranks: not supported")
    if on("is_prefix_caching"):
        # Tiled in the block if few blocks make a sequence; the tiles follow each other.
        return Axes("BNHD", "BNHD")
    if on("is_chunked_prefill"):
        return Axes("BHND", "BHND")
    tiled = "N" if on("kv_cache_tiling") else ""
    value = f"BHN{tiled}D"
    return Axes(f"BHDN{tiled}" if on("k_cache_transposed") else value, value)


def planes(pair: Caches, arrangement: Axes, layer: int, regions: Mapping[int, int]) -> list[Plane]:
    """Planes of one layer; `regions` maps each allocation's base to its index."""
    found = []
    for tensor, kind, letters in (
        (pair.key, "k", arrangement.key),
        (pair.value, "v", arrangement.value),
    ):
        base = tensor.untyped_storage().data_ptr()
        view = View.of(tensor)
        if letters == "BNHD" and len(view.shape) == 5:
            letters = "BNNHD"
        place = layouts.Place(layer, regions[base], base)
        found.append(layouts.single(view, place, "k" if kind == "k" else "v", letters))
    return found


def held_heads(heads: Heads) -> list[tuple[int, ...]]:
    """Global KV heads that each rank's cache holds, in storage order.

    Raises ConfigError where a rank would hold a head twice or one that is padding (the library
    then gives each attention head a KV head of its own), or where ranks hold unlike sequences.
    """
    if heads.data_ranks > 1:
        raise ConfigError(
            "attention data parallelism keeps each sequence on a part of the ranks: not supported"
        )
    if heads.context_ranks > 1:
        return _reordered(heads)
    return _chunks(_slots(heads), heads.ranks)


def _slots(heads: Heads) -> list[int]:
    """The head behind each KV slot of the whole model, before ranks divide them."""
    whole = list(range(heads.kv_heads))
    if heads.kv_heads % heads.ranks == 0:
        return whole
    if heads.ranks % heads.kv_heads == 0:
        return [head for head in whole for _ in range(heads.ranks // heads.kv_heads)]
    raise ConfigError(
        f"{heads.kv_heads} KV heads over {heads.ranks} ranks make NxD Inference store one KV head "
        f"per attention head ({heads.attention_heads}, padded): not supported; choose a tensor "
        "parallel degree that divides, or is a multiple of, the KV heads"
    )


def _reordered(heads: Heads) -> list[tuple[int, ...]]:
    """Prefill runs in groups of ranks and decode in all of them, over one cache."""
    if heads.ranks < heads.kv_heads or heads.ranks % heads.kv_heads:
        raise ConfigError("context parallelism needs a multiple of the KV heads as ranks")
    try:
        utils = importlib.import_module(_UTILS)
    except ImportError as error:
        raise ConfigError(
            "which head a rank holds under context parallelism is known to "
            f"neuronx-distributed-inference only, which does not import: {error}"
        ) from error
    ordering = None
    if heads.context_ranks == 8 and heads.ranks == 64:
        # The one mesh whose groups are not runs of neighbours.
        found = utils.get_cp8_tp8_rank_ordering(
            heads.ranks, heads.context_ranks, switch_cc=heads.switch
        )
        ordering = [int(rank) for rank in found]
    order = utils.get_context_parallel_reordered_tp_mapping(
        heads.ranks, heads.context_ranks, heads.kv_heads, cte_rank_ordering=ordering
    )
    copies = heads.ranks // heads.kv_heads
    return [(int(place) // copies,) for place in order]


def _chunks(slots: Sequence[T], ranks: int) -> list[tuple[T, ...]]:
    each = len(slots) // ranks
    return [tuple(slots[rank * each : (rank + 1) * each]) for rank in range(ranks)]
