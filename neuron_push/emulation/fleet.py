"""Fleets as a file describes them: emulated engines and, if wanted, the router before them.

model: tiny-gqa            # one of MODELS, or a model's folder or name
router: {port: 8000}
engines:
  - {name: prefill, role: prefill, device: trn2, tp: 2}
  - {name: decode, role: decode, device: trn2, vllm: 0.29.0, block_size: 48}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from neuron_push.emulation import VARIABLE, WORKER, environments, models
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.options import DeviceName, Options, Runner, encode
from neuron_push.engines import CONNECTOR, EngineOptions
from neuron_push.errors import ConfigError
from neuron_push.processes import HOST, Server, free_ports

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
    block_size: int = 0
    """Tokens; 0: the device's own."""
    blocks: Count = 512
    prefix_caching: bool = False
    runner: Runner = "gpu-v2"
    verify: Literal["full", "sampled"] = "full"
    profile: str = "instant"
    max_model_len: Count = 4096
    max_batched: Count = 512
    max_seqs: Count = 64
    connector: Literal["neuron-push", "vllm-push", "vllm-pull", "none"] = "neuron-push"
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


def load(path: Path) -> FleetSpec:
    """Read a fleet file; raises ConfigError saying what is wrong with it."""
    try:
        fleet = msgspec.yaml.decode(path.read_bytes(), type=FleetSpec)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None
    names = [engine.name for engine in fleet.engines]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: two engines have the same name")
    return fleet


class EmulatedEngine(Server):
    """A vLLM server over an emulated device."""

    def __init__(
        self, spec: EngineSpec, model: Path, logs: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        free = free_ports(2)
        self.spec = spec
        self.reports = logs / "reports"
        port, self.side_port = spec.port or free[0], spec.side_port or free[1]
        options = engine_options(spec, model, self.reports)
        command = options.command(port)
        command[0] = environments.python(spec.vllm, say)
        command += ["--served-model-name", SERVED]
        super().__init__(
            spec.name, command, port, logs / f"{spec.name}.log", options.variables(self.side_port)
        )

    @property
    def block_size(self) -> int:
        return self.spec.block_size or DEVICES[self.spec.device].block_tokens

    def summaries(self) -> list[dict[str, Any]]:
        """What its ranks have reported last."""
        return [
            json.loads((self.reports / f"{self.spec.name}-{rank}.json").read_text())
            for rank in range(self.spec.tp)
        ]


def engine_options(spec: EngineSpec, model: Path, reports: Path) -> EngineOptions:
    """The server that a spec asks for."""
    emulation = Options(
        device=spec.device, runner=spec.runner, verify=spec.verify, profile=spec.profile,
        report=str(reports.absolute()), fault=_fault(spec.fault),
    )  # fmt: skip
    executor = "uni" if spec.tp == 1 else "mp"
    arguments = [
        "--worker-cls", WORKER, "--tensor-parallel-size", str(spec.tp),
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


def _fault(name: str) -> Any:
    return name


def _transfer(spec: EngineSpec) -> dict[str, Any] | None:
    if spec.connector == "none":
        return None
    role = {"kv_role": ROLES[spec.role], "engine_id": spec.name}
    if spec.connector == "neuron-push":
        settings = {"accelerator": "emulated", **spec.settings}
        return {**CONNECTOR, **role, "kv_connector_extra_config": settings}
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

    @property
    def url(self) -> str:
        """Where clients should ask."""
        return self.router.url if self.router else self.engines[0].url


def build(spec: FleetSpec, logs: Path, say: Callable[[str], None]) -> Fleet:
    """Make the model and the servers' command lines."""
    model = models.find(spec.model, logs / "models")
    engines = tuple(EmulatedEngine(engine, model, logs, say) for engine in spec.engines)
    router = _router(spec.router, engines, logs) if spec.router is not None else None
    return Fleet(engines, router)


def _router(spec: RouterSpec, engines: tuple[EmulatedEngine, ...], logs: Path) -> Server:
    port = spec.port or free_ports(1)[0]
    words = [sys.executable, "-m", "neuron_push.cli", "router", "--host", HOST]
    words += ["--port", str(port)]
    for engine in engines:
        place = f"{engine.url}#side={engine.side_port}"
        if engine.spec.role != "decode":
            words += ["--prefill", place]
        if engine.spec.role != "prefill":
            words += ["--decode", place]
    return Server("router", [*words, *spec.arguments], port, logs / "router.log")
