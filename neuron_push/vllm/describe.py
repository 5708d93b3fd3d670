"""Geometry of one worker's KV caches, from the tensors its runner registers.

The accelerator knows how the attention backends of its device arrange the bytes inside a page;
shapes never say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from neuron_push import layouts
from neuron_push.accelerator import Accelerator
from neuron_push.backends import Attention
from neuron_push.errors import ConfigError
from neuron_push.geometry import Geometry, Group, Plane, Region, check
from neuron_push.limits import LIMITS, Limits
from neuron_push.vllm.identity import group_kind

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

# As vLLM's plug-in for NxD Inference names the caches that it hands to a connector.
_NXD: Final = re.compile(r"tp\d+_layer\d+_(k|v|kv)")


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
    seat: int = 0,
    limits: Limits = LIMITS,
) -> Geometry:
    """Regions, groups and planes of everything in `caches` (layer name -> tensor).

    `heads` are the global KV heads of this rank, `seat` its tensor-parallel number, which names
    its part of a state. Beyond `limits` it is refused here; peers judge it by theirs.

    Raises ConfigError or GeometryError for a cache that cannot be described.
    """
    _refuse_nxd(caches)
    reading = _Reading(vllm_config, caches, accelerator)
    groups = tuple(
        reading.state_group(spec, kv_config.num_blocks, seat)
        if group_kind(spec.kv_cache_spec) == "state"
        else reading.group(spec, kv_config.num_blocks, heads)
        for spec in kv_config.kv_cache_groups
    )
    if len(reading.elements) > 1:
        sizes = " and ".join(map(str, sorted(reading.elements)))
        raise ConfigError(
            f"KV caches have elements of {sizes} bytes; one engine's must be alike to be "
            "transferred (an index cache beside MLA is not known here)"
        )
    geometry = Geometry(tuple(reading.regions.listed), groups, next(iter(reading.elements), 1))
    check(geometry, limits)
    return geometry


class _Reading:
    """The caches of one worker, and what has been learnt of them."""

    def __init__(
        self, config: VllmConfig, caches: Mapping[str, torch.Tensor], accelerator: Accelerator
    ) -> None:
        self._config = config
        self._caches = caches
        self._accelerator = accelerator
        self.regions = _Regions(accelerator)
        self.elements: set[int] = set()  # sizes in bytes

    def _place(self, name: str) -> layouts.Place:
        base = self.regions.base_of(self._caches[name])
        return layouts.Place(layer_index(name), self.regions.number[base], base)

    def group(self, spec: KVCacheGroupSpec, blocks: int, heads: tuple[int, ...]) -> Group:
        """A group that keeps tokens."""
        kind, planes, page_tokens = group_kind(spec.kv_cache_spec), list[Plane](), 0
        for name in spec.layer_names:
            tensor = self._caches[name]
            attention = _attention(self._config, name, kind)
            planes += self._accelerator.planes(tensor, attention, self._place(name))
            page_tokens = _page_tokens(tensor, spec.kv_cache_spec)
            self.elements.add(tensor.element_size())
        return Group(
            kind=_supported(kind),
            block_tokens=spec.kv_cache_spec.block_size,
            page_tokens=page_tokens,
            num_blocks=blocks,
            heads=(0,) if kind == "mla" else heads,
            planes=tuple(planes),
            window=getattr(spec.kv_cache_spec, "sliding_window", 0) or 0,
        )

    def state_group(self, spec: KVCacheGroupSpec, blocks: int, seat: int) -> Group:
        """A group with a state per request: the block that vLLM views as bytes, and their names.

        Tensor-parallel ranks hold parts of a state, each like the others in size only, unless its
        spec calls it replicated.
        """
        planes, inner = list[Plane](), getattr(spec.kv_cache_spec, "kv_cache_specs", {})
        replicated = False
        for name in spec.layer_names:
            state: Any = inner.get(name, spec.kv_cache_spec)
            if state.mamba_cache_mode != "none":
                raise ConfigError(
                    f"mamba_cache_mode is {state.mamba_cache_mode!r}: states of several places in "
                    "a prompt are not transferred; start with --no-enable-prefix-caching"
                )
            replicated = bool(getattr(state, "tp_replicated", False))
            view = layouts.View.of(self._caches[name])
            planes.append(layouts.state([view], self._place(name), name=_state_name(state)))
        tokens = spec.kv_cache_spec.block_size
        heads = (0,) if replicated else (seat,)
        return Group("state", tokens, tokens, blocks, heads, tuple(planes))


def _state_name(state: Any) -> str:
    """What a state's bytes mean: kind of layer, and shape and type of each of its tensors."""
    kind = getattr(state.mamba_type, "name", state.mamba_type)
    tensors = [
        "x".join(map(str, shape)) + f".{str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(state.shapes, state.dtypes, strict=True)
    ]
    return f"{str(kind).lower()}:{'+'.join(tensors)}"


def _refuse_nxd(caches: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError for the caches of vLLM's NxD Inference plug-in, by their names."""
    name = next((name for name in caches if _NXD.fullmatch(name)), None)
    if name is not None:
        raise ConfigError(
            f"{name!r} is a cache of NxD Inference: there one process holds the caches of all "
            "ranks, which this connector cannot serve as one rank. Use vLLM Neuron from 0.29 on, "
            "whose workers hold their own"
        )


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
