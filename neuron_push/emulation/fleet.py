"""Fleets as a file describes them: emulated engines and, if wanted, the router before them.

model: tiny-gqa            # one of MODELS, or a model's folder or name
router: {port: 8000}
engines:
  - {name: prefill, role: prefill, device: trn2, tp: 2}
  - {name: decode, role: decode, device: trn2, vllm: 0.29.0, block_size: 48}
network: {rate_mbit: 1000, delay_ms: 0.1}   # optional: namespaces, needs root
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from neuron_push.emulation import VARIABLE, WORKER, environments, models, network
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.network import NetworkSpec, Place
from neuron_push.emulation.options import DeviceName, Options, Runner, encode
from neuron_push.emulation.relay import Relay
from neuron_push.engines import CONNECTOR, EngineOptions
from neuron_push.errors import ConfigError
from neuron_push.ports import HOST, free_ports
from neuron_push.processes import Server

Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
SERVED: Final = "emulated"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine of a fleet."""

    name: str
    role: Literal["prefill", "decode", "both"] = "both"
    device: DeviceName = "p5en"
    vllm: str = ""
    """Version; "" is the one beside this package."""
    tp: Count = 1
    pp: Count = 1
    """Pipeline stages. KV of the last one alone decides tokens; wrong rows are counted in all."""
    block_size: int = 0
    """Tokens; 0: the device's own."""
    blocks: Count = 512
    prefix_caching: bool = False
    runner: Runner = "gpu-v2"
    verify: Literal["full", "sampled", "none"] = "full"
    profile: str = "instant"
    link: bool = False
    """Whether WRITEs take the time of the profile's link."""
    max_model_len: Count = 4096
    max_batched: Count = 512
    max_seqs: Count = 64
    connector: Literal["neuron-push", "vllm-push", "vllm-pull", "decode-bench", "none"] = (
        "neuron-push"
    )
    huge_pages: bool = False
    """See `options`."""
    progress_delay: Annotated[int, Meta(ge=0)] = 0
    """Of vLLM's connectors, see `options`."""
    settings: dict[str, Any] = {}
    """More of kv_connector_extra_config."""
    fault: str = ""
    """A deliberate fault of the device, see `options`."""
    port: Port | None = None
    side_port: Port | None = None
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router before the fleet."""

    port: Port | None = None
    arguments: tuple[str, ...] = ()


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet file."""

    engines: tuple[EngineSpec, ...]
    model: str = "tiny-gqa"
    router: RouterSpec | None = None
    network: NetworkSpec | None = None


def load(path: Path) -> FleetSpec:
    """Read a fleet file; raises ConfigError saying what is wrong with it."""
    try:
        fleet = msgspec.yaml.decode(path.read_bytes(), type=FleetSpec)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None
    names = [engine.name for engine in fleet.engines]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: two engines have the same name")
    if fleet.network is not None:
        network.plan(fleet.network, len(names), os.getpid())
    return fleet


class EmulatedEngine(Server):
    """A vLLM server over an emulated device."""

    def __init__(
        self,
        spec: EngineSpec,
        model: Path,
        logs: Path,
        say: Callable[[str], None] = lambda _: None,
        place: Place | None = None,
    ) -> None:
        free = free_ports(2)
        self.spec = spec
        self.place = place
        self.reports = logs / "reports"
        port, self.side_port = spec.port or free[0], spec.side_port or free[1]
        options = engine_options(spec, model, self.reports)
        command = options.command(port)
        command[0] = environments.python(spec.vllm, say)
        command += ["--served-model-name", SERVED]
        variables = options.variables(self.side_port)
        if place is not None:
            command = place.inside([*command, "--host", place.address])
            variables |= _addresses(place)
        super().__init__(spec.name, command, port, logs / f"{spec.name}.log", variables)

    @property
    def entry(self) -> str:
        """How the router names this engine."""
        host = self.place.address if self.place else HOST
        return f"http://{host}:{self.port}#side={self.side_port}"

    @property
    def block_size(self) -> int:
        return self.spec.block_size or DEVICES[self.spec.device].block_tokens

    def summaries(self) -> list[dict[str, Any]]:
        """What its ranks have reported last."""
        return [
            json.loads((self.reports / f"{self.spec.name}-{rank}.json").read_text())
            for rank in range(self.spec.tp * self.spec.pp)
        ]


