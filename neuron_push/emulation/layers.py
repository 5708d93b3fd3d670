"""Attention layers without weights: what vLLM and connectors ask of a model's KV cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from neuron_push.emulation.devices import DEVICES, Device
from neuron_push.emulation.options import wanted
from neuron_push.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

_ELEMENTS = {
    "fp8": torch.uint8, "fp8_e4m3": torch.uint8, "fp8_e5m2": torch.uint8,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip


class EmulatedBackend(AttentionBackend):
    """Base of one class per device: vLLM passes backends around as classes."""

    device: Device

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("emulated attention computes nothing")

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError("emulated attention computes nothing")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Pages contiguous per head, as the connectors ask of CUDA."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC,)


class P5enBackend(EmulatedBackend):
    @staticmethod
    def get_name() -> str:
        return DEVICES["p5en"].backend


class Trn2Backend(EmulatedBackend):
    @staticmethod
    def get_name() -> str:
        return DEVICES["trn2"].backend


class CpuBackend(EmulatedBackend):
    @staticmethod
    def get_name() -> str:
        return DEVICES["cpu"].backend


class StateBackend(EmulatedBackend):
    """Of layers that keep a state per request, on any device."""

    @staticmethod
    def get_name() -> str:
        return "MAMBA2_ATTN"


_BACKENDS: dict[str, type[EmulatedBackend]] = {
    "p5en": P5enBackend, "trn2": Trn2Backend, "cpu": CpuBackend,
}  # fmt: skip


def backend_path() -> str:
    """Qualified name of the emulated device's backend."""
    options = wanted()
    assert options is not None
    return f"{__name__}.{_BACKENDS[options.device].__name__}"


class EmulatedLayer(AttentionLayerBase):
    """One attention layer of the model, as far as its cache is concerned."""

    isa = "vec"  # of the CPU's pages

    def __init__(self, backend: type[EmulatedBackend], spec: KVCacheSpec) -> None:
        self._backend = backend
        self._spec = spec

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self._spec


def build(config: VllmConfig, device: str) -> dict[str, KVCacheSpec]:
    """Make this stage's layers known to vLLM; their cache specs by name."""
    model, parallel = config.model_config, config.parallel_config
    first, last = model.get_layers_start_end_indices(parallel)
    specs: dict[str, KVCacheSpec] = {}
    for index in range(first, last):
        name = DEVICES[device].layer_name.format(index=index)  # type: ignore[index]
        backend = _BACKENDS[device]
        if _keeps_state(model.hf_text_config, index):
            name, backend = f"model.layers.{index}.mixer", StateBackend
            spec: KVCacheSpec = _state_spec(config)
        else:
            spec = _spec(config, index)
        layer = EmulatedLayer(backend, spec)
        config.compilation_config.static_forward_context[name] = layer
        specs[name] = spec
    return specs


def _spec(config: VllmConfig, index: int) -> KVCacheSpec:
    model, cache = config.model_config, config.cache_config
    dtype = _ELEMENTS.get(cache.cache_dtype, model.dtype)
    size = {"block_size": cache.block_size, "head_size": model.get_head_size(), "dtype": dtype}
    if model.use_mla:
        return MLAAttentionSpec(num_kv_heads=1, **size)
    size["num_kv_heads"] = model.get_num_kv_heads(config.parallel_config)
    window = _window(model.hf_text_config, index)
    if window and not config.scheduler_config.disable_hybrid_kv_cache_manager:
        return SlidingWindowSpec(sliding_window=window, **size)
    return FullAttentionSpec(**size)


def _keeps_state(text: Any, index: int) -> bool:
    """Whether a layer keeps a state (Mamba) instead of K and V, by the model's own list."""
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    return kinds is not None and kinds[index] in ("mamba", "linear_attention")


def _state_spec(config: VllmConfig) -> KVCacheSpec:
    """Shapes as the model's own class gives them, in pages as large as those of attention."""
    from vllm.model_executor.models.registry import ModelRegistry

    model, cache = config.model_config, config.cache_config
    cls, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    shapes = tuple(cls.get_mamba_state_shape_from_config(config))
    dtypes = tuple(cls.get_mamba_state_dtype_from_config(config))
    if len(set(dtypes)) > 1:
        raise ConfigError(f"state tensors of several types ({dtypes}) are not emulated")
    attention: Any = _spec(config, -1)
    needed = sum(math.prod(shape) for shape in shapes) * dtypes[0].itemsize
    if needed > attention.page_size_bytes:
        raise ConfigError(
            f"a state of {needed} bytes does not fit into blocks of {cache.block_size} tokens, "
            f"{attention.page_size_bytes} bytes: ask for a larger block size"
        )
    return MambaSpec(
        shapes=shapes, dtypes=dtypes, block_size=cache.mamba_block_size,
        page_size_padded=attention.page_size_bytes, mamba_cache_mode=cache.mamba_cache_mode,
    )  # fmt: skip


def _window(text: Any, index: int) -> int:
    """Tokens that a layer looks back over; 0 for all."""
    window = getattr(text, "sliding_window", None) or 0
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return window if kinds[index] == "sliding_attention" else 0
    return window if getattr(text, "use_sliding_window", True) else 0
