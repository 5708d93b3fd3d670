"""Trainium accelerator: KV caches in Neuron device memory, reached by RDMA over EFA.

No Neuron framework is imported or initialised here; the engine does that, and only afterwards may
a NIXL agent be created (libfabric decides then, once per process, whether it can register device
memory).

Two stacks, told apart by torch's device name:

neuron          vLLM Neuron: vLLM owns the caches, one process per logical core. Supported.
privateuseone   NxD Inference: one process for all ranks. Its memory is described (`nxd`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from neuron_push import backends, efa
from neuron_push.accelerator import (
    NO_VARIABLES,
    DoneFence,
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
from neuron_push_neuron import libnrt, memory

__all__ = ["NeuronAccelerator"]

MAP_HBM: Final = "set NEURON_RT_MAP_HBM=1 before the Neuron runtime starts in this process"
CANNOT_REORDER: Final = (
    "Trainium does not reorder pages: a compiled graph owns its cores, and eager strided copies "
    "are refused; the peer has to"
)

logger = logging.getLogger(__name__)


class NeuronAccelerator:
    """Trainium chips. `root` is where /dev and /sys are looked for; tests give another one."""

    name = "neuron"
    # A compiled graph owns the cores, and eager strided copies are refused.
    can_reorder = False
    # It also gives no event for its end.
    hides_end = True

    def __init__(
        self, root: Path = Path("/"), load: Callable[[], libnrt.Loaded] = libnrt.load
    ) -> None:
        self._root = root
        self._load = load
        # Addresses of allocations seen, which exist only once the runtime is initialised.
        self._bases: list[int] = []

    def probe(self) -> Probe:
        devices = self._devices()
        if not devices:
            return Probe(False, "no /dev/neuron* device")
        detail = {"devices": " ".join(devices), "efa": " ".join(efa.devices(self._root))}
        info = self._root / "sys/devices/virtual/neuron_device" / devices[0] / "info/architecture"
        # A container may have the device file without sysfs: the names are then left out.
        for key in ("arch_type", "device_name", "instance_type"):
            if value := efa.read(info / key):
                detail[key] = value
        return Probe(True, f"{len(devices)} Neuron device(s)", detail)

    def environment(self, present: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        # The first: EFA's shared-memory path between two processes of one host knows no device
        # memory. The second: without it tensors have no address that can be registered.
        needed = {"FI_EFA_ENABLE_SHM_TRANSFER": "0", "NEURON_RT_MAP_HBM": "1"}
        return still_to_set(needed, present)

    def memory_type(self, tensor: Tensor) -> MemoryType:
        self._require_neuron(tensor)
        return "VRAM"

    def device_id(self, tensor: Tensor) -> int:
        self._require_neuron(tensor)
        # NIXL carries the number but finds the rail from the address; -1 is a legal answer here
        # and an illegal descriptor there.
        return max(tensor.get_device(), 0)

    def region(self, tensor: Tensor) -> tuple[int, int]:
        self._require_neuron(tensor)
        base, length = whole_allocation(tensor, MAP_HBM, memory.PAGE)
        memory.require_mapped(self._root, base, length)
        self._bases.append(base)
        return base, length

    def planes(self, tensor: Tensor, attention: Attention, place: Place) -> tuple[Plane, ...]:
        return backends.arrange(backends.NEURON, View.of(tensor), place, attention)

    def enter_thread(self) -> None:
        """Check that the runtime is up, and make its library known by its short name.

        Tensors with an address prove that the runtime is up. NIXL and libfabric look for
        libnrt.so.1 on the loader's path only; loaded from here, they find it in the process.
        """
        if not self._bases:
            raise ConfigError(
                "a NIXL agent created before the Neuron runtime has allocated the KV cache would "
                "take device memory for host memory: register the caches first"
            )
        loaded = self._load()
        if loaded.library is None:
            raise ConfigError(
                f"libnrt.so.1 does not load, so libfabric cannot register Neuron memory: "
                f"{loaded.error}"
            )
        rail = libnrt.Runtime(loaded.library).attached_efa(self._bases[0])
        logger.info(
            "Neuron runtime library %s; EFA device of the KV cache: %s",
            "loaded by its full path" if loaded.by_path else "on the loader's path",
            rail or "unknown to this runtime, so NIXL uses all rails",
        )

    def record_fence(self) -> Fence:
        """A fence that is done at once: right only once the step's output is known.

        The worker sees `hides_end` and records at the first hook after the output was read back,
        which is the next step's. By then the graph that wrote the KV bytes has ended.
        """
        return DoneFence()

    def mover(self) -> Mover:
        raise ConfigError(CANNOT_REORDER)

    def slab(self, nbytes: int) -> Slab:
        raise ConfigError(CANNOT_REORDER)

    def nixl_backends(self, wanted: Sequence[str] = ()) -> tuple[str, ...]:
        chosen = tuple(wanted) or ("LIBFABRIC",)
        if chosen != ("LIBFABRIC",):
            raise ConfigError(
                f"{'/'.join(chosen)} cannot register Neuron memory: LIBFABRIC is the only backend "
                "that can, and must be the only one"
            )
        if not efa.devices(self._root):
            kind = efa.instance_type(self._root) or "this machine"
            raise ConfigError(
                f"{kind} shows no EFA device, and Neuron memory can be registered over EFA only; "
                "attach EFA interfaces (in a pod: vpc.amazonaws.com/efa), or set host_staging to "
                "move pages through host memory, slowly"
            )
        return chosen

    def nixl_parameters(self, backend: str) -> dict[str, str]:
        return {}

    def _devices(self) -> list[str]:
        paths = (self._root / "dev").glob("neuron[0-9]*")
        return sorted((path.name for path in paths), key=lambda name: (len(name), name))

    def _require_neuron(self, tensor: Tensor) -> None:
        kind = tensor.device.type
        # The second is the name of whatever backend a process has loaded; the device file tells.
        if kind == "neuron" or (kind == "privateuseone" and self._devices()):
            return
        raise ConfigError(f"the accelerator in use is 'neuron', but the KV cache is on {kind!r}")
