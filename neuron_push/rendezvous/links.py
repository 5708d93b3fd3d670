"""Links: one per peer rank, with its liveness and the agent generation in use.

A link is opened by a hello and lives until it is lost. It is lost when the transport reports
the peer's agent unreachable, when the peer is silent while transfers are under way, or when
the peer greets again (it restarted, or it gave the link up first). A lost link never comes
back: the next request greets anew and gets a new one, so losing a healthy peer costs its
transfers and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from neuron_push.config import Config
from neuron_push.geometry import Geometry, Semantics
from neuron_push.plan import Ask, Plan, StagedPlan
from neuron_push.protocol import Alive, Moved, Notification, Side, Slabs
from neuron_push.rendezvous.events import Action, Count, Forget, Load, Note, Notify
from neuron_push.rendezvous.ranges import EndedAttempts
from neuron_push.rendezvous.slabs import SlabPool
from neuron_push.transport import AgentName


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker rank is. `incarnation` is drawn at process start."""

    engine: str
    rank: int
    incarnation: int
    semantics: Semantics
    geometry: Geometry
    slabs: Slabs | None = None  # for packing and unpacking; None if this rank does neither

    def agent(self, generation: int) -> AgentName:
        """Name of this rank's agent of one generation."""
        return agent_name(self.engine, self.rank, self.incarnation, generation)


def agent_name(engine: str, rank: int, incarnation: int, generation: int) -> AgentName:
    """engine/rank/incarnation/generation; slashes in the engine id are replaced."""
    return AgentName(f"{engine.replace('/', '_')}/{rank}/{incarnation:x}/{generation}")


def base(agent: AgentName) -> str:
    """The part of an agent's name that its generations share."""
    return agent.rpartition("/")[0]


# A peer names its agents; Python refuses to read numbers of thousands of digits.
MOST_DIGITS = 18


def generation_of(agent: AgentName) -> int:
    """The generation in an agent's name; -1 if it has none."""
    tail = agent.rpartition("/")[2]
    return int(tail) if tail.isdecimal() and len(tail) <= MOST_DIGITS else -1


def owns(engine: str, rank: int, incarnation: int, agent: str) -> bool:
    """Whether an agent's name is one that this rank may bear."""
    generation = generation_of(AgentName(agent))
    return generation >= 0 and agent == agent_name(engine, rank, incarnation, generation)


class Context:
    """What the machines of one core share: settings, identity, the outgoing actions."""

    def __init__(self, config: Config, identity: Identity) -> None:
        self.config = config
        self.identity = identity
        self.actions: list[Action] = []
        self.slabs = SlabPool(identity.slabs.count if identity.slabs else 0)
        self.operations = count(1)  # numbers of WRITEs and READs, which share a transport
        # The newest generation: number, agent name and metadata; None until it is open.
        self.generation = 0
        self.open: set[int] = set()  # generations whose agents exist
        self.agent = AgentName("")
        self.metadata = b""

    def act(self, action: Action) -> None:
        self.actions.append(action)

    def count(self, name: str, value: float = 1.0, label: str = "") -> None:
        self.actions.append(Count(name, value, label))

    def note(self, text: str) -> None:
        self.actions.append(Note(text))

    def send(self, link: Link, message: Notification) -> None:
        """Notify a peer; a lost link is never spoken to."""
        if not link.lost:
            self.actions.append(Notify(link.generation, link.agent, message))


@dataclass(slots=True, eq=False)
class Link:
    """One peer rank, in one of its incarnations."""

    id: int
    peer: Side  # what it is to us
    engine: str
    rank: int
    incarnation: int
    agent: AgentName  # the peer's newest agent that we know
    metadata: bytes
    geometry: Geometry
    generation: int  # the generation of ours that we use towards it
    heard: float  # for the measure of silence, which counts only while a transfer waits
    spoke: float  # when a message came in
    hello: int = 0  # number of the hello that opened it, drawn by the decode rank
    plan: Plan | None = None  # for decode peers: how our pages map to theirs
    parts: tuple[Plan, ...] = ()  # for decode peers: the same for each part of our layers
    slabs: Slabs | None = None  # of a decode peer
    arrival: Plan | None = None  # for prefill peers: what they WRITE by, if digests are compared
    unpack: StagedPlan | None = None  # for prefill peers: how what lands in our slabs is unpacked
    ask: Ask | None = None  # what the prefill rank provides
    # How the prefill rank's pages are READ; we as prefill ask only to take digests.
    read: Plan | Literal["unknown"] | None = "unknown"
    sharers: int = 1
    sessions: int = 0  # transfers that need this peer alive
    listed: int = 0  # blocks that a decode peer's registrations list
    asked: float = 0.0  # when a sign of life was last asked for
    # WRITEs and READs of ours in flight, by (our generation, the peer's agent).
    writes: dict[tuple[int, AgentName], int] = field(default_factory=dict)
    # Earlier agents of the peer that drain, and the generation of ours that spoke to each.
    leaving: dict[AgentName, int] = field(default_factory=dict)
    over: EndedAttempts = field(default_factory=EndedAttempts)  # of a decode peer
    kept: dict[int, bytes] = field(default_factory=dict)  # a decode peer's good pulls: digests
    lost: str = ""  # why, once it is lost

    @property
    def us(self) -> Side:
        """What we are to the peer."""
        return "decode" if self.peer == "prefill" else "prefill"

    def posted(self, generation: int, agent: AgentName) -> None:
        """A WRITE or READ is in flight."""
        route = generation, agent
        self.writes[route] = self.writes.get(route, 0) + 1

    def drained(self, generation: int, agent: AgentName) -> None:
        """One of them is not any more."""
        route = generation, agent
        self.writes[route] -= 1
        if not self.writes[route]:
            del self.writes[route]

    def writes_through(self, generation: int) -> int:
        """What is in flight from one of our generations."""
        return sum(n for (ours, _), n in self.writes.items() if ours == generation)

    def writes_towards(self, agent: AgentName) -> int:
        """What is in flight towards one of the peer's agents."""
        return sum(n for (_, theirs), n in self.writes.items() if theirs == agent)


