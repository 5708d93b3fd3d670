"""The engine configurations whose hook order is on record, by name.

This module imports nothing of vLLM, so listing cases is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Block size of every case; CPU attention takes multiples of 32.
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Prompt:
    """One request of a case."""

    tokens: int
    output_tokens: int
    arrives_before_step: int = 0
    """Added to the engine before its n-th call of ``step``, counted from 0."""
    aborted_before_step: int | None = None
    """Aborted before that step; None leaves it to finish."""
    repeats: int = 0
    """Length of the cycle in the token ids; 0 means ids that do not repeat. Drafting from
    n-grams needs a cycle."""


@dataclass(frozen=True)
class Case:
    """A configuration, the connector's behaviour in it, and the requests it serves."""

    behaviour: str
    prompts: tuple[Prompt, ...]
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``vllm.LLM`` on top of the common ones."""
    failure_policy: str = "fail"
    kv_role: str = "kv_both"
    unset: tuple[str, ...] = ()
    """Variables of the common environment that this case does without."""
    overlaps_steps: bool = False
    """Asynchronous scheduling, which the CPU platform switches off although its runner works
    with it: the run switches it on again."""


# Only the warm-up of a compiled model allocates what a later pipeline stage receives into, and
# a fixed cache size skips it. The eager backend of Dynamo compiles nothing.
PIPELINE_UNSET = ("VLLM_CPU_KVCACHE_SPACE",)

PIPELINE: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "gpu_memory_utilization": 0.2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}

CASES: dict[str, Case] = {
    "plain": Case("idle", (Prompt(40, 3), Prompt(20, 3, arrives_before_step=1))),
    "chunked-prefill": Case(
        "idle", (Prompt(150, 2),), {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    ),
    "delayed-free": Case("hold", (Prompt(40, 2),), kv_role="kv_producer"),
    "remote-load": Case("load", (Prompt(40, 3),), kv_role="kv_consumer"),
    "load-failure": Case("fail", (Prompt(40, 3),), kv_role="kv_consumer"),
    "load-failure-recompute": Case(
        "fail", (Prompt(40, 3),), kv_role="kv_consumer", failure_policy="recompute"
    ),
    "abort-while-loading": Case(
        "stall", (Prompt(40, 3, aborted_before_step=3),), kv_role="kv_consumer"
    ),
    # Five usable blocks: the second request's growth evicts itself or its neighbour.
    "preemption": Case(
        "idle",
        (Prompt(60, 8), Prompt(62, 8)),
        {"num_gpu_blocks_override": 6, "max_model_len": 128, "enable_prefix_caching": False},
    ),
    "prefix-hit": Case("idle", (Prompt(70, 2), Prompt(70, 2, arrives_before_step=4))),
    "spec-ngram": Case("idle", (Prompt(40, 6, repeats=4),), {"speculative_config": NGRAM}),
    "spec-ngram-load": Case(
        "load",
        (Prompt(40, 6, repeats=4),),
        {"speculative_config": NGRAM},
        kv_role="kv_consumer",
    ),
    "async": Case(
        "idle", (Prompt(40, 3), Prompt(20, 3, arrives_before_step=1)), overlaps_steps=True
    ),
    "async-load": Case("load", (Prompt(40, 3),), kv_role="kv_consumer", overlaps_steps=True),
    "pp2": Case("idle", (Prompt(40, 3),), PIPELINE, unset=PIPELINE_UNSET),
}
