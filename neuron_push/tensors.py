"""What is used of a torch.Tensor, and the allocation under one. Keeps torch out of the core."""

from __future__ import annotations

from typing import Literal, Protocol

from neuron_push.errors import ConfigError
from neuron_push.layouts import TensorLike

__all__ = ["MemoryType", "Tensor", "whole_allocation"]

# NIXL's own names for the two kinds of memory.
MemoryType = Literal["DRAM", "VRAM"]


class _Storage(Protocol):
    def data_ptr(self) -> int: ...
    def nbytes(self) -> int: ...


class _Device(Protocol):
    @property
    def type(self) -> str: ...


class Tensor(TensorLike, Protocol):
    """The part of a torch.Tensor that accelerators use."""

    @property
    def device(self) -> _Device: ...
    def get_device(self) -> int: ...
    def untyped_storage(self) -> _Storage: ...


def whole_allocation(tensor: Tensor, cause: str, alignment: int = 1) -> tuple[int, int]:
    """Base and length of a tensor's storage; `cause` says why there might be no address.

    `alignment` is what the base of an allocation of that device is a multiple of: any other
    address lies inside one, which a driver does not export.
    """
    storage = tensor.untyped_storage()
    base, length = storage.data_ptr(), storage.nbytes()
    refusal = f"cannot register the KV cache on device {tensor.device.type!r}: its allocation"
    if base <= 0 or length <= 0:
        raise ConfigError(f"{refusal} has address {base:#x} and {length} bytes; {cause}")
    if base % alignment:
        raise ConfigError(
            f"{refusal} starts at {base:#x}, which is no multiple of {alignment}: the tensor lies "
            "inside a larger allocation, and only whole ones can be registered"
        )
    return base, length
