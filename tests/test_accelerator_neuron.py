"""The Trainium accelerator on fakes of device files, of tensors and of libnrt."""

from __future__ import annotations

import ctypes
import importlib
import logging
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from neuron_push.accelerator import Probe
from neuron_push.backends import Attention
from neuron_push.errors import ConfigError
from neuron_push.geometry import GeometryError
from neuron_push.layouts import Place
from tests.devices import machine, nrt
from tests.devices.tensors import FakeTensor

neuron = pytest.importorskip("neuron_push_neuron")
libnrt = pytest.importorskip("neuron_push_neuron.libnrt")


def accelerator(root, **ranges):
    loaded = libnrt.Loaded(nrt.FakeNrt({(0x10000, 4096): "0000:81:00.0"}), True, "")
    return neuron.NeuronAccelerator(root, lambda: loaded)


class TestProbe:
    def test_without_a_device_file_it_says_so(self, tmp_path):
        probe = neuron.NeuronAccelerator(tmp_path).probe()
        assert probe == Probe(False, "no /dev/neuron* device")

    def test_what_sysfs_knows_is_reported(self, tmp_path):
        for number in (10, 2):
            machine.put(tmp_path / f"dev/neuron{number}")
        machine.efa(tmp_path, 2)
        info = "sys/devices/virtual/neuron_device/neuron2/info/architecture"
        machine.put(tmp_path / info / "instance_type", "trn2.48xlarge\n")
        detail = neuron.NeuronAccelerator(tmp_path).probe().detail
        assert detail == {
            "devices": "neuron2 neuron10",
            "efa": "rdmap0s0 rdmap1s0",
            "instance_type": "trn2.48xlarge",
        }


class TestMemory:
    def test_pointer_zero_names_the_variable_to_set(self, tmp_path):
        with pytest.raises(ConfigError, match="NEURON_RT_MAP_HBM=1"):
            accelerator(tmp_path).region(FakeTensor("neuron", base=0))

    def test_memory_that_is_not_mapped_is_refused(self, tmp_path):
        machine.maps(tmp_path, (0x1000, 0x2000), (0x20000, 0x30000))
        with pytest.raises(ConfigError, match=r"it is not mapped.*NEURON_RT_MAP_HBM"):
            accelerator(tmp_path).region(FakeTensor("neuron"))

    def test_memory_that_is_mapped_in_part_is_refused(self, tmp_path):
        machine.maps(tmp_path, (0x10000, 0x10800))
        with pytest.raises(ConfigError, match="only 2048 bytes are mapped"):
            accelerator(tmp_path).region(FakeTensor("neuron"))

    def test_mappings_that_touch_hold_an_allocation(self, tmp_path):
        machine.maps(tmp_path, (0xF000, 0x10800), (0x10800, 0x20000))
        assert accelerator(tmp_path).region(FakeTensor("neuron")) == (0x10000, 4096)

    def test_tensors_of_both_stacks_are_taken(self, tmp_path):
        found = accelerator(machine.trn2(tmp_path))
        assert found.memory_type(FakeTensor("neuron")) == "VRAM"
        assert found.memory_type(FakeTensor("privateuseone")) == "VRAM"

    def test_somebody_elses_private_device_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="'privateuseone'"):
            accelerator(tmp_path).memory_type(FakeTensor("privateuseone"))


class TestPlanes:
    def test_k_and_v_are_halves_of_one_allocation(self, tmp_path):
        tensor = FakeTensor("neuron", shape=(2, 4, 2, 16, 8), size=4096)
        key, value = accelerator(tmp_path).planes(tensor, Attention("CUSTOM"), Place(0, 0, 0x10000))
        assert (key.offset, value.offset) == (0, 2048)
        assert (key.page, key.head, key.token, key.channel) == (512, 256, 16, 2)

    def test_packed_keys_are_whole_pages_and_values_are_not(self, tmp_path):
        tensor = FakeTensor("neuron", shape=(2, 4, 2, 16, 8), element=1, size=2048)
        attention = Attention("CUSTOM", packed_keys=True)
        key, value = accelerator(tmp_path).planes(tensor, attention, Place(0, 0, 0x10000))
        assert key.interior.startswith("neuron:fp8_packed:k:16x8")
        assert (key.page_bytes, key.head) == (128, 128)
        assert value.interior == ""

    def test_packed_keys_need_an_even_number_of_tokens(self, tmp_path):
        tensor = FakeTensor("neuron", shape=(2, 4, 2, 15, 8), element=1)
        with pytest.raises(GeometryError, match="token pairs"):
            accelerator(tmp_path).planes(
                tensor, Attention("CUSTOM", packed_keys=True), Place(0, 0, 0x10000)
            )


