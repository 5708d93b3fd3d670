"""Environment variables that break or slow transfers, and which of them to show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from neuron_push import accelerator as accelerators
from neuron_push import efa
from neuron_push.doctor.finding import Finding, error, ok, warning
from neuron_push.doctor.machine import Machine

__all__ = ["KEEP_ALIVE", "check", "shown"]

# Seconds for which the router keeps an idle connection to an engine (router/app.py).
KEEP_ALIVE: Final = 3.0
_VLLM_KEEP_ALIVE: Final = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
_SHOWN: Final = re.compile(
    r"FI_|NIXL_|UCX_|NEURON_|VLLM_|NCCL_|OFI_|PYTORCH_|CUDA_VISIBLE|RDMAV_|LD_LIBRARY_PATH$"
)
_SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


class _Trap(NamedTuple):
    """A value that is wrong when the named kind of device is here."""

    variable: str
    bad: re.Pattern[str]
    where: str  # "efa", "neuron" or "cuda"
    fatal: bool
    why: str
    remedy: str


def _trap(
    variable: str, bad: str, where: str, *, why: str, remedy: str, fatal: bool = True
) -> _Trap:
    return _Trap(variable, re.compile(bad, re.IGNORECASE), where, fatal, why, remedy)


_ON, _OFF = r"^\s*(1|true|yes|on)\s*$", r"^\s*(0|false|no|off)\s*$"
TRAPS: Final = (
    _trap(
        "FI_PROVIDER", r"^(?!.*\befa\b).+", "efa",
        why="libfabric looks at no other provider, so NIXL takes TCP although EFA is here",
        remedy="unset it, or set it to efa",
    ),
    _trap(
        "FI_HMEM_DISABLE_P2P", _ON, "efa",
        why="EFA then refuses device memory, and for Neuron there is no other way",
        remedy="unset it",
    ),
    _trap(
        "FI_EFA_USE_DEVICE_RDMA", _OFF, "efa",
        why="device memory needs EFA's own RDMA",
        remedy="unset it, or set it to 1",
    ),
    _trap(
        "FI_HMEM", r"^(?!.*\bneuron\b).+", "neuron",
        why="libfabric initialises only the memory kinds named there",
        remedy="unset it, or set it to neuron",
    ),
    _trap(
        "FI_HMEM_NEURON_USE_DMABUF", _OFF, "neuron", fatal=False,
        why="registration falls back to the legacy peer-direct module",
        remedy="unset it unless AWS support asked for it",
    ),
    _trap(
        "NEURON_RT_MAP_HBM", _OFF, "neuron",
        why="device tensors then have address 0 and cannot be registered",
        remedy="set NEURON_RT_MAP_HBM=1 before the process allocates its first tensor",
    ),
    _trap(
        "NEURON_SKIP_EFA_AFFINITY", _ON, "neuron", fatal=False,
        why="a core may then send through an EFA device behind another switch",
        remedy="unset it",
    ),
    _trap(
        "NEURON_RT_VISIBLE_CORES", r".+", "neuron", fatal=False,
        why="vLLM Neuron sets it for each worker, and a value from outside is in the way",
        remedy="choose cores with NEURON_VISIBLE_DEVICES",
    ),
    _trap(
        "PYTORCH_CUDA_ALLOC_CONF", r"expandable_segments\s*:\s*true", "cuda",
        why="such memory lies over many physical pieces and cannot be registered for RDMA",
        remedy="remove expandable_segments:True",
    ),
    _trap(
        "PYTORCH_ALLOC_CONF", r"expandable_segments\s*:\s*true", "cuda",
        why="such memory lies over many physical pieces and cannot be registered for RDMA",
        remedy="remove expandable_segments:True",
    ),
    _trap(
        "UCX_TLS", r"^(?!\^)(?!.*(cuda|gdr|all)).+", "cuda", fatal=False,
        why="UCX then has no transport that knows GPU memory",
        remedy="unset it, or add cuda_copy,cuda_ipc",
    ),
    _trap(
        "LD_LIBRARY_PATH", r"hpcx|/ucx/", "any", fatal=False,
        why="a second build of UCX is found before the one in NIXL's wheel, and mixing them "
        "crashes at the first transfer",
        remedy="take that folder out of LD_LIBRARY_PATH for engines",
    ),
    _trap(
        "UCX_MODULE_DIR", r".+", "any", fatal=False,
        why="UCX loads transports of another build than NIXL's own",
        remedy="unset it for engines",
    ),
)  # fmt: skip


def check(machine: Machine) -> Iterator[Finding]:
    """Each trap that is set, what must be set and is not, and one line if all is well."""
    here = {"any"}
    here |= {"efa"} if efa.devices(machine.root) else set()
    here |= {"neuron"} if machine.names("/dev/neuron[0-9]*") else set()
    here |= {"cuda"} if machine.names("/dev/nvidia[0-9]*") else set()
    found = [*_sprung(machine, here), *_missing(machine, here), *_others(machine)]
    yield from found or [ok("variables", "no variable is in the way")]


def _sprung(machine: Machine, here: set[str]) -> Iterator[Finding]:
    for trap in TRAPS:
        value = machine.environ.get(trap.variable, "")
        if trap.where in here and trap.bad.search(value):
            make = error if trap.fatal else warning
            seen = f"{trap.variable}={value}"
            yield make(f"variables.{trap.variable}", seen, trap.why, trap.remedy)


def _missing(machine: Machine, here: set[str]) -> Iterator[Finding]:
    if not here & {"efa", "neuron"}:
        return
    needed = {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    for name, value in accelerators.still_to_set(needed, machine.environ).items():
        yield error(
            f"variables.{name}",
            f"{name}={machine.environ.get(name, '(unset)')}",
            "two processes of one host would pass device memory through shared memory, which EFA's "
            "path there cannot read: slow at best, wrong bytes at worst",
            f"set {name}={value} for every engine",
        )


def _others(machine: Machine) -> Iterator[Finding]:
    folder = machine.environ.get("NIXL_PLUGIN_DIR", "")
    if folder and not machine.exists(folder):
        yield error(
            "variables.NIXL_PLUGIN_DIR",
            f"NIXL_PLUGIN_DIR={folder}, which does not exist",
            "NIXL looks for its backends there first",
            "unset it, or name the folder of libplugin_*.so",
        )
    idle = machine.environ.get(_VLLM_KEEP_ALIVE, "5")
    if not idle.isdecimal() or int(idle) <= KEEP_ALIVE:
        yield warning(
            f"variables.{_VLLM_KEEP_ALIVE}",
            f"{_VLLM_KEEP_ALIVE}={idle}",
            f"the router keeps idle connections for {KEEP_ALIVE:g} s; an engine that closes them "
            "sooner resets requests in flight",
            f"set it above {KEEP_ALIVE:g}, and above the idle time of any other proxy",
        )


def shown(machine: Machine) -> dict[str, str]:
    """Variables that matter to transfers; what looks like a secret is not shown."""
    return {
        name: "(redacted)" if _SECRET.search(name) else value
        for name, value in sorted(machine.environ.items())
        if _SHOWN.match(name)
    }
