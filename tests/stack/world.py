"""A world: engines, a router, people, and misfortune; then calm, and everything must be over."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import neuron_push.vllm.pins as pins_module
import neuron_push.vllm.scheduler as scheduler_module
from neuron_push import versions
from neuron_push.errors import TransportError
from neuron_push.plan import ways
from neuron_push.protocol import Address, encode
from neuron_push.router import policies
from neuron_push.router.app import Router
from neuron_push.router.dispatch import Rules
from neuron_push.router.legs import Limits
from neuron_push.router.metrics import Metrics
from neuron_push.router.places import Place
from neuron_push.router.settings import Settings
from tests.stack.clients import Client
from tests.stack.clock import Clock, Violation, VirtualLoop
from tests.stack.device import Golden
from tests.stack.engine import Engine
from tests.stack.fabric import StormyFabric, Weather
from tests.stack.http import Doors, Session
from tests.stack.leftovers import leftovers
from tests.stack.shape import Shape
from tests.stack.wire import Wire

SETTINGS = {
    "lease": 1.0, "patience": 3.0, "alive_interval": 0.1, "silence": 0.6, "resend": 0.02,
    "resend_most": 0.2, "greeting_timeout": 0.3, "drain_timeout": 1.0, "move_timeout": 0.5,
    "rotation_interval": 0.2, "slice_bytes": 1 << 16, "min_run": 1, "staging_slabs": 0,
    "accelerator": "cpu",
}  # fmt: skip
installed = cache(versions._version)  # reading it again and again takes time
# Longest that anything may take once faults have stopped: a client's own time-outs (two legs of
# 8 s), and after them what tests/rendezvous/world.py adds up for a transfer.
BOUND = 30.0


@dataclass(frozen=True)
class Profile:
    """What kind of trouble a world has."""

    prefills: tuple[Shape, ...] = (Shape("kv_producer"),)
    decodes: tuple[Shape, ...] = (Shape("kv_consumer"),)
    weather: Weather = field(default_factory=Weather)
    mode: Any = "push"
    clients: dict[str, float] = field(default_factory=lambda: {"routed": 1.0})
    requests: int = 25
    seconds: float = 1.0
    crowds: int = 0  # moments at which people come; 0: any time
    leave: float = 0.0  # share of people who leave before they are answered
    long: int = 120  # tokens of a prompt at most
    crashes: int = 0
    freezes: int = 0
    quarrels: int = 0  # connections that break though both ends live
    resets: int = 0  # of an engine's prefix cache, which preempts all that runs
    settings: tuple[tuple[str, Any], ...] = ()


class World:
    """Everything of one seed. `run` plays it."""

    def __init__(self, seed: int, profile: Profile) -> None:
        self.profile, self.weather = profile, Weather()
        # Chunks travel one by one, or wait for more as they do by default.
        batch = {"batch_tokens": 48 if seed % 3 == 2 else 0}
        self.settings = {**SETTINGS, **batch, **dict(profile.settings)}
        self.clock = Clock(seed)
        self.notes: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.broken: list[BaseException] = []
        self.engines: dict[str, Engine] = {}
        self._bases = [self.clock.rng.choices(range(3, 500), k=200) for _ in range(3)]

    # ------------------------------------------------------------------ what people ask for

    def prompt(self) -> list[int]:
        """New, or like an earlier one up to somewhere, or just like it."""
        rng = self.clock.rng
        length = rng.randint(1, self.profile.long)
        if rng.random() < 0.4:
            return rng.choices(range(3, 500), k=length)
        base = rng.choice(self._bases)[:length]
        return base if rng.random() < 0.5 else base[: length // 2] + rng.choices(range(3, 500), k=5)

    def pick(self) -> tuple[str, str]:
        """A prefill and a decode engine."""
        return tuple(
            f"{kind}{self.clock.rng.randrange(len(shapes))}"
            for kind, shapes in (("p", self.profile.prefills), ("d", self.profile.decodes))
        )

    # ------------------------------------------------------------------ life

    def run(self) -> World:
        with ExitStack() as stack:
            self._enter(stack)
            try:
                self._play()
            except Violation as broken:
                raise AssertionError(str(broken)) from broken
        return self

    def story(self) -> tuple[object, ...]:
        """What happened, to compare two runs of one seed by."""
        return dict(self.clock.steps), self.clock.now, dict(self.outcomes), list(self.clock.trace)

    def _play(self) -> None:
        self._build()
        self.clock.run(0.5)
        self._let_loose()
        self.clock.run(self.profile.seconds + 0.5)
        self._calm()
        self.clock.run(BOUND, self._over)
        self._judge()

    def _enter(self, stack: ExitStack) -> None:
        """Time and chance are the world's own while it lasts."""
        clock, urandom = self.clock, random.Random(self.clock.rng.random())
        draw = random.Random(self.clock.rng.random())
        random.seed(self.clock.rng.random())
        for patch in (
            mock.patch.object(time, "monotonic", clock),
            mock.patch.object(pins_module, "monotonic", clock),
            mock.patch.object(scheduler_module, "monotonic", clock),
            mock.patch.object(os, "urandom", urandom.randbytes),
            mock.patch.object(versions, "_version", installed),
            # Prompts are short here: no number of copies is too few for a slab.
            mock.patch.object(ways, "FEW_COPIES", 0),
            mock.patch.object(policies, "make", partial(policies.make, draw=draw)),
        ):
            stack.enter_context(patch)
        Golden.known.clear()
        logging.disable(logging.ERROR)
        stack.callback(logging.disable, logging.NOTSET)
        self.loop = VirtualLoop(clock)
        stack.callback(self._close)

    def _build(self) -> None:
        self.wire, self.fabric, self.doors = Wire(self), StormyFabric(self), Doors(self)
        self.session = Session(self)
        shapes = [(f"p{n}", shape) for n, shape in enumerate(self.profile.prefills)]
        shapes += [(f"d{n}", shape) for n, shape in enumerate(self.profile.decodes)]
        self._shapes = dict(shapes)
        for name, shape in shapes:
            self.engines[name] = Engine(self, name, shape)
        places = {name: Place(f"http://{name}:8000", Address(name, 5600)) for name in self._shapes}
        settings = Settings(
            [place for name, place in places.items() if name[0] == "p"],
            [place for name, place in places.items() if name[0] == "d"],
            limits=Limits(connect=1.0, prefill=6.0, silence=6.0),
            rules=Rules(mode=self.profile.mode, retries=1, room=2.0),
            refresh=0.2, ask_timeout=0.5,
        )  # fmt: skip
        self.router = Router(settings, self._ask, None, Metrics())
        self.router.session = self.session
        self.router.fleet._clock = self.clock
        self.loop.call_soon(self._start_router)

    def _start_router(self) -> None:
        self.router._assemble()
        self.router.watch.start()

    async def _ask(self, address, message, patience):
        """The router's questions on the side channel."""
        answer = self.loop.create_future()
        answered = lambda outcome: answer.done() or answer.set_result(outcome)  # noqa: E731
        self.wire.ask(address, encode(message), answered)
        try:
            async with asyncio.timeout(patience):
                outcome = await answer
        except TimeoutError:
            raise TransportError("no answer in time") from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _close(self) -> None:
        for _ in range(20):  # who is cancelled may have something to wait for
            for task in (pending := asyncio.all_tasks(self.loop)):
                task.cancel()
            if not pending:
                break
            self.loop.turn()
        self.loop.close()
        for engine in self.engines.values():
            for worker in engine.workers if engine.up else ():
                worker.thread._pause.close()

    # ------------------------------------------------------------------ misfortune

    def _let_loose(self) -> None:
        clock, profile = self.clock, self.profile
        self.weather = profile.weather
        self.people = [Client(self, number) for number in range(profile.requests)]

        def some(count: int, kind: str, action) -> None:
            for _ in range(count):
                clock.at(clock.rng.uniform(0, profile.seconds), kind, action)

        moments = [clock.rng.uniform(0, profile.seconds) for _ in range(profile.crowds)]
        for client in self.people:
            when = clock.rng.choice(moments) if moments else clock.rng.uniform(0, profile.seconds)
            clock.at(when, "client", client.start)
        some(profile.crashes, "fault", self._crash)
        some(profile.freezes, "fault", self._freeze)
        some(profile.quarrels, "fault", self._quarrel)
        some(profile.resets, "fault", self._reset)

    def _alive(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.up]

    def _crash(self) -> bool | None:
        if not self._alive():
            return False
        engine = self.clock.rng.choice(self._alive())
        engine.crash()
        self.doors.crash(engine.name)
        self.clock.at(
            self.clock.rng.choice([0.01, 0.3, 1.0]), "fault", lambda: self._restart(engine)
        )
        return None

    def _restart(self, engine: Engine) -> None:
        self.clock.log(f"{engine} is started again")
        self.engines[engine.name] = Engine(self, engine.name, engine.shape)

    def _freeze(self) -> bool | None:
        if not self._alive():
            return False
        rng = self.clock.rng
        return rng.choice(self._alive()).freeze(rng.choice([0.05, 0.5, 1.0, 2.0]))

    def _quarrel(self) -> bool:
        """A connection breaks; both its ends live."""
        pairs = [
            (one.name, other)
            for one in self.fabric._agents.values()
            if not one.closed
            for other in one._peers
        ]
        if not pairs:
            return False
        pair = self.clock.rng.choice(pairs)
        self.clock.log(f"the connection of {pair} breaks")
        self.fabric.disconnect(*pair)
        return True

    def _reset(self) -> bool | None:
        if not self._alive():
            return False
        engine = self.clock.rng.choice(self._alive())

        def reset() -> None:
            engine.unasked = True
            try:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError as error:  # vLLM says so where blocks are held
                self.clock.log(f"{engine}: {error}")

        engine.when_awake(reset)
        return None

    # ------------------------------------------------------------------ the end

    def _calm(self) -> None:
        self.clock.log("calm")
        self.weather = Weather()
        for engine in self._alive():
            engine.thaw(now=True)

    def _over(self) -> bool:
        return next(leftovers(self), None) is None

    def _judge(self) -> None:
        check = self.clock.check
        left = [f"{whose}: {which} {what}" for whose, which, what in leftovers(self)]
        check(not left, "not over: " + "; ".join(left)[:1500])
        for error in self.broken:
            raise error
        for engine in self.engines.values():
            for worker in engine.workers:
                counters, _ = worker.thread.tally.take()
                check(not counters.get("defects"), f"{worker}: a defect on honest input")
                check(worker.thread.failure is None, f"{worker}: the thread stopped")


def play(seed: int, profile: Profile) -> World:
    """One world; raises AssertionError where a promise is broken."""
    return World(seed, profile).run()
