"""Attention layers without weights: what vLLM and connectors ask of a model's KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from neuron_push.emulation.devices import DEVICES, Device
from neuron_push.emulation.options import wanted

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
        spec = _spec(config, index)
        layer = EmulatedLayer(_BACKENDS[device], spec)
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


def _window(text: Any, index: int) -> int:
    """Tokens that a layer looks back over; 0 for all."""
    window = getattr(text, "sliding_window", None) or 0
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return window if kinds[index] == "sliding_attention" else 0
    return window if getattr(text, "use_sliding_window", True) else 0
