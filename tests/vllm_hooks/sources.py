"""The lines of vLLM that derived traces rest on, and the check that they still stand there.

A line is written as its number and the call it makes. Lines of one file ascend in the order
in which the calls happen, so a line that keeps its place keeps the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.vllm_hooks.traces import Source

RUNNER = "v1/worker/gpu/model_runner.py"
CONNECTOR = "v1/worker/gpu/kv_connector.py"
LAYERS = "model_executor/layers/attention/kv_transfer_utils.py"
CORE = "v1/engine/core.py"
SCHEDULER = "v1/core/sched/scheduler.py"

V1_RUNNER = "v1/worker/gpu_model_runner.py"
MIXIN = "v1/worker/kv_connector_model_runner_mixin.py"

# What a trace can rest on.
V1 = ("v1",)
V2 = ("v2",)
DRAFTING = ("drafting",)
PIPELINE = ("pipeline",)
STRUCTURED = ("structured",)

# By version, topic and file.
_LINES: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "0.29.0": {
        "v1": {
            V1_RUNNER: (
                "4280 handle_preemptions(",
                "4499 defer_kv_connector_finalize = self.speculative_config is not None",
                "4548 return hidden_states",
                "4639 ModelRunnerOutput.with_kv_conn_output_only(",
                "4833 finalize_kv_connector(",
            ),
            MIXIN: (
                "62 kv_connector.wait_for_save(",
                "63 kv_connector.clear_connector_metadata(",
                "94 if wait_for_save and not defer_finalize:",
                "104 kv_connector.build_connector_worker_meta(",
                "106 if not defer_finalize:",
            ),
        },
        "v2": {
            RUNNER: (
                "1536 kv_connector.no_forward(",
                "1742 kv_connector.pre_forward(",
                "1765 kv_connector.pre_forward(",
                "1970 kv_connector.post_forward(",
            ),
            CONNECTOR: (
                "66 kv_connector.handle_preemptions(",
                "67 kv_connector.bind_connector_metadata(",
                "93 _start_load_kv(",
                "97 kv_connector.wait_for_save(",
                "99 kv_connector.get_finished(",
                "101 kv_connector.get_block_ids_with_load_errors(",
                "102 kv_connector.get_kv_connector_stats(",
                "103 kv_connector.get_kv_connector_kv_cache_events(",
                "105 kv_connector.build_connector_worker_meta(",
                "107 kv_connector.clear_connector_metadata(",
                "114 pre_forward(",
                "116 post_forward(finished_req_ids, wait_for_save=False",
            ),
            LAYERS: (
                "51 connector.wait_for_layer_load(",
                "57 connector.save_kv_layer(",
            ),
            CORE: (
                "609 model_executor.execute_model(",
                "617 model_executor.sample_tokens(",
            ),
            SCHEDULER: ("1243 scheduled_new_reqs.extend(",),
        },
        "drafting": {
            RUNNER: ("1940 speculator.propose(",),
            "v1/worker/gpu/spec_decode/autoregressive/speculator.py": ("385 set_forward_context(",),
        },
        "pipeline": {
            RUNNER: (
                "1841 pp_handler.receive(",
                "1851 kv_connector.post_forward(",
            ),
        },
        "structured": {
            CORE: (
                "690 deferred_scheduler_output = scheduler_output",
                "724 scheduler.update_from_output(",
                "749 model_executor.sample_tokens(",
            ),
        },
    },
    "0.32.0": {
        "v1": {
            V1_RUNNER: (
                "3971 handle_preemptions(",
                "4179 defer_kv_connector_finalize = self.speculative_config is not None",
                "4230 return hidden_states",
                "4315 ModelRunnerOutput.with_kv_conn_output_only(",
                "4509 finalize_kv_connector(",
            ),
            MIXIN: (
                "60 kv_connector.wait_for_save(",
                "61 kv_connector.clear_connector_metadata(",
                "91 if not defer_finalize:",
                "104 kv_connector.build_connector_worker_meta(",
                "106 if not defer_finalize:",
            ),
        },
        "v2": {
            RUNNER: (
                "1745 kv_connector.no_forward(",
                "2003 kv_connector.pre_forward(",
                "2028 kv_connector.pre_forward(",
                "2046 kv_connector.finish_forward(",
                "2276 kv_connector.post_forward(",
            ),
            CONNECTOR: (
                "81 kv_connector.handle_preemptions(",
                "82 kv_connector.bind_connector_metadata(",
                "126 kv_connector.finish_forward(",
                "136 _start_load_kv(",
                "139 kv_connector.wait_for_save(",
                "140 kv_connector.get_transfer_results(",
                "144 kv_connector.get_block_ids_with_load_errors(",
                "145 kv_connector.get_kv_connector_stats(",
                "146 kv_connector.get_kv_connector_kv_cache_events(",
                "148 kv_connector.build_connector_worker_meta(",
                "150 kv_connector.clear_connector_metadata(",
                "157 pre_forward(",
                "158 finish_forward(",
                "160 post_forward(",
            ),
            LAYERS: (
                "51 connector.wait_for_layer_load(",
                "57 connector.save_kv_layer(",
            ),
            CORE: (
                "668 model_executor.execute_model(",
                "676 model_executor.sample_tokens(",
            ),
            SCHEDULER: ("1419 scheduled_new_reqs.extend(",),
        },
        "drafting": {
            RUNNER: ("2239 speculator.propose(",),
            "v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py": (
                "382 set_forward_context(",
            ),
        },
        "pipeline": {
            RUNNER: (
                "2114 pp_handler.receive(",
                "2124 kv_connector.post_forward(",
            ),
        },
        "structured": {
            CORE: (
                "749 deferred_scheduler_output = scheduler_output",
                "783 scheduler.update_from_output(",
                "809 model_executor.sample_tokens(",
            ),
        },
    },
}


def sources(vllm: str, topics: Iterable[str]) -> Iterator[Source]:
    """The lines of ``topics`` in that version."""
    for topic in topics:
        for file, lines in _LINES[vllm][topic].items():
            for line in lines:
                number, _, text = line.partition(" ")
                yield Source(file, int(number), text)


def misplaced(package: Path, claimed: Iterable[Source]) -> list[str]:
    """What of ``claimed`` no longer holds in the ``vllm`` package at ``package``, readably."""
    problems = []
    for source in claimed:
        path = package / source.file
        lines = path.read_text().splitlines() if path.is_file() else []
        found = lines[source.line - 1].strip() if source.line <= len(lines) else "(no such line)"
        if source.text not in found:
            problems.append(
                f"{source.file}:{source.line} holds {found!r} instead of {source.text!r}"
            )
    return problems
