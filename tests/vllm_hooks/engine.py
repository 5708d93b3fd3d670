"""Runs one case on a tiny offline engine of the installed vLLM; a process of its own.

``python -m tests.vllm_hooks.engine CASE FILE`` appends the raw recording to FILE.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.vllm_hooks.cases import BLOCK_SIZE, CASES, Case, Prompt

# Steps after which a run counts as stuck.
MAX_STEPS = 200

VOCABULARY = 512

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Binding by core refuses two workers on one NUMA node.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # None: the connector under test must not load itself into the recording.
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def _token_ids(prompt: Prompt) -> list[int]:
    cycle = prompt.repeats or VOCABULARY - 16
    return [16 + i % cycle for i in range(prompt.tokens)]


def _overlap_steps() -> None:
    """Makes the platform's check leave asynchronous scheduling on."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_overlap(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(check_and_overlap)


def _make_engine(case: Case, record_to: Path, model: Path) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="RecordingConnector",
        kv_connector_module_path="tests.vllm_hooks.recorder",
        kv_role=case.kv_role,
        kv_load_failure_policy=case.failure_policy,
        kv_connector_extra_config={
            "record_to": str(record_to),
            "behaviour": case.behaviour,
        },
    )
    common = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 64,
        "kv_transfer_config": transfer,
    }
    return LLM(**(common | case.engine)).llm_engine


def _drive(engine: Any, case: Case, record_to: Path) -> None:
    from vllm import SamplingParams

    arrivals = dict(enumerate(case.prompts))
    for step in range(MAX_STEPS):
        with record_to.open("a") as recording:
            recording.write(json.dumps({"engine_step": step}) + "\n")
        for number, prompt in list(arrivals.items()):
            if prompt.arrives_before_step == step:
                del arrivals[number]
                sampling = SamplingParams(
                    temperature=0, max_tokens=prompt.output_tokens, ignore_eos=True
                )
                engine.add_request(f"r{number}", {"prompt_token_ids": _token_ids(prompt)}, sampling)
        aborted = [
            f"r{number}"
            for number, prompt in enumerate(case.prompts)
            if prompt.aborted_before_step == step
        ]
        if aborted:
            engine.abort_request(aborted)
        if not arrivals and not _has_work(engine):
            return
        engine.step()
    raise RuntimeError(f"the engine still has work after {MAX_STEPS} steps")


def _has_work(engine: Any) -> bool:
    """Asks the engine core, whose loop goes on while the scheduler has requests of any kind."""
    core = engine.engine_core.engine_core
    return bool(core.scheduler.has_requests() or getattr(core, "batch_queue", None))


def main(case_name: str, record_to: str) -> None:
    case = CASES[case_name]
    os.environ |= {key: ENVIRONMENT[key] for key in ENVIRONMENT if key not in case.unset}
    path = Path(record_to)
    if case.overlaps_steps:
        _overlap_steps()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        engine = _make_engine(case, path, model)
        _drive(engine, case, path)
        engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
