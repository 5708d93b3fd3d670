"""A machine whose every part a test chooses, and findings by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from neuron_push.doctor.machine import UNLIMITED, Machine, Point, Ran

ENTRY = Point("neuron_push", "neuron_push.vllm:register", "neuron-push")
HEALTHY = {
    "memory": ["DRAM", "VRAM"],
    "providers": ["efa"],
    "rails": "",
    "bytes": 64 << 20,
    "seconds": 0.1,
    "equal": True,
}


@dataclass
class FakeMachine(Machine):
    """Nothing of the real one but the folder that stands for its file system."""

    commands: dict[str, Ran] = field(default_factory=dict)  # by "name first-argument" or "name"
    children: dict[str, Ran] = field(default_factory=dict)  # by "backend UCX" or "plugin"
    libraries: dict[str, set[str]] = field(default_factory=dict)  # those that load: symbols
    versions: dict[str, str] = field(default_factory=dict)
    offered: dict[str, list[Point]] = field(default_factory=dict)
    release: str = "6.14.0-1015-aws"
    lockable: int = UNLIMITED
    shm: int = 8 << 30
    hosts: dict[str, list[str]] = field(default_factory=dict)
    bound: dict[int, int] = field(default_factory=dict)  # port -> errno
    closed: set[int] = field(default_factory=set)

    def run(self, command, timeout=10.0, environment=None):
        return self.commands.get(" ".join(command[:2]), self.commands.get(command[0]))

    def child(self, arguments, timeout, environment=None):
        return self.children.get(" ".join(arguments[:2]), Ran(1, "", "no such child"))

    def loads(self, library, symbol=""):
        if library not in self.libraries:
            return f"{library}: cannot open shared object file: No such file or directory"
        return "" if not symbol or symbol in self.libraries[library] else f"no {symbol}"

    def version(self, distribution):
        return self.versions.get(distribution, "")

    def points(self, group):
        return self.offered.get(group, [])

    def kernel(self):
        return self.release

    def memlock(self):
        return self.lockable

    def shared_memory(self):
        return self.shm

    def resolve(self, host):
        return self.hosts.get(host, [])

    def binds(self, address, port):
        return self.bound.get(port, 0)

    def reaches(self, host, port, timeout=3.0):
        return "timed out" if port in self.closed else ""


def answer(**changes):
    """What a backend's process prints when all is well, but for the changes."""
    return Ran(0, f"some log line\n{json.dumps({**HEALTHY, **changes})}\n", "")


def loaded(device="cpu", refused=""):
    return Ran(0, json.dumps({"device": device, "refused": refused}), "")


def fi_info(count):
    """`fi_info -p efa`: each device twice, as libfabric's efa provider lists them."""
    blocks = [
        f"provider: efa\n    fabric: efa-direct\n    domain: rdmap{n}s0-{kind}\n    version: 203.0"
        for n in range(count)
        for kind in ("rdm", "dgrm")
    ]
    return Ran(0, "\n".join(blocks) + "\n", "")


def neuron_ls(count, cores=8):
    devices = [
        {"neuron_device": n, "nc_count": cores, "neuron_processes": []} for n in range(count)
    ]
    return Ran(0, json.dumps(devices), "")


def found(findings):
    """By check; a check that reports twice at one place is an error of the test."""
    listed = list(findings)
    assert len({f.check for f in listed}) == len(listed), listed
    for each in listed:
        if each.level in ("warning", "error"):
            assert each.seen and each.why and each.remedy
    return {each.check: each for each in listed}


def levels(findings):
    return {check: each.level for check, each in found(findings).items()}
