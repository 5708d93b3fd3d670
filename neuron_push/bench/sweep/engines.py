"""The engines of a sweep: one pair per kind, made from the template that a fleet file is.

Only one pair may be awake at a time: the others are stopped in their tracks (SIGSTOP), as an
idle engine still wakes up, and vLLM's keep a thread of NIXL busy. A pair is paused only while it
has no traffic, so nothing waits for an answer meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from neuron_push import processes
from neuron_push.bench.sweep import proxy
from neuron_push.bench.sweep.columns import KINDS
from neuron_push.emulation import models
from neuron_push.emulation.fleet import EmulatedEngine, EngineSpec, FleetSpec
from neuron_push.errors import ConfigError

# Of an engine without its KV: API server and engine core.
OVERHEAD: Final = 1 << 30
Say = Callable[[str], None]


@dataclass(frozen=True)
class Template:
    """The two engines that every kind varies."""

    prefill: EngineSpec
    decode: EngineSpec
    model: str

    @classmethod
    def of(cls, fleet: FleetSpec) -> Template:
        """Raises ConfigError unless the fleet has a prefill and a decode engine."""
        found = {
            role: [each for each in fleet.engines if each.role == role]
            for role in ("prefill", "decode")
        }
        if any(len(each) != 1 for each in found.values()):
            raise ConfigError("the fleet of a sweep has one prefill and one decode engine")
        return cls(found["prefill"][0], found["decode"][0], fleet.model)


class Pair:
    """The engines of one kind."""

    def __init__(self, kind: str, template: Template, logs: Path) -> None:
        self.kind = kind
        model = models.find(template.model, logs / "models")
        make = KINDS[kind]
        specs = [template.prefill, template.decode] if make.prefill else [template.decode]
        self.engines = [
            EmulatedEngine(_spec(spec, kind), model, logs / kind) for spec in specs
        ]  # fmt: skip
        self.prefill = self.engines[0] if make.prefill else None
        self.decode = self.engines[-1]

    def target(self, dispatch: Any) -> proxy.Target:
        """What the proxy needs to know."""
        legs = {"prefill": self.prefill, "decode": self.decode}
        known = {
            role: proxy.Engine(
                url=each.url, name=each.spec.name, side_port=each.side_port, tp=each.spec.tp
            )
            for role, each in legs.items()
            if each is not None
        }
        return proxy.Target(dispatch=dispatch, **known)

    def check(self) -> None:
        """Raise ServerFailed if an engine has ended."""
        for engine in self.engines:
            if not engine.running:
                raise processes.ServerFailed(f"{engine.name} has ended{engine.tail()}")

    def pause(self) -> None:
        """Stop them in their tracks."""
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        """Let them go on."""
        for engine in self.engines:
            engine.resume()


def _spec(spec: EngineSpec, kind: str) -> EngineSpec:
    make = KINDS[kind]
    ours = make.connector == "neuron-push"
    verify = "none" if make.connector == "decode-bench" else spec.verify
    settings = {**(spec.settings if ours else {}), **make.settings}
    if not ours:
        # An emulated link is under this connector only.
        spec = msgspec.structs.replace(spec, link=False)
    return msgspec.structs.replace(
        spec, name=f"{kind}-{spec.role}", connector=make.connector, settings=settings,
        verify=verify, runner=make.runner or spec.runner, port=None, side_port=None,
    )  # fmt: skip


def memory_needed(kinds: Iterable[str], template: Template, token_bytes: int) -> int:
    """Bytes that the engines of these kinds occupy together."""
    total = 0
    for kind in kinds:
        specs = [template.prefill, template.decode] if KINDS[kind].prefill else [template.decode]
        for spec in specs:
            total += OVERHEAD + spec.blocks * (spec.block_size or 16) * token_bytes
    return total


def memory_free() -> int:
    """Bytes that this machine can give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


class Pairs:
    """The pairs that are up. Leaving the `with` block stops all of them."""

    def __init__(self, template: Template, logs: Path, say: Say, *, together: bool) -> None:
        self._template = template
        self._logs = logs
        self._say = say
        self.together = together
        self._up: dict[str, Pair] = {}

    def awake(self, kind: str, warm: Callable[[Pair], None]) -> Pair:
        """The pair of this kind, running, all others paused; started (and warmed up) if need be."""
        for name, pair in list(self._up.items()):
            if name != kind and not self.together:
                processes.stop(pair.engines)
                del self._up[name]
            elif name != kind:
                pair.pause()
        if kind in self._up:
            pair = self._up[kind]
            pair.resume()
            pair.check()
            return pair
        pair = Pair(kind, self._template, self._logs)
        self._up[kind] = pair
        self._say(f"starting the engines of {kind}")
        for engine in pair.engines:
            engine.start()
        processes.wait_ready(pair.engines, progress=self._say)
        warm(pair)
        return pair

    def summaries(self, kind: str) -> list[dict[str, Any]]:
        """What the emulated devices of a pair have reported last."""
        return [each for engine in self._up[kind].engines for each in engine.summaries()]

    def stop(self) -> None:
        """Stop all."""
        engines = [engine for pair in self._up.values() for engine in pair.engines]
        processes.stop(engines)
        self._up.clear()


@contextmanager
def pairs(template: Template, logs: Path, say: Say, *, together: bool) -> Iterator[Pairs]:
    """Pairs started on demand, stopped at the end whatever happens."""
    up = Pairs(template, logs, say, together=together)
    try:
        yield up
    finally:
        up.stop()
