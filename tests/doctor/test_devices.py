from __future__ import annotations

import pytest

from neuron_push import accelerator as core
from neuron_push.accelerator import Probe
from neuron_push.doctor import devices
from neuron_push.doctor.machine import Ran
from neuron_push.errors import ConfigError
from tests.devices import machine as files
from tests.doctor.kit import FakeMachine, found, levels, neuron_ls

NRT = {"libnrt.so.1": {"nrt_get_attached_efa_bdf"}, "libcuda.so.1": set()}
INSTALLED = "/opt/aws/neuron/lib/libnrt.so.1"


def trn2(tmp_path, count=16, adapters=16, **parts):
    files.trn2(tmp_path, count, adapters)
    parts.setdefault("commands", {"neuron-ls": neuron_ls(count)})
    parts.setdefault("libraries", dict(NRT))
    return FakeMachine(tmp_path, {}, **parts)


class TestNeuron:
    def test_a_machine_without_is_no_trouble(self, tmp_path):
        assert levels(devices.neuron(FakeMachine(tmp_path, {}))) == {"neuron.devices": "note"}

    def test_a_healthy_one(self, tmp_path):
        seen = found(devices.neuron(trn2(tmp_path)))
        assert {each.level for each in seen.values()} == {"ok"}
        assert seen["neuron.devices"].seen == "16 devices, 128 cores, 0 in use"

    @pytest.mark.parametrize(
        "commands", [{}, {"neuron-ls": Ran(1, "", "no driver")}, {"neuron-ls": Ran(0, "?", "")}]
    )
    def test_tools_that_do_not_answer(self, tmp_path, commands):
        here = trn2(tmp_path, commands=commands)
        assert levels(devices.neuron(here))["neuron.devices"] == "warning"

    def test_devices_that_are_lost(self, tmp_path):
        here = trn2(tmp_path, commands={"neuron-ls": neuron_ls(15)})
        assert levels(devices.neuron(here))["neuron.devices"] == "error"

    def test_a_runtime_off_the_loaders_path(self, tmp_path):
        here = trn2(tmp_path, libraries={INSTALLED: NRT["libnrt.so.1"], "libcuda.so.1": set()})
        finding = next(f for f in devices.neuron(here) if f.level == "warning")
        assert "off the loader's path" in finding.seen

    def test_no_runtime_at_all(self, tmp_path):
        here = trn2(tmp_path, libraries={"libcuda.so.1": set()})
        finding = found(devices.neuron(here))["neuron.libnrt"]
        assert finding.level == "error"
        assert "cannot open shared object" in finding.seen

    def test_a_runtime_that_cannot_tell_the_rail(self, tmp_path):
        here = trn2(tmp_path, libraries={"libnrt.so.1": set(), "libcuda.so.1": set()})
        assert levels(devices.neuron(here))["neuron.rails"] == "warning"

    def test_libcuda_is_needed_even_here(self, tmp_path):
        here = trn2(tmp_path, libraries={"libnrt.so.1": NRT["libnrt.so.1"]})
        finding = found(devices.neuron(here))["neuron.libcuda"]
        assert finding.level == "error"
        assert "-soname,libcuda.so.1" in finding.remedy

    @pytest.mark.parametrize(("adapters", "level"), [(0, "error"), (1, "warning")])
    def test_adapters_that_were_not_attached(self, tmp_path, adapters, level):
        assert levels(devices.neuron(trn2(tmp_path, 16, adapters)))["neuron.efa"] == level

    def test_an_old_kernel(self, tmp_path):
        here = trn2(tmp_path, release="5.10.244-240.970.amzn2.x86_64")
        assert levels(devices.neuron(here))["neuron.kernel"] == "error"


class TestNvidia:
    def machine(self, tmp_path, ran):
        files.p5en(tmp_path)
        return FakeMachine(tmp_path, {}, commands={"nvidia-smi": ran} if ran else {})

    def test_a_machine_without_is_no_trouble(self, tmp_path):
        assert levels(devices.nvidia(FakeMachine(tmp_path, {}))) == {"cuda.devices": "note"}

    @pytest.mark.parametrize(
        ("ran", "level"),
        [
            (Ran(0, "NVIDIA H200, 580.126.16, 00000000:53:00.0\n" * 8, ""), "ok"),
            (Ran(0, "NVIDIA H200, 580.126.16, 00000000:53:00.0\n" * 7, ""), "warning"),
            (Ran(18, "Failed to initialize NVML: Driver/library version mismatch", ""), "warning"),
            (None, "warning"),
        ],
    )
    def test_the_drivers_count(self, tmp_path, ran, level):
        assert levels(devices.nvidia(self.machine(tmp_path, ran))) == {"cuda.devices": level}


class TestAccelerator:
    def test_no_device_needs_none(self, tmp_path):
        assert levels(devices.accelerator(FakeMachine(tmp_path, {}))) == {}

    def test_a_device_without_its_distribution(self, tmp_path, monkeypatch):
        monkeypatch.setattr(core, "_entry_points", dict)
        finding = found(devices.accelerator(trn2(tmp_path)))["accelerator.neuron"]
        assert finding.level == "error"
        assert finding.remedy.startswith("pip install neuron-push-neuron")

    @pytest.mark.parametrize(
        ("probe", "level"),
        [(Probe(True, "16 devices"), "ok"), (Probe(False, "built without CUDA"), "error")],
    )
    def test_what_it_says_of_the_device(self, tmp_path, monkeypatch, probe, level):
        class Asked(core.CpuAccelerator):
            def probe(self):
                return probe

        monkeypatch.setattr(core, "lookup", lambda name: Asked())
        assert levels(devices.accelerator(trn2(tmp_path))) == {"accelerator.neuron": level}

    def test_one_that_does_not_load(self, tmp_path, monkeypatch):
        def lookup(name):
            raise ConfigError("lacks members")

        monkeypatch.setattr(core, "lookup", lookup)
        assert levels(devices.accelerator(trn2(tmp_path))) == {"accelerator.neuron": "error"}
