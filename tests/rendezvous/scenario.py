"""Random requests and random misfortune, from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import patch

from neuron_push.plan import ways
from neuron_push.protocol import Match
from neuron_push.rendezvous.events import Unreachable
from tests.rendezvous.malice import pester
from tests.rendezvous.net import Faults
from tests.rendezvous.shapes import Shape
from tests.rendezvous.world import World


@dataclass(frozen=True)
class Profile:
    """What kind of trouble a run has."""

    faults: Faults = field(default_factory=Faults)
    prefills: tuple[Shape, ...] = (Shape(),)
    decodes: tuple[Shape, ...] = (Shape(),)
    requests: int = 14
    seconds: float = 2.0
    aborts: float = 0.0  # share of requests given up, on either side
    missing: float = 0.0  # share of legs that never come
    preempt: float = 0.0
    layers: bool = False  # prompts travel by parts of their layers
    pulls: float = 0.0  # share of requests whose prompt decode READs
    digests: bool = False  # and compares what it has READ with what was lent
    twins: float = 0.0  # share of requests without a transfer id that share their base id
    crashes: int = 0
    freezes: int = 0
    false_deaths: int = 0
    aliases: float = 0.0  # share of requests that call the prefill engine by another address
    malice: int = 0  # absurd events
    long: bool = False  # prompts that replicas divide
    both: bool = False  # every engine prefills and decodes
    min_run: int = 16_384
    spared: str = ""  # an engine that has no trouble and whose peers must not feel any


def run(seed: int, profile: Profile) -> World:
    """Play one world to its end; raises Violation with the seed in the caller's message."""
    # Prompts are short here: no number of copies is too few for a slab.
    with patch.object(ways, "FEW_COPIES", 0):
        return _run(seed, profile)


def _run(seed: int, profile: Profile) -> World:
    roles = ("both", "both") if profile.both else ("producer", "consumer")
    shapes = {f"P{i}": (roles[0], shape) for i, shape in enumerate(profile.prefills)}
    shapes |= {f"D{i}": (roles[1], shape) for i, shape in enumerate(profile.decodes)}
    streaming = "layer" if profile.layers else "chunk"
    world = World(
        seed, shapes, profile.faults, streaming=streaming, kv_digest=profile.digests,
        min_run=profile.min_run,
    )  # fmt: skip
    for number in range(profile.requests):
        Request(world, profile, number)
    for _ in range(profile.crashes):
        name = world.rng.choice(list(shapes))
        pause = world.rng.choice([0.01, 0.3, 1.0])
        world.at(world.rng.uniform(0, profile.seconds), lambda n=name, p=pause: world.crash(n, p))
    for _ in range(profile.freezes):
        seconds = world.rng.choice([0.05, 0.5, 1.0, 2.0])
        world.at(world.rng.uniform(0, profile.seconds), lambda s=seconds: _freeze(world, s))
    for _ in range(profile.false_deaths):
        world.at(world.rng.uniform(0, profile.seconds), lambda: _false_death(world, profile.spared))
    for _ in range(profile.malice):
        world.at(world.rng.uniform(0, profile.seconds), lambda: _pester(world))
    world.run(profile.seconds + 1.0)
    world.calm()
    world.settle_down()
    for engine in world.engines.values():
        for attempt in engine.attempts.values():
            served = all(attempt.reported.values())
            unharmed = served or attempt.prefill != profile.spared
            world.check(unharmed, f"{engine.name}: {attempt} of a healthy peer failed")
    return world


def _freeze(world, seconds):
    alive = world.processes()
    if alive:
        world.rng.choice(alive).freeze(seconds)


def _false_death(world, spared):
    """A transport cries wolf about one healthy link."""
    links = [
        (process, link)
        for process in world.processes()
        for link in process.core.links
        if spared not in (process.engine.name, link.engine)
    ]
    if links:
        process, link = world.rng.choice(links)
        process.later(0.0, Unreachable(link.agent, "false alarm"))


