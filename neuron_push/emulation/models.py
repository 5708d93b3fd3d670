"""Models for emulated engines: a config and a tokenizer are enough, as no weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from neuron_push import tiny_model
from neuron_push.errors import ConfigError

# name -> what its config changes in the tiny model's
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny-gqa": {},
    # Full and sliding layers in turn: two cache groups over one pool of blocks.
    "tiny-sliding": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "sliding_window": 128, "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "tiny-mla": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "num_key_value_heads": 4, "kv_lora_rank": 96, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": None, "head_dim": 32,
        "first_k_dense_replace": 4, "moe_intermediate_size": 64,
    },
    # Attention and Mamba layers in turn: KV of all tokens, and a state that every step overwrites.
    "tiny-mamba": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
        "layer_types": ["attention", "mamba"] * 2, "layers_block_type": ["attention", "mamba"] * 2,
        "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 4, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_n_groups": 1, "position_embedding_type": "rope",
        "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 64,
    },
    # One of eight tensor-parallel ranks of the next model.
    "qwen3-32b-rank": {
        "num_hidden_layers": 64, "hidden_size": 640, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 3200,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    },
    # Many small blocks: 64 bytes of KV per token and layer.
    "small-kv": {
        "num_hidden_layers": 64, "hidden_size": 128, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 256,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    },
    # The shape of the published benchmark, for cost profiles at TP 8.
    "qwen3-32b": {
        "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    },
}  # fmt: skip


def find(name: str, folder: Path) -> Path:
    """A folder with that model's config: made for the names above, else the given path."""
    if name not in FAMILIES:
        path = Path(name)
        if not (path / "config.json").exists():
            raise ConfigError(f"no config.json in {name!r}; known by name: {', '.join(FAMILIES)}")
        return path.absolute()
    target = folder / name
    if not (target / "config.json").exists():
        # Its weights are a few hundred kilobytes that nobody reads.
        tiny_model.make(target, tiny_model.TinyModel(layers=4))
        config = json.loads((target / "config.json").read_text())
        config.update(FAMILIES[name])
        (target / "config.json").write_text(json.dumps(config, indent=1))
    return target.absolute()
