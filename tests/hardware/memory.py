"""A flat buffer on a device or on the host, with the region that NIXL is told."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np

from neuron_push import accelerator as accelerators
from neuron_push.geometry import Region
from tests.hardware.suite import Skip

HOST = "cpu"


class Buffer:
    """`kind` is "cpu", "cuda" or "neuron"; the bytes are read and written through the host."""

    def __init__(self, kind: str, nbytes: int):
        self.kind = kind
        torch = importlib.import_module("torch")
        if kind == "neuron":
            load_neuron()
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device_of(kind))
        self.accelerator = accelerator_of(kind)
        base, length = self.accelerator.region(self.tensor)
        memory = self.accelerator.memory_type(self.tensor)
        self.region = Region(base, length, memory, self.accelerator.device_id(self.tensor))

    def write(self, data: np.ndarray, start: int = 0) -> None:
        torch = importlib.import_module("torch")
        host = torch.from_numpy(np.ascontiguousarray(data))
        # narrow and copy_ between equal sizes: the form that Neuron takes.
        self.tensor.narrow(0, start, len(data)).copy_(host)

    def read(self, start: int = 0, length: int | None = None) -> np.ndarray:
        torch = importlib.import_module("torch")
        length = len(self.tensor) - start if length is None else length
        host = torch.empty(length, dtype=torch.uint8)
        host.copy_(self.tensor.narrow(0, start, length))
        return host.numpy()


def accelerator_of(kind: str):
    """The accelerator of that name; from this checkout's sources if it is not installed."""
    if kind not in accelerators.installed():
        sources = Path(__file__).resolve().parents[2] / "accel" / kind
        if str(sources) not in sys.path:
            sys.path.append(str(sources))
        module = importlib.import_module(f"neuron_push_{kind}")
        return getattr(module, f"{kind.capitalize()}Accelerator")()
    return accelerators.lookup(kind)


def device_of(kind: str) -> str:
    return kind if kind == HOST else f"{kind}:0"


def load_neuron() -> None:
    """Bring torch's neuron device up, by whichever package is here; its import initialises it."""
    torch = importlib.import_module("torch")
    for package in ("torch_neuronx", "libtorch_neuronx_lite"):
        try:
            importlib.import_module(package)
        except ImportError:
            continue
        runtime = getattr(torch.classes, "neuron", None)
        if runtime is not None and package != "torch_neuronx":
            runtime.Runtime().initialize()
        return
    raise Skip("no torch backend for Neuron: install vLLM Neuron's environment")
