"""Trainium and NVIDIA devices, the libraries that reach them, our accelerator for each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from neuron_push import accelerator as accelerators
from neuron_push import efa, versions
from neuron_push.doctor.finding import Finding, error, note, ok, warning
from neuron_push.doctor.machine import Machine
from neuron_push.errors import ConfigError

__all__ = ["accelerator", "neuron", "nvidia"]

_NRT: Final = "libnrt.so.1"
_NRT_INSTALLED: Final = "/opt/aws/neuron/lib/libnrt.so.1"
_DMABUF_KERNEL: Final = (5, 15)
_FILES: Final = {"neuron": "/dev/neuron[0-9]*", "cuda": "/dev/nvidia[0-9]*"}


def accelerator(machine: Machine) -> Iterator[Finding]:
    """Whether each device that is here has its distribution, and what that says of it."""
    installed = accelerators.installed()
    for name, pattern in _FILES.items():
        count = len(machine.names(pattern))
        if not count:
            continue
        if name not in installed:
            yield error(
                f"accelerator.{name}",
                f"{count} {name} devices, but neuron-push-{name} is not installed",
                "engines would look for their KV cache in host memory and refuse it",
                f"pip install neuron-push-{name} in the engine's environment",
            )
            continue
        try:
            probe = accelerators.lookup(name).probe()
        except ConfigError as problem:
            yield error(
                f"accelerator.{name}",
                str(problem),
                "engines do not start with it",
                f"reinstall neuron-push-{name} of the same version as neuron-push",
            )
            continue
        if probe.available:
            yield ok(f"accelerator.{name}", probe.reason)
        else:
            yield error(
                f"accelerator.{name}",
                probe.reason,
                "the engine in this environment cannot use the device",
                "install the engine's build for it",
            )


def neuron(machine: Machine) -> Iterator[Finding]:
    """Neuron devices, their runtime library, and what stands between them and NIXL."""
    files = machine.names(_FILES["neuron"])
    if not files:
        yield note("neuron.devices", "no /dev/neuron* here")
        return
    yield from _listed(machine, len(files))
    yield from _runtime(machine)
    yield from _stub(machine)
    adapters = len(efa.devices(machine.root))
    if not adapters:
        yield error(
            "neuron.efa",
            f"{efa.instance_type(machine.root) or 'this machine'}: {len(files)} Neuron devices and "
            "no EFA device",
            "Neuron memory can be registered over EFA only; trn2.3xlarge has none",
            "use an instance with EFA (trn2.48xlarge), with its interfaces attached; or, slowly, "
            "set host_staging (NEURON_PUSH_HOST_STAGING=1)",
        )
    elif adapters < len(files):
        yield warning(
            "neuron.efa",
            f"{adapters} EFA devices for {len(files)} Neuron devices",
            "each Neuron device has an adapter of its own; without it, its KV takes a detour",
            "attach one EFA interface per network card at launch; in a pod, request them all",
        )
    release = machine.kernel()
    if versions.parse(release) < _DMABUF_KERNEL:
        yield error(
            "neuron.kernel",
            f"kernel {release}",
            "the driver exports memory as dma-buf from kernel 5.15 on",
            "boot a kernel of 5.15 or newer",
        )


def _listed(machine: Machine, count: int) -> Iterator[Finding]:
    ran = machine.run(["neuron-ls", "-j"]) or machine.run(["/opt/aws/neuron/bin/neuron-ls", "-j"])
    listed = _devices(ran.out) if ran is not None and ran.status == 0 else None
    if listed is None:
        said = f": {ran.err.strip()[:200]}" if ran is not None else ""
        yield warning(
            "neuron.devices",
            f"{count} /dev/neuron*; neuron-ls does not answer{said}",
            "the driver may not be loaded, or the tools are not in this container",
            "install aws-neuronx-tools, or run the doctor on the host too",
        )
    elif len(listed) != count:
        yield error(
            "neuron.devices",
            f"neuron-ls lists {len(listed)} devices, /dev has {count}",
            "some devices are not usable",
            "reload the neuron driver, or give the container all of them",
        )
    else:
        cores = sum(int(each.get("nc_count", 0)) for each in listed)
        busy = sum(bool(each.get("neuron_processes")) for each in listed)
        yield ok("neuron.devices", f"{count} devices, {cores} cores, {busy} in use")


def _runtime(machine: Machine) -> Iterator[Finding]:
    problem = machine.loads(_NRT)
    if not problem:
        yield from _asks(machine, _NRT)
        return
    if machine.loads(_NRT_INSTALLED):
        yield error(
            "neuron.libnrt",
            f"{_NRT} does not load: {problem}",
            "libfabric looks it up before it can register Neuron memory",
            "install aws-neuronx-runtime-lib",
        )
        return
    yield warning(
        "neuron.libnrt",
        f"{_NRT} is at {_NRT_INSTALLED}, off the loader's path",
        "libfabric and NIXL look it up by name only. The connector loads it by its path first, "
        "which covers the engine's process, and nothing else",
        "add /opt/aws/neuron/lib to LD_LIBRARY_PATH or to ld.so.conf",
    )
    yield from _asks(machine, _NRT_INSTALLED)


def _asks(machine: Machine, library: str) -> Iterator[Finding]:
    if machine.loads(library, "nrt_get_attached_efa_bdf"):
        yield warning(
            "neuron.rails",
            "this runtime cannot say which EFA device is next to an address",
            "NIXL then uses all rails for each core; runtime 2.31.24 (SDK 2.29) and later can say",
            "update aws-neuronx-runtime-lib",
        )
    else:
        yield ok("neuron.libnrt", f"{library} loads and knows its EFA devices")


def _stub(machine: Machine) -> Iterator[Finding]:
    problem = machine.loads("libcuda.so.1")
    if problem:
        yield error(
            "neuron.libcuda",
            f"libcuda.so.1 does not load: {problem}",
            "NIXL's LIBFABRIC plugin names it among its needs, also where no GPU is",
            "AWS's images carry a stub; make one with `echo | cc -shared -fPIC -x c "
            "-Wl,-soname,libcuda.so.1 -o libcuda.so.1 -` in a folder of LD_LIBRARY_PATH",
        )
    else:
        yield ok("neuron.libcuda", "libcuda.so.1 loads (a stub will do)")


def nvidia(machine: Machine) -> Iterator[Finding]:
    """NVIDIA devices as the driver sees them."""
    files = machine.names(_FILES["cuda"])
    if not files:
        yield note("cuda.devices", "no /dev/nvidia* here")
        return
    query = "--query-gpu=name,driver_version,pci.bus_id"
    ran = machine.run(["nvidia-smi", query, "--format=csv,noheader"])
    if ran is None or ran.status != 0:
        said = (ran.err or ran.out).strip()[:200] if ran is not None else "it is not installed"
        yield warning(
            "cuda.devices",
            f"{len(files)} /dev/nvidia*; nvidia-smi does not answer: {said}",
            "driver and library may differ in version, or the container lacks the utility",
            "match the container's driver libraries with the host's (nvidia-container-toolkit)",
        )
        return
    lines = [line for line in ran.out.splitlines() if line.strip()]
    if len(lines) == len(files):
        yield ok("cuda.devices", f"{len(lines)} GPUs: {lines[0].strip()}")
    else:
        yield warning(
            "cuda.devices",
            f"nvidia-smi lists {len(lines)} GPUs, /dev has {len(files)}",
            "a GPU that fell off its bus disappears this way",
            "look for Xid messages in the kernel's log",
        )


def _devices(text: str) -> list[dict[str, Any]] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None
