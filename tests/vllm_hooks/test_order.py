"""The order of hooks on record is the order of the vLLM that is installed."""

import difflib
import importlib.util
from pathlib import Path

import pytest

from tests.vllm_hooks import load_traces
from tests.vllm_hooks.derive import all_derived
from tests.vllm_hooks.record import installed_version, record
from tests.vllm_hooks.sources import misplaced

RECORDED_VERSIONS = ("0.29.0", "0.32.0")


@pytest.fixture
def vllm() -> str:
    version = installed_version()
    if version is None:
        pytest.skip("vLLM is not installed")
    return version


def package() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.engines
@pytest.mark.slow
def test_the_installed_vllm_calls_hooks_in_the_order_on_record(vllm):
    on_record = load_traces(vllm, "v1", "plain")
    if not on_record:
        pytest.fail(
            f"record traces for vLLM {vllm}: run `python -m tests.vllm_hooks.record` and "
            "`python -m tests.vllm_hooks.derive` with it, read what changed, commit the result"
        )
    seen = record("plain")
    difference = "\n".join(
        difflib.unified_diff(
            on_record[0].lines(), seen.lines(), "on record", f"vLLM {vllm}", lineterm="", n=5
        )
    )
    if difference:
        pytest.fail(f"vLLM {vllm} calls the connector differently:\n{difference}")


@pytest.mark.parametrize(
    "trace",
    [trace for trace in load_traces() if trace.provenance == "derived"],
    ids=lambda trace: trace.name,
)
def test_the_source_lines_of_a_derived_trace_still_hold(trace, vllm):
    if trace.vllm != vllm:
        pytest.skip(f"vLLM {vllm} is installed")
    problems = misplaced(package(), trace.sources)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("version", RECORDED_VERSIONS)
def test_derived_traces_follow_from_the_recorded_ones(version):
    on_record = {trace.name: trace for trace in load_traces(version)}
    for trace in all_derived(version):
        assert on_record[trace.name] == trace


@pytest.mark.parametrize("trace", load_traces(), ids=lambda trace: trace.name)
def test_a_trace_says_where_it_comes_from(trace):
    assert trace.steps
    assert (trace.provenance == "derived") == bool(trace.sources)
    assert (trace.provenance == "recorded") == bool(trace.startup)


@pytest.mark.parametrize("trace", load_traces(), ids=lambda trace: trace.name)
def test_every_step_with_metadata_reaches_every_worker(trace):
    workers = {call.side for step in trace.steps for call in step} - {"scheduler"}
    for step in trace.steps:
        if any(call.hook == "build_connector_meta" for call in step):
            bound = {call.side for call in step if call.hook == "bind_connector_metadata"}
            assert bound == workers
