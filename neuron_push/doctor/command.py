"""`neuron-push doctor`: findings as text or JSON, and an exit status."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Final

from neuron_push import __version__
from neuron_push.config import Config
from neuron_push.doctor import backends, devices, fabric, network, peer, software, variables
from neuron_push.doctor.finding import Finding, error, exit_status
from neuron_push.doctor.machine import Machine
from neuron_push.errors import ConfigError
from neuron_push.protocol import Address
from neuron_push.sidechannel import Keyring, add_option, ask

__all__ = ["CHECKS", "add_arguments", "examine", "main"]

Check = Callable[[Machine], Iterable[Finding]]
CHECKS: Final[tuple[Check, ...]] = (
    software.tested,
    software.duplicates,
    software.placeholders,
    software.plugin,
    software.platform,
    devices.accelerator,
    devices.neuron,
    devices.nvidia,
    fabric.devices,
    fabric.huge_pages,
    fabric.locked_memory,
    fabric.shared_memory,
    variables.check,
    backends.check,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument(
        "--peer", type=address, metavar="HOST:PORT",
        help="another engine's side channel: say whether it and the engine here can talk",
    )  # fmt: skip
    parser.add_argument(
        "--engine", type=address, metavar="HOST:PORT",
        help="side channel of the engine here (default: VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT)",
    )  # fmt: skip
    add_option(parser)
    parser.add_argument(
        "--data-parallel", type=int, default=1, metavar="N", help="data-parallel ranks here"
    )
    parser.add_argument(
        "--peer-only", action="store_true", help="with --peer: skip the checks of this machine"
    )


def address(text: str) -> Address:
    """HOST:PORT, for argparse."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return Address(host.strip("[]"), int(port))


def main(args: argparse.Namespace, machine: Machine | None = None) -> int:
    """Examine, print, and return 0 if all is well, 1 with warnings, 2 with errors."""
    machine = machine or Machine()
    findings = []
    for finding in examine(machine, args):
        findings.append(finding)
        if not args.json:
            _say(text(finding))
    status = exit_status(findings)
    _say(report(machine, findings) if args.json else summary(findings))
    return status


def examine(machine: Machine, args: argparse.Namespace) -> Iterator[Finding]:
    """Every finding, in the order in which they are known."""
    if not (args.peer and args.peer_only):
        for check in CHECKS:
            yield from check(machine)
    here: Address | None = args.engine
    if here is None:
        try:
            settings = Config.parse({}, machine.environ)
        except ConfigError as problem:
            yield error("network.host", str(problem), "engines do not start with it", "mend it")
            return
        here = Address(settings.side_channel_host, settings.side_channel_port)
    try:
        asking = partial(ask, ring=Keyring.of(args.side_channel_keys))
    except ConfigError as problem:
        yield error("network.keys", str(problem), "engines do not start with it", "mend it")
        return
    if not (args.peer and args.peer_only):
        yield from network.host(machine, here)
        yield from network.ports(machine, here, args.data_parallel, asking)
    if args.peer:
        yield from peer.peer(machine, here, args.peer, asking)


def text(finding: Finding) -> str:
    """One finding for people."""
    lines = [f"{finding.level:8}{finding.check}: {finding.seen}"]
    if finding.why:
        lines.append(f"{'':8}why: {finding.why}")
    if finding.remedy:
        lines.append(f"{'':8}do:  {finding.remedy}")
    return "\n".join(lines)


def summary(findings: Iterable[Finding]) -> str:
    """The last line."""
    levels = [finding.level for finding in findings]
    errors, warnings = levels.count("error"), levels.count("warning")
    return f"{len(levels)} findings, {errors} errors, {warnings} warnings"


def report(machine: Machine, findings: list[Finding]) -> str:
    """Everything for programs and for bug reports; secrets in variables are left out."""
    return json.dumps(
        {
            "neuron_push": __version__,
            "status": exit_status(findings),
            "findings": [asdict(finding) for finding in findings],
            "environment": variables.shown(machine),
        },
        indent=2,
    )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
