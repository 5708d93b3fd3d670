"""Accelerators: one contract for all three, and the lookup. What each refuses is in
test_accelerator_cuda.py and test_accelerator_neuron.py."""

from __future__ import annotations

import inspect
import logging
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from neuron_push import accelerator as core
from neuron_push import geometry
from neuron_push.accelerator import Accelerator, CpuAccelerator, Probe, lookup, still_to_set
from neuron_push.backends import Attention
from neuron_push.errors import ConfigError
from neuron_push.geometry import GeometryError
from neuron_push.layouts import Place
from neuron_push.transform import Rows
from tests.devices import machine, nrt, torch_cuda
from tests.devices.tensors import FakeTensor

cuda = pytest.importorskip("neuron_push_cuda")
neuron = pytest.importorskip("neuron_push_neuron")
libnrt = pytest.importorskip("neuron_push_neuron.libnrt")

INTERLEAVED = (4, 2, 16, 16)
SPLIT_FIRST = (2, 4, 2, 16, 8)


@pytest.fixture(params=["cpu", "cuda", "neuron"])
def case(request, tmp_path, monkeypatch):
    """An accelerator whose device is present, a tensor that lives on it, its backend."""
    torch_cuda.install(monkeypatch)
    machine.p5en(tmp_path)
    machine.trn2(tmp_path)
    loaded = libnrt.Loaded(nrt.FakeNrt(), False, "")
    return {
        "cpu": lambda: (CpuAccelerator(), FakeTensor("cpu", shape=INTERLEAVED), "FLASH_ATTN"),
        "cuda": lambda: (
            cuda.CudaAccelerator(tmp_path),
            FakeTensor("cuda", number=3, shape=INTERLEAVED),
            "FLASH_ATTN",
        ),
        "neuron": lambda: (
            neuron.NeuronAccelerator(tmp_path, lambda: loaded),
            FakeTensor("neuron", shape=SPLIT_FIRST),
            "CUSTOM",
        ),
    }[request.param]()