def engine_options(spec: EngineSpec, model: Path, reports: Path) -> EngineOptions:
    """The server that a spec asks for."""
    emulation = Options(
        device=spec.device, runner=spec.runner, verify=spec.verify, profile=spec.profile,
        report=str(reports.absolute()), fault=_fault(spec.fault), link=spec.link,
        progress_delay=spec.progress_delay,
        huge_pages=spec.huge_pages,
    )  # fmt: skip
    executor = "uni" if spec.tp * spec.pp == 1 else "mp"
    arguments = [
        "--worker-cls", WORKER, "--tensor-parallel-size", str(spec.tp),
        "--pipeline-parallel-size", str(spec.pp),
        "--distributed-executor-backend", executor, "--max-num-seqs", str(spec.max_seqs),
    ]  # fmt: skip
    return EngineOptions(
        name=spec.name, model=model, transfer=_transfer(spec),
        block_size=spec.block_size or DEVICES[spec.device].block_tokens, kv_blocks=spec.blocks,
        max_model_len=spec.max_model_len, max_batched=spec.max_batched,
        prefix_caching=spec.prefix_caching, arguments=[*arguments, *spec.arguments],
        environment={
            VARIABLE: encode(emulation), "OMP_NUM_THREADS": "1", **spec.environment,
        },
    )  # fmt: skip


def _addresses(place: Place) -> dict[str, str]:
    """What makes an engine's transfers use its own address."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": place.address, "VLLM_HOST_IP": place.address,
        "UCX_NET_DEVICES": network.DEVICE,
    }  # fmt: skip


def _fault(name: str) -> Any:
    return name


def _transfer(spec: EngineSpec) -> dict[str, Any] | None:
    if spec.connector == "none":
        return None
    role = {"kv_role": ROLES[spec.role], "engine_id": spec.name}
    if spec.connector == "neuron-push":
        settings = {"accelerator": "emulated", **spec.settings}
        return {**CONNECTOR, **role, "kv_connector_extra_config": settings}
    if spec.connector == "decode-bench":
        # KV is there when a request is scheduled; what it holds does not matter.
        settings = {"startup_fill": True, **spec.settings}
        return {
            "kv_connector": "DecodeBenchConnector", **role, "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }  # fmt: skip
    name = "NixlPushConnector" if spec.connector == "vllm-push" else "NixlConnector"
    return {
        "kv_connector": name, **role, "kv_role": "kv_both", "kv_buffer_device": "cpu",
        "kv_connector_extra_config": spec.settings,
    }  # fmt: skip


@dataclass(frozen=True)
class Fleet:
    """Servers of a fleet, not yet started."""

    engines: tuple[EmulatedEngine, ...]
    router: Server | None
    plan: network.Plan | None = None

    @property
    def url(self) -> str:
        """Where clients should ask."""
        return self.router.url if self.router else self.engines[0].url

    @contextmanager
    def connected(self) -> Iterator[None]:
        """The fleet's network, if it has one, and the host's way into it."""
        with ExitStack() as stack:
            if self.plan is not None:
                stack.enter_context(network.up(self.plan))
                doors: list[tuple[Server, Place]] = list(
                    zip(self.engines, self.plan.engines, strict=True)
                )
                doors += [(self.router, self.plan.hub)] if self.router else []
                for server, place in doors:
                    stack.enter_context(Relay(server.port, place, server.port))
            yield


def build(spec: FleetSpec, logs: Path, say: Callable[[str], None]) -> Fleet:
    """Make the model and the servers' command lines."""
    model = models.find(spec.model, logs / "models")
    plan = None
    if spec.network is not None:
        plan = network.plan(spec.network, len(spec.engines), os.getpid())
    places: tuple[Place | None, ...] = plan.engines if plan else (None,) * len(spec.engines)
    engines = tuple(
        EmulatedEngine(engine, model, logs, say, place)
        for engine, place in zip(spec.engines, places, strict=True)
    )
    hub = plan.hub if plan else None
    router = _router(spec.router, engines, logs, hub) if spec.router is not None else None
    return Fleet(engines, router, plan)


def _router(
    spec: RouterSpec, engines: tuple[EmulatedEngine, ...], logs: Path, hub: Place | None
) -> Server:
    port = spec.port or free_ports(1)[0]
    words = [sys.executable, "-m", "neuron_push.cli", "router"]
    words += ["--host", hub.address if hub else HOST, "--port", str(port)]
    for engine in engines:
        if engine.spec.role != "decode":
            words += ["--prefill", engine.entry]
        if engine.spec.role != "prefill":
            words += ["--decode", engine.entry]
    words += spec.arguments
    return Server("router", hub.inside(words) if hub else words, port, logs / "router.log")
