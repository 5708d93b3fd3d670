"""Agent generations: the fence.

A posted WRITE cannot be recalled and a dead peer's bytes may land whenever the target next
makes progress. Destroying the target's agent is what stops them. So when a link is lost with
bytes possibly on the way, in either direction, this machine

1. opens a new generation of our agent over the same memory (new hellos get it at once),
2. tells every healthy peer to move, again until it has, and lets what is in flight drain,
3. closes the old generation, and with that every lost link is *fenced*.

One rotation runs at a time and they are spaced out. A healthy peer that does not follow in
time is lost too. A link lost once the new agent is open waits for the next rotation: the peer
may have moved already without our knowing, and then its bytes travel to the new agent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from neuron_push.protocol import Move
from neuron_push.rendezvous.events import Close, Load, Open, Opened
from neuron_push.rendezvous.links import Context, Link, Links
from neuron_push.transport import AgentName


@dataclass(slots=True)
class Rotation:
    """A change from one generation to the next, under way."""

    old: int
    new: int
    lost: list[Link]
    deadline: float
    opened: bool = False
    closing: bool = False
    told: float = 0.0
    staying: dict[int, Link] = field(default_factory=dict)  # healthy peers still to move


class Generations:
    """Decides when to open, move and close; at most one rotation at a time."""

    def __init__(self, context: Context, links: Links) -> None:
        self._context = context
        self._links = links
        self._wanted: list[Link] = []
        self._rotation: Rotation | None = None
        self._last = float("-inf")

    @property
    def pending(self) -> bool:
        """Whether a lost link still waits for its fence."""
        return bool(self._wanted or self._rotation)

    def want(self, link: Link) -> None:
        """Fence a lost link: joins the running rotation if its peer cannot know the new agent."""
        self.forget(link)
        if self._rotation and not self._rotation.opened:
            self._rotation.lost.append(link)
        else:
            self._wanted.append(link)

    def forget(self, link: Link) -> None:
        """A link is lost: nobody waits for it to move."""
        if self._rotation:
            self._rotation.staying.pop(link.id, None)

    def on_opened(self, event: Opened, now: float) -> None:
        """A generation is ready: the first one, or the next of a rotation."""
        context = self._context
        context.generation, context.agent, context.metadata = (
            event.generation, event.agent, event.metadata,
        )  # fmt: skip
        context.open.add(event.generation)
        rotation = self._rotation
        if not rotation or rotation.new != event.generation:
            return
        rotation.opened = True
        rotation.deadline = now + context.config.move_timeout
        for link in self._links:
            if link.generation <= rotation.old:
                rotation.staying[link.id] = link
                context.act(Load(rotation.new, link.agent, link.metadata))

    def on_moved(self, link: Link, agent: AgentName) -> None:
        """A healthy peer uses our new agent now, and left nothing behind."""
        rotation = self._rotation
        if rotation and agent == self._context.agent and link.id in rotation.staying:
            link.generation = rotation.new

    def on_closed(self, generation: int) -> list[Link]:
        """The old agent is destroyed; returns the links that this fences."""
        rotation = self._rotation
        if not rotation or generation != rotation.old:
            return []
        self._rotation = None
        return rotation.lost

    def tick(self, now: float) -> list[tuple[Link, str]]:
        """Move the rotation on; returns healthy peers that did not follow in time."""
        rotation = self._rotation
        if rotation is None:
            self._start(now)
            return []
        if not rotation.opened or rotation.closing:
            return []
        self._release(rotation)
        if not rotation.staying:
            rotation.closing = True
            self._context.open.discard(rotation.old)
            self._context.act(Close(rotation.old))
            return []
        if now >= rotation.deadline:
            return [(link, "did not follow to the new agent") for link in rotation.staying.values()]
        if now - rotation.told >= self._context.config.resend:
            rotation.told = now
            for link in rotation.staying.values():
                if link.generation == rotation.old:
                    self._context.send(link, self._move(link))
        return []

    def _move(self, link: Link) -> Move:
        return Move(link.us, self._context.agent, self._context.metadata)

    def _release(self, rotation: Rotation) -> None:
        """Peers that have moved leave once our own WRITEs through the old agent drained."""
        for link in list(rotation.staying.values()):
            if link.generation != rotation.old and not link.writes_through(rotation.old):
                del rotation.staying[link.id]

    def _start(self, now: float) -> None:
        config = self._context.config
        if not self._wanted or now - self._last < config.rotation_interval:
            return
        self._last = now
        old = self._context.generation
        self._rotation = Rotation(old, old + 1, self._wanted, deadline=float("inf"))
        self._context.count("rotations")
        self._context.note(f"agent generation {old + 1} begins, to fence {len(self._wanted)} peers")
        self._wanted = []
        self._context.act(Open(old + 1))
