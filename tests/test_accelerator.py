"""Accelerators: one contract for all three, the lookup, and what each refuses."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from neuron_push import accelerator as core
from neuron_push.accelerator import Accelerator, CpuAccelerator, Probe, lookup
from neuron_push.errors import ConfigError

cuda = pytest.importorskip("neuron_push_cuda")
neuron = pytest.importorskip("neuron_push_neuron")


@dataclass
class FakeTensor:
    """Looks like a torch.Tensor to an accelerator."""

    kind: str = "cpu"
    base: int = 0x10000
    size: int = 4096
    number: int = -1

    @property
    def device(self):
        return SimpleNamespace(type=self.kind)

    def get_device(self):
        return self.number

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: self.base, nbytes=lambda: self.size)


class FakeEvent:
    """A CUDA event: unrecorded it claims to be done, recorded it is done after some looks.

    That an unrecorded event answers cudaSuccess is the documented behaviour of cudaEventQuery.
    """

    looks_until_done = 0

    def __init__(self, enable_timing):
        assert not enable_timing
        self.recorded = False
        self.looks = 0

    def record(self):
        self.recorded = True

    def query(self):
        assert self.recorded, "an unrecorded event says it is done"
        self.looks += 1
        return self.looks > self.looks_until_done


def fake_torch(monkeypatch, *, cuda_version="12.9", devices=1):
    module = SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda_version),
        cuda=SimpleNamespace(device_count=lambda: devices, Event=FakeEvent),
    )
    monkeypatch.setitem(sys.modules, "torch", module)


def put(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(params=["cpu", "cuda", "neuron"])
def case(request, tmp_path, monkeypatch):
    """An accelerator whose device is present, and a tensor that lives on it."""
    fake_torch(monkeypatch)
    put(tmp_path / "dev/nvidia0")
    put(tmp_path / "dev/neuron0")
    return {
        "cpu": lambda: (CpuAccelerator(), FakeTensor("cpu")),
        "cuda": lambda: (cuda.CudaAccelerator(tmp_path), FakeTensor("cuda", number=3)),
        "neuron": lambda: (neuron.NeuronAccelerator(tmp_path), FakeTensor("neuron")),
    }[request.param]()


class TestContract:
    def test_it_is_an_accelerator_under_its_own_name(self, case):
        accelerator, _ = case
        assert isinstance(accelerator, Accelerator)
        assert type(accelerator) is type(lookup(accelerator.name))

    def test_a_present_device_is_found_and_described(self, case):
        probe = case[0].probe()
        assert probe.available and probe.reason
        assert all(isinstance(value, str) for value in probe.detail.values())

    def test_memory_type_and_device_are_legal_for_nixl(self, case):
        accelerator, tensor = case
        expected = "DRAM" if accelerator.name == "cpu" else "VRAM"
        assert accelerator.memory_type(tensor) == expected
        assert accelerator.device_id(tensor) == max(tensor.number, 0)

    def test_the_region_is_the_whole_allocation(self, case):
        accelerator, tensor = case
        assert accelerator.region(tensor) == (0x10000, 4096)

    @pytest.mark.parametrize("hole", [{"base": 0}, {"size": 0}])
    def test_an_allocation_without_address_or_length_is_refused(self, case, hole):
        accelerator, tensor = case
        vars(tensor).update(hole)
        with pytest.raises(ConfigError, match="cannot register"):
            accelerator.region(tensor)

    def test_a_tensor_of_another_device_is_refused(self, case):
        accelerator, tensor = case
        tensor.kind = "meta"
        with pytest.raises(ConfigError, match="'meta'"):
            accelerator.memory_type(tensor)

    def test_a_recorded_fence_ends(self, case):
        fence = case[0].record_fence()
        assert fence.wait(1.0)
        assert fence.done()

    def test_it_prefers_some_backend_and_names_its_environment(self, case):
        accelerator, _ = case
        assert accelerator.nixl_backends()[0] in {"UCX", "LIBFABRIC"}
        assert all(isinstance(value, str) for value in accelerator.environment().values())


class TestCpu:
    def test_a_gpu_tensor_is_refused_with_a_way_out(self):
        with pytest.raises(ConfigError, match=r"'cuda'.*install the distribution"):
            CpuAccelerator().memory_type(FakeTensor("cuda"))

    def test_it_reads_real_tensors(self):
        torch = pytest.importorskip("torch")
        tensor = torch.zeros(4, 8, dtype=torch.uint8)
        view = tensor[2:]
        assert CpuAccelerator().region(view) == (tensor.data_ptr(), 32)
        assert CpuAccelerator().memory_type(view) == "DRAM"


class TestCuda:
    def test_without_a_device_file_it_says_so(self, tmp_path):
        probe = cuda.CudaAccelerator(tmp_path).probe()
        assert not probe.available
        assert probe.reason == "no CUDA device: no /dev/nvidia* device file"

    @pytest.mark.parametrize(
        ("torch", "reason"),
        [
            ({"cuda_version": None}, "built without CUDA"),
            ({"devices": 0}, "PyTorch sees none"),
        ],
    )
    def test_a_torch_that_cannot_use_the_device_is_named(
        self, monkeypatch, tmp_path, torch, reason
    ):
        put(tmp_path / "dev/nvidia0")
        fake_torch(monkeypatch, **torch)
        probe = cuda.CudaAccelerator(tmp_path).probe()
        assert not probe.available
        assert reason in probe.reason

    def test_a_missing_torch_is_named(self, monkeypatch, tmp_path):
        put(tmp_path / "dev/nvidia0")
        monkeypatch.setitem(sys.modules, "torch", None)
        probe = cuda.CudaAccelerator(tmp_path).probe()
        assert not probe.available
        assert "PyTorch does not import" in probe.reason

    def test_control_files_are_not_devices(self, tmp_path):
        put(tmp_path / "dev/nvidiactl")
        assert not cuda.CudaAccelerator(tmp_path).probe().available

    def test_a_fence_waits_until_the_event_is_done(self, monkeypatch):
        fake_torch(monkeypatch)
        monkeypatch.setattr(FakeEvent, "looks_until_done", 3)
        monkeypatch.setattr(cuda.time, "sleep", lambda seconds: None)
        fence = cuda.CudaAccelerator().record_fence()
        assert not fence.done()
        assert fence.wait(60.0)

    def test_a_wait_ends_at_its_deadline(self, monkeypatch):
        fake_torch(monkeypatch)
        monkeypatch.setattr(FakeEvent, "looks_until_done", sys.maxsize)
        clock = iter(range(100))
        fake = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None)
        monkeypatch.setattr(cuda, "time", fake)
        assert not cuda.CudaAccelerator().record_fence().wait(5.0)

    def test_efa_devices_choose_libfabric(self, tmp_path):
        accelerator = cuda.CudaAccelerator(tmp_path)
        put(tmp_path / "sys/class/infiniband/mlx5_0/device/vendor", "0x15b3\n")
        assert accelerator.nixl_backends() == ("UCX",)
        assert accelerator.environment() == {}
        put(tmp_path / "sys/class/infiniband/rdmap79s0/device/vendor", "0x1d0f\n")
        assert accelerator.nixl_backends() == ("LIBFABRIC",)
        assert accelerator.environment() == {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}


class TestNeuron:
    def test_without_a_device_file_it_says_so(self, tmp_path):
        probe = neuron.NeuronAccelerator(tmp_path).probe()
        assert probe == Probe(False, "no /dev/neuron* device")

    def test_what_sysfs_knows_is_reported(self, tmp_path):
        for number in (10, 2):
            put(tmp_path / f"dev/neuron{number}")
        info = "sys/devices/virtual/neuron_device/neuron2/info/architecture"
        put(tmp_path / info / "instance_type", "trn2.48xlarge\n")
        detail = neuron.NeuronAccelerator(tmp_path).probe().detail
        assert detail == {"devices": "neuron2 neuron10", "instance_type": "trn2.48xlarge"}

    def test_pointer_zero_names_the_variable_to_set(self):
        with pytest.raises(ConfigError, match="NEURON_RT_MAP_HBM=1"):
            neuron.NeuronAccelerator().region(FakeTensor("neuron", base=0))

    def test_nxd_inference_tensors_are_taken(self):
        assert neuron.NeuronAccelerator().memory_type(FakeTensor("privateuseone")) == "VRAM"

    def test_it_never_reorders_and_needs_libfabric(self):
        accelerator = neuron.NeuronAccelerator()
        assert not accelerator.can_reorder
        assert accelerator.nixl_backends() == ("LIBFABRIC",)
        assert accelerator.environment()["NEURON_RT_MAP_HBM"] == "1"


class Present(CpuAccelerator):
    name = "present"


class Absent(CpuAccelerator):
    name = "absent"

    def probe(self):
        return Probe(False, "not here")


class NotAnAccelerator:
    name = "odd"


class TestLookup:
    @pytest.fixture
    def entry_points(self, monkeypatch):
        """Sets what is installed, as name = attribute of this module (or a wrong target)."""

        def install(**targets):
            monkeypatch.setitem(sys.modules, "plugins_of_test", sys.modules[__name__])
            points = {
                name: EntryPoint(name, target, core.ENTRY_POINTS)
                for name, target in targets.items()
            }
            monkeypatch.setattr(core, "_entry_points", lambda: points)

        return install

    def test_the_embedded_one_needs_no_installation(self, entry_points):
        entry_points()
        assert isinstance(lookup("cpu"), CpuAccelerator)
        assert isinstance(lookup(), CpuAccelerator)

    def test_auto_takes_the_first_that_is_present(self, entry_points):
        entry_points(
            cuda="plugins_of_test:Present", neuron="plugins_of_test:Absent", cpu="nowhere:Nothing"
        )
        assert core.installed() == ("neuron", "cuda", "cpu")
        assert lookup("auto").name == "present"

    def test_auto_asks_other_vendors_before_the_cpu(self, entry_points):
        entry_points(other="plugins_of_test:Present", cuda="plugins_of_test:Absent")
        assert lookup().name == "present"

    def test_auto_reports_a_broken_one_and_goes_on(self, entry_points, caplog):
        entry_points(neuron="nowhere_at_all:Thing")
        with caplog.at_level(logging.WARNING):
            assert lookup().name == "cpu"
        assert "does not load: ModuleNotFoundError" in caplog.text

    def test_a_name_is_looked_up_even_if_its_device_is_absent(self, entry_points):
        entry_points(cuda="plugins_of_test:Absent")
        assert lookup("cuda").name == "absent"

    def test_an_unknown_name_lists_what_is_installed(self, entry_points):
        entry_points(cuda="plugins_of_test:Present")
        with pytest.raises(ConfigError, match=r"no accelerator 'rocm'; installed: cuda, cpu"):
            lookup("rocm")

    @pytest.mark.parametrize(
        ("target", "words"),
        [
            ("nowhere_at_all:Thing", "does not load: ModuleNotFoundError"),
            ("plugins_of_test:Missing", "does not load: AttributeError"),
            ("plugins_of_test:NotAnAccelerator", "lacks members"),
        ],
    )
    def test_a_broken_one_is_reported_in_words(self, entry_points, target, words):
        entry_points(cuda=target)
        with pytest.raises(ConfigError, match=words):
            lookup("cuda")
