"""Derives the traces that cannot run on a CPU: ``python -m tests.vllm_hooks.derive``.

The V2 runner needs a GPU, and the CPU platform has no speculation across pipeline stages. The
scheduler half is called by the same code under both runners, so a derived trace takes the
scheduler's calls, and what each step's worker calls reported, from the trace recorded with the
V1 runner, and orders the worker's calls as the source does. For the V2 runner:

- ``execute_model`` hands over metadata, runs the forward, and says that it ended (0.32);
- everything else waits for ``sample_tokens``, on every pipeline stage, after drafting;
- a step without a forward does all of it inside ``execute_model``, in 0.29 without
  ``wait_for_save``;
- with structured output, ``sample_tokens`` of a step waits until the scheduler has taken in
  the previous step's output.

For the V1 runner with speculation on a pipeline stage before the last, nobody calls
``wait_for_save`` or clears the metadata after a forward; the last stage calls both last.

Run it after ``record`` with each version installed in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from tests.vllm_hooks.record import ROOT, installed_version
from tests.vllm_hooks.sources import DRAFTING, PIPELINE, STRUCTURED, V1, V2, sources
from tests.vllm_hooks.traces import Call, Step, Trace, load_traces, save_trace

LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")

# The tiny model has layers 0 and 1; a drafter's layers count on from there.
DRAFT_LAYER = "model.layers.2.self_attn.attn"

# What the V2 runner of 0.32 passes to start_load_kv after an eager forward.
LOAD_ARGUMENTS = ["num_tokens", "request_ids", "request_state_indices", "scheduler_output"]

# Case of a derived V2 trace: the recorded case it starts from, and the extra source lines.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("plain", ()),
    "chunked-prefill": ("chunked-prefill", ()),
    "prefix-hit": ("prefix-hit", ()),
    "delayed-free": ("delayed-free", ()),
    "remote-load": ("remote-load", ()),
    "load-failure": ("load-failure", ()),
    "load-failure-recompute": ("load-failure-recompute", ()),
    "abort-while-loading": ("abort-while-loading", ()),
    "preemption": ("preemption", ()),
    "async": ("async", ()),
    "async-load": ("async-load", ()),
    "spec-ngram": ("spec-ngram", DRAFTING),
    "spec-draft-model": ("spec-ngram", DRAFTING),
    "pp2": ("pp2", PIPELINE),
    "structured-output": ("async", STRUCTURED),
}


def _calls(
    names: Iterable[str], recorded: dict[str, Call], side: str, within: str
) -> Iterator[Call]:
    """Calls in the order of ``names``, with the details that the V1 runner's calls had."""
    for name in names:
        bound = name not in ("handle_preemptions", "bind_connector_metadata")
        detail: dict[str, Any] = {"metadata_bound": bound}
        if name in recorded:
            detail |= recorded[name].detail
        yield Call(side, name, detail | {"metadata_bound": bound, "within": within})


def _drafted(side: str) -> Iterator[Call]:
    for name in LAYER_HOOKS:
        detail = {"layer": DRAFT_LAYER, "metadata_bound": True, "within": "sample_tokens"}
        yield Call(side, name, detail)


def _loads(call: Call, vllm: str, forward: bool) -> Call:
    """``sample_tokens`` has no forward context, so the connector sees an empty one."""
    if call.hook != "start_load_kv":
        return call
    detail = {key: value for key, value in call.detail.items() if key != "kwargs"}
    if forward and vllm != "0.29.0":
        detail["kwargs"] = LOAD_ARGUMENTS
    return Call(call.side, call.hook, detail | {"forward": False})


