"""Tiny models of random weights whose caches are not plain full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from neuron_push import tiny_model
from neuron_push.tiny_model import TinyModel, Weights

# Of every second layer of `sliding`; several blocks, and far less than the longest prompt.
WINDOW = 100
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


def _write(folder: Path, model: TinyModel, tensors: Weights, changes: dict[str, Any]) -> Path:
    from safetensors.numpy import save_file

    tiny_model.make(folder, model)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
