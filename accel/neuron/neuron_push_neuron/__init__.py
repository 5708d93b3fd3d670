"""Trainium accelerator: KV caches in Neuron device memory, reached by RDMA over EFA.

No Neuron library is imported or initialised here; the engine does that, and only afterwards may
a NIXL agent be created (it decides at creation whether it can register device memory).
"""

from __future__ import annotations

from pathlib import Path

from neuron_push.accelerator import (
    DoneFence,
    Fence,
    MemoryType,
    Probe,
    Tensor,
    whole_allocation,
)
from neuron_push.errors import ConfigError

__all__ = ["NeuronAccelerator"]

# torch's device names: native PyTorch for Neuron, and NxD Inference's.
DEVICE_TYPES = ("neuron", "privateuseone")


class NeuronAccelerator:
    """Trainium chips. `root` is where /dev and /sys are looked for; tests give another one."""

    name = "neuron"
    # A compiled graph owns the cores, and eager strided copies are refused.
    can_reorder = False

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def probe(self) -> Probe:
        devices = self._devices()
        if not devices:
            return Probe(False, "no /dev/neuron* device")
        detail = {"devices": " ".join(devices)}
        info = self._root / "sys/devices/virtual/neuron_device" / devices[0] / "info/architecture"
        # A container may have the device file without sysfs: the names are then left out.
        for key in ("arch_type", "device_name", "instance_type"):
            if value := _read(info / key):
                detail[key] = value
        return Probe(True, f"{len(devices)} Neuron device(s)", detail)

    def memory_type(self, tensor: Tensor) -> MemoryType:
        _require_neuron(tensor)
        return "VRAM"

    def device_id(self, tensor: Tensor) -> int:
        _require_neuron(tensor)
        # NIXL carries the number but finds the rail from the address; -1 is a legal answer here
        # and an illegal descriptor there.
        return max(tensor.get_device(), 0)

    def region(self, tensor: Tensor) -> tuple[int, int]:
        _require_neuron(tensor)
        return whole_allocation(
            tensor, "set NEURON_RT_MAP_HBM=1 before the Neuron runtime starts in this process"
        )

    def record_fence(self) -> Fence:
        """A fence that is done at once: right only once the step's output is known.

        A compiled graph gives no event for its end. The connector therefore records at the
        first hook after the step's output was read back, and by then its KV bytes are in memory.
        """
        return DoneFence()

    def nixl_backends(self) -> tuple[str, ...]:
        # The only backend that registers Neuron memory.
        return ("LIBFABRIC",)

    def environment(self) -> dict[str, str]:
        # The first: EFA's shared-memory path between two processes of one host knows no device
        # memory. The second: without it tensors have no address that can be registered.
        return {"FI_EFA_ENABLE_SHM_TRANSFER": "0", "NEURON_RT_MAP_HBM": "1"}

    def _devices(self) -> list[str]:
        paths = (self._root / "dev").glob("neuron[0-9]*")
        return sorted((path.name for path in paths), key=lambda name: (len(name), name))


def _require_neuron(tensor: Tensor) -> None:
    kind = tensor.device.type
    if kind not in DEVICE_TYPES:
        raise ConfigError(f"the accelerator in use is 'neuron', but the KV cache is on {kind!r}")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
