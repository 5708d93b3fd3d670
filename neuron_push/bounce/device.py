"""An accelerator behind host memory, as a worker sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuron_push import efa
from neuron_push.accelerator import (
    NO_VARIABLES,
    Accelerator,
    Fence,
    MemoryType,
    Probe,
    Slab,
    Tensor,
)
from neuron_push.backends import Attention
from neuron_push.bounce.copies import Bytes, HostCopies
from neuron_push.bounce.mover import StagedMover
from neuron_push.bounce.transport import Slots, StagedTransport
from neuron_push.errors import ConfigError
from neuron_push.geometry import Plane, Region
from neuron_push.layouts import Place
from neuron_push.transform import Mover
from neuron_push.transport import AgentName, Transport, TransportFactory

__all__ = ["HostStaged"]

logger = logging.getLogger(__name__)


class HostStaged:
    """An accelerator whose pages reach the network through host memory alone."""

    can_reorder = True  # on the host

    def __init__(
        self, inner: Accelerator, allocate: Callable[[int], Bytes], flat: Callable[[Any], Bytes]
    ) -> None:
        """`allocate` makes host tensors; `flat` views a tensor's whole allocation as bytes.

        Raises ConfigError for a device that reorders: its memory is registered.
        """
        if inner.can_reorder:
            raise ConfigError(
                f"host_staging is for devices whose memory cannot be registered; {inner.name}'s "
                "can: leave it off"
            )
        self._inner = inner
        self._flat = flat
        self.name, self.hides_end = inner.name, inner.hides_end
        self.copies = HostCopies(allocate)
        self._scratch_bytes = 0

    def probe(self) -> Probe:
        return self._inner.probe()

    def environment(self, present: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        return self._inner.environment(present)

    def memory_type(self, tensor: Tensor) -> MemoryType:
        self._inner.memory_type(tensor)  # refuses the tensors of another device
        return "DRAM"

    def device_id(self, tensor: Tensor) -> int:
        return 0

    def region(self, tensor: Tensor) -> tuple[int, int]:
        base, length = self._inner.region(tensor)
        memory = self._flat(tensor)
        if memory.numel() != length:
            raise ConfigError(
                f"host_staging needs a cache that fills its allocation: {memory.numel()} bytes of "
                f"{length}"
            )
        self.copies.add(base, memory)
        return base, length

    def planes(self, tensor: Tensor, attention: Attention, place: Place) -> tuple[Plane, ...]:
        return self._inner.planes(tensor, attention, place)

    def enter_thread(self) -> None:
        """Nothing of the device is registered, so nothing of it must be up."""

    def record_fence(self) -> Fence:
        return self._inner.record_fence()

    def mover(self) -> Mover:
        return StagedMover(self.copies, self._scratch_bytes)

    def slab(self, nbytes: int) -> Slab:
        return self.copies.host(nbytes)

    def nixl_backends(self, wanted: Sequence[str] = ()) -> tuple[str, ...]:
        return tuple(wanted) or (("LIBFABRIC",) if efa.devices(Path("/")) else ("UCX",))

    def nixl_parameters(self, backend: str) -> dict[str, str]:
        return {}

    def transports(self, opens: TransportFactory, slots: int, size: int) -> TransportFactory:
        """`opens` for host memory only, with this many slots of `size` bytes to send from."""
        self._scratch_bytes = size
        pool = Slots.make(self.copies, slots, size)
        logger.warning(
            "host_staging: KV pages pass through %d MiB of host memory on their way; expect a "
            "fraction of the direct rate, and copies that hold up the transfer thread",
            (2 * slots + 1) * size >> 20,
        )

        def factory(name: AgentName, regions: Sequence[Region]) -> Transport:
            held = [region for region in regions if self.copies.on_host(region.base)]
            return StagedTransport(opens(name, [*held, pool.region]), self.copies, pool)

        return factory
