"""Metrics: declared once, counted by that name, summed over ranks, told to Prometheus."""

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import neuron_push
from neuron_push.transfer import Tally
from neuron_push.vllm.stats import COUNTERS, GAUGES, HISTOGRAMS, PushPromMetrics, PushStats

LABELS = ["model_name", "engine"]
ENGINES = {0: ["tiny", "0"], 1: ["tiny", "1"]}
ROOT = Path(neuron_push.__file__).parent


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    def of(kind):
        return lambda *args, **options: kind(*args, registry=registry, **options)

    kinds = {kind: of(kind) for kind in (Counter, Gauge, Histogram)}
    return PushPromMetrics(SimpleNamespace(kv_transfer_config=None), kinds, LABELS, ENGINES)


def stats(counters=None, samples=None, gauges=None):
    return PushStats({"counters": counters or {}, "samples": samples or {}, "gauges": gauges or {}})


def counted_names():
    """First arguments of every `count(...)` of the core and `add(...)` of a tally."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            counts = node.func.attr == "count" and owner.endswith("context")
            adds = node.func.attr == "add" and owner.endswith("tally")
            first = node.args[0] if node.args else None
            if (counts or adds) and isinstance(first, ast.Constant):
                yield first.value, any(word.arg == "label" for word in node.keywords)


def test_every_name_the_core_counts_is_declared_and_labelled_as_declared():
    seen = set(counted_names())
    assert len(seen) > 10
    for name, labelled in seen:
        assert name in COUNTERS or name in HISTOGRAMS, f"{name} is counted but not declared"
        assert labelled == bool(name in COUNTERS and COUNTERS[name][1]), name


def test_every_declared_metric_is_counted_somewhere():
    counted = {name for name, _ in counted_names()}
    assert counted == set(COUNTERS) | set(HISTOGRAMS)


@pytest.mark.parametrize("name", COUNTERS)
def test_each_counter_moves_for_its_engine(name, metrics, registry):
    label = COUNTERS[name][1]
    metrics.observe(stats({name: {"x" if label else "": 3.0}}).data, 1)
    where = {"model_name": "tiny", "engine": "1"} | ({label: "x"} if label else {})
    assert registry.get_sample_value(f"neuron_push_{name}_total", where) == 3
    other = where | {"engine": "0"}
    assert registry.get_sample_value(f"neuron_push_{name}_total", other) == (None if label else 0)


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_each_histogram_moves(name, metrics, registry):
    metrics.observe(stats(samples={name: [0.01, 2.0]}).data, 0)
    where = {"model_name": "tiny", "engine": "0"}
    assert registry.get_sample_value(f"neuron_push_{name}_count", where) == 2
    assert registry.get_sample_value(f"neuron_push_{name}_sum", where) == pytest.approx(2.01)


@pytest.mark.parametrize("name", GAUGES)
def test_each_gauge_is_set(name, metrics, registry):
    where = {"model_name": "tiny", "engine": "0"}
    assert registry.get_sample_value(f"neuron_push_{name}", where) == 0
    for value in (7, 2):
        metrics.observe(stats(gauges={name: value}).data)
        assert registry.get_sample_value(f"neuron_push_{name}", where) == value


def test_unknown_names_of_another_version_are_ignored(metrics):
    metrics.observe(stats({"news": {"": 1}}, {"more_seconds": [1.0]}, {"level": 1}).data)


def test_what_a_thread_tallies_is_what_is_reported():
    tally = Tally()
    assert not tally.dirty
    tally.add("bytes", 5)
    tally.add("bytes", 7)
    tally.add("sends", label="sent")
    tally.add("match_seconds", 0.25)
    found = PushStats.of(tally.take())
    assert found.data["counters"] == {"bytes": {"": 12}, "sends": {"sent": 1}}
    assert found.data["samples"] == {"match_seconds": [0.25]}
    assert not tally.dirty
    assert PushStats.of(tally.take()).is_empty()


def test_ranks_and_halves_add_up_in_any_order():
    parts = (
        lambda: stats({"bytes": {"": 10}, "sends": {"sent": 1}}, {"match_seconds": [0.1]}),
        lambda: stats({"bytes": {"": 5}, "sends": {"failed": 2}}, {"match_seconds": [0.3, 0.2]}),
        lambda: stats(gauges={"pinned_blocks": 4}),
    )
    for order in itertools.permutations(parts):
        total = order[0]()
        for part in order[1:]:
            total = total.aggregate(part())
        assert total.data["counters"] == {"bytes": {"": 15}, "sends": {"sent": 1, "failed": 2}}
        assert sorted(total.data["samples"]["match_seconds"]) == [0.1, 0.2, 0.3]
        assert total.data["gauges"] == {"pinned_blocks": 4}


def test_aggregation_leaves_the_other_side_alone():
    mine, other = stats(), stats({"bytes": {"": 1}}, {"match_seconds": [1.0]})
    mine.aggregate(other)
    mine.aggregate(other)
    assert other.data["counters"] == {"bytes": {"": 1}}
    assert other.data["samples"] == {"match_seconds": [1.0]}


def test_the_log_line():
    line = stats(
        {"sends": {"sent": 2, "failed": 1}},
        {"match_seconds": [0.3, 0.1, 0.2], "transfer_copies_size": [4]},
        {"pinned_blocks": 9},
    ).reduce()
    assert line == {"sends": 3, "match_seconds_p50": 0.2, "pinned_blocks": 9}


def test_reset_empties():
    full = stats({"bytes": {"": 1}})
    assert not full.is_empty()
    full.reset()
    assert full.is_empty()
    assert full.reduce() == {}
