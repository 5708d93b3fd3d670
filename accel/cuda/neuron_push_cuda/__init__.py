"""CUDA accelerator: KV caches in GPU memory, CUDA events as fences, copies on a side stream.

torch is imported where it is used: this module is loaded on machines without a GPU too, to
say that there is none.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from neuron_push import backends, efa
from neuron_push.accelerator import (
    NO_VARIABLES,
    Fence,
    MemoryType,
    Probe,
    Slab,
    Tensor,
    still_to_set,
    whole_allocation,
)
from neuron_push.backends import Attention
from neuron_push.errors import ConfigError
from neuron_push.geometry import Plane
from neuron_push.layouts import Place, View
from neuron_push.transform import Mover
from neuron_push_cuda import segments
from neuron_push_cuda.fences import EventFence
from neuron_push_cuda.mover import StreamMover, device_bytes

__all__ = ["ALLOW_TCP", "CudaAccelerator", "EventFence"]

# Set to 1 to let KV travel over TCP on a machine that has, or should have, EFA.
ALLOW_TCP: Final = "NEURON_PUSH_ALLOW_TCP"
# cudaMalloc aligns to 256 bytes at least, PyTorch's allocator to 512.
ALIGNMENT: Final = 256


class CudaAccelerator:
    """NVIDIA GPUs. `root` is where /dev and /sys are looked for; tests give another one."""

    name = "cuda"
    can_reorder = True
    hides_end = False

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        # The device of the tensors, once one was seen; and the stream that reorders on it.
        self._device: int | None = None
        self._side: Any = None

    def probe(self) -> Probe:
        devices = self._devices()
        if not devices:
            return Probe(False, "no CUDA device: no /dev/nvidia* device file")
        detail = {"devices": " ".join(devices), "efa": " ".join(efa.devices(self._root))}
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

    def environment(self, present: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        # EFA's shared-memory path between two processes of one host knows no device memory.
        needed = {"FI_EFA_ENABLE_SHM_TRANSFER": "0"} if efa.devices(self._root) else {}
        return still_to_set(needed, present)

    def memory_type(self, tensor: Tensor) -> MemoryType:
        _require_cuda(tensor)
        return "VRAM"

    def device_id(self, tensor: Tensor) -> int:
        _require_cuda(tensor)
        return tensor.get_device()

    def region(self, tensor: Tensor) -> tuple[int, int]:
        _require_cuda(tensor)
        base, length = whole_allocation(
            tensor, "the tensor is empty or its memory was released", ALIGNMENT
        )
        if segments.holds(importlib.import_module("torch"), base):
            raise ConfigError(
                f"the KV cache at {base:#x} lies in an expandable segment of PyTorch's allocator, "
                "which cannot be registered for RDMA; remove expandable_segments:True from "
                f"{' and '.join(segments.VARIABLES)}"
            )
        self._device = tensor.get_device()
        return base, length

    def planes(self, tensor: Tensor, attention: Attention, place: Place) -> tuple[Plane, ...]:
        return backends.arrange(backends.GPU, View.of(tensor), place, attention)

    def enter_thread(self) -> None:
        # CUDA's current device belongs to a thread, and a new one starts on device 0. NIXL and
        # the side stream both use the current one.
        if self._device is not None:
            importlib.import_module("torch").cuda.set_device(self._device)

    def record_fence(self) -> Fence:
        torch = importlib.import_module("torch")
        event = torch.cuda.Event(enable_timing=False)
        event.record()
        return EventFence(event)

    def mover(self) -> Mover:
        return StreamMover(self._aside, device_bytes(self._device or 0))

    def slab(self, nbytes: int) -> Slab:
        torch = importlib.import_module("torch")
        memory = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self._device or 0}")
        return Slab(int(memory.data_ptr()), memory)

    def _aside(self, work: Callable[[], None]) -> Fence:
        """Launch copies on a stream of their own; the engine's stream goes on undisturbed.

        Pages and slabs live as long as the engine, so the allocator need not be told that this
        stream uses them. Temporaries are the stream's own, and reused in its order.
        """
        torch = importlib.import_module("torch")
        if self._side is None:
            self._side = torch.cuda.Stream(device=self._device)
        with torch.cuda.stream(self._side):
            work()
        event = torch.cuda.Event(enable_timing=False)
        event.record(self._side)
        return EventFence(event)

    def nixl_backends(self, wanted: Sequence[str] = ()) -> tuple[str, ...]:
        seen = efa.devices(self._root)
        chosen = tuple(wanted) or (("LIBFABRIC",) if seen else ("UCX",))
        expected = bool(seen) or efa.should_have_efa(self._root)
        if not expected or chosen == ("LIBFABRIC",) or os.environ.get(ALLOW_TCP) == "1":
            return chosen
        state = (
            f"{len(seen)} EFA devices are here"
            if seen
            else f"a {efa.instance_type(self._root)} has EFA, but no device of it is visible; ask "
            "for vpc.amazonaws.com/efa in the pod, or launch with EFA interfaces"
        )
        raise ConfigError(
            f"{state}, but NIXL would use {'/'.join(chosen)}, which is TCP on this machine and a "
            f"hundred times slower; use LIBFABRIC alone, or set {ALLOW_TCP}=1 to accept that"
        )

    def nixl_parameters(self, backend: str) -> dict[str, str]:
        return {}

    def _devices(self) -> list[str]:
        return sorted(path.name for path in (self._root / "dev").glob("nvidia[0-9]*"))


def _require_cuda(tensor: Tensor) -> None:
    kind = tensor.device.type
    if kind != "cuda":
        raise ConfigError(f"the accelerator in use is 'cuda', but the KV cache is on {kind!r}")
