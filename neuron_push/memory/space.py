"""Byte arrays that are found by address."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from neuron_push.errors import TransportError
from neuron_push.geometry import Region

__all__ = ["AddressSpace", "Bytes"]

Bytes = npt.NDArray[np.uint8]


class AddressSpace:
    """Memory of all machines of one test. Any thread may call."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._arrays: dict[int, Bytes] = {}
        self._next_address = 1 << 20

    def allocate(self, nbytes: int) -> Region:
        """Zeroed memory at an address of its own; `view` shows its bytes."""
        with self.lock:
            base = self._next_address
            # A gap, so that running over the end hits nothing.
            self._next_address += -(-nbytes // 4096) * 4096 + 4096
            self._arrays[base] = np.zeros(nbytes, np.uint8)
            return Region(base=base, length=nbytes, memory="DRAM", device=0)

    def adopt(self, array: npt.NDArray[np.generic]) -> Region:
        """Put an array's own memory on the fabric, at its real address."""
        with self.lock:
            base = array.ctypes.data
            self._arrays[base] = array.reshape(-1).view(np.uint8)
            return Region(base=base, length=array.nbytes, memory="DRAM", device=0)

    def view(self, address: int, nbytes: int) -> Bytes:
        """The bytes themselves, not a copy."""
        for base, array in self._arrays.items():
            if base <= address and address + nbytes <= base + len(array):
                return array[address - base : address - base + nbytes]
        raise TransportError(f"no memory at {address:#x} + {nbytes}")
