"""An engine without a model in a process of its own, for `bench faults`: told, killed, restarted.

As in `bench hooks` (rig.py), vLLM's own scheduler and block manager drive a connector's two halves
over real NIXL. Here an engine takes a step every millisecond, as one under load does.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

from neuron_push.bench.pipe import answer

__all__ = ["BLOCKS", "CHUNK_BLOCKS", "Recipe", "Seat"]

BLOCKS: Final = 1200
# Blocks that a chunk of the prompt fills.
CHUNK_BLOCKS: Final = 128
_LIFE: Final = 600
_PR_SET_PDEATHSIG: Final = 1
_PRELOAD: Final = ("neuron_push.bench.seat_imports",)


@dataclass(frozen=True)
class Recipe:
    """Which engine; `model` is a folder of its configuration, `policy` vLLM's for failed loads."""

    connector: str
    role: str
    engine: str
    port: int
    policy: str
    model: str


class Seat:
    """One engine in another process; every method of `_Engine` is a `call` away."""

    def __init__(self, recipe: Recipe) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        self.recipe = recipe
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, recipe), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has started."""
        self._hear(180)

    def again(self, engine: str) -> Seat:
        """The engine started anew on its port, with the id of a new process."""
        return Seat(replace(self.recipe, engine=engine))

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method there and wait for its result."""
        self._pipe.send((method, arguments))
        return self._hear(60)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. Idempotent."""
        self._process.kill()
        self._process.join(10)

    def _hear(self, within: float) -> Any:
        return answer(self._pipe, self.recipe.engine, within)


class _Engine:
    """The child's end."""

    def __init__(self, recipe: Recipe) -> None:
        from neuron_push.bench import rig

        self.side = rig.Side(
            recipe.connector, recipe.role, BLOCKS, recipe.port, engine=recipe.engine,
            policy=recipe.policy, model=recipe.model,
        )  # fmt: skip
        self._schedule = self.side.scheduler.schedule
        self.side.scheduler.schedule = self._note
        self._legs: dict[str, Any] = {}
        # When a request first computed tokens here, and when it ended (monotonic).
        self._computed: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._held = 0
        self._budget: int | None = None

    def _note(self) -> Any:
        output = self._schedule()
        now = time.monotonic()
        for name in output.num_scheduled_tokens:
            self._computed.setdefault(name, now)
            self._held += name in self._legs
        return output

    def step(self) -> None:
        """One engine step, unless the request stands still after so many chunks."""
        if self._budget is not None and self._held >= self._budget:
            return
        self.side.step()
        now = time.monotonic()
        for name in list(self._legs):
            if name not in self.side.scheduler.requests:
                self._ended[name] = now
                self.side.drop(self._legs.pop(name))

    def add(self, name: str, tokens: list[int], params: dict[str, Any]) -> None:
        """A request of one output token."""
        self._legs[name] = self.side.add(tokens, params, name, 1)

    def stand_after(self, chunks: int | None) -> None:
        """Take no step once requests have had so many chunks from now on; None: go on."""
        self._held, self._budget = 0, chunks

    def stands(self) -> bool:
        """Whether it does."""
        return self._budget is not None and self._held >= self._budget

    def abort(self, name: str) -> None:
        """The client leaves."""
        from vllm.v1.request import RequestStatus

        self.side.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def computed(self, name: str) -> float | None:
        """When it began to compute a request."""
        return self._computed.get(name)

    def ended(self, name: str) -> float | None:
        """When a request left the engine."""
        return self._ended.get(name)

    def identity(self) -> str:
        """The engine's id as its configuration has it."""
        return str(self.side.engine_id)

    def free(self) -> int:
        """KV blocks that nothing holds."""
        return int(self.side.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def _serve(pipe: Connection, recipe: Recipe) -> None:
    signal.alarm(_LIFE)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        from neuron_push.bench import shells

        shells.prepare()
        here = _Engine(recipe)
    except Exception as error:  # noqa: BLE001  the parent raises it again
        pipe.send((False, repr(error)))
        return
    pipe.send((True, None))
    while True:
        try:
            if not pipe.poll(0.001):
                here.step()
                continue
            method, arguments = pipe.recv()
            pipe.send((True, getattr(here, method)(*arguments)))
        except EOFError:
            os._exit(0)
        except Exception as error:  # noqa: BLE001  the parent raises it again
            pipe.send((False, repr(error)))
            time.sleep(0.1)
