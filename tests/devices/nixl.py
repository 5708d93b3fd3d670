"""NIXL's Python API over a pretended machine, as far as `neuron_push.nixl` uses it.

Sources, of ai-dynamo/nixl 8770b655: libfabric_rail_manager.cpp (the runtime is decided once, when
the backend is created; VRAM is offered only with CUDA or Neuron, and those only on efa), and its
debug lines about rails; libfabric_rail.cpp (a provider without FI_HMEM: a warning, then host
memory); src/core/nixl_agent.cpp (a transfer of memory that is not registered is "not found").
Of ofiwg/libfabric af8ddbe9: hmem_neuron.c (dmabuf v1 exports from the base of an allocation only).
Of aws-neuron-driver 2.24.7: neuron_dmabuf.c (page alignment).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

PAGE = 4096


class nixlNotSupportedError(Exception):
    pass


class nixlBackendError(Exception):
    pass


class nixlNotFoundError(Exception):
    pass


@dataclass
class FakeMachine:
    """What NIXL finds: plugins that load, the libfabric provider, the device, its allocations."""

    plugins: tuple[str, ...] = ("UCX", "LIBFABRIC")
    provider: str = "efa"
    device: str = ""  # "neuron" or "cuda"
    runtime_started: bool = True
    hmem: bool = True  # whether the provider supports device memory
    allocations: tuple[tuple[int, int], ...] = ()
    agents: list[FakeAgent] = field(default_factory=list)

    def module(self):
        """Stands in for nixl._api."""
        return SimpleNamespace(
            nixl_agent_config=FakeConfig,
            nixl_agent=lambda name, config: FakeAgent(self, name, config),
        )

    def memories(self, backend):
        if backend == "UCX":
            return ["DRAM_SEG", "VRAM_SEG"] if self.device == "cuda" else ["DRAM_SEG"]
        usable = self.provider == "efa" and self.device and self.runtime_started
        return ["DRAM_SEG", "VRAM_SEG"] if usable else ["DRAM_SEG"]

    def log(self, text):
        os.write(2, f"{text}\n".encode())


@dataclass
class FakeConfig:
    enable_prog_thread: bool = True
    backends: list[str] = field(default_factory=lambda: ["UCX"])
    num_threads: int = 0


class CppAgent:
    """What the wrapper holds; its end is the end of the agent."""


class FakeAgent:
    def __init__(self, machine, name, config):
        self._machine, self.name = machine, name
        self.agent = CppAgent()
        self.backends, self.parameters = {}, {}
        self._registered = []
        self._memories = {}
        machine.agents.append(self)
        for backend in config.backends:
            self.create_backend(backend, {"num_threads": str(config.num_threads)})

    def create_backend(self, backend, parameters):
        if backend not in self._machine.plugins:
            raise nixlNotFoundError(f"unsupported backend '{backend}'")
        self.backends[backend] = object()
        self.parameters[backend] = parameters
        # Decided now: a runtime that starts later changes nothing.
        self._memories[backend] = self._machine.memories(backend)
        if backend == "LIBFABRIC":
            self._machine.log(
                f"D0829 Created rail 0 (device=rdmap0s0, provider={self._machine.provider})"
            )

    def get_plugin_list(self):
        return list(self._machine.plugins)

    def get_backend_mem_types(self, backend):
        return self._memories[backend]

    def get_agent_metadata(self):
        return b"metadata"

    def register_memory(self, rows, memory):
        for backend in self.backends:
            if f"{memory}_SEG" not in self._memories[backend]:
                raise nixlNotSupportedError(f"{backend} does not support {memory}")
        for base, length, device, _ in rows:
            if device < 0:
                raise nixlBackendError("a device id is unsigned")
            if memory == "VRAM":
                self._register_device_memory(base, length)
            self._registered.append((base, length))
        return list(rows)

    def _register_device_memory(self, base, length):
        machine = self._machine
        if not machine.hmem:
            machine.log(
                "W0829 VRAM memory requested but provider does not support FI_HMEM - falling back "
                "to system memory registration"
            )
            return
        if machine.device == "neuron":
            if base % PAGE:
                raise nixlBackendError("fi_mr_reg failed on rail 0: Invalid argument")
            if (base, length) not in machine.allocations:
                raise nixlBackendError("fi_mr_reg failed on rail 0: not an allocation's base")
        machine.log(f"D0829 VRAM memory {base:#x} on device PCI 0000:53:00.0 mapped to rail 0")

    def deregister_memory(self, registration):
        for base, length, *_ in registration:
            self._registered.remove((base, length))

    def get_xfer_descs(self, rows, memory):
        return [tuple(int(n) for n in row) for row in rows]

    def add_remote_agent(self, raw):
        return raw.decode()

    def remove_remote_agent(self, name):
        pass

    def initialize_xfer(self, operation, local, remote, peer, payload):
        for address, length, _ in local:
            if not any(b <= address and address + length <= b + n for b, n in self._registered):
                raise nixlNotFoundError("no backend has this memory registered")
        return SimpleNamespace()

    def transfer(self, handle):
        return "PROC"

    def release_xfer_handle(self, handle):
        pass
