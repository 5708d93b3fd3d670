"""Workflow files: valid, bounded in time, and closed to forks where machines are our own."""

import importlib.machinery
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# YAML reads the key "on" as a boolean.
WORKFLOWS = {path.name: msgspec.yaml.decode(path.read_bytes()) for path in FILES}
JOBS = [(name, job, body) for name, file in WORKFLOWS.items() for job, body in file["jobs"].items()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_schema_of_github_workflows_holds(path):
    pytest.importorskip("check_jsonschema")
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows",
         str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_has_no_complaint():
    command = [Path(sys.executable).with_name("zizmor"), "--offline", "--no-progress", *FILES]
    config = ["--config", ROOT / ".github" / "zizmor.yml"]
    done = subprocess.run([*command, *config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_has_no_complaint():
    done = subprocess.run(["actionlint", *map(str, FILES)], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize(("name", "job", "body"), JOBS, ids=lambda value: str(value)[:20])
def test_every_job_is_bounded_and_needs_jobs_that_exist(name, job, body):
    assert body["timeout-minutes"] <= 180
    needs = body.get("needs", [])
    for other in [needs] if isinstance(needs, str) else needs:
        assert other in WORKFLOWS[name]["jobs"]


@pytest.mark.parametrize(("name", "job", "body"), JOBS, ids=lambda value: str(value)[:20])
def test_forks_reach_no_machine_of_ours(name, job, body):
    if body["runs-on"] == "ubuntu-latest":
        return
    assert "head.repo.full_name == github.repository" in body["if"]
    assert body["environment"] == "hardware"
    assert "pull_request_target" not in json.dumps(WORKFLOWS[name], default=str)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_tokens_may_read_only(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}


def planner():
    path = str(ROOT / "ci" / "plan_rows")
    spec = importlib.util.spec_from_loader(
        "plan_rows", importlib.machinery.SourceFileLoader("plan_rows", path)
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_go_to_runners_that_exist():
    emulated, hardware = planner().rows("merge", {"trn2", "p5en"})
    labels = {row["name"]: json.loads(row["labels"]) for row in hardware}
    assert labels["trn2-to-p5en"] == ["self-hosted", "trn2", "efa"]
    assert "cpu-to-cpu" not in labels and "cpu-to-cpu" in {row["name"] for row in emulated}
    assert planner().rows("pr", set())[1] == []


def test_the_plan_needs_no_vllm(tmp_path):
    code = (
        "import runpy, sys; sys.modules['vllm'] = sys.modules['torch'] = None; "
        f"runpy.run_path({str(ROOT / 'ci' / 'plan_rows')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, env={"PATH": "", "EVENT": "schedule"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tier=nightly")