class Links:
    """All links of a rank, by id and by the peer's agent."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ids = count(1)
        # By what the peer is to us and its agents' shared name: two engines may serve each other.
        self._open: dict[tuple[Side, str], Link] = {}
        self._ticked = 0.0

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def new_id(self) -> int:
        """A number for a link about to be opened."""
        return next(self._ids)

    def add(self, link: Link) -> None:
        self._open[link.peer, base(link.agent)] = link

    def find(self, agent: AgentName) -> list[Link]:
        """The open links that a peer's agent, of whatever generation, speaks for."""
        if generation_of(agent) < 0:
            return []
        sides: tuple[Side, ...] = ("prefill", "decode")
        keys = [(side, base(agent)) for side in sides]
        return [self._open[key] for key in keys if key in self._open]

    def of_rank(self, peer: Side, engine: str, rank: int) -> list[Link]:
        """Open links to any incarnation of a rank."""
        wanted = (peer, engine, rank)
        return [link for link in self if (link.peer, link.engine, link.rank) == wanted]

    def drop(self, link: Link) -> None:
        """Take a lost link out; messages of its agents find nothing from now on."""
        key = (link.peer, base(link.agent))
        if self._open.get(key) is link:
            del self._open[key]

    def forget(self, generation: int, agent: AgentName) -> None:
        """Remove a peer's agent, unless a link still speaks to it."""
        if not any(agent in (link.agent, *link.leaving) for link in self.find(agent)):
            self._context.act(Forget(generation, agent))

    def on_alive(self, link: Link, message: Alive) -> None:
        if message.answer:
            self._context.send(link, Alive(answer=False))

    def moved_to(self, link: Link, agent: AgentName, metadata: bytes) -> None:
        """The peer replaces its agent: use the new one, leave the old when drained."""
        if base(agent) != base(link.agent):
            self._context.count("rejected_messages", label="move to a foreign agent")
            return
        if generation_of(agent) < generation_of(link.agent):
            self._context.count("stale_messages", label="Move")
            return
        if agent != link.agent:
            link.leaving[link.agent] = link.generation
            link.agent, link.metadata = agent, metadata
            # While we rotate too, the peer must be known to both of our agents.
            for generation in {link.generation, self._context.generation}:
                self._context.act(Load(generation, agent, metadata))
        self.settle_move(link)

    def settle_move(self, link: Link) -> None:
        """Confirm a move once nothing is in flight towards the agents that were left.

        The confirmation goes to the agent that is left, behind the `Done`s that it was sent: the
        peer destroys that agent when it has heard, and what is unread then is lost. Said again,
        when the old agent is forgotten already, it goes to the new one.
        """
        if link.lost or any(link.writes_towards(agent) for agent in link.leaving):
            return
        left, link.leaving = link.leaving, {}
        moved = Moved(link.us, link.agent)
        if not left:
            self._context.send(link, moved)
        for agent, ours in sorted(left.items()):
            if ours in self._context.open:
                self._context.act(Notify(ours, agent, moved))
            else:
                self._context.send(link, moved)
            for generation in {link.generation, self._context.generation}:
                self.forget(generation, agent)

    def tick(self, now: float) -> list[tuple[Link, str]]:
        """Ask busy peers for signs of life; return those that have been silent too long."""
        config = self._context.config
        stalled = now - self._ticked - config.alive_interval
        silent = []
        for link in self._open.values():
            if not link.sessions:
                link.heard = now
                if now - link.asked >= config.silence:
                    # Nobody waits for it, but a transport that knows of the peer's death says so
                    # only when it is used; else links to engines that are gone would pile up.
                    link.asked = now
                    self._context.send(link, Alive(answer=False))
                continue
            if stalled > 0:  # this process itself was stopped: peers get their time back
                link.heard = min(now, link.heard + stalled)
            if now - link.heard >= config.silence:
                silent.append((link, f"silent for {config.silence:g} s"))
            elif now - link.asked >= config.alive_interval:
                link.asked = now
                self._context.send(link, Alive(answer=True))
        self._ticked = now
        return silent
