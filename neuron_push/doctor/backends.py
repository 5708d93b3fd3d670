"""NIXL's backends: each is created in a process of its own, and a WRITE goes through it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from neuron_push import efa, versions
from neuron_push.doctor.finding import Finding, Level, error, note, ok
from neuron_push.doctor.machine import Machine, Ran

__all__ = ["BACKENDS", "MIB", "check", "one"]

BACKENDS: Final = ("UCX", "LIBFABRIC")
# Enough for a rate; a second at worst over loopback TCP.
MIB: Final = 64
# LIBFABRIC waits up to 60 s for a peer that does not answer.
_TIMEOUT: Final = 100.0
_REFUSED: Final = re.compile(r"Failed to load plugin from (\S+): (.+)$", re.MULTILINE)


class _Cause(NamedTuple):
    """What the loader says, and what it takes."""

    words: str
    remedy: str


_CAUSES: Final = (
    _Cause(
        "FABRIC_1.",
        "this build of NIXL needs libfabric 2.7 or newer: install one and put its folder first in "
        "LD_LIBRARY_PATH, or use nixl 1.3.2 to 1.4.1",
    ),
    _Cause(
        "libfabric.so.1",
        "install libfabric (AWS's EFA installer puts it in /opt/amazon/efa/lib) and name its "
        "folder in LD_LIBRARY_PATH",
    ),
    _Cause(
        "libcuda.so.1",
        "install the NVIDIA driver's libraries; on a Trainium host a stub library of that name "
        "will do (docs/hardware.md)",
    ),
    _Cause(
        "libcudart.so",
        "pip install nvidia-cuda-runtime-cu12 (or -cu13, as NIXL's flavour) and add its lib folder "
        "to LD_LIBRARY_PATH",
    ),
    _Cause("libhwloc.so", "install hwloc 2.x (libhwloc15)"),
)


def check(machine: Machine) -> Iterator[Finding]:
    """Try each backend that an engine could use here."""
    if not any(machine.version(name) for name in versions.NIXL.distributions):
        return  # said among the versions
    for backend in BACKENDS:
        yield from one(machine, backend)


def one(machine: Machine, backend: str) -> Iterator[Finding]:
    """Create it, and WRITE through it; a failure says what the loader said."""
    # The loader's error is an INFO line, the rails are DEBUG lines; both go to the child's stderr.
    ran = machine.child(["backend", backend, str(MIB)], _TIMEOUT, {"NIXL_LOG_LEVEL": "DEBUG"})
    answer = _answer(ran)
    if answer is None:
        yield from _failed(machine, backend, ran)
        return
    kinds = "/".join(sorted(answer["memory"]))
    yield ok(f"nixl.{backend}", f"instantiated, for {kinds}")
    yield from _device_memory(machine, backend, answer)
    yield from _loopback(backend, answer)


def _failed(machine: Machine, backend: str, ran: Ran) -> Iterator[Finding]:
    words = _loader(ran.err)
    if not words and ran.status is None:
        words = f"it did not end within {_TIMEOUT:g} s"
    elif not words and ran.status is not None and ran.status < 0:
        words = f"its process died of signal {-ran.status}"
    words = words or _last(ran.out) or _last(ran.err) or f"status {ran.status}"
    remedies = [cause.remedy for cause in _CAUSES if cause.words in words]
    level: Level = "error" if _needed(machine, backend) else "note"
    yield Finding(
        f"nixl.{backend}",
        level,
        f"not usable: {words}",
        "engines here need it" if level == "error" else "nothing here needs it",
        "; ".join(remedies)
        or "run it with NIXL_LOG_LEVEL=DEBUG: python -m "
        f"neuron_push.doctor.child backend {backend} 1",
    )


def _device_memory(machine: Machine, backend: str, answer: Any) -> Iterator[Finding]:
    providers = "/".join(answer.get("providers", ())) or "an unknown provider"
    if backend != "LIBFABRIC" or not efa.devices(machine.root):
        return
    devices = machine.names("/dev/neuron[0-9]*") + machine.names("/dev/nvidia[0-9]*")
    if devices and "VRAM" not in answer["memory"]:
        yield error(
            "nixl.device_memory",
            f"LIBFABRIC offers {'/'.join(answer['memory'])} over {providers}, and no device memory",
            "NIXL found no device it knows, or chose a provider other than efa; engines refuse "
            "to start rather than stage through host memory",
            "check FI_PROVIDER, the EFA driver, and that the device shows up in lspci",
        )
    elif answer.get("rails"):
        yield ok("nixl.rails", str(answer["rails"]))


def _loopback(backend: str, answer: Any) -> Iterator[Finding]:
    check = f"nixl.{backend}.loopback"
    if answer.get("failure"):
        yield error(
            check,
            f"a WRITE between two agents here failed: {answer['failure']}",
            "what fails on one machine fails between two",
            "run the doctor again with NIXL_LOG_LEVEL=DEBUG; check security groups (EFA needs all "
            "traffic to itself, both ways) and the network interface that UCX picks",
        )
    elif not answer["equal"]:
        yield error(
            check,
            f"{answer['bytes']} bytes were written and their checksum differs",
            "tokens would be wrong without a word",
            "do not use this machine; FI_EFA_ENABLE_SHM_TRANSFER=0 is the first thing to check",
        )
    else:
        rate = answer["bytes"] / answer["seconds"] / 2**30
        yield note(check, f"{answer['bytes'] >> 20} MiB at {rate:.2f} GiB/s, checksum equal")


def _needed(machine: Machine, backend: str) -> bool:
    return (backend == "LIBFABRIC") == bool(
        efa.devices(machine.root) or machine.names("/dev/neuron[0-9]*")
    )


def _loader(text: str) -> str:
    """What the loader said; it stops at the first library that is missing."""
    return "; ".join(dict.fromkeys(match[2].strip() for match in _REFUSED.finditer(text)))


def _answer(ran: Ran) -> Any:
    lines = ran.out.strip().splitlines()
    try:
        return json.loads(lines[-1]) if ran.status == 0 and lines else None
    except ValueError:
        return None


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
