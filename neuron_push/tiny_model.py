"""A tiny model of random weights, and a tokenizer with one token per byte, made on the spot.

For tests, demos and benchmarks that need a real engine and no particular answer. The scales
below make each next token depend on the whole context, so that a wrong byte of KV shows in
the output, and the element type is float32, so that rounding, which differs with batch shape
and chunking, does not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Weights = dict[str, npt.NDArray[np.float32]]

BYTES: Final = 256
END_OF_TEXT: Final = 256

# Standard deviation of attention scores before the softmax. At 2 a query attends mostly to a
# few dozen out of a thousand tokens: sharp enough that single tokens matter, not so sharp that
# most of the cache is never looked at.
SCORE_SPREAD: Final = 2.0
# The mean over that many values is small; this brings attention back to the size of the
# residual stream, so that the context weighs as much as the current token.
ATTENTION_GAIN: Final = 8.0
# Keys and values are stored this much smaller than they act (queries and the output projection
# make up for it, exactly, as it is a power of two). Flipping the top byte of a small float makes
# a huge one, so a single flipped byte drowns its whole token instead of hiding in an average.
STORED_SCALE: Final = 2.0**-12
# Layers that multiply their input twice (gate and up) and dominate the residual stream spread
# a small difference over all channels.
MLP_GAIN: Final = 3.0


@dataclass(frozen=True)
class TinyModel:
    """Shape of the model; two models of equal shape and seed are equal byte for byte."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    feed_forward: int = 256
    vocabulary: int = 288
    positions: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocabulary <= END_OF_TEXT:
            raise ValueError(f"vocabulary {self.vocabulary} has no room for {BYTES} bytes and one")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not share {self.kv_heads} KV heads evenly")

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers, in the float32 that the model runs in."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


def make(folder: Path, model: TinyModel | None = None) -> Path:
    """Write config, weights and tokenizer into `folder` and return it."""
    from safetensors.numpy import save_file

    model = model or TinyModel()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    documents = {
        "config.json": _config(model),
        "generation_config.json": {"eos_token_id": END_OF_TEXT},
        "tokenizer.json": _tokenizer(model),
        "tokenizer_config.json": _tokenizer_config(model),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1, ensure_ascii=False))
    return folder


def weights(model: TinyModel) -> Weights:
    """Every tensor of the model by its checkpoint name."""
    random = np.random.default_rng(model.seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        # Unit variance in gives variance gain**2 out.
        scale = np.float32(gain / np.sqrt(columns))
        return random.standard_normal((rows, columns), dtype=np.float32) * scale

    tensors = {
        "model.embed_tokens.weight": matrix(
            model.vocabulary, model.hidden, gain=np.sqrt(model.hidden)
        ),
        "model.norm.weight": np.ones(model.hidden, np.float32),
        "lm_head.weight": matrix(model.vocabulary, model.hidden),
    }
    for number in range(model.layers):
        for name, tensor in _layer(model, matrix).items():
            tensors[f"model.layers.{number}.{name}.weight"] = tensor
    return tensors


def _layer(model: TinyModel, matrix: Any) -> Weights:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    ones = np.ones(model.hidden, np.float32)
    # Queries and keys are normalised per head, so their norms' weights alone set the scores.
    score = np.full(model.head_dim, np.sqrt(SCORE_SPREAD), np.float32)
    return {
        "input_layernorm": ones,
        "self_attn.q_proj": matrix(queries, model.hidden),
        "self_attn.k_proj": matrix(keys, model.hidden),
        "self_attn.v_proj": matrix(keys, model.hidden, gain=STORED_SCALE),
        "self_attn.o_proj": matrix(model.hidden, queries, gain=ATTENTION_GAIN / STORED_SCALE),
        "self_attn.q_norm": score / np.float32(STORED_SCALE),
        "self_attn.k_norm": score * np.float32(STORED_SCALE),
        "post_attention_layernorm": ones.copy(),
        "mlp.gate_proj": matrix(model.feed_forward, model.hidden, gain=MLP_GAIN),
        "mlp.up_proj": matrix(model.feed_forward, model.hidden),
        "mlp.down_proj": matrix(model.hidden, model.feed_forward, gain=MLP_GAIN),
    }


def _config(model: TinyModel) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.feed_forward,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT,
    }


def _special_tokens(model: TinyModel) -> list[str]:
    fillers = range(END_OF_TEXT + 1, model.vocabulary)
    return ["<|endoftext|>", *(f"<|unused_{number}|>" for number in fillers)]


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, take the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def _tokenizer(model: TinyModel) -> dict[str, Any]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": END_OF_TEXT + index, "content": text, "special": True, **special}
            for index, text in enumerate(_special_tokens(model))
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())},
            "merges": [],
        },
    }


def _tokenizer_config(model: TinyModel) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.positions,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    }
