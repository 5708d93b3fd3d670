"""Names that must mean the same on both engines: semantics, request ids, fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from neuron_push.geometry import Semantics
from neuron_push.prompts import Prompt, match_of
from neuron_push.protocol import Match

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Model configuration that decides what the KV bytes mean.
_MODEL_FIELDS = (
    "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling",
    "rope_parameters", "rms_norm_eps", "sliding_window", "kv_lora_rank", "qk_rope_head_dim",
)  # fmt: skip
_HEAD, _TAIL, _SPREAD = 16, 16, 16


def name_of(request: Request, transfer: str, counterpart: str = "") -> Match | Prompt:
    """What tells a request's prompt from others.

    `counterpart` is the other engine's request id where the router passed it on. Without a
    router's id the request id decides, which clients may repeat; then the whole prompt is
    digested, here, as it is too large to travel. With one, a sample guards against mistakes.
    """
    tokens: Sequence[int] = request.prompt_token_ids or ()
    also: tuple[str, ...] = ()
    if request.mm_features or request.lora_request is not None:
        also = tuple([str(feature.identifier) for feature in request.mm_features or ()])
        if request.lora_request is not None:
            also += (request.lora_request.lora_name,)
    told = _sample(tokens) if transfer else tokens
    prompt = Prompt(
        request.request_id, transfer, counterpart, request.num_prompt_tokens, told, also
    )
    return prompt if transfer else match_of(prompt)


def _sample(tokens: Sequence[int]) -> Sequence[int]:
    """The ends of a prompt and some tokens between."""
    count = len(tokens)
    if count <= _HEAD + _TAIL + _SPREAD:
        return tokens
    step = max(1, (count - _HEAD - _TAIL) // _SPREAD)
    return [*tokens[:_HEAD], *tokens[_HEAD:-_TAIL:step], *tokens[-_TAIL:]]


def semantics(config: VllmConfig, kinds: Sequence[str]) -> Semantics:
    """What P and D must agree on; vLLM version, backend and block size are not part of it."""
    model = config.model_config
    text = model.hf_text_config
    facts = {name: getattr(text, name, None) for name in _MODEL_FIELDS}
    digest = hashlib.blake2b(json.dumps(facts, default=str, sort_keys=True).encode(), digest_size=8)
    dtype = config.cache_config.cache_dtype
    return Semantics(
        model=f"{str(model.model).rstrip('/').rpartition('/')[2]}@{digest.hexdigest()}",
        layers=model.get_total_num_hidden_layers(),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        dtype=str(model.dtype).removeprefix("torch.") if dtype == "auto" else str(dtype),
        groups=tuple(kinds),
        backoff=backoff(config, kinds),
        extra=draft_model(config),
    )


def backoff(config: VllmConfig, kinds: Sequence[str]) -> int:
    """Prompt tokens that prefill leaves to decode, because what they change can be made only once.

    Decode computes the last token in any case. A state (Mamba) must not have seen it before, nor
    may a draft model's layers have read the token that prefill samples behind it; a chain of MTP
    modules reads as many tokens ahead as it has links (vLLM 0.30 and later say how many).
    """
    least = 1 if "state" in kinds or draft_model(config) else 0
    return max(least, getattr(config, "num_prefill_lookahead_tokens", 0) - 1)


def draft_model(config: VllmConfig) -> tuple[tuple[str, str], ...]:
    """Draft-model layers keep KV too, so both sides must run the same draft model."""
    speculative: Any = config.speculative_config
    if speculative is None or getattr(speculative, "draft_model_config", None) is None:
        return ()
    if speculative.method in ("ngram", "suffix"):
        return ()
    return (("draft", f"{speculative.method}:{speculative.draft_model_config.model}"),)


def group_kinds(config: KVCacheConfig) -> list[str]:
    """Kind of each KV cache group: "full", "sliding", "mla" or "state"."""
    return [group_kind(group.kv_cache_spec) for group in config.kv_cache_groups]


def group_kind(spec: Any) -> str:
    """Kind of a KV cache spec, by vLLM's class names, most specific first."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner:  # layers of one kind under one page size
        spec = next(iter(inner.values()))
    names = [kind.__name__ for kind in type(spec).__mro__]
    for name, kind in (
        ("MambaSpec", "state"),
        ("MLAAttentionSpec", "mla"),
        ("SlidingWindowSpec", "sliding"),
        ("FullAttentionSpec", "full"),
    ):
        if name in names:
            return kind
    return names[0]
