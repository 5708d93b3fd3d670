"""The CUDA accelerator on fakes of PyTorch's CUDA interface and of sysfs."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from neuron_push.errors import ConfigError
from neuron_push.hostmover import HostMover
from neuron_push.transform import Rows
from tests.devices import machine, torch_cuda
from tests.devices.tensors import FakeTensor

cuda = pytest.importorskip("neuron_push_cuda")
fences = pytest.importorskip("neuron_push_cuda.fences")
mover = pytest.importorskip("neuron_push_cuda.mover")
segments = pytest.importorskip("neuron_push_cuda.segments")


@pytest.fixture
def torch(monkeypatch):
    return torch_cuda.install(monkeypatch)


class TestProbe:
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
        machine.p5en(tmp_path)
        torch_cuda.install(monkeypatch, **torch)
        probe = cuda.CudaAccelerator(tmp_path).probe()
        assert not probe.available
        assert reason in probe.reason

    def test_a_missing_torch_is_named(self, monkeypatch, tmp_path):
        machine.p5en(tmp_path)
        monkeypatch.setitem(sys.modules, "torch", None)
        probe = cuda.CudaAccelerator(tmp_path).probe()
        assert not probe.available
        assert "PyTorch does not import" in probe.reason

    def test_control_files_are_not_devices(self, tmp_path):
        machine.put(tmp_path / "dev/nvidiactl")
        assert not cuda.CudaAccelerator(tmp_path).probe().available


class TestFence:
    def test_the_fake_refuses_an_event_that_was_not_recorded(self, torch):
        with pytest.raises(RuntimeError, match="before it was recorded"):
            torch.Event(enable_timing=False).query()

    def test_it_marks_the_stream_of_the_caller_and_what_came_before(self, torch):
        torch.default.launch("forward")
        fence = cuda.CudaAccelerator().record_fence()
        torch.default.launch("next forward")
        assert not fence.done()
        torch.default.finished = 1
        assert fence.done()

    def test_it_waits_until_the_event_is_done(self, torch, monkeypatch):
        torch.default.launch("forward")
        fence = cuda.CudaAccelerator().record_fence()
        naps = iter([None, None, torch.default.finish])
        monkeypatch.setattr(fences.time, "sleep", lambda seconds: (next(naps) or (lambda: 0))())
        assert fence.wait(60.0)
        assert fence.event.looks == 4

    def test_a_wait_ends_at_its_deadline(self, torch, monkeypatch):
        torch.default.launch("endless")
        clock = itertools.count()
        fake = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None)
        monkeypatch.setattr(fences, "time", fake)
        assert not cuda.CudaAccelerator().record_fence().wait(5.0)


class TestThread:
    def test_a_thread_takes_the_device_of_the_caches(self, torch, tmp_path):
        accelerator = cuda.CudaAccelerator(tmp_path)
        accelerator.region(FakeTensor("cuda", number=5))
        found = []

        def body():
            accelerator.enter_thread()
            found.append(torch.current_device())

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        assert found == [5]
        assert torch.current_device() == 0

    def test_before_any_cache_there_is_nothing_to_choose(self, torch, tmp_path):
        cuda.CudaAccelerator(tmp_path).enter_thread()
        assert torch.current_device() == 0


class TestReorder:
    """The copies are PyTorch's, on host tensors; streams and events are the fake's."""

    @pytest.fixture
    def hybrid(self, monkeypatch):
        real = pytest.importorskip("torch")
        fake = torch_cuda.FakeCuda(8)

        class Hybrid:
            cuda = fake

            def __getattr__(self, name):
                return getattr(real, name)

        monkeypatch.setitem(sys.modules, "torch", Hybrid())
        return fake

    def mover(self, tmp_path, device=3):
        accelerator = cuda.CudaAccelerator(tmp_path)
        accelerator.region(FakeTensor("cuda", number=device))
        return mover.StreamMover(accelerator._aside, host_bytes)

    def test_copies_run_on_a_side_stream_and_end_with_an_event(self, hybrid, tmp_path, monkeypatch):
        moving = self.mover(tmp_path)
        seen = []
        monkeypatch.setattr(moving, "_copy", lambda rows: seen.append(hybrid.current_stream()))
        for _ in range(2):
            fence = moving.move([SimpleNamespace(count=1), SimpleNamespace(count=0)])
        one, two = seen
        assert one is two and one is not hybrid.default and one.device == 3
        assert hybrid.current_stream() is hybrid.default
        assert fence.event.stream is one

    @pytest.mark.parametrize("unit", [1, 2, 6, 8, 24, 256])
    @pytest.mark.parametrize("odd", [0, 1])
    @pytest.mark.parametrize("way", ["pack", "unpack", "both", "neither"])
    def test_rows_arrive_as_host_copies_do(self, hybrid, tmp_path, monkeypatch, unit, odd, way):
        monkeypatch.setattr(mover, "BATCH_BYTES", 3 * unit)
        random = np.random.default_rng(unit + odd)
        pages = random.integers(0, 256, 64 * unit + odd, np.uint8)
        count = 20
        scattered = [
            memory.ctypes.data + odd + unit * random.permutation(64)[:count].astype(np.int64)
            for memory in (pages, pages)
        ]
        results = []
        for moving in (HostMover(), self.mover(tmp_path)):
            target = np.zeros_like(pages)
            shift = target.ctypes.data - pages.ctypes.data
            source = scattered[0] if way in ("pack", "both") else pages.ctypes.data + odd
            into = scattered[1] + shift if way in ("unpack", "both") else target.ctypes.data + odd
            moving.move([Rows(unit, unit, count, source, into)])
            results.append(target)
        assert results[0].any()
        assert (results[0] == results[1]).all()

    def test_rows_may_start_at_finer_steps_than_their_length(self, hybrid, tmp_path):
        pages = np.arange(128, dtype=np.uint8)
        target = np.zeros(24, np.uint8)
        places = pages.ctypes.data + np.array([4, 12, 100], np.int64)
        self.mover(tmp_path).move([Rows(8, 4, 3, places, target.ctypes.data)])
        assert target.tolist() == [*range(4, 12), *range(12, 20), *range(100, 108)]

    def test_device_memory_is_seen_through_the_array_interface(self, monkeypatch):
        asked = []
        fake = SimpleNamespace(as_tensor=lambda raw, device: asked.append((raw, device)))
        monkeypatch.setitem(sys.modules, "torch", fake)
        mover.device_bytes(5)(0x7000, 64)
        ((raw, device),) = asked
        assert device == "cuda:5"
        assert raw.__cuda_array_interface__["data"] == (0x7000, False)
        assert raw.__cuda_array_interface__["shape"] == (64,)


def host_bytes(address, length):
    torch = sys.modules["torch"]
    return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)


class TestRegion:
    def test_memory_in_an_expandable_segment_is_refused(self, torch, tmp_path):
        torch.segment(0x8000, 0x1000, expandable=True)
        torch.segment(0x10000, 0x100000, expandable=True)
        with pytest.raises(ConfigError, match=r"expandable segment.*PYTORCH_CUDA_ALLOC_CONF"):
            cuda.CudaAccelerator(tmp_path).region(FakeTensor("cuda"))

    def test_a_plain_segment_beside_it_is_fine(self, torch, tmp_path):
        torch.segment(0x8000, 0x1000, expandable=True)
        torch.segment(0x10000, 0x100000, expandable=False)
        assert cuda.CudaAccelerator(tmp_path).region(FakeTensor("cuda")) == (0x10000, 4096)

    @pytest.mark.parametrize(
        ("variables", "name"),
        [
            ({}, ""),
            ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, ""),
            (
                {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"},
                "PYTORCH_CUDA_ALLOC_CONF",
            ),
            ({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}, "PYTORCH_ALLOC_CONF"),
        ],
    )
    def test_the_setting_is_read_from_both_variables(self, variables, name):
        assert segments.asked_for(variables) == name


class TestBackends:
    def test_efa_devices_choose_libfabric(self, tmp_path):
        accelerator = cuda.CudaAccelerator(tmp_path)
        machine.efa(tmp_path, vendor="0x15b3")
        assert accelerator.nixl_backends() == ("UCX",)
        assert accelerator.environment() == {}
        machine.efa(tmp_path)
        assert accelerator.nixl_backends() == ("LIBFABRIC",)
        assert accelerator.environment() == {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}

    def test_elsewhere_the_user_chooses(self, tmp_path):
        assert cuda.CudaAccelerator(tmp_path).nixl_backends(("MOONCAKE",)) == ("MOONCAKE",)

    @pytest.mark.parametrize("wanted", [("UCX",), ("UCX", "LIBFABRIC"), ("LIBFABRIC", "UCX")])
    def test_with_efa_nothing_may_choose_tcp(self, tmp_path, monkeypatch, wanted):
        accelerator = cuda.CudaAccelerator(machine.p5en(tmp_path))
        with pytest.raises(ConfigError, match=r"16 EFA devices are here.*NEURON_PUSH_ALLOW_TCP=1"):
            accelerator.nixl_backends(wanted)
        monkeypatch.setenv(cuda.ALLOW_TCP, "1")
        assert accelerator.nixl_backends(wanted) == wanted

    def test_a_pod_without_its_efa_devices_is_refused(self, tmp_path, monkeypatch):
        accelerator = cuda.CudaAccelerator(machine.p5en(tmp_path, adapters=0))
        with pytest.raises(ConfigError, match=r"p5en.48xlarge has EFA.*vpc.amazonaws.com/efa"):
            accelerator.nixl_backends()
        monkeypatch.setenv(cuda.ALLOW_TCP, "1")
        assert accelerator.nixl_backends() == ("UCX",)
