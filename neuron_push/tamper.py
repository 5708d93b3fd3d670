"""A deliberate fault: every WRITE and every READ carries one wrong byte.

"Token-exact" means something only if a wrong byte shows. The byte is wrong on its way: it is
taken from a scratch page beside the KV cache, so the source's own cache stays right. What is READ
is turned when it is here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np

from neuron_push.errors import ConfigError, TransportError
from neuron_push.geometry import Region
from neuron_push.transport import (
    AgentName,
    Descriptors,
    Transport,
    TransportFactory,
    Wrapped,
    WriteId,
    WriteState,
)

__all__ = ["Tampering"]

_PAGE: Final = 4096
# WRITEs that may be in flight at once, each with a page of its own.
_PAGES: Final = 256


class Tampering:
    """Wraps a transport factory over host memory."""

    def __init__(self, plain: TransportFactory) -> None:
        self._plain = plain

    def __call__(self, name: AgentName, regions: Sequence[Region]) -> Transport:
        if any(region.memory != "DRAM" for region in regions):
            raise ConfigError('fault "tamper" works on host memory only')
        scratch = np.zeros((_PAGES, _PAGE), np.uint8)
        extra = Region(base=scratch.ctypes.data, length=scratch.nbytes, memory="DRAM", device=0)
        return _Tampered(self._plain(name, [*regions, extra]), scratch)


class _Tampered(Wrapped):
    def __init__(self, inner: Transport, scratch: np.ndarray) -> None:
        super().__init__(inner)
        self._scratch = scratch
        self._free = list(range(_PAGES))
        # Page that each WRITE in flight reads its first bytes from.
        self._pages: dict[WriteId, int] = {}
        # Address of a byte of each READ in flight.
        self._turned: dict[WriteId, int] = {}

    def post(
        self,
        write: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
        payload: bytes,
    ) -> None:
        if not self._free:
            raise TransportError(f"more than {_PAGES} tampered WRITEs in flight")
        page = self._pages[write] = self._free.pop()
        length = min(int(source[0, 1]), _PAGE)
        scratch = self._scratch[page]
        ctypes.memmove(scratch.ctypes.data, int(source[0, 0]), length)
        # The last byte of an element: its sign and exponent, in every float that KV comes in.
        scratch[min((length // 2) | 3, length - 1)] ^= 0xFF
        head = np.array([[scratch.ctypes.data, length, 0]], np.uint64)
        source = np.concatenate([head, _without_head(source, length)])
        device = destination[0, 2]
        head = np.array([[destination[0, 0], length, device]], np.uint64)
        destination = np.concatenate([head, _without_head(destination, length)])
        self._inner.post(write, peer, source, destination, memory, payload)

    def fetch(
        self,
        read: WriteId,
        peer: AgentName,
        source: Descriptors,
        destination: Descriptors,
        memory: tuple[str, str],
    ) -> None:
        length = int(destination[0, 1])
        self._turned[read] = int(destination[0, 0]) + min((length // 2) | 3, length - 1)
        self._inner.fetch(read, peer, source, destination, memory)

    def poll(self, write: WriteId) -> WriteState:
        state = self._inner.poll(write)
        if write in self._turned:
            if state == "done":
                byte = ctypes.c_ubyte.from_address(self._turned.pop(write))
                byte.value ^= 0xFF
            return state
        # A page of a WRITE that failed stays taken: its bytes may still be read.
        if state == "done":
            self._free.append(self._pages.pop(write))
        return state


def _without_head(rows: Descriptors, length: int) -> Descriptors:
    """The rows without the first `length` bytes of the first one."""
    rest = rows.copy()
    rest[0, 0] += np.uint64(length)
    rest[0, 1] -= np.uint64(length)
    return rest if rest[0, 1] else rest[1:]
