"""CUDA accelerator: KV caches in GPU memory, CUDA events as fences.

torch is imported where it is used: this module is loaded on machines without a GPU too, to
say that there is none.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from neuron_push.accelerator import Fence, MemoryType, Probe, Tensor, whole_allocation
from neuron_push.errors import ConfigError

__all__ = ["CudaAccelerator", "EventFence"]

# How long a waiting thread sleeps between two looks at an event. Far below the milliseconds of
# a decode step, far above the microsecond that a look costs.
POLL_S = 50e-6
# PCI vendor of EFA devices.
AMAZON = "0x1d0f"


class EventFence:
    """A CUDA event recorded on the stream that was current for the calling thread.

    It is polled and never synchronised with: cudaEventSynchronize cannot be given a deadline.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True


class CudaAccelerator:
    """NVIDIA GPUs. `root` is where /dev and /sys are looked for; tests give another one."""

    name = "cuda"
    can_reorder = True

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def probe(self) -> Probe:
        devices = self._devices()
        if not devices:
            return Probe(False, "no CUDA device: no /dev/nvidia* device file")
        detail = {"devices": " ".join(devices), "efa": " ".join(self._efa_devices())}
        try:
            torch = importlib.import_module("torch")
        except (ImportError, OSError) as error:
            return Probe(False, f"no CUDA device: PyTorch does not import: {error}", detail)
        detail["torch"] = str(torch.__version__)
        if torch.version.cuda is None:
            reason = f"no CUDA device: PyTorch {torch.__version__} is built without CUDA"
            return Probe(False, reason, detail)
        detail["cuda"] = str(torch.version.cuda)
        # Asks the driver without creating a context, so a process may still fork afterwards.
        count = int(torch.cuda.device_count())
        if count == 0:
            return Probe(False, "no CUDA device: PyTorch sees none (CUDA_VISIBLE_DEVICES?)", detail)
        return Probe(True, f"{count} CUDA device(s)", detail)

    def memory_type(self, tensor: Tensor) -> MemoryType:
        _require_cuda(tensor)
        return "VRAM"

    def device_id(self, tensor: Tensor) -> int:
        _require_cuda(tensor)
        return tensor.get_device()

    def region(self, tensor: Tensor) -> tuple[int, int]:
        _require_cuda(tensor)
        return whole_allocation(tensor, "the tensor is empty or its memory was released")

    def record_fence(self) -> Fence:
        torch = importlib.import_module("torch")
        event = torch.cuda.Event(enable_timing=False)
        event.record()
        return EventFence(event)

    def nixl_backends(self) -> tuple[str, ...]:
        return ("LIBFABRIC",) if self._efa_devices() else ("UCX",)

    def environment(self) -> dict[str, str]:
        # EFA's shared-memory path between two processes of one host knows no device memory.
        return {"FI_EFA_ENABLE_SHM_TRANSFER": "0"} if self._efa_devices() else {}

    def _devices(self) -> list[str]:
        return sorted(path.name for path in (self._root / "dev").glob("nvidia[0-9]*"))

    def _efa_devices(self) -> list[str]:
        vendors = (self._root / "sys/class/infiniband").glob("*/device/vendor")
        return sorted(path.parts[-3] for path in vendors if _read(path) == AMAZON)


def _require_cuda(tensor: Tensor) -> None:
    kind = tensor.device.type
    if kind != "cuda":
        raise ConfigError(f"the accelerator in use is 'cuda', but the KV cache is on {kind!r}")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
