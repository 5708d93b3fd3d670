"""Moving pages through registered host memory, where device memory cannot be registered.

Some instances (trn2.3xlarge, or any without EFA) have no way to register Neuron memory. Then
ranges of a cache are copied to a slab of host memory, which NIXL sends from, or from a slab that
a peer has written to. It costs a pass over PCIe on each side and blocks the calling thread, so it
is off unless NEURON_PUSH_HOST_STAGING=1 asks for it, and says so when it starts.

Copies are `narrow` to the exact range and `copy_` with a host tensor of equal size. Neuron refuses
every other form: strided device views, and copies between device tensors (LMCache pull request
4864).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from neuron_push.errors import ConfigError

__all__ = ["HOST_STAGING", "Range", "Slab", "wanted"]

# Set to 1 to stage through host memory.
HOST_STAGING: Final = "NEURON_PUSH_HOST_STAGING"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Range:
    """`length` bytes at `offset` of an allocation, which is numbered as regions are."""

    allocation: int
    offset: int
    length: int


def wanted(environ: Any) -> bool:
    """Whether the user has chosen host staging."""
    return bool(environ.get(HOST_STAGING) == "1")


class Slab:
    """A bounded piece of host memory and the device allocations that pass through it.

    `memory` is a one-dimensional byte tensor on the host, registered with NIXL by its owner;
    `allocations` are one-dimensional byte views of whole device allocations.
    """

    def __init__(self, memory: Any, allocations: Sequence[Any]) -> None:
        if memory.device.type != "cpu":
            raise ConfigError(f"a slab lies in host memory, not on {memory.device.type!r}")
        for tensor in (memory, *allocations):
            if tensor.dim() != 1 or tensor.element_size() != 1 or tensor.stride(0) != 1:
                raise ConfigError("staging needs flat byte views of whole allocations")
        self._memory = memory
        self._allocations = tuple(allocations)
        logger.warning(
            "KV pages are staged through %d MiB of host memory (%s=1): expect a fraction of the "
            "direct rate, and copies that hold up their thread",
            memory.numel() >> 20,
            HOST_STAGING,
        )

    @property
    def capacity(self) -> int:
        """Bytes that fit at once."""
        return int(self._memory.numel())

    def take(self, ranges: Iterable[Range]) -> int:
        """Copy ranges of the device into the slab, one behind the other; the bytes copied."""
        return self._copy(ranges, to_host=True)

    def give(self, ranges: Iterable[Range]) -> int:
        """Copy the slab, from its start, into ranges of the device; the bytes copied."""
        return self._copy(ranges, to_host=False)

    def _copy(self, ranges: Iterable[Range], *, to_host: bool) -> int:
        listed = self._checked(ranges)
        at = 0
        for each in listed:
            host = self._memory.narrow(0, at, each.length)
            device = self._allocations[each.allocation].narrow(0, each.offset, each.length)
            target, source = (host, device) if to_host else (device, host)
            target.copy_(source)
            at += each.length
        return at

    def _checked(self, ranges: Iterable[Range]) -> list[Range]:
        listed = list(ranges)
        total = sum(each.length for each in listed)
        if total > self.capacity:
            raise ConfigError(f"{total} bytes do not fit into a slab of {self.capacity}")
        for each in listed:
            size = (
                int(self._allocations[each.allocation].numel())
                if 0 <= each.allocation < len(self._allocations)
                else -1
            )
            if not (each.offset >= 0 and each.length > 0 and each.offset + each.length <= size):
                raise ConfigError(f"{each} lies outside the registered allocations")
        return listed
