"""Geometry of one worker's KV caches, from the tensors its runner registers.

The accelerator knows how the attention backends of its device arrange the bytes inside a page;
shapes never say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from neuron_push import layouts
from neuron_push.accelerator import Accelerator
from neuron_push.backends import Attention
from neuron_push.errors import ConfigError
from neuron_push.geometry import Geometry, Group, Plane, Region, check
from neuron_push.vllm.identity import group_kind

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def held_heads(total: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Global KV heads of a tensor-parallel rank, as vLLM divides or replicates them."""
    if total >= ranks:
        each = total // ranks
        return tuple(range(rank * each, (rank + 1) * each))
    return (rank * total // ranks,)


def describe(
    vllm_config: VllmConfig,
    kv_config: KVCacheConfig,
    caches: Mapping[str, torch.Tensor],
    accelerator: Accelerator,
    heads: tuple[int, ...],
) -> Geometry:
    """Regions, groups and planes of everything in `caches` (layer name -> tensor).

    Raises ConfigError or GeometryError for a cache that cannot be described.
    """
    regions = _Regions(accelerator)
    groups = []
    element = 0
    for spec in kv_config.kv_cache_groups:
        kind = group_kind(spec.kv_cache_spec)
        planes: list[Plane] = []
        page_tokens = 0
        for name in spec.layer_names:
            tensor = caches[name]
            base = regions.base_of(tensor)
            place = layouts.Place(layer_index(name), regions.number[base], base)
            attention = _attention(vllm_config, name, kind)
            planes += accelerator.planes(tensor, attention, place)
            page_tokens, element = _page_tokens(tensor, spec.kv_cache_spec), tensor.element_size()
        groups.append(
            Group(
                kind=_supported(kind),
                block_tokens=spec.kv_cache_spec.block_size,
                page_tokens=page_tokens,
                num_blocks=kv_config.num_blocks,
                heads=(0,) if kind == "mla" else heads,
                planes=tuple(planes),
                window=getattr(spec.kv_cache_spec, "sliding_window", 0) or 0,
            )
        )
    geometry = Geometry(tuple(regions.listed), tuple(groups), element)
    check(geometry)
    return geometry


class _Regions:
    """The allocations under the tensors, each once, whichever layers share it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.number: dict[int, int] = {}  # by base address
        self.listed: list[Region] = []

    def base_of(self, tensor: torch.Tensor) -> int:
        """Base of the tensor's allocation, which is listed from now on."""
        base, length = self._accelerator.region(tensor)
        if base not in self.number:
            self.number[base] = len(self.listed)
            memory = self._accelerator.memory_type(tensor)
            device = self._accelerator.device_id(tensor)
            self.listed.append(Region(base, length, memory, device))
        return base


def layer_index(name: str) -> int:
    """Global layer number in a name such as "model.layers.3.self_attn.attn"."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if not numbers:
        raise ConfigError(f"KV cache {name!r} carries no layer number")
    return int(numbers[0])


def refuse_context_parallel(config: VllmConfig) -> None:
    """Raise ConfigError if ranks hold parts of one request's tokens: planes cannot say which."""
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(config.parallel_config, setting, 1)
        if isinstance(size, int) and size > 1:
            raise ConfigError(
                f"{setting} is {size}: context parallelism spreads a request's tokens over ranks, "
                "which this version does not transfer (and vLLM Neuron allows DCP only with its "
                "own NeuronNixlConnector); set it to 1"
            )


def _attention(config: VllmConfig, name: str, kind: str) -> Attention:
    # Models that bring their own layers (vLLM Neuron's do) may leave this table empty; then only
    # an accelerator with one backend can tell.
    layer: Any = config.compilation_config.static_forward_context.get(name)
    return Attention(
        backend=layer.get_attn_backend().get_name() if layer is not None else "",
        kind=kind,
        isa=str(getattr(layer, "isa", "")),
        packed_keys=bool((config.additional_config or {}).get("fp8_packed_kv", False)),
    )


def _page_tokens(tensor: torch.Tensor, spec: Any) -> int:
    """Tokens per page of the tensor: its block axis may count smaller kernel blocks."""
    axis = {5: 3, 4: 2, 3: 1}.get(tensor.dim())
    if axis is None:
        raise ConfigError(f"a KV cache of {tensor.dim()} dimensions is not known here")
    tokens = int(tensor.shape[axis])
    if spec.block_size % tokens:
        raise ConfigError(f"blocks of {spec.block_size} tokens over pages of {tokens} tokens")
    return tokens


def _supported(kind: str) -> Any:
    if kind not in ("full", "sliding", "mla"):
        raise ConfigError(f"KV caches of kind {kind!r} are not transferred by this version")
    return kind
