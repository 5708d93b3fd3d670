"""The simulated network and the driver stub of one worker rank.

A WRITE lands in torn pieces at arbitrary later times, as long as the target's agent generation
that it names is open and the writer's own is too. Nothing else stops it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from neuron_push.config import Config
from neuron_push.protocol import Address, EngineInfo, Refusal
from neuron_push.rendezvous import Core, Identity
from neuron_push.rendezvous import events as ev
from tests.rendezvous.shapes import SEMANTICS

CONFIG = Config(
    lease=1.0, patience=3.0, alive_interval=0.1, silence=0.6, resend=0.02, resend_most=0.2,
    greeting_timeout=0.3, drain_timeout=1.0, move_timeout=0.5, rotation_interval=0.2,
    slice_bytes=1 << 16, writes_in_flight=2, batch_tokens=0,
)  # fmt: skip
TICK = 0.02


@dataclass
class Faults:
    """What may go wrong on the way; everything is a probability except `slow` (seconds)."""

    drop: float = 0.0
    dup: float = 0.0
    reorder: bool = False
    slow: float = 0.003
    side_slow: float = 0.003  # on the side channel
    stuck: float = 0.0  # the completion of a WRITE that landed never comes
    lose_done: float = 0.0
    hang: float = 0.0  # the completion of a WRITE into a dead target never comes
    write_slow: float = 0.01
    false_unreachable: float = 0.0
    refuse: float = 0.0  # a listener does not answer, or a hello times out and arrives later
    unposted: float = 0.0
    turned: float = 0.0  # a token's bytes are wrong when they have been READ


@dataclass(eq=False)
class Write:
    """A WRITE on the wire; `ghost` holds what a crashed writer had sent."""

    writer: Process
    post: ev.Post
    attempt: int
    target: str
    pin: int
    pieces: list[list[tuple[int, int, int, int, int]]]  # (token, source and target block + slot)
    ghost: dict[int, object] | None = None
    over: bool = False  # nothing of it moves any more
    read_over: bool = False  # the writer knows that nothing of it moves any more


@dataclass(eq=False)
class Read:
    """A READ on the wire, from `target`'s memory into the reader's."""

    reader: Process
    fetch: ev.Fetch
    target: str
    pin: int
    link: object  # prefill's, to the reader
    pieces: list[list[tuple[int, int, int, int, int]]]  # as of a WRITE
    over: bool = False


@dataclass(eq=False)
class Process:
    """One worker rank: its core and what the driver knows."""

    world: object
    engine: object
    rank: int
    incarnation: int
    alive: bool = True
    frozen_until: float = 0.0
    inbox: list = field(default_factory=list)  # what happens to a frozen process
    open: dict[int, str] = field(default_factory=dict)
    loaded: dict[int, set[str]] = field(default_factory=dict)
    unloadable: set[tuple[int, str]] = field(default_factory=set)  # the core may not know it yet
    writes: dict[int, Write] = field(default_factory=dict)
    reads: dict[int, Read] = field(default_factory=dict)
    # Staging memory: slab -> token -> content; and attempts whose pieces are being unpacked.
    staging: dict[int, dict[int, object]] = field(default_factory=dict)
    unpacking: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.identity = Identity(
            self.engine.name, self.rank, self.incarnation, SEMANTICS,
            self.engine.shape.geometry(self.rank), self.engine.shape.staging(),
        )  # fmt: skip
        self.core = Core(self.world.config, self.identity)
        self.address = Address(self.engine.name, 1 + self.rank)

    def __repr__(self):
        return f"{self.engine.name}/{self.rank}/{self.incarnation}"

    def later(self, delay, event, *, if_open=None):
        """Hand an event to the core after a delay, unless this process dies; wait while frozen.

        `if_open` names an agent that must still be open then.
        """

        def fire():
            if if_open is None or if_open in self.open.values():
                self.when_awake(lambda: self.feed(event))

        self.world.at(delay, fire)

    def when_awake(self, action):
        """Do something now, or in its turn when this process thaws, unless it dies."""
        if not self.alive:
            return
        if self.frozen_until > self.world.now:
            self.inbox.append(action)
        else:
            action()

    def freeze(self, seconds):
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)
        self.world.at(seconds, self.thaw)

    def thaw(self, *, now=False):
        if now:
            self.frozen_until = 0.0
        while self.alive and self.inbox and self.frozen_until <= self.world.now:
            self.inbox.pop(0)()

    def feed(self, event):
        self.carry_out(self.core.handle(event, self.world.now))

    def tick(self):
        if not self.alive:
            return
        world = self.world
        if self.frozen_until <= world.now:
            self.carry_out(self.core.tick(world.now))
        world.at(TICK * world.rng.uniform(0.7, 1.3), self.tick)

    def carry_out(self, actions):
        for action in actions:
            self.world.log(self, action)
            getattr(self, "_" + type(action).__name__.lower())(action)

    # -------------------------------------------------------------------- actions

    def _open(self, action):
        agent = self.identity.agent(action.generation)
        self.open[action.generation] = agent
        self.loaded[action.generation] = set()
        self.world.agents[agent] = (self, action.generation)
        delay = self.world.rng.choice([0.0, 0.001, 0.05])
        self.later(delay, ev.Opened(action.generation, agent, agent.encode()))

    def _close(self, action):
        agent = self.open.pop(action.generation)
        del self.world.agents[agent], self.loaded[action.generation]
        for number, write in list(self.writes.items()):
            if write.post.generation == action.generation:
                write.over = write.read_over = True
                del self.writes[number]
        for number, read in list(self.reads.items()):
            if read.fetch.generation == action.generation:
                read.over = True
                del self.reads[number]
        self.later(0.0, ev.Closed(action.generation))

    def _load(self, action):
        self.world.check(action.generation in self.open, f"{self}: load into a closed generation")
        self.loads(action.generation, action.agent)

    def loads(self, generation, agent):
        """Load an agent, if it has not been replaced since it was named, and is not dead."""
        if agent in self.world.agents:
            self.loaded[generation].add(agent)
            return True
        self.unloadable.add((generation, agent))
        self.later(0.0, ev.Unreachable(agent, "cannot be loaded"))
        return False

    def _forget(self, action):
        self.loaded.get(action.generation, set()).discard(action.agent)
        self.unloadable.discard((action.generation, action.agent))

    def _note(self, action):
        """Nobody reads the log here."""

    def _count(self, action):
        self.world.counts[action.name, action.label] += action.value

    def _tell(self, action):
        self.engine.report(self, action.report)

    def _findengine(self, action):
        world, delay = self.world, self.world.side_delay()
        if world.chance(world.faults.refuse):
            return self.later(CONFIG.greeting_timeout, ev.EngineMissing(action.address, "silent"))

        def ask():
            engine = world.engines[action.address.host.rstrip("~")]
            if engine.up:
                event = ev.EngineFound(action.address, engine.info(), self.engine.info())
            else:
                event = ev.EngineMissing(action.address, "connection refused")
            self.later(world.side_delay(), event)

        world.at(delay, ask)
        return None

    def _greet(self, action):
        world = self.world
        late = world.chance(world.faults.refuse)
        delay = world.rng.uniform(0, 1.5) if late else world.side_delay()
        if late:
            self.later(CONFIG.greeting_timeout, ev.Greeted(action.link, Refusal("timed out")))

        def arrive():
            peer = world.process_at(action.address)
            if peer is None:
                self.later(world.side_delay(), ev.Greeted(action.link, Refusal("nobody answers")))
                return
            token = (self, action.link, late)
            peer.later(0.0, ev.HelloArrived(token, action.hello))
            if peer.frozen_until > world.now:
                peer.world.at(CONFIG.greeting_timeout, lambda: self._give_up_greeting(action.link))

        world.at(delay, arrive)

    def _give_up_greeting(self, link):
        self.later(0.0, ev.Greeted(link, Refusal("timed out")))

    def _answer(self, action):
        caller, link, late = action.token
        message, agent = action.message, action.metadata.decode()
        if agent and not self.loads(action.generation, agent):
            message = Refusal(f"cannot load the metadata of {agent}")
        if not late:
            caller.later(self.world.side_delay(), ev.Greeted(link, message))

    def _notify(self, action):
        world = self.world
        world.check(action.generation in self.open, f"{self}: notify through a closed generation")
        if (action.generation, action.agent) in self.unloadable:
            self.later(0.0, ev.Unreachable(action.agent, "is not loaded"))
            return
        known = action.agent in self.loaded[action.generation]
        world.check(known, f"{self}: notify {action.agent}, which is not loaded")
        if action.agent not in world.agents:
            if world.chance(0.5):
                self.later(world.delay(), ev.Unreachable(action.agent, "disconnected"))
            return
        if world.chance(world.faults.false_unreachable):
            self.later(world.delay(), ev.Unreachable(action.agent, "false alarm"))
        if not world.chance(world.faults.drop):
            world.deliver(self.open[action.generation], action.agent, action.message)

    def _post(self, action):
        world = self.world
        if world.chance(world.faults.unposted):
            self.later(0.0, ev.WriteEnded(action.write, "unposted", "no room"))
            return
        if (action.generation, action.agent) in self.unloadable:
            self.later(0.0, ev.WriteEnded(action.write, "broken", "is not loaded"))
            return
        known = action.agent in self.loaded.get(action.generation, ())
        world.check(known, f"{self}: post towards {action.agent}, which is not loaded")
        write = world.memory.start(self, action)
        self.writes[action.write] = write
        world.writes.append(write)
        if not write.pieces:
            world.at(world.rng.uniform(0, world.faults.write_slow), lambda: land(write))
        for piece in range(len(write.pieces)):
            world.at(world.rng.uniform(0, world.faults.write_slow), lambda p=piece: land(write, p))

    def _fetch(self, action):
        world = self.world
        if world.chance(world.faults.unposted):
            self.later(0.0, ev.ReadEnded(action.read, "unposted", "no room"))
            return
        if (action.generation, action.agent) in self.unloadable:
            self.later(0.0, ev.ReadEnded(action.read, "broken", "is not loaded"))
            return
        known = action.agent in self.loaded.get(action.generation, ())
        world.check(known, f"{self}: READs from {action.agent}, which is not loaded")
        read = world.memory.fetch(self, action)
        if not read.pieces:  # other replicas have all of the range
            self.later(0.0, ev.ReadEnded(action.read, "done"))
            return
        self.reads[action.read] = read
        world.reads.append(read)
        for piece in range(len(read.pieces)):
            world.at(world.rng.uniform(0, world.faults.write_slow), lambda p=piece: take(read, p))

    def _unpack(self, action):
        world, job = self.world, self.core.consumer.landings._jobs[action.job]
        link = self.core.consumer.attempts[job.attempt].shares[job.link].link
        self.unpacking.append(job.attempt)

        def copy():
            self.unpacking.remove(job.attempt)
            if world.chance(world.faults.unposted):
                self.feed(ev.Unpacked(action.job, "no room"))
                return
            world.memory.unpack(self, action, job.attempt, link.rank)
            self.feed(ev.Unpacked(action.job))

        delay = world.rng.uniform(0, world.faults.write_slow)
        world.at(delay, lambda: self.when_awake(copy))

    def _seal(self, action):
        world = self.world

        def seal():
            self.feed(ev.Sealed(action.link, action.attempt, world.memory.lent(self, action)))

        delay = world.rng.uniform(0, world.faults.write_slow)
        world.at(delay, lambda: self.when_awake(seal))

    def _check(self, action):
        world, job = self.world, self.core.consumer.landings._jobs[action.job]
        attempt = self.core.consumer.attempts.get(job.attempt)
        if not action.source_blocks or attempt is None:  # a WRITE's bytes are never wrong here
            self.later(0.0, ev.Unpacked(action.job))
            return
        prefill = attempt.shares[job.link].link.rank

        def compare():
            same = world.memory.found(self, action, prefill) == action.done.digest
            reason = "" if same or not action.done.nbytes else "other bytes"
            self.feed(ev.Unpacked(action.job, reason, corrupt=bool(reason)))

        delay = world.rng.uniform(0, world.faults.write_slow)
        world.at(delay, lambda: self.when_awake(compare))

    # -------------------------------------------------------------------- life

    def crash(self):
        """The process dies; what it had put on the wire may still land."""
        self.alive = False
        for agent in self.open.values():
            del self.world.agents[agent]
        self.open.clear()
        for write in self.writes.values():
            write.read_over = True
            if self.world.chance(0.5):
                write.over = True
            else:
                write.ghost = self.world.memory.snapshot(write)
        for read in self.reads.values():
            read.over = True


def land(write, index=None):
    """Land one piece, or no bytes at all, if the target's and the writer's generation are open."""
    world, writer = write.writer.world, write.writer
    if write.over:
        return
    if write.target not in world.agents:
        write.over = True
        if writer.alive and not world.chance(world.faults.hang):
            gone = ev.WriteEnded(write.post.write, "broken", "remote disconnect")
            world.at(world.delay(), lambda: end(write, gone))
        return
    if index is not None:
        world.memory.land(write, write.pieces[index])
        write.pieces[index] = []
    if any(write.pieces):
        return
    write.over = True
    if not world.chance(world.faults.lose_done):
        world.deliver(write.writer.identity.agent(write.post.generation), write.target,
                      write.post.done)  # fmt: skip
    if write.ghost is None and not world.chance(world.faults.stuck):
        done = ev.WriteEnded(write.post.write, "done")
        world.at(world.rng.uniform(0, world.faults.write_slow), lambda: end(write, done))


def end(write, event):
    """The writer's driver sees how a WRITE ended, unless its generation is closed by then."""
    writer = write.writer

    def see():
        if write.post.generation not in writer.open:
            return
        if event.outcome == "done":
            write.read_over = True
            writer.writes.pop(write.post.write, None)
        writer.feed(event)

    writer.when_awake(see)


