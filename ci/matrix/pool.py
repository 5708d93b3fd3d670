"""Engines shared by cells: started when a cell needs them, stopped when room is short."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ci.matrix.cells import Cell, Side
from neuron_push import processes
from neuron_push.emulation import models
from neuron_push.emulation.fleet import EmulatedEngine, EngineSpec

Role = Literal["prefill", "decode"]
# Aborted legs leave prompts that nobody fetches; cells wait for them to be let go.
SETTINGS = {"lease": 4.0}


@dataclass(frozen=True)
class Key:
    """Cells that agree on these share an engine."""

    role: Role
    side: Side
    model: str
    connector: str
    prefix_caching: bool
    runner: str
    kv_tokens: int
    timed: str = ""
    streaming: str = "chunk"

    @property
    def name(self) -> str:
        words = [self.role, str(self.side), self.model, self.connector, self.runner]
        words += [] if self.prefix_caching else ["uncached"]
        words += [str(self.kv_tokens), *([self.timed] if self.timed else [])]
        words += [] if self.streaming == "chunk" else [self.streaming]
        return "-".join(words).replace("/", ".").replace("@", ".")


def keys(cell: Cell) -> tuple[Key, Key]:
    """The engines that a cell needs."""
    rest = (
        cell.model, cell.connector, cell.prefix_caching, cell.runner, cell.kv_tokens, cell.timed
    )  # fmt: skip
    prefill = Key("prefill", cell.prefill, *rest, streaming=cell.streaming)
    return prefill, Key("decode", cell.decode, *rest)


class Pool:
    """Running engines, at most `most_ranks` worker processes."""

    def __init__(self, logs: Path, most_ranks: int, say: Callable[[str], None]) -> None:
        self._logs = logs
        self._most = most_ranks
        self._say = say
        self._running: dict[Key, EmulatedEngine] = {}
        self._used: dict[Key, float] = {}
        self._ready: set[Key] = set()
        self._broken: dict[Key, str] = {}

    def get(
        self, cell: Cell, upcoming: Cell | None = None
    ) -> tuple[EmulatedEngine, EmulatedEngine]:
        """The cell's two engines, serving; those of the `upcoming` cell begin to start meanwhile.

        Raises ServerFailed or ConfigError.
        """
        wanted = keys(cell)
        for key in wanted:
            if key in self._broken:
                raise processes.ServerFailed(self._broken[key])
        self._make_room(wanted)
        self._launch(wanted)
        if upcoming is not None:
            self._launch(keys(upcoming), only_if_room=True)
        try:
            self._await(wanted)
        except processes.ServerFailed as error:
            # A free port may be taken by another process before the server binds it.
            self._say(f"once more: {str(error).splitlines()[0]}")
            self._again(wanted)
        for key in wanted:
            self._used[key] = time.monotonic()
        prefill, decode = wanted
        return self._running[prefill], self._running[decode]

    def close(self) -> None:
        """Stop everything."""
        processes.stop(list(self._running.values()))
        self._running.clear()
        self._ready.clear()

    def _launch(self, wanted: tuple[Key, ...], *, only_if_room: bool = False) -> None:
        for key in wanted:
            if self._alive(key) or key in self._broken:
                continue
            if only_if_room and self._ranks() + key.side.ranks > self._most:
                continue
            self._running[key] = self._make(key)
            self._running[key].start()

    def _await(self, wanted: tuple[Key, ...]) -> None:
        waiting = [key for key in wanted if key not in self._ready]
        processes.wait_ready([self._running[key] for key in waiting], progress=self._say)
        self._ready.update(waiting)

    def _again(self, wanted: tuple[Key, ...]) -> None:
        """The last try, one by one; what fails is not tried again for other cells."""
        for key in wanted:
            if key in self._ready:
                continue
            self._drop(key)
            self._launch((key,))
            try:
                self._await((key,))
            except processes.ServerFailed as error:
                self._drop(key)
                self._broken[key] = str(error)
                raise

    def _alive(self, key: Key) -> bool:
        engine = self._running.get(key)
        if engine is not None and not engine.running:
            self._drop(key)
            engine = None
        return engine is not None

    def _drop(self, key: Key) -> None:
        self._ready.discard(key)
        if (engine := self._running.pop(key, None)) is not None:
            engine.stop()

    def _make_room(self, wanted: tuple[Key, ...]) -> None:
        """Stop what was used longest ago until the wanted engines fit."""
        needed = sum(key.side.ranks for key in wanted if not self._alive(key))
        spare = [key for key in self._running if key not in wanted]
        spare.sort(key=lambda key: self._used.get(key, 0.0))
        while spare and self._ranks() + needed > self._most:
            self._drop(spare.pop(0))

    def _ranks(self) -> int:
        return sum(key.side.ranks for key in self._running)

    def _make(self, key: Key) -> EmulatedEngine:
        side = key.side
        settings: dict[str, Any] = dict(SETTINGS) if key.connector == "neuron-push" else {}
        if key.streaming != "chunk":
            settings["streaming"] = key.streaming
        spec = EngineSpec(
            name=key.name, role=key.role, device=side.device, vllm=side.vllm,  # type: ignore[arg-type]
            tp=side.tp, pp=side.pp, block_size=side.block,
            blocks=max(64, key.kv_tokens // side.block),
            prefix_caching=key.prefix_caching, runner=key.runner,  # type: ignore[arg-type]
            profile=key.timed or "quick", verify="sampled" if key.timed else "full",
            connector=key.connector, settings=settings,  # type: ignore[arg-type]
        )  # fmt: skip
        model = models.find(key.model, self._logs / "models")
        return EmulatedEngine(spec, model, self._logs, self._say)
