"""Versions, duplicates, placeholders, and the plugin as vLLM would load it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from neuron_push import versions
from neuron_push.doctor.finding import Finding, error, note, ok, warning
from neuron_push.doctor.machine import Machine

__all__ = ["duplicates", "placeholders", "platform", "plugin", "tested"]

# The lowest version of each name that is not an empty package of the public index. The real ones
# come from AWS's index.
REAL: Final = {"torch-neuronx": "2", "neuronx-distributed": "0.9", "vllm-neuron": "0.21"}
AWS_INDEX: Final = "AWS's package index (pip.repos.neuron.amazonaws.com)"
_FLAVOURS: Final = ("nixl-cu12", "nixl-cu13")
_GROUP: Final = "vllm.general_plugins"
_NAME: Final = "neuron_push"


def tested(machine: Machine) -> Iterator[Finding]:
    """vLLM and NIXL against the ranges that are tested."""
    for component in (versions.VLLM, versions.NIXL):
        check = f"version.{component.name}"
        found = [(d, v) for d in component.distributions if (v := machine.version(d))]
        if not found:
            yield warning(
                check,
                f"{component.name} is not installed",
                "an engine needs it; a router does not",
                f"install {component.supported} where engines run",
            )
            continue
        distribution, version = found[0]
        seen = f"{component.name} {version} ({distribution})"
        if component.accepts(version):
            yield ok(check, f"{seen}, tested")
            continue
        allowed = machine.environ.get(versions.ALLOW_UNTESTED) == "1"
        make = warning if allowed else error
        yield make(
            check,
            f"{seen} is outside the tested range, {component.supported}",
            "hooks and formats change between releases"
            + ("" if allowed else "; the connector refuses to load"),
            f"install {component.supported}"
            + ("" if allowed else f", or set {versions.ALLOW_UNTESTED}=1 to try it"),
        )


def duplicates(machine: Machine) -> Iterator[Finding]:
    """Two flavours of NIXL bring two builds of UCX into one process."""
    found = [f"{name} {version}" for name in _FLAVOURS if (version := machine.version(name))]
    if len(found) > 1:
        yield error(
            "nixl.flavours",
            f"{' and '.join(found)} are both installed",
            "both bring a UCX of their own, and a process that loads two of them crashes or picks "
            "the wrong one at the first transfer",
            "keep the one that fits the CUDA libraries here: pip uninstall the other, and install "
            "`nixl` itself with --no-deps, since it asks for both",
        )
    elif found:
        yield ok("nixl.flavours", f"one flavour: {found[0]}")


def placeholders(machine: Machine) -> Iterator[Finding]:
    """Empty packages that the public index carries under the names of AWS's."""
    for name, real in REAL.items():
        version = machine.version(name)
        if version and versions.parse(version) < versions.parse(real):
            yield error(
                f"version.{name}",
                f"{name} {version} is a placeholder without code",
                "it came from the public index; the real package is elsewhere, so nothing of "
                "Neuron is installed",
                f"pip uninstall {name}, then install {name}>={real} from {AWS_INDEX}",
            )
        elif version:
            yield ok(f"version.{name}", f"{name} {version}")


def plugin(machine: Machine) -> Iterator[Finding]:
    """Whether vLLM finds the connector by name: the entry point, and who may hide it."""
    points = [point for point in machine.points(_GROUP) if point.name == _NAME]
    if not points:
        yield error(
            "plugin.found",
            f"no entry point {_NAME!r} in {_GROUP}",
            "vLLM does not know NeuronPushConnector by name",
            "pip install neuron-push into the engine's environment; or name the class's module in "
            "kv_connector_module_path",
        )
        return
    # A source folder installed in place lists its own version a second time when it is the
    # working directory.
    points = list(dict.fromkeys(points))
    if len(points) > 1:
        yield warning(
            "plugin.found",
            f"{len(points)} distributions offer it: {', '.join(p.distribution for p in points)}",
            "an old installation (a left-over .egg-info) may be loaded in place of the new one",
            "pip uninstall neuron-push until none is left, then install it once",
        )
    yield from _allowed(machine)


def _allowed(machine: Machine) -> Iterator[Finding]:
    value = machine.environ.get("VLLM_PLUGINS")
    if value is None:
        yield ok("plugin.found", f"entry point {_NAME}, not filtered")
        return
    names = [name.strip() for name in value.split(",") if name.strip()]
    every = {p.name for group in (_GROUP, "vllm.platform_plugins") for p in machine.points(group)}
    if _NAME not in names:
        yield error(
            "plugin.allowed",
            f"VLLM_PLUGINS={value!r} leaves out {_NAME}",
            "vLLM loads only the plugins named there, and says nothing about the others",
            f"add {_NAME} to VLLM_PLUGINS, or unset it",
        )
    else:
        yield ok("plugin.allowed", f"VLLM_PLUGINS names {_NAME}")
    if unknown := [name for name in names if name not in every]:
        yield warning(
            "plugin.names",
            f"VLLM_PLUGINS names {', '.join(unknown)}, which no distribution offers",
            "vLLM ignores such names without a word",
            f"installed plugins: {', '.join(sorted(every)) or 'none'}",
        )


def platform(machine: Machine) -> Iterator[Finding]:
    """Load vLLM as an engine would: which platform it takes, and whether our plugin loads."""
    if not any(machine.version(name) for name in versions.VLLM.distributions):
        return
    ran = machine.child(["plugin"], 180.0)
    answer = _json(ran.out)
    if ran.status != 0 or answer is None:
        yield error(
            "plugin.loads",
            f"vLLM or the plugin does not load: {_last(ran.err) or ran.status}",
            "an engine fails the same way, or goes on without the connector",
            "mend what the message names; run `python -m neuron_push.doctor.child plugin` for all "
            "of it",
        )
        return
    if answer["refused"]:
        yield error(
            "plugin.loads",
            f"the connector refuses to load: {answer['refused']}",
            "engines configured with it do not start",
            "do what the message says",
        )
    else:
        yield ok("plugin.loads", "the connector loads")
    yield from _chosen(machine, str(answer["device"]))


def _chosen(machine: Machine, device: str) -> Iterator[Finding]:
    present = {
        "neuron": machine.names("/dev/neuron[0-9]*"),
        "cuda": machine.names("/dev/nvidia[0-9]*"),
    }
    missed = [kind for kind, files in present.items() if files and kind != device]
    if missed and device not in present:
        yield error(
            "plugin.platform",
            f"vLLM runs on {device!r} although {' and '.join(missed)} devices are here",
            "a platform plugin that fails to load is passed over with a DEBUG message",
            "start once with VLLM_LOGGING_LEVEL=DEBUG and read why the plugin was refused; on "
            f"Trainium vllm-neuron must be installed from {AWS_INDEX}",
        )
    else:
        yield note("plugin.platform", f"vLLM runs on {device!r}")


def _json(text: str) -> Any:
    lines: Sequence[str] = text.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
