"""A world of engines in virtual time, deterministic from its seed.

`World.run` lets time pass; every step checks the promises (memory.py, engines.py) and raises
`Violation`. After `calm` no fault happens any more, and `settle_down` demands that everything
has ended within the bound that the settings imply.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque

from msgspec.structs import replace

from neuron_push.protocol import decode_notification, encode
from neuron_push.rendezvous import events as ev
from tests.rendezvous.engines import Engine
from tests.rendezvous.memory import Memory
from tests.rendezvous.net import CONFIG, Faults
from tests.rendezvous.shapes import Shape


class Violation(AssertionError):
    """A promise was broken."""


# Longest that anything may take once faults have stopped: a request registered last waits for
# its patience, its cancellation for the drain, then up to three rotations must fence.
BOUND = (
    CONFIG.patience + 2 * CONFIG.drain_timeout + CONFIG.lease + 2 * CONFIG.silence
    + 3 * (CONFIG.move_timeout + CONFIG.rotation_interval + 0.2) + 2 * CONFIG.greeting_timeout
)  # fmt: skip


class World:
    """Engines by name, the agents that are open, and everything that is going to happen."""

    def __init__(self, seed: int, shapes: dict[str, tuple[str, Shape]], faults: Faults, **settings):
        batch = 6 if seed % 3 == 2 else 0  # tokens that wait for more
        self.config = replace(CONFIG, batch_tokens=batch, **settings)
        self.rng = random.Random(seed)
        self.now = 0.0
        self.faults = faults
        self.memory = Memory(self)
        self.agents: dict[str, tuple] = {}
        self.writes: list = []
        self.reads: list = []
        self.counts, self.outcomes, self.reasons = Counter(), Counter(), Counter()
        self.landed = 0
        self.steps = 0
        self.trace: deque = deque(maxlen=4000)
        self._heap: list = []
        self._sequence = itertools.count()
        self._last_delivery: dict[tuple[str, str], float] = {}
        self._shapes = shapes
        self.engines: dict[str, Engine] = {}
        for name in shapes:
            self.start(name, 1)
        self.run(0.2)

    # -------------------------------------------------------------------- time and chance

    def at(self, delay, action):
        heapq.heappush(self._heap, (self.now + delay, next(self._sequence), action))

    def chance(self, probability) -> bool:
        return probability > 0 and self.rng.random() < probability

    def delay(self) -> float:
        return self.rng.expovariate(1 / self.faults.slow) if self.faults.slow else 0.0

    def side_delay(self) -> float:
        return self.rng.expovariate(1 / self.faults.side_slow)

    def run(self, seconds):
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.step()
        self.now = end
        self.writes = [write for write in self.writes if not write.over]
        self.reads = [read for read in self.reads if not read.over]

    def step(self):
        """Let the next thing happen."""
        self.now, _, action = heapq.heappop(self._heap)
        self.steps += 1
        action()

    def check(self, held, complaint):
        if not held:
            raise Violation(f"at {self.now:.4f}: {complaint}")

    def log(self, process, action):
        if not isinstance(action, ev.Count):
            self.trace.append((self.now, process, action))

    # -------------------------------------------------------------------- network

    def deliver(self, sender, target, message):
        """A notification travels; to a target that is gone it is lost without a word."""
        copies = 2 if self.chance(self.faults.dup) else 1
        for _ in range(copies):
            when = self.now + self.delay()
            if not self.faults.reorder:
                when = max(when, self._last_delivery.get((sender, target), 0.0))
                self._last_delivery[sender, target] = when
            copy = decode_notification(encode(message))
            self.at(when - self.now, lambda m=copy: self._arrive(sender, target, m))

    def _arrive(self, sender, target, message):
        entry = self.agents.get(target)
        if entry is not None:
            self.trace.append((self.now, f"  {entry[0]} <- {sender}", message))
            entry[0].later(0.0, ev.Notified(sender, message), if_open=target)

    def process_at(self, address):
        engine = self.engines.get(address.host)
        return engine.processes[address.port - 1] if engine and engine.up else None

    # -------------------------------------------------------------------- life and death

    def start(self, name, incarnation):
        role, shape = self._shapes[name]
        engine = self.engines[name] = Engine(self, name, shape, role, incarnation)
        for process in engine.processes:
            process.carry_out([ev.Open(0)])
            process.tick()

    def crash(self, name, restart_after=0.05):
        """Kill an engine; peers may or may not be told by their transport."""
        engine = self.engines[name]
        if not engine.up:
            return
        engine.up = False
        dead = [agent for process in engine.processes for agent in process.open.values()]
        for process in engine.processes:
            process.crash()
        if self.chance(0.5):
            for peer in self.processes():
                for agent in dead:
                    peer.later(self.delay(), ev.Unreachable(agent, "connection reset"))
        self.at(restart_after, lambda: self.start(name, engine.incarnation + 1))

    def processes(self):
        return [p for engine in self.engines.values() for p in engine.processes if p.alive]

    # -------------------------------------------------------------------- the end

    def calm(self):
        """Faults stop: the network delivers, nobody dies, what froze thaws."""
        self.faults = Faults()
        for process in self.processes():
            process.thaw(now=True)

    def settle_down(self, bound=BOUND):
        """Promise 4: everything ends and every block comes back, in bounded time."""
        self.run(bound)
        for engine in self.engines.values():
            for attempt in engine.attempts.values():
                self._check_attempt(engine, attempt)
            for number, pin in engine.pins.items():
                self.check(pin.free, f"{engine.name}: pin {number} of ranks {pin.unpinned} only")
            self.check(not engine.holder, f"{engine.name}: blocks not back: {engine.holder}")
            for process in engine.processes:
                self._check_idle(process)

    def _check_attempt(self, engine, attempt):
        name = f"{engine.name}: attempt {attempt.number}"
        ranks = set(range(len(engine.processes)))
        wanted = ranks if attempt.start < attempt.stop else set()
        self.check(set(attempt.reported) == wanted, f"{name} reported by {attempt.reported}")

    def _check_idle(self, process):
        core = process.core
        leftovers = {
            "attempts": list(core.consumer.attempts.values()),
            "sendings": list(core.producer.sendings.values()),
            "sources": list(core.producer.sources),
            "writes": core.producer.writes,
            "reads": core.consumer.reads,
            "loans": core.producer.loans,
            "rotation": core.generations.pending,
            "sessions": [link for link in core.links if link.sessions],
            "generations": len(process.open) != 1,
            "slabs": core._context.slabs.used,
            "waiting for slabs": core._context.slabs.waiting,
        }
        left = {name: what for name, what in leftovers.items() if what}
        self.check(not left, f"{process} is not idle: {left}")
