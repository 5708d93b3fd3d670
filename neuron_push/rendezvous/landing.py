"""The decode side of staged shares: slabs granted, pieces landed in them, pieces unpacked.

    (nothing) --Need--> queued --slab free--> granted --Done--> unpacking --Unpacked--> over
                          |                      |                            ^
                          +--- Return, quiet ----+----------------------------+

A prefill rank asks for a slab per piece, when the piece's bytes are ready. A granted slab is its
own until its WRITE has landed and was unpacked, until it says that it will not use the grant, or
until nothing of it can land any more (promise 1 holds for slabs as it does for blocks).

A share that we READ ourselves (reads.py) has its slabs here too, by the number of the READ.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from neuron_push.plan import Blocks, Plan, StagedPlan
from neuron_push.protocol import Done, Grant, Need, Return
from neuron_push.rendezvous.events import Check, Unpack
from neuron_push.rendezvous.links import Context, Link
from neuron_push.rendezvous.ranges import RangeSet

if TYPE_CHECKING:
    from neuron_push.rendezvous.attempt import Attempt, Share

# Pieces that one share may have asked for and not yet been granted; a healthy peer asks for as
# many as it has WRITEs in flight, 64 at most.
MOST_NEEDS = 64
# Returns of pieces that were not asked for, as when a `Need` is overtaken, in ranges of numbers.
MOST_RETURNS = 4096


@dataclass(frozen=True, slots=True)
class Job:
    """One piece being unpacked."""

    attempt: int
    link: int
    piece: int
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Landing:
    """What a staged share has of our slabs."""

    granted: dict[int, int] = field(default_factory=dict)  # piece -> slab
    queued: set[int] = field(default_factory=set)
    over: RangeSet = field(default_factory=RangeSet)  # pieces
    received: RangeSet = field(default_factory=RangeSet)  # tokens, unpacked or not
    running: set[int] = field(default_factory=set)  # pieces being unpacked


class Landings:
    """All staged shares of this decode rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._numbers = count(1)
        self._jobs: dict[int, Job] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is being unpacked."""
        return bool(self._jobs)

    def landed(self, attempt: Attempt, share: Share, message: Done) -> bool:
        """A WRITE has landed, in blocks or in a slab; whether that was the share's last."""
        start, stop, arrived = attempt.command.start, attempt.command.stop, share.landing.received
        complaint = ""
        if message.start < start or message.stop > stop:
            complaint = "Done outside the registration"
        elif message.piece or (share.link.unpack and share.link.unpack.way == "unpacked"):
            complaint = self.on_done(attempt, share, message)
        elif share.link.arrival is not None:
            arrived.add(message.start, message.stop)
            self.check(attempt, share, share.link.arrival, message)
        elif not self._in_blocks(share, message):
            complaint = "Done of other parts"
        if complaint:
            self._context.count("rejected_messages", label=complaint)
            return False
        self._context.count("received_bytes", message.nbytes)
        return arrived.covers(start, stop)

    def _in_blocks(self, share: Share, message: Done) -> bool:
        """Tokens are here, whole or a part of their layers; False if the parts are others."""
        ranges = [(message.start, message.stop)]
        if message.part:
            share.parts = share.parts or message.parts
            if share.parts != message.parts:
                return False
            ranges = share.parted.add(message.part, message.parts, *ranges[0])
        for start, stop in ranges:
            share.landing.received.add(start, stop)
            share.landed.add(start, stop)
        return True

    def on_need(self, attempt: Attempt, share: Share, message: Need) -> None:
        """A prefill rank has a piece ready: grant a slab, now or in its turn."""
        landing, link, piece = share.landing, share.link, message.piece
        if link.unpack is None:
            self._context.count("rejected_messages", label="Need over a direct link")
        elif share.quiet or piece in landing.queued or landing.over.covers(piece, piece + 1):
            self._context.count("stale_messages", label="Need")
        elif piece in landing.granted:
            self._context.send(link, Grant(message.attempt, piece, landing.granted[piece]))
        elif len(landing.queued) >= MOST_NEEDS:
            self._context.count("rejected_messages", label="too many Needs")
        else:
            landing.queued.add(piece)

            def serve(slab: int, now: float) -> bool:
                landing.queued.discard(piece)
                landing.granted[piece] = slab
                self._context.send(link, Grant(message.attempt, piece, slab))
                return True

            key = _key(attempt.command.attempt, link, piece)
            self._context.slabs.ask(key, serve, promise=link.unpack.way == "both")

    def on_return(self, attempt: Attempt, share: Share, message: Return) -> None:
        """A prefill rank will not use a grant, nor any other of that number."""
        landing, piece = share.landing, message.piece
        if piece in landing.queued:
            landing.queued.discard(piece)
            self._context.slabs.drop(_key(attempt.command.attempt, share.link, piece))
        if piece in landing.granted and piece not in landing.running:
            self._context.slabs.give(landing.granted.pop(piece))
        elif len(landing.over) >= MOST_RETURNS:
            self._context.count("rejected_messages", label="too many Returns")
            return
        landing.over.add(piece, piece + 1)

    def on_done(self, attempt: Attempt, share: Share, message: Done) -> str:
        """A piece has landed in its slab: unpack it if anybody still wants it; a complaint."""
        landing, plan, piece = share.landing, share.link.unpack, message.piece
        slab = landing.granted.get(piece)
        if plan is None or slab is None or piece in landing.running:
            known = landing.over.covers(piece, piece + 1) or piece in landing.running
            return "" if known else "Done for a slab that was not granted"
        done = message if self._context.config.kv_digest else None
        self.arrived(attempt, share, plan, piece, message.start, message.stop, done)
        return ""

    def check(
        self, attempt: Attempt, share: Share, plan: Plan, message: Done,
        source: tuple[Blocks, ...] = (),
    ) -> None:  # fmt: skip
        """Bytes are in our blocks, WRITTEN or READ: they count once their digest was compared."""
        number, span = next(self._numbers), (message.start, message.stop)
        self._jobs[number] = Job(attempt.command.attempt, share.link.id, 0, *span)
        last = message.stop == attempt.command.stop
        self._context.act(Check(number, plan, *span, attempt.blocks, message, last, source))

    def arrived(
        self, attempt: Attempt, share: Share, plan: StagedPlan, piece: int, start: int, stop: int,
        done: Done | None = None,
    ) -> None:  # fmt: skip
        """The bytes of a piece are in its slab: unpack it, or free the slab if nobody cares."""
        landing = share.landing
        landing.received.add(start, stop)
        if attempt.draining or (share.quiet and share.reading is None):
            self._free(landing, piece)
            return
        number = next(self._numbers)
        self._jobs[number] = Job(attempt.command.attempt, share.link.id, piece, start, stop)
        landing.running.add(piece)
        slab = landing.granted[piece]
        last = stop == attempt.command.stop
        self._context.act(Unpack(number, plan, start, stop, attempt.blocks, slab, done, last))

    def unused(self, share: Share, piece: int) -> None:
        """Nothing was or will be put into the slab of a piece, if it has one."""
        if piece in share.landing.granted:
            self._free(share.landing, piece)

    def take(self, number: int) -> Job | None:
        """A job has ended."""
        return self._jobs.pop(number, None)

    def finished(self, share: Share, piece: int) -> None:
        """A piece is unpacked, or failed to be: its slab is free."""
        share.landing.running.discard(piece)
        if piece in share.landing.granted:
            self._free(share.landing, piece)

    def quiet(self, attempt: Attempt, share: Share) -> None:
        """Nothing of this share can land any more: take back what it has, but what is running."""
        landing = share.landing
        for piece in list(landing.queued):
            self._context.slabs.drop(_key(attempt.command.attempt, share.link, piece))
        landing.queued.clear()
        for piece in list(landing.granted):
            if piece not in landing.running:
                self._free(landing, piece)

    def _free(self, landing: Landing, piece: int) -> None:
        self._context.slabs.give(landing.granted.pop(piece))
        landing.over.add(piece, piece + 1)


def _key(attempt: int, link: Link, piece: int) -> Hashable:
    return "unpack", attempt, link.id, piece
