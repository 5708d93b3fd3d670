"""One engine of the model: its ranks, and the engine above them (engines.py).

The cores, both scheduler halves (`Prefills`, `Decodes`, `Pins`) and the worker halves are the code
that ships. What is made up is what surrounds them: vLLM's scheduler and block pool (engines.py)
and each rank's driver (ranks.py).
"""

from __future__ import annotations

from neuron_push.rendezvous.events import Open
from tests.model.effects import Effects
from tests.model.pairs import SOON, STEP, STEPS, Pair
from tests.model.ranks import Rank


class Process:
    """All ranks of an engine, and the engine (`engine` is set by engines.py)."""

    def __init__(self, name: str, role: str, incarnation: int, pair: Pair):
        self.now = 0.0
        self.name, self.role, self.incarnation, self.pair = name, role, incarnation, pair
        self.world = pair.shape(role).world
        self.engine = None
        self.crippled = False  # a rank of it is gone
        self.prompt = True  # its engine steps at once when it has something to do or to hear
        self.effects = Effects()
        self.ranks = [Rank(self, number) for number in range(self.world)]
        for rank in self.ranks:
            rank.carry_out([Open(0)])
            rank.opened()

    # -------------------------------------------------------------------- what happens to it

    def apply(self, event: tuple) -> Effects:
        """One event: its name and arguments; returns what it does to the world."""
        self.effects = Effects()
        getattr(self, event[0])(*event[1:])
        self.submit()
        while self.prompt and not self.crippled and self.engine.waits():
            self.engine.step()
            self.submit()
        if any(rank.unpacking for rank in self.ranks):
            writable = self.engine.writable()
            for rank in self.ranks:
                rank.judge_unpacking(writable)
        effects, self.effects = self.effects, Effects()
        return effects

    def submit(self):
        for rank in self.ranks:
            rank.submit()

    def at(self, number, name, *args):
        """Something happens to one of its ranks."""
        getattr(self.ranks[number], name)(*args)

    def lose(self, number):
        """A rank dies alone. Its engine does nothing any more, and dies when it has noticed."""
        self.ranks[number].die()
        self.crippled = True

    def soon(self):
        """Time in which repeats are due passes."""
        self.now += SOON
        for rank in self.ranks:
            rank.tick()

    def late(self, alive):
        """Time in which everything is due passes; each rank hears of those agents that live."""
        for _ in range(STEPS):
            self.now += STEP
            for rank, agents in zip(self.ranks, alive, strict=True):
                rank.hears_of(agents)
                rank.tick()

    def step(self, *choice):
        self.engine.step(*choice)

    def new(self, leg):
        self.engine.new(leg)

    def forward(self):
        self.engine.forward()

    def abort(self, name):
        self.engine.abort(name)

    def preempt(self, name):
        self.engine.preempt(name)

    def reset(self):
        self.engine.reset()

    def finish(self, name):
        self.engine.finish(name)

    # -------------------------------------------------------------------- what is seen of it

    def enabled(self):
        """Events of its engine that may happen now."""
        return () if self.crippled else self.engine.enabled()

    def open(self) -> tuple[str, ...]:
        """Its agents."""
        return tuple(agent for rank in self.ranks for agent in rank.open.values())

    def granted(self):
        """Slabs of decode that are kept: ("slab", lane, attempt, piece, slab)."""
        return {slab for rank in self.ranks for slab in rank.granted()}

    def leftovers(self) -> list[str]:
        """What is not as it was at the start."""
        return [each for rank in self.ranks for each in rank.leftovers()] + self.engine.leftovers()
