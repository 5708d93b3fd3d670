"""One worker rank of the model's engines: the real core and the real worker half.

What is made up here is the driver, which turns the core's actions into `Effects` on the world.
"""

from __future__ import annotations

from unittest import mock

from neuron_push.commands import decode
from neuron_push.plan import ways
from neuron_push.protocol import Hello, Refusal, encode
from neuron_push.rendezvous import Core, Identity
from neuron_push.rendezvous import events as ev
from neuron_push.rendezvous.attempt import attempt_of
from neuron_push.vllm.worker import WorkerHalf
from tests.model.effects import Read, Write, check, held_by, slab_number, touched
from tests.model.pairs import FIRST_PORT, LISTENER, VLLM, geometry, info
from tests.rendezvous.shapes import SEMANTICS


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


class Rank:
    """A core and its driver; its engine and what it does to the world are its process's."""

    def __init__(self, process, number: int):
        self.process, self.number = process, number
        self.name = process.name if process.world == 1 else f"{process.name}{number}"
        shape = process.pair.shape(process.role)
        self.identity = Identity(
            process.name, number, process.incarnation, SEMANTICS, geometry(shape, number),
            shape.staging(),
        )  # fmt: skip
        self.core = Core(process.pair.config, self.identity)
        self.thread = Thread()
        self.worker = WorkerHalf(VLLM, None, process.pair.config)
        self.worker._thread, self.worker._rank = self.thread, number
        self.alive = True
        self.open: dict[int, str] = {}
        self.loaded: dict[int, list[str]] = {}
        self.opening: list[int] = []
        self.closing: list[int] = []
        # What is being unpacked, by job: (lane, attempt, start, stop, piece), slab, blocks.
        self.unpacking: dict[int, tuple[tuple, int, tuple[int, ...]]] = {}

    # -------------------------------------------------------------------- what happens to it

    def judge_unpacking(self, writable):
        """What is unpacked comes from a slab that is kept for it, into blocks that are held."""
        granted = self.granted() if self.unpacking else ()
        for (lane, attempt, start, stop, piece), slab, blocks in self.unpacking.values():
            mine = ("slab", lane, attempt, piece, slab) in granted
            check(
                mine, f"tokens {start}..{stop} are unpacked from slab {slab}, which is given back"
            )
            for block in blocks:
                held = (attempt, block) in writable
                check(held, f"tokens {start}..{stop} are unpacked into block {block}, not held")

    def granted(self):
        """Slabs of decode that are kept: ("slab", lane, attempt, piece, slab)."""
        return {
            ("slab", (share.link.rank, self.number), attempt.command.attempt, piece, slab)
            for attempt in self.core.consumer.attempts.values()
            for share in attempt.shares.values()
            for piece, slab in share.landing.granted.items()
        }

    def feed(self, event):
        if self.alive:
            self.carry_out(self.core.handle(event, self.process.now))

    def tick(self):
        if self.alive:
            self.carry_out(self.core.tick(self.process.now))

    def die(self):
        """Its agents are gone, and nothing happens to it any more."""
        self.alive = False
        for held in (self.open, self.loaded, self.opening, self.closing, self.unpacking):
            held.clear()

    def submit(self):
        while self.thread.submitted:
            self.feed(self.thread.submitted.pop(0))

    def hears_of(self, agents):
        """Signs of life of peers."""
        for agent in agents:
            for link in self.core.links.find(agent):
                link.heard = link.spoke = self.process.now

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
        address = LISTENER
        if peer:
            mine = self.process
            them = info("P", "producer", peer, mine.pair)
            us = info(mine.name, mine.role, mine.incarnation, mine.pair)
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
        self.process.effects.unpacked.append(what)
        self.feed(ev.Unpacked(job))

    def unreachable(self, agent):
        self.feed(ev.Unreachable(agent, "disconnected"))

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
        self.process.effects.closed.append(self.open.pop(action.generation))
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
        self.process.effects.asked.append(("find", self.process.incarnation, self.number))

    def _greet(self, action):
        here, there = self.process.incarnation, action.address.port - FIRST_PORT
        self.process.effects.asked.append(
            ("hello", here, self.number, action.link, there, action.hello)
        )

    def _answer(self, action):
        if action.metadata:
            self._know(action.generation, action.metadata.decode())
        self.process.effects.asked.append(("answer", *action.token, action.message))

    def _notify(self, action):
        check(action.generation in self.open, f"{self.name} notifies through a closed generation")
        known = action.agent in self.loaded[action.generation]
        check(known, f"{self.name} notifies {action.agent}, which it has not met")
        sender = self.open[action.generation]
        self.process.effects.sent.append((sender, str(action.agent), encode(action.message)))

    def _post(self, action):
        known = action.agent in self.loaded.get(action.generation, ())
        check(known, f"{self.name} posts towards {action.agent}, which it has not met")
        done = action.done
        source = self.core.producer.writes.sending(action.write).source
        reads, blocks = touched(action, done, source.match)
        own, slab = slab_number(action.slab), slab_number(action.granted)
        if own >= 0:  # it is filled at once, and read from then on
            held = {(source.pin, *each) for each in reads} <= self.process.engine.readable()
            check(
                held, f"tokens {done.start}..{done.stop} are packed from blocks that are not held"
            )
        self.process.effects.posted.append(
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
        self.process.effects.posted.append(
            Read(
                self.open[action.generation], str(action.agent), int(action.read), action.attempt,
                action.start, action.stop, reads, blocks if slab < 0 else (), slab,
            )
        )  # fmt: skip

    def _unpack(self, action):
        job = self.core.consumer.landings._jobs[action.job]
        share = self.core.consumer.attempts[job.attempt].shares[job.link]
        lane = share.link.rank, self.number
        what = (lane, job.attempt, action.start, action.stop, job.piece)
        blocks = held_by(action, action.blocks[0])
        self.unpacking[action.job] = what, action.slab, blocks
        self.process.effects.unpacks.append(what)

    def _tell(self, action):
        self.thread.reports.append(action.report)

    # -------------------------------------------------------------------- what is seen of it

    def peers(self) -> list[str]:
        """Agents that it would hear the death of."""
        return [str(link.agent) for link in self.core.links] if self.alive else []

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
        return [name for name, value in left.items() if value]
