"""One engine process of the model: the real core and the real halves of the connector.

The core, both scheduler halves (`Prefills`, `Decodes`, `Pins`) and the worker half are the code
that ships. What is made up here is what surrounds them: vLLM's scheduler and block pool
(engines.py) and the driver, which turns the core's actions into `Effects` on the world.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

from msgspec.structs import replace

from neuron_push.commands import decode
from neuron_push.config import Config
from neuron_push.plan import ways
from neuron_push.protocol import Address, EngineInfo, Hello, RankInfo, Refusal, encode
from neuron_push.rendezvous import Core, Identity
from neuron_push.rendezvous import events as ev
from neuron_push.rendezvous.attempt import attempt_of
from neuron_push.vllm.worker import WorkerHalf
from tests.model.effects import (
    BLOCK,
    Broken,
    Effects,
    Read,
    Write,
    check,
    held_by,
    slab_number,
    touched,
)
from tests.rendezvous.shapes import SEMANTICS, SLAB_BYTES, Shape

# A repeat is due at every `soon`; every timeout is due after a `late`, and nothing in between.
# Silence is measured in steps that are shorter than the signs of life are apart.
SOON, STEP, STEPS, TIMEOUT = 0.002, 4.0, 3, 10.0
CONFIG = Config(
    accelerator="cpu", lease=TIMEOUT, patience=TIMEOUT, alive_interval=STEP, silence=TIMEOUT,
    resend=0.001, resend_most=0.001, greeting_timeout=TIMEOUT, drain_timeout=TIMEOUT,
    move_timeout=TIMEOUT, rotation_interval=0.001, slice_bytes=1 << 16, writes_in_flight=2,
    batch_tokens=0,
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """What a prefill and a decode rank are like, and by that how bytes go between them."""

    prefill: Shape
    decode: Shape
    config: Config = CONFIG

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        return self.prefill, self.decode


# By who reorders: with K and V apart on one side, somebody has to. Where both can, all runs are too
# short for them; one slab of decode's is never promised, so with three two WRITEs are under way.
PAIRS = {
    "": Pair(Shape(), Shape()),
    "packed": Pair(Shape(apart=True, slabs=1), Shape()),
    "unpacked": Pair(Shape(apart=True), Shape(slabs=1)),
    "both": Pair(Shape(slabs=2), Shape(slabs=3), replace(CONFIG, min_run=1 << 20)),
}
GEOMETRIES = {shape: shape.geometry(0) for pair in PAIRS.values() for shape in pair.shapes}
VLLM = SimpleNamespace(
    kv_transfer_config=SimpleNamespace(engine_id="engine"), speculative_config=None
)


class Thread:
    """Stands where the transfer thread does: hands commands to the core at once."""

    failure = None
    stands = 0.0

    def __init__(self):
        self.submitted = []
        self.reports = []

    def submit(self, packed, fence=None, *, wake=True):
        self.submitted += decode(packed)

    @property
    def news(self):
        return bool(self.reports)

    def take(self):
        reports, self.reports = self.reports, []
        return reports

    def wait(self, timeout):
        return bool(self.reports)


class Process:
    """A core, its driver, and the engine above it (`engine` is set by engines.py)."""

    def __init__(self, name: str, role: str, incarnation: int, staged: str = ""):
        self.now = 0.0
        self.name, self.role, self.incarnation = name, role, incarnation
        pair = PAIRS[staged]
        self.shapes = pair.shapes
        shape = self.shapes[role == "consumer"]
        self.identity = Identity(
            name, 0, incarnation, SEMANTICS, GEOMETRIES[shape], shape.staging()
        )
        self.core = Core(pair.config, self.identity)
        self.thread = Thread()
        self.worker = WorkerHalf(VLLM, None, pair.config)
        self.worker._thread = self.thread
        self.open: dict[int, str] = {}
        self.loaded: dict[int, list[str]] = {}
        self.opening: list[int] = []
        self.closing: list[int] = []
        # What is being unpacked, by job: (attempt, start, stop, piece), slab, blocks.
        self.unpacking: dict[int, tuple[tuple[int, int, int, int], int, tuple[int, ...]]] = {}
        self.engine = None
        self.prompt = True  # its engine steps at once when it has something to do or to hear
        self.effects = Effects()
        self.carry_out([ev.Open(0)])
        self.opened()

    # -------------------------------------------------------------------- what happens to it

    def apply(self, event: tuple) -> Effects:
        """One event: its name and arguments; returns what it does to the world."""
        self.effects = Effects()
        getattr(self, event[0])(*event[1:])
        self.submit()
        while self.prompt and self.engine.waits():
            self.engine.step()
            self.submit()
        self.judge_unpacking()
        effects, self.effects = self.effects, Effects()
        return effects

    def judge_unpacking(self):
        """What is unpacked comes from a slab that is kept for it, into blocks that are held."""
        if not self.unpacking:
            return
        granted, writable = self.granted(), self.engine.writable()
        for (attempt, start, stop, piece), slab, blocks in self.unpacking.values():
            mine = ("slab", attempt, piece, slab) in granted
            check(
                mine, f"tokens {start}..{stop} are unpacked from slab {slab}, which is given back"
            )
            for block in blocks:
                held = (attempt, block) in writable
                check(held, f"tokens {start}..{stop} are unpacked into block {block}, not held")

    def granted(self):
        """Slabs of decode that are kept for pieces of attempts: ("slab", attempt, piece, slab)."""
        return {
            ("slab", attempt.command.attempt, piece, slab)
            for attempt in self.core.consumer.attempts.values()
            for share in attempt.shares.values()
            for piece, slab in share.landing.granted.items()
        }

    def feed(self, event):
        self.carry_out(self.core.handle(event, self.now))

    def submit(self):
        while self.thread.submitted:
            self.feed(self.thread.submitted.pop(0))

    def opened(self):
        generation = self.opening.pop(0)
        agent = self.open[generation]
        self.feed(ev.Opened(generation, agent, agent.encode()))

    def closed(self):
        self.feed(ev.Closed(self.closing.pop(0)))

    def message(self, sender, message):
        self.feed(ev.Notified(sender, message))

    def found(self, peer):
        """Listeners have answered: the peer's, in that incarnation, or 0 for nobody."""
        address = Address("P", 1)
        if peer:
            them, us = (
                info(name, role, incarnation, shape)
                for name, role, incarnation, shape in (
                    ("P", "producer", peer, self.shapes[0]),
                    (self.name, self.role, self.incarnation, self.shapes[1]),
                )
            )
            self.feed(ev.EngineFound(address, them, us))
        else:
            self.feed(ev.EngineMissing(address, "connection refused"))

    def greeted(self, link, answer):
        self.feed(ev.Greeted(link, answer or Refusal("timed out")))

    def hello(self, token, hello: Hello):
        with mock.patch.object(ways, "FEW_COPIES", 0):  # prompts are short here
            self.feed(ev.HelloArrived(token, hello))

    def ended(self, number, outcome):
        if self.core.producer.writes.sending(number) is not None:
            self.feed(ev.WriteEnded(number, outcome, "" if outcome == "done" else "cancelled"))

    def read(self, number, outcome):
        if self.core.consumer.reads.find(number) is not None:
            self.feed(ev.ReadEnded(number, outcome, "" if outcome == "done" else "cancelled"))

    def unpacked(self):
        """The oldest piece is in its blocks."""
        job = next(iter(self.unpacking))
        what, _, _ = self.unpacking.pop(job)
        self.effects.unpacked.append(what)
        self.feed(ev.Unpacked(job))

    def unreachable(self, agent):
        self.feed(ev.Unreachable(agent, "disconnected"))

    def soon(self):
        """Time in which repeats are due passes."""
        self.now += SOON
        self.carry_out(self.core.tick(self.now))

    def late(self, alive):
        """Time in which everything is due passes, with signs of life of these agents only."""
        for _ in range(STEPS):
            self.now += STEP
            for agent in alive:
                for link in self.core.links.find(agent):
                    link.heard = link.spoke = self.now
            self.carry_out(self.core.tick(self.now))

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

    # -------------------------------------------------------------------- what it does

    def carry_out(self, actions):
        for action in actions:
            carry = getattr(self, "_" + type(action).__name__.lower(), None)
            if carry is not None:
                carry(action)

    def _open(self, action):
        self.open[action.generation] = self.identity.agent(action.generation)
        self.loaded[action.generation] = []
        self.opening.append(action.generation)

    def _close(self, action):
        self.effects.closed.append(self.open.pop(action.generation))
        del self.loaded[action.generation]
        self.closing.append(action.generation)

    def _load(self, action):
        check(action.generation in self.open, f"{self.name} loads into a closed generation")
        self._know(action.generation, action.agent)

    def _know(self, generation, agent):
        if agent not in self.loaded[generation]:
            self.loaded[generation].append(agent)

    def _forget(self, action):
        known = self.loaded.get(action.generation, [])
        if action.agent in known:
            known.remove(action.agent)

    def _findengine(self, action):
        self.effects.asked.append(("find", self.name, self.incarnation))

    def _greet(self, action):
        self.effects.asked.append(("hello", self.incarnation, action.link, action.hello))

    def _answer(self, action):
        if action.metadata:
            self._know(action.generation, action.metadata.decode())
        incarnation, link = action.token
        self.effects.asked.append(("answer", incarnation, link, action.message))

    def _notify(self, action):
        check(action.generation in self.open, f"{self.name} notifies through a closed generation")
        known = action.agent in self.loaded[action.generation]
        check(known, f"{self.name} notifies {action.agent}, which it has not met")
        sender = self.open[action.generation]
        self.effects.sent.append((sender, str(action.agent), encode(action.message)))

    def _post(self, action):
        known = action.agent in self.loaded.get(action.generation, ())
        check(known, f"{self.name} posts towards {action.agent}, which it has not met")
        done = action.done
        source = self.core.producer.writes.sending(action.write).source
        reads, blocks = touched(action, done, source.match)
        own, slab = slab_number(action.slab), slab_number(action.granted)
        if own >= 0:  # it is filled at once, and read from then on
            held = {(source.pin, *each) for each in reads} <= self.engine.readable()
            check(
                held, f"tokens {done.start}..{done.stop} are packed from blocks that are not held"
            )
        self.effects.posted.append(
            Write(
                self.open[action.generation], str(action.agent), int(action.write),
                attempt_of(done.attempt), done.start, done.stop, source.pin,
                reads if own < 0 else (), blocks if slab < 0 else (), encode(done),
                slab, done.piece, own,
            )
        )  # fmt: skip

    def _fetch(self, action):
        known = action.agent in self.loaded.get(action.generation, ())
        check(known, f"{self.name} READs from {action.agent}, which it has not met")
        match = self.core.consumer.attempts[action.attempt].command.match
        reads, blocks = touched(action, action, match)
        slab = slab_number(action.slab)
        self.effects.posted.append(
            Read(
                self.open[action.generation], str(action.agent), int(action.read), action.attempt,
                action.start, action.stop, reads, blocks if slab < 0 else (), slab,
            )
        )  # fmt: skip

    def _unpack(self, action):
        job = self.core.consumer.landings._jobs[action.job]
        what = (job.attempt, action.start, action.stop, job.piece)
        blocks = held_by(action, action.blocks[0])
        self.unpacking[action.job] = what, action.slab, blocks
        self.effects.unpacks.append(what)

    def _tell(self, action):
        self.thread.reports.append(action.report)

    # -------------------------------------------------------------------- what is seen of it

    def peers(self) -> list[str]:
        """Agents that it would hear the death of."""
        return [str(link.agent) for link in self.core.links]

    def leftovers(self) -> list[str]:
        """What is not as it was at the start."""
        core = self.core
        left = {
            "attempts": core.consumer.attempts,
            "sendings": core.producer.sendings,
            "sources": len(core.producer.sources),
            "WRITEs": core.producer.writes,
            "READs": core.consumer.reads,
            "loans": core.producer.loans,
            "a rotation": core.generations.pending,
            "sessions": any(link.sessions for link in core.links),
            "two agents": len(self.open) != 1,
            "reports": self.thread.reports,
            "slabs": core._context.slabs.used,
            "waits for slabs": core._context.slabs.waiting,
            "unpacking": self.unpacking,
        }
        return [name for name, value in left.items() if value] + self.engine.leftovers()


def info(name, role, incarnation, shape):
    """What an engine's listener answers."""
    slab = SLAB_BYTES if shape.slabs else 0
    rank = RankInfo(0, incarnation, Address(name, 1), GEOMETRIES[shape], slab)
    return EngineInfo(name, incarnation, role, 1, 1, 1, 0, ("push",), SEMANTICS, (rank,))


CONFIGS = [pair.config for pair in PAIRS.values()]
SHARED = (SEMANTICS, VLLM, *CONFIGS, *PAIRS.values(), *GEOMETRIES, *GEOMETRIES.values())
__all__ = ["BLOCK", "CONFIG", "SHARED", "TIMEOUT", "Broken", "Process", "Read", "check"]