def _pester(world):
    alive = world.processes()
    if alive:
        pester(world, world.rng.choice(alive))


class Request:
    """Both legs of one request, dispatched at random times."""

    def __init__(self, world, profile, number):
        rng = world.rng
        self.world, self.profile = world, profile
        self.prefill = f"P{rng.randrange(len(profile.prefills))}"
        self.decode = f"D{rng.randrange(len(profile.decodes))}"
        if profile.both and world.chance(0.5):
            self.prefill, self.decode = self.decode, self.prefill
        twin = world.chance(profile.twins)
        self.prompt = "twin" if twin else f"prompt{number}"
        transfer = "" if twin or world.chance(0.2) else f"t{number}"
        base = "twin" if twin else f"b{number}"
        lengths = [9, 64, 100, 160] if profile.long else [1, 3, 4, 8, 9, 21, 40]
        self.tokens = 21 if twin else rng.choice(lengths)
        self.match = Match(transfer, base, self.prompt.encode(), self.tokens)
        self.source = -1
        begin = rng.uniform(0, profile.seconds)
        lag = rng.choice([0.0, rng.uniform(0, 0.2)])
        first, second = rng.sample([begin, begin + lag], 2)
        prefill_comes = not world.chance(profile.missing)
        if prefill_comes:
            world.at(first, lambda: self.compute(world.engines[self.prefill]))
        if not prefill_comes or not world.chance(profile.missing):
            world.at(second, self.receive)

    # -------------------------------------------------------------------- decode leg

    def receive(self):
        world, engine = self.world, self.world.engines[self.decode]
        if not engine.up:
            return
        rng = world.rng
        start = rng.choice([0, 0, 0, 4, self.tokens]) if self.tokens > 4 else 0
        alias = "~" if world.chance(self.profile.aliases) else ""
        attempt = engine.receive(
            self.match, self.prompt, self.prefill + alias, start=start, hold=rng.random() < 0.3,
            patience=rng.choice([0.3, 3.0]) if self.profile.aborts else 3.0,
            pull=world.chance(self.profile.pulls),
        )  # fmt: skip
        if attempt is None:
            return
        if world.chance(self.profile.aborts):
            delay = rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.5)])
            world.at(delay, lambda: engine.abandon(attempt))
        elif start == self.tokens:
            world.at(0.1, lambda: engine.drop(attempt))

    # -------------------------------------------------------------------- prefill leg

    def compute(self, engine):
        """Offer, then settle in chunks; a preempted request is offered again from the start."""
        if not engine.up:
            return
        source = self.source = engine.offer(self.match)
        fate = "finished"
        if self.world.chance(self.profile.preempt):
            fate = "preempted"
        elif self.world.chance(self.profile.aborts):
            fate = "ended"
        edges = sorted({self.world.rng.randint(1, self.tokens) for _ in range(3)} | {self.tokens})
        if fate != "finished":
            edges = edges[: self.world.rng.randint(0, len(edges))]
        self.chunk(engine, source, [0, *edges], fate)

    def chunk(self, engine, source, edges, fate):
        if not engine.up:
            return
        wait = self.world.rng.choice([0.0, self.world.rng.uniform(0, 0.03)])
        if len(edges) > 1:
            last = edges[1] == self.tokens
            if self.profile.layers:
                if not engine.settle_by_layers(
                    source, self.prompt, edges[0], edges[1], last=last,
                    then=lambda: self.chunk(engine, source, edges[1:], fate),
                ):  # fmt: skip
                    engine.retire(source, "ended")
                return
            done = engine.settle(source, self.prompt, edges[0], edges[1], self.tokens, last=last)
            if not done:
                engine.retire(source, "ended")
                return
            self.world.at(wait, lambda: self.chunk(engine, source, edges[1:], fate))
            return
        engine.retire(source, fate)
        if fate == "preempted":
            self.world.at(wait, lambda: self.compute(engine))
