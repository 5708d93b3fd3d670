from __future__ import annotations

from dataclasses import replace

import pytest

from neuron_push.doctor import software
from neuron_push.doctor.machine import Point, Ran
from tests.devices import machine as files
from tests.doctor.kit import ENTRY, FakeMachine, found, levels, loaded


def machine(tmp_path, **parts):
    return FakeMachine(tmp_path, parts.pop("environ", {}), **parts)


class TestVersions:
    def test_tested_ones_are_fine(self, tmp_path):
        here = machine(tmp_path, versions={"vllm": "0.29.0", "nixl-cu12": "1.3.2"})
        assert levels(software.tested(here)) == {"version.vllm": "ok", "version.nixl": "ok"}

    def test_missing_ones_are_named(self, tmp_path):
        assert levels(software.tested(machine(tmp_path))) == {
            "version.vllm": "warning",
            "version.nixl": "warning",
        }

    def test_one_outside_the_range_is_an_error_unless_allowed(self, tmp_path):
        here = machine(tmp_path, versions={"vllm": "0.24.0", "nixl": "1.5.1"})
        finding = found(software.tested(here))["version.vllm"]
        assert finding.level == "error"
        assert "0.24.0 (vllm) is outside" in finding.seen
        here.environ = {"NEURON_PUSH_ALLOW_UNTESTED": "1"}
        assert levels(software.tested(here))["version.vllm"] == "warning"

    def test_two_flavours_of_nixl_are_an_error(self, tmp_path):
        here = machine(tmp_path, versions={"nixl-cu12": "1.5.1", "nixl": "1.5.1"})
        assert levels(software.duplicates(here)) == {"nixl.flavours": "ok"}
        here.versions["nixl-cu13"] = "1.5.1"
        finding = found(software.duplicates(here))["nixl.flavours"]
        assert finding.level == "error"
        assert "nixl-cu12 1.5.1 and nixl-cu13 1.5.1" in finding.seen

    @pytest.mark.parametrize(
        ("name", "version", "level"),
        [
            ("torch-neuronx", "1.0", "error"),
            ("torch-neuronx", "2.9.0.2.15", "ok"),
            ("neuronx-distributed", "0.1", "error"),
            ("neuronx-distributed", "0.16.0", "ok"),
            ("vllm-neuron", "0.1.0", "error"),
            ("vllm-neuron", "0.29.0.1.2.0", "ok"),
        ],
    )
    def test_placeholders_of_the_public_index_are_told_from_the_real_ones(
        self, tmp_path, name, version, level
    ):
        here = machine(tmp_path, versions={name: version})
        finding = found(software.placeholders(here))[f"version.{name}"]
        assert finding.level == level
        assert (level == "ok") or "AWS's package index" in finding.remedy


class TestPlugin:
    def machine(self, tmp_path, **parts):
        return machine(tmp_path, offered={"vllm.general_plugins": [ENTRY]}, **parts)

    def test_it_is_found(self, tmp_path):
        assert levels(software.plugin(self.machine(tmp_path))) == {"plugin.found": "ok"}

    def test_it_is_missed(self, tmp_path):
        assert levels(software.plugin(machine(tmp_path))) == {"plugin.found": "error"}

    def test_an_old_copy_is_seen(self, tmp_path):
        here = self.machine(tmp_path)
        here.offered["vllm.general_plugins"].append(ENTRY._replace(distribution="neuron-push-old"))
        finding = next(iter(software.plugin(here)))
        assert finding.level == "warning"
        assert "neuron-push-old" in finding.seen

    def test_a_filter_that_leaves_it_out_is_an_error(self, tmp_path):
        here = self.machine(tmp_path, environ={"VLLM_PLUGINS": "lora_resolver"})
        here.offered["vllm.general_plugins"].append(Point("lora_resolver", "x:y", "vllm"))
        assert levels(software.plugin(here)) == {"plugin.allowed": "error"}

    def test_an_empty_filter_loads_nothing(self, tmp_path):
        here = self.machine(tmp_path, environ={"VLLM_PLUGINS": ""})
        assert levels(software.plugin(here)) == {"plugin.allowed": "error"}

    def test_a_name_that_matches_nothing_is_pointed_out(self, tmp_path):
        here = self.machine(tmp_path, environ={"VLLM_PLUGINS": "neuron_push,neuron_pusch"})
        seen = found(software.plugin(here))
        assert seen["plugin.allowed"].level == "ok"
        assert "neuron_pusch" in seen["plugin.names"].seen


class TestPlatform:
    def machine(self, tmp_path, ran):
        return machine(tmp_path, versions={"vllm": "0.32.0"}, children={"plugin": ran})

    def test_without_vllm_there_is_nothing_to_load(self, tmp_path):
        assert levels(software.platform(machine(tmp_path))) == {}

    def test_what_loads_is_fine(self, tmp_path):
        assert levels(software.platform(self.machine(tmp_path, loaded()))) == {
            "plugin.loads": "ok",
            "plugin.platform": "note",
        }

    @pytest.mark.parametrize(
        "ran", [Ran(1, "", "Traceback\nImportError: libcudart"), Ran(None, "", ""), Ran(0, "?", "")]
    )
    def test_an_engine_that_does_not_load_is_an_error(self, tmp_path, ran):
        assert levels(software.platform(self.machine(tmp_path, ran))) == {"plugin.loads": "error"}

    def test_the_connectors_own_refusal_is_repeated(self, tmp_path):
        here = self.machine(tmp_path, loaded(refused="supports vllm >=0.29"))
        finding = found(software.platform(here))["plugin.loads"]
        assert finding.level == "error"
        assert "supports vllm >=0.29" in finding.seen

    @pytest.mark.parametrize(
        ("device", "level"), [("cpu", "error"), ("neuron", "note"), ("cuda", "note")]
    )
    def test_devices_that_vllm_does_not_use_are_an_error(self, tmp_path, device, level):
        files.put(tmp_path / "dev/neuron0")
        here = self.machine(tmp_path, loaded(device))
        assert levels(software.platform(here))["plugin.platform"] == level


def test_no_finding_without_a_why(tmp_path):
    finding = found(software.plugin(machine(tmp_path)))["plugin.found"]
    with pytest.raises(AssertionError):
        found([replace(finding, why="")])