class TestContract:
    def test_the_protocol_stays_a_page(self):
        assert len(inspect.getsource(Accelerator).splitlines()) < 100

    def test_it_is_an_accelerator_under_its_own_name(self, case):
        accelerator = case[0]
        assert isinstance(accelerator, Accelerator)
        assert type(accelerator) is type(lookup(accelerator.name))

    def test_a_present_device_is_found_and_described(self, case):
        probe = case[0].probe()
        assert probe.available and probe.reason
        assert all(isinstance(value, str) for value in probe.detail.values())

    def test_memory_type_and_device_are_legal_for_nixl(self, case):
        accelerator, tensor, _ = case
        expected = "DRAM" if accelerator.name == "cpu" else "VRAM"
        assert accelerator.memory_type(tensor) == expected
        assert accelerator.device_id(tensor) == max(tensor.number, 0)

    def test_the_region_is_the_whole_allocation(self, case):
        accelerator, tensor, _ = case
        assert accelerator.region(tensor) == (0x10000, 4096)

    @pytest.mark.parametrize("hole", [{"base": 0}, {"size": 0}])
    def test_an_allocation_without_address_or_length_is_refused(self, case, hole):
        accelerator, tensor, _ = case
        vars(tensor).update(hole)
        with pytest.raises(ConfigError, match="cannot register"):
            accelerator.region(tensor)

    def test_an_unaligned_allocation_is_refused_where_the_device_needs_one(self, case):
        accelerator, tensor, _ = case
        tensor.base += 8
        if accelerator.name == "cpu":
            assert accelerator.region(tensor) == (0x10008, 4096)
        else:
            with pytest.raises(ConfigError, match="no multiple of"):
                accelerator.region(tensor)

    def test_a_tensor_of_another_device_is_refused(self, case):
        accelerator, tensor, _ = case
        tensor.kind = "meta"
        with pytest.raises(ConfigError, match="'meta'"):
            accelerator.memory_type(tensor)

    def test_it_makes_a_geometry_of_its_own_backend(self, case):
        accelerator, tensor, backend = case
        base, length = accelerator.region(tensor)
        key, value = accelerator.planes(tensor, Attention(backend), Place(7, 0, base))
        assert (key.layer, key.kind, value.kind) == (7, "k", "v")
        region = geometry.Region(
            base, length, accelerator.memory_type(tensor), accelerator.device_id(tensor)
        )
        group = geometry.Group("full", 16, 16, 4, (0, 1), (key, value))
        geometry.check(geometry.Geometry((region,), (group,), 2))

    def test_another_backend_is_refused_with_the_known_ones(self, case):
        accelerator, tensor, backend = case
        with pytest.raises(ConfigError, match=rf"'FANCY_ATTN'.*use one of.*{backend}"):
            accelerator.planes(tensor, Attention("FANCY_ATTN"), Place(0, 0, tensor.base))

    def test_a_tensor_that_does_not_fit_its_backend_is_refused(self, case):
        accelerator, tensor, backend = case
        tensor.shape = (4, 4)
        with pytest.raises(GeometryError, match="axes"):
            accelerator.planes(tensor, Attention(backend), Place(0, 0, tensor.base))

    def test_latents_are_taken_from_any_backend(self, case):
        accelerator, tensor, _ = case
        tensor.shape = (4, 16, 32)
        attention = Attention("FANCY_MLA", kind="mla")
        (latent,) = accelerator.planes(tensor, attention, Place(0, 0, tensor.base))
        assert (latent.kind, latent.width) == ("latent", 32)

    def test_a_recorded_fence_ends(self, case):
        fence = case[0].record_fence()
        assert fence.wait(1.0)
        assert fence.done()

    def test_it_says_whether_the_end_of_a_step_is_visible(self, case):
        assert case[0].hides_end is (case[0].name == "neuron")

    def test_it_reorders_or_says_why_not(self, case):
        accelerator = case[0]
        if accelerator.can_reorder:
            assert callable(accelerator.mover().move)
        else:
            for ask in (accelerator.mover, lambda: accelerator.slab(64)):
                with pytest.raises(ConfigError, match="does not reorder"):
                    ask()

    def test_a_thread_can_be_made_ready_once_the_caches_are_known(self, case):
        accelerator, tensor, _ = case
        accelerator.region(tensor)
        accelerator.enter_thread()

    def test_it_prefers_some_backend(self, case):
        accelerator = case[0]
        (backend,) = accelerator.nixl_backends()
        assert backend == ("UCX" if accelerator.name == "cpu" else "LIBFABRIC")
        assert accelerator.nixl_backends((backend,)) == (backend,)
        assert accelerator.nixl_parameters(backend) == {}

    def test_what_it_needs_of_the_environment_is_what_is_missing(self, case):
        accelerator = case[0]
        needed = accelerator.environment()
        assert accelerator.environment(needed) == {}
        assert accelerator.environment({**needed, "OTHER": "x"}) == {}
        for name in needed:
            wrong = {**needed, name: "other"}
            assert accelerator.environment(wrong) == {name: needed[name]}


@pytest.mark.parametrize(
    ("value", "wanted", "fits"),
    [
        ("0", "0", True),
        ("off", "0", True),
        ("No ", "0", True),
        ("1", "0", False),
        ("", "0", False),
        ("1", "1", True),
        ("TRUE", "1", True),
        ("8", "1", True),
        ("0", "1", False),
        ("x", "x", True),
        ("y", "x", False),
    ],
)
def test_a_variable_may_say_off_and_on_in_other_words(value, wanted, fits):
    assert still_to_set({"V": wanted}, {"V": value}) == ({} if fits else {"V": wanted})


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

    def test_it_knows_how_cpu_attention_packs(self):
        tensor = FakeTensor(shape=INTERLEAVED)
        place = Place(0, 0, tensor.base)
        vec, _ = CpuAccelerator().planes(tensor, Attention("CPU_ATTN", isa="vec"), place)
        assert (vec.token, vec.channel, vec.interior) == (2, 32, "")
        packed, _ = CpuAccelerator().planes(tensor, Attention("CPU_ATTN", isa="amx"), place)
        assert packed.interior == "cpu_attn:amx:k:16x8x2"

    def test_it_packs_and_unpacks_where_it_is_called(self):
        slab = CpuAccelerator().slab(64)
        slab.owner[:] = np.arange(64)
        places = slab.base + np.array([8, 0, 24], np.int64)
        assert CpuAccelerator().mover().move([Rows(8, 8, 3, places, slab.base + 40)]).done()
        assert slab.owner[40:].tolist() == [*range(8, 16), *range(8), *range(24, 32)]


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
