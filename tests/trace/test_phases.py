"""Events become phases that add up, a Perfetto trace, spans, and a page that a browser draws."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from neuron_push.trace.chrome import trace
from neuron_push.trace.collect import Clock, Track
from neuron_push.trace.page import page
from neuron_push.trace.phases import PHASES, requests, summary
from neuron_push.tracing import TraceContext
from tests.trace.sample import event, tracks, whole_pull


def found():
    return {each.transfer: each for each in requests(tracks())}


def test_phases_of_a_push_add_up_to_the_time_to_the_first_token():
    each = found()["a"]
    assert [p.name for p in each.phases] == [name for name in PHASES if name != "hand-over"]
    lengths = {p.name: round(p.seconds * 1000, 3) for p in each.phases}
    assert lengths == {
        "router": 1, "dispatch": 2, "queue": 2, "prefill": 30, "registration wait": 0,
        "match": 1, "post": 2, "wire": 10, "notify": 3, "first step": 10,
    }  # fmt: skip
    assert sum(lengths.values()) == pytest.approx(each.seconds * 1000) == 61
    assert (each.request, each.mode, each.engines) == ("req-a", "push", "P D")
    assert each.nbytes == 1 << 20


def test_a_late_registration_shows_as_a_wait_and_an_early_one_does_not():
    lengths = {p.name: p.seconds for p in found()["b"].phases}
    assert lengths["registration wait"] == pytest.approx(0.005)


def test_a_request_seen_from_the_router_only_still_has_a_shape():
    each = found()["c"]
    assert each.mode == "pull"
    assert [p.name for p in each.phases] == ["router", "prefill", "first step"]


def test_clocks_that_disagree_make_no_negative_phases():
    part = tracks()
    part[2].events = [event(e.at - 1, e.name, e.transfer) for e in part[2].events]
    for each in requests(part):
        assert all(p.seconds >= 0 for p in each.phases)
        assert all(a.stop == b.start for a, b in zip(each.phases, each.phases[1:], strict=False))


def test_one_request_can_be_asked_for():
    assert [each.transfer for each in requests(tracks(), "req-b")] == ["b"]
    assert requests(tracks(), "nobody") == []


def test_failures_are_told():
    part = tracks()
    part[2].events.append(event(101.0, "receive failed", "a", "no route"))
    assert {r.transfer: r.outcome for r in requests(part)}["a"] == "receive failed"


def test_the_summary_tells_modes_apart():
    rows = summary(requests(tracks()))
    assert rows["push"]["total"]["count"] == 2 and rows["pull"]["total"]["count"] == 1
    assert rows["push"]["wire"]["p50"] > 0 and "wire" not in rows["pull"]


def test_the_perfetto_trace_is_complete_and_states_the_clocks():
    got = json.loads(json.dumps(trace(tracks(), requests(tracks()))))
    slices = [e for e in got["traceEvents"] if e["ph"] == "X" and e["cat"] != "event"]
    assert {e["name"] for e in slices} == set(PHASES) - {"hand-over"}  # no whole pull among them
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in slices)
    assert {c["source"] for c in got["otherData"]["clocks"]} == {"router", "P rank 0", "D rank 0"}
    assert all(c["error_seconds"] == 0.0001 for c in got["otherData"]["clocks"])
    # Two requests that overlap must not share a line: Perfetto would nest their slices.
    lanes = {e["args"]["transfer"]: e["tid"] for e in slices}
    assert lanes["a"] != lanes["b"]
    starts = {(e["cat"], e["id"]) for e in got["traceEvents"] if e["ph"] == "s"}
    ends = {(e["cat"], e["id"]) for e in got["traceEvents"] if e["ph"] == "f"}
    assert starts == ends and starts


def test_a_pull_shows_what_a_push_hides_behind_prefill():
    clock = Clock(0.0, 0.0001)
    parts = [Track(n, clock, e) for n, e in zip("rpd", whole_pull("p", 50.0), strict=True)]
    (each,) = requests(parts)
    assert each.mode == "pull" and each.nbytes == 2 << 20
    lengths = {phase.name: round(phase.seconds * 1000, 3) for phase in each.phases}
    assert lengths == {
        "router": 1, "dispatch": 2, "queue": 2, "prefill": 30, "hand-over": 8,
        "registration wait": 2, "match": 2, "post": 1, "wire": 22, "notify": 2, "first step": 8,
    }  # fmt: skip
    (alone,) = requests(parts[1:])
    assert alone.mode == "pull", "without a router the READs tell"
    found = requests([*tracks(), *parts])
    data = page([*tracks(), *parts], found)
    assert set(summary(found)) == {"push", "pull"} and '"hand-over"' in data


def test_spans_have_the_same_phases():
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from neuron_push.trace.otel import export

    exporter = memory.InMemorySpanExporter()
    count = export(requests(tracks()), exporter)
    spans = exporter.get_finished_spans()
    assert len(spans) == count == 10 + 10 + 3 + 3
    roots = {s.context.span_id: s for s in spans if s.parent is None}
    assert len(roots) == 3
    for span in spans:
        if span.parent is not None:
            root = roots[span.parent.span_id]
            assert root.start_time <= span.start_time <= span.end_time <= root.end_time + 1000
            assert span.name in PHASES


def test_spans_join_the_clients_trace_under_the_name_that_engines_were_told():
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from neuron_push.trace.otel import export

    client = TraceContext("ab" * 16, "12" * 8)
    own, later = TraceContext.below(client), TraceContext.below(None)
    part = tracks()
    part[0].events += [
        event(100.0, "trace context", "a", f"{own} {client}"),
        event(100.0, "trace context", "b", f"{later} "),
    ]
    exporter = memory.InMemorySpanExporter()
    export(requests(part), exporter)
    spans = exporter.get_finished_spans()
    roots = {s.attributes["neuron_push.transfer_id"]: s for s in spans if s.name == "first token"}
    joined, alone = roots["a"], roots["b"]
    assert f"{joined.context.trace_id:032x}" == client.trace
    assert f"{joined.context.span_id:016x}" == own.span
    assert f"{joined.parent.span_id:016x}" == client.span
    assert f"{alone.context.trace_id:032x}-{alone.context.span_id:016x}" == (
        f"{later.trace}-{later.span}"
    )
    assert alone.parent is None
    below = [s for s in spans if s.context.trace_id == joined.context.trace_id and s is not joined]
    assert len(below) == 10
    assert {s.parent.span_id for s in below} == {joined.context.span_id}
    assert len({s.context.span_id for s in spans}) == len(spans)


@pytest.mark.parametrize(
    "header",
    ["", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "a" * 32 + "-" + "0" * 16 + "-01",
     "00-abc-def-01", "x" * 55],
)  # fmt: skip
def test_a_malformed_traceparent_is_no_context(header):
    assert TraceContext.parse(header) is None


def test_names_of_requests_cannot_leave_the_page():
    part = tracks()
    part[0].events[0] = event(100.0, "arrived", "a", "</script><b>x")
    text = page(part, requests(part))
    assert "</script><b>" not in text
    assert not re.search(r"(src|href)=|https?://", text), "the page loads nothing"


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.mark.skipif(not BROWSER, reason="no chromium or google-chrome is installed")
def test_a_browser_draws_every_phase_and_every_request(tmp_path):
    file = tmp_path / "timeline.html"
    file.write_text(page(tracks(), requests(tracks())), encoding="utf-8")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/u",
         "--virtual-time-budget=3000", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    dom = done.stdout
    assert 'data-drawn="yes"' in dom, "the script ran to its end"
    drawn = re.findall(r'class="seg" data-phase="([^"]+)"', dom)
    # Two bars of modes, three of requests; every phase of a push in each of its bars.
    assert drawn.count("prefill") == 2 + 3
    assert set(drawn) == set(PHASES) - {"hand-over"}
    assert set(re.findall(r'data-transfer="(\w+)"', dom)) == {"a", "b", "c"}
    assert "61.0 ms" in dom
