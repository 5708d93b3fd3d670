"""What the core asks of an accelerator, how one is found, and the one for host memory.

An accelerator answers questions about tensors and about the end of a forward pass; it never
moves bytes between machines. Each one but the CPU's is a distribution of its own, found by the
entry-point group `neuron_push.accelerators`, so the core knows no vendor by name in its imports.
Tensors are taken as they look (`neuron_push.tensors`): torch stays out of the core.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from neuron_push import backends
from neuron_push.backends import Attention
from neuron_push.errors import ConfigError
from neuron_push.geometry import Plane
from neuron_push.hostmover import HostMover
from neuron_push.layouts import Place, View
from neuron_push.tensors import MemoryType, Tensor, whole_allocation
from neuron_push.transform import Mover

__all__ = [
    "NO_VARIABLES",
    "Accelerator",
    "CpuAccelerator",
    "DoneFence",
    "Fence",
    "MemoryType",
    "Probe",
    "Slab",
    "Tensor",
    "installed",
    "lookup",
    "still_to_set",
    "whole_allocation",
]

ENTRY_POINTS = "neuron_push.accelerators"
# "auto" asks these first, then any other that is installed, and the host's memory last: a
# machine with an accelerator also has a CPU.
PREFERRED = ("neuron", "cuda")

NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})
# How libfabric reads a switch that is off.
_OFF = frozenset({"0", "false", "no", "off"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """Whether this machine has the accelerator, why (not), and what was seen on the way."""

    available: bool
    reason: str
    detail: dict[str, str] = field(default_factory=dict)


class Fence(Protocol):
    """Marks a point in the device's work. Recorded on the main loop, asked from any thread."""

    def done(self) -> bool:
        """True once all work before the record has ended and its bytes are in memory."""

    def wait(self, timeout_s: float) -> bool:
        """Block the calling thread until done or until the time is over; returns `done()`."""


class Slab(NamedTuple):
    """Staging memory: its address, and the object whose end frees it."""

    base: int
    owner: object