class TestDescription:
    """Through the vLLM facade, with the objects that vLLM Neuron's runner hands over."""

    def config(self, **parallel):
        return SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={}),
            parallel_config=SimpleNamespace(**parallel),
            additional_config=None,
        )

    def describe(self, tmp_path, config):
        describe = importlib.import_module("neuron_push.vllm.describe").describe
        spec = type("FullAttentionSpec", (), {"block_size": 16})()
        names = [f"layers.{n}.self_attn" for n in range(2)]
        group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        caches = {name: FakeTensor("neuron", 0x10000 * (n + 1)) for n, name in enumerate(names)}
        for tensor in caches.values():
            tensor.dim = lambda: 5
        kv_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=4)
        return describe(config, kv_config, caches, accelerator(tmp_path), (4, 5))

    def test_each_layer_is_an_allocation_and_the_null_block_is_left_out(self, tmp_path):
        geometry = self.describe(tmp_path, self.config())
        assert [region.base for region in geometry.regions] == [0x10000, 0x20000]
        assert {region.memory for region in geometry.regions} == {"VRAM"}
        assert geometry.reserved_blocks == 1
        (group,) = geometry.groups
        assert (group.heads, group.page_tokens, len(group.planes)) == ((4, 5), 16, 4)
        assert [(p.layer, p.kind, p.offset) for p in group.planes[2:]] == [
            (1, "k", 0),
            (1, "v", 2048),
        ]

    def test_context_parallelism_is_refused(self):
        refuse = importlib.import_module("neuron_push.vllm.describe").refuse_context_parallel
        refuse(self.config(decode_context_parallel_size=1))
        with pytest.raises(ConfigError, match=r"decode_context_parallel_size is 2.*NeuronNixl"):
            refuse(self.config(decode_context_parallel_size=2))


class TestThread:
    def test_an_agent_before_the_runtime_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="created before the Neuron runtime"):
            accelerator(tmp_path).enter_thread()

    def test_a_missing_library_is_refused_with_the_loaders_words(self, tmp_path):
        dlopen = nrt.loader(installed=False)
        found = neuron.NeuronAccelerator(tmp_path, lambda: libnrt.load(dlopen))
        found.region(FakeTensor("neuron"))
        with pytest.raises(ConfigError, match=r"libnrt.so.1 does not load.*cannot open"):
            found.enter_thread()

    def test_the_rail_of_the_cache_is_logged(self, tmp_path, caplog):
        found = accelerator(tmp_path)
        found.region(FakeTensor("neuron"))
        with caplog.at_level(logging.INFO):
            found.enter_thread()
        assert "by its full path" in caplog.text
        assert "0000:81:00.0" in caplog.text

    def test_a_fence_is_done_at_once(self):
        assert neuron.NeuronAccelerator().record_fence().done()


class TestLibrary:
    def test_the_loaders_path_comes_first(self):
        assert libnrt.load(nrt.loader(path_has_it=True)).by_path is False

    def test_the_installed_path_is_the_second_choice(self):
        loaded = libnrt.load(nrt.loader())
        assert loaded.by_path and "cannot open" in loaded.error

    def test_it_asks_without_initialising(self):
        runtime = libnrt.Runtime(nrt.FakeNrt({(0x1000, 0x1000): "0000:81:00.0"}, cores=64))
        assert runtime.cores() == 64
        assert runtime.attached_efa(0x1800) == "0000:81:00.0"
        assert runtime.attached_efa(0x9000) is None

    def test_an_old_runtime_cannot_tell_the_rail(self):
        assert libnrt.Runtime(nrt.OldNrt()).attached_efa(0x1000) is None

    @pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
    def test_a_library_loaded_by_its_path_is_then_found_by_its_name(self, tmp_path):
        """What `enter_thread` relies on, with the real loader and a library of that name."""
        source = tmp_path / "nrt.c"
        source.write_text("int nrt_get_total_nc_count(unsigned *n) { *n = 8; return 0; }\n")
        library = tmp_path / libnrt.NAME
        subprocess.run(
            ["cc", "-shared", "-fPIC", f"-Wl,-soname,{libnrt.NAME}", "-o", library, source],
            check=True,
        )
        code = f"""
import ctypes
try:
    ctypes.CDLL("{libnrt.NAME}")
    raise SystemExit("found before it was loaded")
except OSError:
    pass
ctypes.CDLL("{library}")
count = ctypes.c_uint32()
ctypes.CDLL("{libnrt.NAME}").nrt_get_total_nc_count(ctypes.byref(count))
print(count.value)
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, "8"), done.stderr

    def test_loading_uses_the_real_loader_by_default(self):
        assert libnrt.load.__defaults__ == (ctypes.CDLL,)


class TestBackends:
    def test_only_libfabric_over_efa(self, tmp_path):
        found = accelerator(machine.trn2(tmp_path))
        assert found.nixl_backends() == ("LIBFABRIC",)
        for wanted in [("UCX",), ("UCX", "LIBFABRIC")]:
            with pytest.raises(ConfigError, match="cannot register Neuron memory"):
                found.nixl_backends(wanted)

    def test_a_machine_without_efa_is_refused(self, tmp_path):
        machine.trn2(tmp_path, 1, 0)
        machine.instance(tmp_path, "trn2.3xlarge")
        with pytest.raises(ConfigError, match=r"trn2.3xlarge shows no EFA device"):
            accelerator(tmp_path).nixl_backends()
