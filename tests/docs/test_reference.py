"""Pages, dashboard and alerts say what the code says."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("vllm")


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference, dashboard = script("reference"), script("dashboard")


@pytest.mark.parametrize("page", sorted(reference.PAGES))
def test_generated_pages_are_current(page):
    written = (ROOT / "docs" / page).read_text()
    assert written == reference.PAGES[page](), "run python scripts/reference.py"


def test_every_setting_is_documented():
    from neuron_push.config import Config

    assert set(reference.docstrings(Config)) == set(Config.__struct_fields__)


def exported():
    """Every sample name that a query may use."""
    names = set()
    for name, kind, _, _ in (*reference.engine_metrics(), *reference.router_metrics()):
        names |= (
            {name + s for s in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
        )
    return names


def labels_of():
    rows = (*reference.engine_metrics(), *reference.router_metrics())
    return {name: {*labels, "le", "instance"} for name, _, labels, _ in rows}


def queries():
    panels = json.loads((ROOT / "deploy/observability/grafana-dashboard.json").read_text())[
        "panels"
    ]
    for panel in panels:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    rules = yaml.safe_load((ROOT / "deploy/observability/alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


NAME = re.compile(r"neuron_push_\w+")


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_every_query_names_exported_metrics_and_their_labels(title, query):
    used = set(NAME.findall(query))
    assert used and used <= exported()
    known = labels_of()
    for name in used:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        labels = known.get(name) or known[base]
        for text in re.findall(rf"{name}{{([^}}]*)}}", query):
            assert {part.split("!")[0].split("=")[0] for part in text.split(",")} <= labels
        for text in re.findall(r"by \(([^)]*)\)", query):
            assert set(text.replace(" ", "").split(",")) <= labels
    assert query.count("(") == query.count(")")


def test_every_metric_is_on_the_dashboard():
    used = {name for _, query in queries() for name in NAME.findall(query)}
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert set(labels_of()) <= used | bases


def test_the_dashboard_is_current():
    assert json.loads(dashboard.FILE.read_text()) == dashboard.dashboard()
    panels = dashboard.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_alerts_have_what_prometheus_and_people_need():
    rules = yaml.safe_load((ROOT / "deploy/observability/alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


def test_the_check_of_the_script_agrees():
    done = subprocess.run(
        [sys.executable, "scripts/dashboard.py", "--check"], cwd=ROOT, check=False
    )
    assert done.returncode == 0