@runtime_checkable
class Accelerator(Protocol):
    """One kind of memory that KV caches live in. Constructed without arguments, cheaply.

    In the order in which a worker asks: `probe` and `environment` before anything is loaded, the
    questions about tensors when the runner hands over its caches, `enter_thread` first on the
    transfer thread, and from then on `record_fence` after each forward.
    """

    # Its name in the entry-point group and in the settings.
    name: str
    # True if the device can gather and scatter strided bytes while the engine runs, so that
    # pages of unlike layouts can be packed or unpacked on this side.
    can_reorder: bool
    # True if nothing on the device marks the end of a forward: then a fence is right only if it is
    # recorded once the step's output is known, and the worker settles a step at the next one.
    hides_end: bool

    def probe(self) -> Probe:
        """Look for the device. Never raises, never initialises it; safe in any process."""

    def environment(self, present: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        """Variables that must still be set before the device or NIXL is first used.

        `present` is the environment as it is; empty when all of it fits.
        """

    def memory_type(self, tensor: Tensor) -> MemoryType:
        """What NIXL calls this tensor's memory; ConfigError if it is another device's."""

    def device_id(self, tensor: Tensor) -> int:
        """The device number to give NIXL with each descriptor; never negative."""

    def region(self, tensor: Tensor) -> tuple[int, int]:
        """Base address and length of the whole allocation under the tensor.

        Allocations are registered whole: drivers export memory from an allocation's base.
        Raises ConfigError, naming the cause, if the allocation has no usable address.
        """

    def planes(self, tensor: Tensor, attention: Attention, place: Place) -> tuple[Plane, ...]:
        """Where K and V of one layer lie in the tensor that the runner registers for it.

        Raises ConfigError for a backend whose pages are not known, GeometryError for a tensor
        that does not fit its backend.
        """

    def enter_thread(self) -> None:
        """Make the calling thread ready for the device, before it creates a NIXL agent.

        Comes after `region` was asked for every tensor. Raises ConfigError if an agent created
        now would not be able to register the device's memory.
        """

    def record_fence(self) -> Fence:
        """Mark the end of what the calling thread has launched. Returns at once."""

    def mover(self) -> Mover:
        """What packs and unpacks pages in this memory, beside the engine where that is possible.

        Moves what is settled: the caller has seen the fence done. Used by one thread, the one
        that called `enter_thread`. Raises ConfigError where `can_reorder` is False.
        """

    def slab(self, nbytes: int) -> Slab:
        """Memory of the caches' own kind, to pack into. Raises ConfigError as `mover` does."""

    def nixl_backends(self, wanted: Sequence[str] = ()) -> tuple[str, ...]:
        """NIXL backends to instantiate, best first: `wanted` if it is not empty, else its own.

        Raises ConfigError where device memory would silently travel over plain TCP.
        """

    def nixl_parameters(self, backend: str) -> dict[str, str]:
        """Parameters to create that backend with; empty for its defaults."""


@dataclass(frozen=True)
class DoneFence:
    """For work that has already ended when the fence is recorded."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True


DONE: Final = DoneFence()


class CpuAccelerator:
    """Host memory: the forward pass runs on the calling thread, so its end needs no mark."""

    name = "cpu"
    can_reorder = True
    hides_end = False

    def probe(self) -> Probe:
        return Probe(True, "host memory is always there")

    def memory_type(self, tensor: Tensor) -> MemoryType:
        kind = tensor.device.type
        if kind != "cpu":
            raise ConfigError(
                f"the KV cache is on device {kind!r}, but the accelerator in use is 'cpu'; "
                f"install the distribution for that device (installed: {', '.join(installed())})"
            )
        return "DRAM"

    def device_id(self, tensor: Tensor) -> int:
        return 0

    def region(self, tensor: Tensor) -> tuple[int, int]:
        return whole_allocation(tensor, "the tensor is empty or a meta tensor without memory")

    def planes(self, tensor: Tensor, attention: Attention, place: Place) -> tuple[Plane, ...]:
        return backends.arrange(backends.HOST, View.of(tensor), place, attention)

    def enter_thread(self) -> None:
        pass

    def record_fence(self) -> Fence:
        return DONE

    def mover(self) -> Mover:
        return HostMover()

    def slab(self, nbytes: int) -> Slab:
        memory = np.empty(nbytes, np.uint8)
        return Slab(memory.ctypes.data, memory)

    def nixl_backends(self, wanted: Sequence[str] = ()) -> tuple[str, ...]:
        return tuple(wanted) or ("UCX",)

    def nixl_parameters(self, backend: str) -> dict[str, str]:
        return {}

    def environment(self, present: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        return {}


def still_to_set(needed: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str]:
    """The part of `needed` that `present` does not say, in whichever spelling of off and on."""

    def fits(value: str, wanted: str) -> bool:
        off = value.strip().lower() in _OFF
        return off if wanted == "0" else value == wanted or (wanted == "1" and _is_on(value))

    return {
        name: wanted
        for name, wanted in needed.items()
        if name not in present or not fits(present[name], wanted)
    }


def _is_on(value: str) -> bool:
    text = value.strip().lower()
    return text == "true" or (text.isdecimal() and int(text) > 0)


def installed() -> tuple[str, ...]:
    """Names that `lookup` knows, in the order in which "auto" asks them."""
    names = set(_entry_points()) - {CpuAccelerator.name}
    first = [name for name in PREFERRED if name in names]
    return (*first, *sorted(names.difference(first)), CpuAccelerator.name)


def lookup(name: str = "auto") -> Accelerator:
    """The accelerator of that name, or with "auto" the first whose device is present.

    A name that is asked for and cannot be had is a ConfigError, without a second choice. Under
    "auto" a distribution that cannot be loaded is reported and passed over: it says nothing
    about whether this machine has the device.
    """
    if name != "auto":
        return _load(name)
    for candidate in installed():
        try:
            accelerator = _load(candidate)
        except ConfigError as error:
            logger.warning("passing over accelerator %s: %s", candidate, error)
            continue
        probe = accelerator.probe()
        if probe.available:
            return accelerator
        logger.debug("accelerator %s is not available: %s", candidate, probe.reason)
    return CpuAccelerator()


def _load(name: str) -> Accelerator:
    # The embedded one does not depend on how this package was installed.
    if name == CpuAccelerator.name:
        return CpuAccelerator()
    entry_point = _entry_points().get(name)
    if entry_point is None:
        raise ConfigError(f"no accelerator {name!r}; installed: {', '.join(installed())}")
    try:
        accelerator = entry_point.load()()
    except Exception as error:  # whatever a foreign distribution raises while it loads
        raise ConfigError(
            f"accelerator {name!r} ({entry_point.value}) is installed but does not load: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(
            f"accelerator {name!r} ({entry_point.value}) does not fit this version of "
            "neuron-push: it lacks members of the Accelerator protocol"
        )
    return accelerator


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
