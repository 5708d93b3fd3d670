"""Copies between a device and its host, by address."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Protocol

from neuron_push.accelerator import Slab
from neuron_push.errors import PlanError

__all__ = ["Bytes", "HostCopies"]


class Bytes(Protocol):
    """A flat tensor of bytes, as torch's are."""

    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def narrow(self, axis: int, start: int, length: int) -> Bytes: ...
    def copy_(self, source: Any) -> Any: ...


class HostCopies:
    """Allocations on the device and on the host, and copies between them by address."""

    def __init__(self, allocate: Callable[[int], Bytes]) -> None:
        """`allocate` makes host tensors of so many bytes."""
        self._allocate = allocate
        self._bases: list[int] = []  # sorted
        self._memory: dict[int, tuple[Bytes, bool]] = {}  # base -> tensor, whether on the host

    def add(self, base: int, memory: Bytes) -> None:
        """A whole device allocation."""
        self._note(base, memory, on_host=False)

    def host(self, nbytes: int) -> Slab:
        """A new host allocation."""
        memory = self._allocate(nbytes)
        self._note(memory.data_ptr(), memory, on_host=True)
        return Slab(memory.data_ptr(), memory)

    def on_host(self, address: int) -> bool:
        """Whether an address lies in host memory of ours."""
        found = self._at(address)
        return found is not None and found[2]

    def copy(self, destination: int, source: int, length: int) -> None:
        """Copy between device and host; raises PlanError for anything else."""
        views = []
        for address in (destination, source):
            found = self._at(address)
            if found is None or address + length > found[0] + found[1].numel():
                raise PlanError(f"{length} bytes at {address:#x} are no part of a KV cache or slab")
            base, memory, on_host = found
            views.append((memory.narrow(0, address - base, length), on_host))
        (target, on_host), (origin, from_host) = views
        if on_host == from_host:
            raise PlanError("staging copies between a device and its host")
        try:
            target.copy_(origin)
        except Exception as error:
            raise PlanError(f"copying between device and host failed: {error}") from error

    def _note(self, base: int, memory: Bytes, *, on_host: bool) -> None:
        self._memory[base] = memory, on_host
        self._bases = sorted(self._memory)

    def _at(self, address: int) -> tuple[int, Bytes, bool] | None:
        index = bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        base = self._bases[index]
        memory, on_host = self._memory[base]
        return (base, memory, on_host) if address < base + memory.numel() else None