def take(read, index):
    """Bring one piece, if both generations are open: what lies there now, whosever it is."""
    world, reader = read.reader.world, read.reader
    if read.over:
        return
    number = read.fetch.read

    def see(event):
        if read.fetch.generation in reader.open and number in reader.reads:
            if event.outcome == "done":
                del reader.reads[number]
            reader.feed(event)

    if read.target not in world.agents:
        read.over = True
        if not world.chance(world.faults.hang):
            gone = ev.ReadEnded(number, "broken", "remote disconnect")
            world.at(world.delay(), lambda: reader.when_awake(lambda: see(gone)))
        return
    world.memory.take(read, read.pieces[index])
    read.pieces[index] = []
    if any(read.pieces):
        return
    read.over = True
    if not world.chance(world.faults.stuck):
        done = ev.ReadEnded(number, "done", nbytes=1)
        delay = world.rng.uniform(0, world.faults.write_slow)
        world.at(delay, lambda: reader.when_awake(lambda: see(done)))


def engine_info(engine, role, ranks):
    """What an engine's listener answers."""
    return EngineInfo(
        engine.name, engine.incarnation, role, engine.shape.world, engine.shape.tp,
        engine.shape.pp, 0, ("push",), SEMANTICS, ranks,
    )  # fmt: skip