def _one_worker(calls: Step, vllm: str, drafts: bool) -> tuple[Step, Step]:
    """The calls of one worker in one step, before and in ``sample_tokens``."""
    side = calls[0].side
    if calls[0].hook == "shutdown":
        return calls, ()
    old = vllm == "0.29.0"
    recorded = {call.hook: call for call in calls}
    layers = [call for call in calls if call.hook in LAYER_HOOKS]
    within = "sample_tokens" if layers else "execute_model"
    before = list(
        _calls(("handle_preemptions", "bind_connector_metadata"), recorded, side, "execute_model")
    )
    before += [Call(side, c.hook, c.detail | {"within": "execute_model"}) for c in layers]
    if not old:
        before += _calls(("finish_forward",), recorded, side, "execute_model")
    after_names = [
        "start_load_kv",
        *(["wait_for_save"] if layers or not old else []),
        "get_finished" if old else "get_transfer_results",
        "get_block_ids_with_load_errors",
        "get_kv_connector_stats",
        "get_kv_connector_kv_cache_events",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    ]
    after = list(_drafted(side)) if drafts and layers else []
    after += [
        _loads(call, vllm, bool(layers)) for call in _calls(after_names, recorded, side, within)
    ]
    if not layers:
        return tuple(before + after), ()
    return tuple(before), tuple(after)


def _scheduled(call: Call) -> Call:
    """The V2 runner gets resumed requests as new ones."""
    if call.hook != "build_connector_meta" or "resumed" not in call.detail:
        return call
    detail = dict(call.detail)
    detail["new"] = [*detail.get("new", []), *detail.pop("resumed")]
    return Call(call.side, call.hook, detail)


def _step(step: Step, vllm: str, drafts: bool, defers: bool) -> Step:
    opening: list[Call] = []
    sampling: list[Call] = []
    closing: list[Call] = []
    worker_seen = False
    for side, group in groupby(step, key=lambda call: call.side):
        calls = tuple(group)
        if side == "scheduler":
            (closing if worker_seen else opening).extend(map(_scheduled, calls))
            continue
        worker_seen = True
        before, after = _one_worker(calls, vllm, drafts)
        opening += before
        # Calls of one worker stay together, as in recorded traces.
        (sampling if defers else opening).extend(after)
    return tuple(opening + closing + sampling if defers else opening + sampling + closing)


def _speculating_stage(calls: Step, last: str, bound: bool) -> Step:
    """The V1 runner's calls of one stage in one step; ``bound``: metadata is left from before."""
    if not any(call.hook in LAYER_HOOKS for call in calls):
        kept = calls
    else:
        final = ("wait_for_save", "clear_connector_metadata")
        kept = tuple(call for call in calls if call.hook not in final)
        if calls[0].side == last:
            kept += tuple(call for call in calls if call.hook in final)
    return tuple(
        Call(call.side, call.hook, call.detail | {"metadata_bound": True}) if bound else call
        for call in kept
    )


def derive_speculating_pipeline(vllm: str) -> Trace:
    """The V1 runner with speculation on two pipeline stages."""
    (recorded,) = load_traces(vllm, "v1", "pp2")
    bound = dict.fromkeys(("worker0", "worker1"), False)
    steps = []
    for step in recorded.steps:
        calls: list[Call] = []
        for side, group in groupby(step, key=lambda call: call.side):
            stage = tuple(group)
            if side in bound and stage[0].hook == "handle_preemptions":
                stage = _speculating_stage(stage, "worker1", bound[side])
                bound[side] = stage[-1].hook != "clear_connector_metadata"
            calls += stage
        steps.append(tuple(calls))
    claimed = tuple(sources(vllm, V1))
    return Trace(vllm, "v1", "pp2-spec", "derived", (), tuple(steps), claimed)


def derive(case: str, vllm: str) -> Trace:
    """The V2 runner; needs the recorded trace of the case it starts from."""
    recorded_case, extra = CASES[case]
    (recorded,) = load_traces(vllm, "v1", recorded_case)
    return Trace(
        vllm=vllm,
        runner="v2",
        case=case,
        provenance="derived",
        startup=(),
        steps=tuple(
            _step(step, vllm, case == "spec-draft-model", case == "structured-output")
            for step in recorded.steps
        ),
        sources=tuple(sources(vllm, (*V2, *extra))),
    )


def all_derived(vllm: str) -> list[Trace]:
    """Every derived trace of a version whose recorded traces are at hand."""
    return [derive_speculating_pipeline(vllm), *(derive(case, vllm) for case in CASES)]


def main() -> int:
    vllm = installed_version()
    if vllm is None:
        print("vLLM is not installed", file=sys.stderr)
        return 1
    for trace in all_derived(vllm):
        print(save_trace(trace).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
