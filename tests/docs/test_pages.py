"""Pages link to what is there, name commands and options that exist, and leave nothing out."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from pathlib import Path

import pytest

from neuron_push.cli import COMMANDS, Group
from neuron_push.config import Config
from neuron_push.router import command
from neuron_push.trace.phases import PHASES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy/README.md"]
ids = {"ids": lambda path: path.name}


@pytest.mark.parametrize("page", PAGES, **ids)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def commands():
    for page in PAGES:
        for line in page.read_text().replace("\\\n", " ").splitlines():
            if found := re.search(r"(?<![\w/-])neuron-push ([a-z]+)\b([^`|&;]*)", line):
                yield page.name, found[1], found[2]


def test_every_command_that_is_named_exists():
    for page in PAGES:
        for word in re.findall(r"`(?:[\w./]*/)?neuron-push ([a-z]+)", page.read_text()):
            assert word in COMMANDS, f"{page.name}: {word}"
    for page, word, rest in commands():
        group = COMMANDS.get(word)
        if isinstance(group, Group) and (sub := rest.split()):
            assert sub[0] in group.commands, f"{page}: {word} {sub[0]}"


@pytest.mark.parametrize("page", PAGES, **ids)
def test_options_of_the_router_exist(page):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    for name, word, rest in commands():
        if name == page.name and word == "router":
            used = {w.partition("=")[0] for w in shlex.split(rest, posix=False) if w[:2] == "--"}
            assert used <= known, f"{name}: {used - known}"


def test_every_doctor_finding_has_a_remedy():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    names = set()
    for path in (ROOT / "neuron_push/doctor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called not in ("warning", "error", "note", "Finding"):
                continue
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names.add(first.value)
            elif isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
                names.add(first.values[0].value + "*")
    # Of those that carry a name (version.vllm), the pattern stands in the table.
    covered = set(re.findall(r"`([\w.*]+)`", text))
    missing = {n for n in names if n not in covered and re.sub(r"\.\w+$", ".*", n) not in covered}
    assert names and not missing


def test_every_published_failure_is_there():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    for words in ("connector or mode differ", "404", "router is up before", "5600", "TP size"):
        assert words in text


def test_every_phase_and_label_is_explained():
    text = (ROOT / "docs/observability.md").read_text()
    assert all(f"| {phase} |" in text for phase in PHASES)
    rows = (ROOT / "docs/compatibility.md").read_text().splitlines()
    labels = [row.split("|")[3] for row in rows if row.startswith("| ") and "---" not in row][1:]
    assert all(re.search(r"validated|emulated|untested|parsed|checked", each) for each in labels)


def test_settings_that_pages_name_exist():
    for page in PAGES:
        for name in re.findall(r'"kv_connector_extra_config": \{"(\w+)"', page.read_text()):
            assert name in Config.__struct_fields__


def test_the_fleet_of_the_quick_start_is_one(tmp_path):
    pytest.importorskip("vllm")
    from neuron_push.emulation.fleet import load

    text = (ROOT / "docs/quick-start.md").read_text()
    lines = re.search(r"<<'END'\n(.*?)\n    END", text, re.DOTALL)[1].splitlines()
    (tmp_path / "fleet.yaml").write_text("\n".join(line[4:] for line in lines))
    fleet = load(tmp_path / "fleet.yaml")
    assert {engine.device for engine in fleet.engines} == {"trn2", "p5en"}
    for engine in fleet.engines:
        Config.parse(engine.settings, {})
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    parser.parse_args(fleet.router.arguments)


def test_the_readme_has_a_row_for_every_module_and_none_for_others():
    rows = re.findall(r"^\| `(neuron_push/[^`]+)` \|", (ROOT / "README.md").read_text(), re.M)
    package = ROOT / "neuron_push"
    modules = {f"neuron_push/{path.name}" for path in package.glob("[!_]*.py")}
    modules |= {f"neuron_push/{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert sorted(rows) == sorted(modules)
