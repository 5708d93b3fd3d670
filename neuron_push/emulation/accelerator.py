"""Host memory whose fences are the emulated device's.

Found through the entry-point group `neuron_push.accelerators` under the name "emulated".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_push.accelerator import CpuAccelerator, DoneFence, Fence, Probe, Slab
from neuron_push.emulation import VARIABLE
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.options import wanted
from neuron_push.errors import ConfigError

if TYPE_CHECKING:
    from neuron_push.emulation.writer import Writer
    from neuron_push.transform import Mover

_writer: Writer | None = None


def use(writer: Writer | None) -> None:
    """The worker of this process announces its device."""
    global _writer
    _writer = writer


class EmulatedAccelerator(CpuAccelerator):
    """One per process, as there is one emulated device per process."""

    name = "emulated"

    def __init__(self) -> None:
        options = wanted()
        self.can_reorder = DEVICES[options.device].can_reorder if options else True

    def probe(self) -> Probe:
        if wanted() is None:
            return Probe(False, f"{VARIABLE} is not set")
        return Probe(True, f"{VARIABLE} is set")

    def record_fence(self) -> Fence:
        return _writer.fence() if _writer is not None else DoneFence()

    def mover(self) -> Mover:
        """On p5en, plain memory operations stand for the device's; trn2 has none."""
        self._must_reorder()
        return super().mover()

    def slab(self, nbytes: int) -> Slab:
        self._must_reorder()
        return super().slab(nbytes)

    def _must_reorder(self) -> None:
        if not self.can_reorder:
            raise ConfigError("this emulated device does not move strided bytes")
