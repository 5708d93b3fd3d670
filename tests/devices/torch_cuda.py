"""PyTorch's CUDA interface without a GPU.

Sources: PyTorch's documentation of torch.cuda.Event, Stream, set_device and memory_snapshot; the
CUDA driver API for events (cuEventQuery of an event that was not recorded answers success, so the
fake refuses the question) and for devices (the current one belongs to a thread, 0 at first).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from types import SimpleNamespace


class FakeEvent:
    """Recorded on a stream; done once the stream's work before it is."""

    def __init__(self, cuda, enable_timing):
        assert not enable_timing, "timing makes an event slow to poll"
        self._cuda = cuda
        self._mark = None
        self.stream = None
        self.looks = 0

    def record(self, stream=None):
        self.stream = stream or self._cuda.current_stream()
        self._mark = len(self.stream.work)

    def query(self):
        if self._mark is None:
            raise RuntimeError("polled before it was recorded")
        self.looks += 1
        return self.stream.finished >= self._mark

    def synchronize(self):
        raise AssertionError("nobody may synchronise")


class FakeStream:
    def __init__(self, device=0):
        self.device = device
        self.work = []
        self.finished = 0

    def launch(self, what):
        self.work.append(what)

    def wait_event(self, event):
        self.launch(("wait", event))

    def finish(self):
        self.finished = len(self.work)

    def synchronize(self):
        raise AssertionError("nobody may synchronise")


class FakeCuda:
    """torch.cuda."""

    def __init__(self, devices=1):
        self._devices = devices
        self._thread = threading.local()
        self.default = FakeStream()
        self.segments = []

    def device_count(self):
        return self._devices

    def Event(self, enable_timing=False):
        return FakeEvent(self, enable_timing)

    def Stream(self, device=None):
        return FakeStream(self.current_device() if device is None else device)

    def set_device(self, device):
        self._thread.device = device

    def current_device(self):
        return getattr(self._thread, "device", 0)

    def current_stream(self):
        return getattr(self._thread, "stream", None) or self.default

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def memory_snapshot(self):
        return self.segments

    def segment(self, address, size, expandable):
        self.segments.append({"address": address, "total_size": size, "is_expandable": expandable})

    def synchronize(self):
        raise AssertionError("nobody may synchronise")


def install(monkeypatch, *, cuda_version="12.9", devices=1):
    """Puts the fake in torch's place and returns its torch.cuda."""
    cuda = FakeCuda(devices)
    module = SimpleNamespace(
        __version__="2.13.0", version=SimpleNamespace(cuda=cuda_version), cuda=cuda
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return cuda
