"""Manifests build, fit the schemas of Kubernetes, and agree with the code and each other."""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from neuron_push.config import Config
from neuron_push.router import command
from neuron_push.router.kubernetes import LEG, places_in
from neuron_push.router.places import Listing

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("p5en", "trn2", "mixed")
VERSIONS = ("1.31", "1.34")
needs_kubectl = pytest.mark.skipif(
    not shutil.which("kubectl"), reason="kubectl (for kustomize) is not installed"
)


def built(overlay):
    words = ["kubectl", "kustomize", str(DEPLOY / "kustomize/overlays" / overlay)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects, kind):
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def plain_objects():
    for path in sorted((DEPLOY / "kustomize").rglob("*.yaml")):
        for each in yaml.safe_load_all(path.read_text()):
            if each["kind"] not in ("Kustomization", "Component") and path.name != "values.yaml":
                yield f"{path.relative_to(DEPLOY)}:{each['kind']}", each


@pytest.mark.parametrize(
    ("name", "each"), plain_objects(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_every_object_fits_its_schema(name, each):
    validate = pytest.importorskip("kubernetes_validate").validate
    if each["kind"] == "Deployment" and "engines/" in name:
        each["spec"]["template"]["spec"]["containers"][0].setdefault("image", "x")
    for version in VERSIONS:
        validate(each, version, strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_builds_and_fits_the_schemas(overlay):
    validate = pytest.importorskip("kubernetes_validate").validate
    for each in built(overlay):
        for version in VERSIONS:
            validate(each, version, strict=True)
        assert each["metadata"]["namespace"] == "neuron-push"


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_meet_and_services_carry_what_the_router_reads(overlay):
    objects = built(overlay)
    templates = [d["spec"]["template"] for d in of_kind(objects, "Deployment").values()]
    for service in of_kind(objects, "Service").values():
        selector = service["spec"]["selector"].items()
        met = [t for t in templates if selector <= t["metadata"]["labels"].items()]
        assert len(met) == 1, f"{service['metadata']['name']} selects one deployment"
        names = {p["name"] for p in met[0]["spec"]["containers"][0]["ports"]}
        if LEG in service["metadata"].get("labels", {}):
            assert (
                {p["name"] for p in service["spec"]["ports"]} == {"http", "side-channel"} == names
            )
            each = {
                "metadata": {"name": "x", "labels": service["metadata"]["labels"]},
                "ports": service["spec"]["ports"],
                "endpoints": [{"addresses": ["10.0.0.1"]}],
            }
            (place,) = places_in(each)
            assert place.device in ("p5en", "trn2") and place.side.port == 5600


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_engines_are_given_settings_that_the_connector_accepts(overlay):
    roles = set()
    for name, each in of_kind(built(overlay), "Deployment").items():
        (container,) = each["spec"]["template"]["spec"]["containers"]
        if name == "router":
            continue
        env = {e["name"]: e.get("value", "") for e in container["env"]}
        (text,) = [a for a in container["args"] if a.startswith("--kv-transfer-config=")]
        text = re.sub(r"\$\((\w+)\)", lambda m, env=env: env[m[1]], text)
        transfer = json.loads(text.partition("=")[2])
        config = Config.parse(transfer["kv_connector_extra_config"], {})
        roles.add(transfer["kv_role"])
        # vLLM Neuron's word for device memory; its own default there is refused by it.
        assert transfer["kv_buffer_device"] == "cuda"
        # The connector refuses a Neuron engine without it.
        assert ("--no-async-scheduling" in container["args"]) is (config.accelerator == "neuron")
        device = {"cuda": "nvidia.com/gpu", "neuron": "aws.amazon.com/neuron"}[config.accelerator]
        limits = container["resources"]["limits"]
        assert {device, "vpc.amazonaws.com/efa", "hugepages-2Mi"} <= set(limits)
        assert config.backends == ("LIBFABRIC",)
        grace = each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > Config().lease + Config().drain_timeout
    assert roles == {"kv_producer", "kv_consumer"}


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_router_is_given_options_that_it_accepts(overlay, tmp_path):
    (tmp_path / "keys").write_text("a:b\n")
    container = of_kind(built(overlay), "Deployment")["router"]["spec"]["template"]["spec"]
    (container,) = container["containers"]
    words = [a.replace("/etc/neuron-push/keys", str(tmp_path / "keys")) for a in container["args"]]
    settings = parse_router(words)
    assert settings.keys and settings.canary_period
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["readinessProbe"]["timeoutSeconds"] > settings.canary_timeout
    if overlay == "mixed":
        assert list(settings.preferred) == [("trn2", "p5en"), ("p5en", "p5en")]


def parse_router(words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.settings(parser.parse_args(words))


def units():
    return sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", units(), ids=lambda path: path.name)
def test_units_are_complete(unit):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    text = re.sub(r"\\\n\s*", "", unit.read_text())
    parser.read_string(text)
    service = dict(parser["Service"])
    assert service["ExecStart"] and parser["Install"]["WantedBy"]
    known = dict(
        line.split("=", 1)
        for line in (DEPLOY / "systemd/engine.env").read_text().splitlines()
        if line and not line.startswith("#")
    )
    if "router" in unit.name:
        words = service["ExecStart"].split()[2:]
        file = DEPLOY / "systemd/engines.json"
        options = argparse.ArgumentParser()
        command.add_arguments(options)
        args = options.parse_args(words)
        named = json.loads(file.read_text())
        assert Listing.parse(named["prefill"], named["decode"], 5600).prefill[0].device == "trn2"
        assert int(args.drain) < int(service["TimeoutStopSec"])
        return
    used = set(re.findall(r"\$\{?(\w+)\}?", service["ExecStart"]))
    assert used <= set(known), "every variable is in engine.env"
    raw = re.search(r"--kv-transfer-config '(.*)'", service["ExecStart"])[1]
    transfer = json.loads(raw.replace("${DEVICE}", "cuda"))
    assert Config.parse(transfer["kv_connector_extra_config"], {}).accelerator == "cuda"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("unit", units(), ids=lambda path: path.name)
def test_systemd_accepts_the_units(unit):
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert not [line for line in complaints if unit.name in line]


@pytest.mark.parametrize(
    "file", sorted((DEPLOY / "containers").iterdir()), ids=lambda path: path.name
)
def test_container_files_copy_what_is_there(file):
    text = re.sub(r"\\\n\s*", "", file.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert any(line.startswith("FROM ") for line in lines)
    for line in lines:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), f"{source} is in the build context"


INSTRUCTIONS = {
    "FROM",
    "ARG",
    "ENV",
    "RUN",
    "COPY",
    "WORKDIR",
    "USER",
    "EXPOSE",
    "ENTRYPOINT",
    "CMD",
}


@pytest.mark.parametrize(
    "file", sorted((DEPLOY / "containers").iterdir()), ids=lambda path: path.name
)
def test_container_files_are_well_formed(file):
    """Known instructions, shell that parses, arguments that are declared, no floating base."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE))
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    declared = {rest.partition("=")[0] for word, rest in lines if word == "ARG"}
    for word, rest in lines:
        assert word in INSTRUCTIONS, word
        if word == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
        if word == "FROM":
            assert not rest.split()[0].endswith(":latest")
            assert set(re.findall(r"\$\{(\w+)\}", rest)) <= declared
        if word in ("ENTRYPOINT", "CMD"):
            assert json.loads(rest), "the exec form: signals reach the process"
