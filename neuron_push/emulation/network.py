"""Network namespaces around a fleet: engines have addresses of their own, over shaped links.

    host ... relay ... [ hub: bridge .1, router ] ---- [ engine 0: eth0 .2 ]
                                                  ---- [ engine 1: eth0 .3 ]

Every interface, address and route is inside the namespaces; the host's own network is left as
it is, and reaches the servers through `relay`. Each link is shaped at both ends for the rate,
and at the engine's end for delay and loss: one way between two engines takes one delay. The
namespaces carry the fleet's process id in their names, and go with it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from neuron_push.errors import ConfigError

logger = logging.getLogger(__name__)

Words = tuple[str, ...]
Runner = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints; raises ConfigError if it fails."""

DEVICE: Final = "eth0"
PREFIX: Final = "neuron-push"
_NAMED: Final = re.compile(rf"{PREFIX}-(\d+)-\w+")
# A bucket that holds less than a timer tick of traffic, or than one large segment, never
# reaches its rate.
_LEAST_BURST: Final = 128 << 10
_TICKS: Final = 100
_PACKET: Final = 1500


class NetworkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `network` of a fleet file."""

    rate_mbit: Annotated[float, Meta(ge=0)] = 0
    """Of each engine's link, in each direction; 0: as fast as the machine allows."""
    delay_ms: Annotated[float, Meta(ge=0)] = 0
    """One way, between two engines."""
    loss_percent: Annotated[float, Meta(ge=0, lt=100)] = 0
    subnet: str = "10.231.0.0/24"
    """Private addresses; seen in the namespaces only."""


@dataclass(frozen=True)
class Place:
    """Where a server runs."""

    namespace: str
    address: str

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line, run in the namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]


@dataclass(frozen=True)
class Plan:
    """Commands that make and remove the namespaces, and where servers go."""

    hub: Place
    engines: tuple[Place, ...]
    make: tuple[Words, ...]

    @property
    def remove(self) -> tuple[Words, ...]:
        """Interfaces go with the namespaces that they are in."""
        places = (*self.engines, self.hub)
        return tuple(("ip", "netns", "delete", place.namespace) for place in places)


def plan(spec: NetworkSpec, engines: int, pid: int) -> Plan:
    """A hub and so many engines. Raises ConfigError for a subnet that does not do."""
    try:
        subnet = ipaddress.IPv4Network(spec.subnet)
    except ValueError as error:
        raise ConfigError(f"network: subnet {spec.subnet!r}: {error}") from None
    if not subnet.is_private or subnet.num_addresses < engines + 3:
        raise ConfigError(
            f"network: subnet {spec.subnet} is not a private one with room for {engines} engines"
        )
    names = ["hub", *map(str, range(engines))]
    hub, *places = (
        Place(f"{PREFIX}-{pid}-{name}", str(subnet[index + 1])) for index, name in enumerate(names)
    )
    make = [*_hub(hub, subnet.prefixlen)]
    for index, place in enumerate(places):
        make += _link(hub, place, f"port{index}", subnet.prefixlen)
        make += _shape(spec, place.namespace, DEVICE, both=True)
        make += _shape(spec, hub.namespace, f"port{index}", both=False)
    return Plan(hub, tuple(places), tuple(make))


def _hub(hub: Place, prefix: int) -> Iterator[Words]:
    inside = ("ip", "-n", hub.namespace)
    yield ("ip", "netns", "add", hub.namespace)
    yield (*inside, "link", "set", "lo", "up")
    yield (*inside, "link", "add", "bridge", "type", "bridge")
    yield (*inside, "address", "add", f"{hub.address}/{prefix}", "dev", "bridge")
    yield (*inside, "link", "set", "bridge", "up")


def _link(hub: Place, place: Place, port: str, prefix: int) -> Iterator[Words]:
    there, here = ("ip", "-n", hub.namespace), ("ip", "-n", place.namespace)
    yield ("ip", "netns", "add", place.namespace)
    yield (*there, "link", "add", port, "type", "veth", "peer", "name", DEVICE,
           "netns", place.namespace)  # fmt: skip
    yield (*there, "link", "set", port, "master", "bridge", "up")
    yield (*here, "link", "set", "lo", "up")
    yield (*here, "address", "add", f"{place.address}/{prefix}", "dev", DEVICE)
    yield (*here, "link", "set", DEVICE, "up")


def _shape(spec: NetworkSpec, namespace: str, device: str, *, both: bool) -> Iterator[Words]:
    """The rate, and with `both` also delay and loss."""
    add = ("tc", "-n", namespace, "qdisc", "add", "dev", device)
    where: Words = ("root", "handle", "1:")
    if both and (spec.delay_ms or spec.loss_percent):
        # Packets on their way at the full rate, which the queue must hold.
        flying = int(spec.rate_mbit * 1e6 / 8 * spec.delay_ms * 1e-3 / _PACKET)
        words: Words = ("netem", "limit", str(max(10_000, 2 * flying)))
        words += ("delay", f"{spec.delay_ms * 1e3:.0f}us") if spec.delay_ms else ()
        words += ("loss", f"{spec.loss_percent:g}%") if spec.loss_percent else ()
        yield (*add, *where, *words)
        where = ("parent", "1:1", "handle", "2:")
    if spec.rate_mbit:
        burst = max(_LEAST_BURST, int(spec.rate_mbit * 1e6 / 8 / _TICKS))
        yield (*add, *where, "tbf", "rate", f"{spec.rate_mbit * 1e6:.0f}bit",
               "burst", str(burst), "latency", "50ms")  # fmt: skip


def missing(which: Callable[[str], str | None] = shutil.which, user: int | None = None) -> str:
    """What this machine lacks for namespaces; "" if nothing that can be seen beforehand."""
    if (os.geteuid() if user is None else user) != 0:
        return "`network:` makes network namespaces, which needs root"
    absent = [tool for tool in ("ip", "tc") if which(tool) is None]
    if absent:
        return f"`network:` needs {' and '.join(absent)}: install iproute2"
    return ""


@contextmanager
def up(made: Plan, run: Runner | None = None) -> Iterator[None]:
    """Make the namespaces; remove them at the end, and also if making them fails."""
    if run is None:
        if lacking := missing():
            raise ConfigError(lacking)
        run = execute
        sweep(run)
    try:
        for command in made.make:
            run(command)
        yield
    finally:
        there = set(_namespaces(run))
        for command in made.remove:
            if command[-1] in there:
                _try(run, command)


def sweep(run: Runner) -> None:
    """Remove namespaces of fleets that were killed before they could."""
    for name in _namespaces(run):
        found = _NAMED.fullmatch(name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _try(run, ("ip", "netns", "delete", name))


def execute(command: Sequence[str]) -> str:
    """Run a command as root; says what is missing if the kernel refuses."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"network: {' '.join(command)}: {error}") from None
    if ended.returncode == 0:
        return ended.stdout
    said = ended.stderr.strip()
    kinds = {"netem": "sch_netem", "tbf": "sch_tbf"}
    kind = next((kind for kind in kinds if kind in command), "")
    if kind and "unknown" in said:
        raise ConfigError(f"network: this kernel has no {kind} (module {kinds[kind]})")
    raise ConfigError(f"network: {' '.join(command)}: {said or ended.returncode}")


def _namespaces(run: Runner) -> list[str]:
    return [line.split()[0] for line in run(("ip", "netns", "list")).splitlines() if line.strip()]


def _try(run: Runner, command: Words) -> None:
    try:
        run(command)
    except ConfigError as error:
        logger.warning("left behind: %s", error)
