"""Tiny models of random weights whose caches are not plain full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from neuron_push import tiny_model
from neuron_push.tiny_model import ATTENTION_GAIN, STORED_SCALE, TinyModel, Weights

# Of every second layer of `sliding`; several blocks, and far less than the longest prompt.
WINDOW = 100
# Of `latent`: DeepSeek's own latent row, which vLLM's kernel for CPUs expects.
LATENT, ROPE, NOPE, VALUE = 512, 64, 32, 32
_PER_HEAD = ("q_norm.weight", "k_norm.weight")


def sliding(folder: Path) -> Path:
    """Llama with full and sliding attention in turn: two cache groups."""
    model = TinyModel()
    # Llama does not normalise queries and keys.
    tensors = {n: w for n, w in tiny_model.weights(model).items() if not n.endswith(_PER_HEAD)}
    return _write(folder, model, tensors, {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (model.layers // 2),
        "mlp_bias": False,
    })  # fmt: skip


def latent(folder: Path) -> Path:
    """DeepSeek-V2 without experts: one latent row per token."""
    model = TinyModel()
    random = np.random.default_rng(1)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        scale = np.float32(gain / np.sqrt(columns))
        return random.standard_normal((rows, columns), dtype=np.float32) * scale

    tensors = {n: w for n, w in tiny_model.weights(model).items() if "self_attn" not in n}
    for layer in range(model.layers):
        inner = {
            "q_proj": matrix(model.heads * (NOPE + ROPE), model.hidden),
            "kv_a_proj_with_mqa": matrix(LATENT + ROPE, model.hidden),
            "kv_a_layernorm": np.full(LATENT, STORED_SCALE, np.float32),
            "kv_b_proj": matrix(model.heads * (NOPE + VALUE), LATENT, gain=1 / STORED_SCALE),
            "o_proj": matrix(model.hidden, model.heads * VALUE, gain=ATTENTION_GAIN),
        }
        for name, tensor in inner.items():
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = tensor
    return _write(folder, model, tensors, {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "num_key_value_heads": model.heads, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "q_lora_rank": None,
        "first_k_dense_replace": model.layers, "moe_intermediate_size": 64,
    })  # fmt: skip


def _write(folder: Path, model: TinyModel, tensors: Weights, changes: dict[str, Any]) -> Path:
    from safetensors.numpy import save_file

    tiny_model.make(folder, model)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
