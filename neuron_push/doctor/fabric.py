"""EFA devices, libfabric, and what the operating system gives to RDMA."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from neuron_push import efa
from neuron_push.doctor.finding import Finding, error, note, ok, warning
from neuron_push.doctor.machine import UNLIMITED, Machine

__all__ = ["devices", "domains", "huge_pages", "locked_memory", "shared_memory"]

# AWS's installer puts it here, often off the PATH.
_FI_INFO: Final = ("fi_info", "/opt/amazon/efa/bin/fi_info")
_DOMAIN: Final = re.compile(r"^\s*domain:\s*(\S+?)(?:-(?:rdm|dgrm))?\s*$", re.MULTILINE)
_SHM_LEAST: Final = 1 << 30


def devices(machine: Machine) -> Iterator[Finding]:
    """EFA devices in sysfs, against the machine's kind and against what libfabric sees."""
    seen = efa.devices(machine.root)
    kind = efa.instance_type(machine.root)
    if not seen:
        if efa.should_have_efa(machine.root):
            yield error(
                "efa.devices",
                f"a {kind} without any EFA device",
                "KV would travel over TCP, a hundred times slower, or not at all (Trainium)",
                "launch the instance with EFA interfaces; in a pod, request vpc.amazonaws.com/efa",
            )
        else:
            where = f"on this {kind}" if kind else "here"
            yield note("efa.devices", f"no EFA device {where}")
        return
    yield ok("efa.devices", f"{len(seen)} EFA devices: {' '.join(seen)}")
    nodes = machine.names("/dev/infiniband/uverbs*")
    if len(nodes) < len(seen):
        yield warning(
            "efa.nodes",
            f"{len(nodes)} /dev/infiniband/uverbs* for {len(seen)} EFA devices",
            "sysfs shows the host's devices, and a container uses only those it was given",
            f"request vpc.amazonaws.com/efa: {len(seen)} (15 schedulable on some p5en groups)",
        )
    yield from _libfabric(machine, len(seen))


def _libfabric(machine: Machine, count: int) -> Iterator[Finding]:
    for command in _FI_INFO:
        ran = machine.run([command, "-p", "efa"])
        if ran is not None:
            break
    else:
        yield warning(
            "efa.fi_info",
            "fi_info is not installed",
            "without it nobody can tell whether libfabric reaches the EFA devices",
            "install AWS's EFA installer, which brings libfabric and fi_info",
        )
        return
    found = domains(ran.out)
    if len(found) == count:
        version = machine.run([command, "--version"])
        lines = version.out.split("\n") if version else [""]
        yield ok("efa.fi_info", f"libfabric reaches all {count} ({lines[0].strip()})")
        return
    yield error(
        "efa.fi_info",
        f"`fi_info -p efa` shows {len(found)} of {count} EFA devices: "
        f"{ran.err.strip() or 'no message'}",
        "NIXL uses the devices that libfabric shows; the others carry nothing",
        "check the efa kernel module and /dev/infiniband in the container; put /opt/amazon/efa/lib "
        "first in LD_LIBRARY_PATH if another libfabric is found",
    )


def domains(text: str) -> set[str]:
    """Devices that fi_info lists; it lists each once per kind of endpoint."""
    return set(_DOMAIN.findall(text))


def huge_pages(machine: Machine) -> Iterator[Finding]:
    """EFA takes its bounce buffers from huge pages."""
    match = re.search(r"^HugePages_Total:\s*(\d+)", machine.text("/proc/meminfo"), re.MULTILINE)
    total = int(match[1]) if match else 0
    if not efa.devices(machine.root):
        yield note("memory.huge_pages", f"{total} huge pages; only EFA needs them")
    elif total:
        yield ok("memory.huge_pages", f"{total} huge pages")
    elif machine.environ.get("FI_EFA_USE_HUGE_PAGE") == "0":
        yield note("memory.huge_pages", "none, and FI_EFA_USE_HUGE_PAGE=0 asks for none")
    else:
        yield warning(
            "memory.huge_pages",
            "no huge pages",
            "EFA's buffers then cost more page table walks, and agents start slower",
            "set vm.nr_hugepages (2560 pages of 2 MiB, or hugepages-2Mi: 5120Mi in a pod), or "
            "FI_EFA_USE_HUGE_PAGE=0",
        )


def locked_memory(machine: Machine) -> Iterator[Finding]:
    """Registered memory is locked memory."""
    limit = machine.memlock()
    if limit == UNLIMITED:
        yield ok("memory.memlock", "unlimited")
    elif machine.names("/sys/class/infiniband/*"):
        yield error(
            "memory.memlock",
            f"a process may lock {limit >> 10} KiB",
            "registering memory with an RDMA device locks it; the KV cache is many GiB",
            "ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity); in a pod, IPC_LOCK",
        )
    else:
        yield note(
            "memory.memlock", f"a process may lock {limit >> 10} KiB", "only RDMA needs more"
        )


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """vLLM's workers and UCX meet in /dev/shm."""
    size = machine.shared_memory()
    if size >= _SHM_LEAST:
        yield ok("memory.shm", f"/dev/shm holds {size >> 20} MiB")
    else:
        yield warning(
            "memory.shm",
            f"/dev/shm holds {size >> 20} MiB",
            "vLLM's worker processes and UCX share memory there; containers start with 64 MiB",
            "docker run --shm-size=8g; in a pod, an emptyDir with medium Memory at /dev/shm",
        )
