"""The READs of a decode rank: pulls of finished prompts.

    registered --Lend--> READs posted --all done--> Taken sent --Kept--> good

A prefill rank *lends* the blocks of a prompt, and names them; what it named is READ by the plan of
the pair, directly or by way of a slab of ours. Having them back too early is prefill's right: it
may take us for dead, and nobody can call a READ back. So bytes count only once prefill has said,
after the last READ had ended, that it still held the blocks (`Kept`). Until then nothing is
decoded. With `kv_digest` it says so with a digest of the blocks, which is compared with what is
here; what would have to be unpacked is pushed then.

A share that is pulled is *quiet* when no READ of it is in flight. One that fails half way, or
whose peer is lost, may write into our blocks until our own agent is gone, as a peer's WRITE may.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neuron_push.errors import PlanError
from neuron_push.plan import Blocks, Means, Plan, StagedPlan, decide
from neuron_push.protocol import Done, Kept, Lend, Taken
from neuron_push.rendezvous.blocklists import decode_blocks
from neuron_push.rendezvous.cuts import Cut, cut_of
from neuron_push.rendezvous.events import Fetch, ReadEnded
from neuron_push.rendezvous.landing import Landings
from neuron_push.rendezvous.links import Context, Link
from neuron_push.rendezvous.ranges import RangeSet
from neuron_push.transport import AgentName, WriteId

if TYPE_CHECKING:
    from neuron_push.rendezvous.attempt import Attempt, Share


@dataclass(frozen=True, slots=True)
class Read:
    """One READ in flight."""

    start: int
    stop: int
    generation: int  # ours
    agent: AgentName  # theirs
    posted: float  # when


@dataclass(slots=True, eq=False)
class Reading:
    """What is known of a share that is pulled."""

    plan: Plan
    cut: Cut
    source: tuple[Blocks, ...] = ()  # the prefill rank's blocks, once it has lent them
    posted: RangeSet = field(default_factory=RangeSet)
    reads: dict[WriteId, Read] = field(default_factory=dict)  # in flight
    broken: bool = False  # a READ failed half way: quiet only when fenced
    asked: bool = False  # `Taken` was sent
    kept: bool = False
    nbytes: int = 0  # that have arrived

    @property
    def quiet(self) -> bool:
        return not self.reads and not self.broken


class Reads:
    """All READs of this rank."""

    def __init__(self, context: Context, landings: Landings) -> None:
        self._context = context
        self._landings = landings
        self._compares = context.config.kv_digest
        self._in_flight: dict[WriteId, tuple[int, Link]] = {}  # attempt number, link

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    def find(self, read: WriteId) -> tuple[int, Link] | None:
        """The attempt and the link of a READ in flight."""
        return self._in_flight.get(read)

    def reading(self, link: Link) -> Reading | None:
        """A new pull over a link; None if this rank cannot read what the peer holds.

        Then prefill, which can bring it into order, must push.
        """
        if link.read == "unknown":
            link.read = self._plan(link)
        if link.read is None or (self._compares and isinstance(link.read, StagedPlan)):
            return None
        me = self._context.identity
        cut = cut_of(link.read, me.geometry, self._context.config.slice_bytes)
        return Reading(link.read, cut)

    def _plan(self, link: Link) -> Plan | None:
        me = self._context.identity
        assert link.ask is not None
        slabs = me.slabs
        means = Means(
            decode_slab=slabs.slab_bytes if slabs else 0,
            min_run=self._context.config.min_run,
            decode_sole=slabs is not None and slabs.sole,
        )
        try:
            return decide(link.geometry, me.geometry, link.ask, means)
        except PlanError:
            return None

    def lent(self, attempt: Attempt, share: Share, message: Lend, now: float) -> None:
        """The prefill rank holds the blocks for us; raises PeerError if they are not possible."""
        reading, command = share.reading, attempt.command
        assert reading is not None
        if reading.source or attempt.draining:
            return
        geometry = share.link.geometry
        most = self._context.config.limits.blocks
        reading.source = decode_blocks(geometry, message.blocks, command.start, command.stop, most)
        self.advance(attempt, share, now)

    def advance(self, attempt: Attempt, share: Share, now: float) -> None:
        """Post the next READs, up to those allowed in flight."""
        reading = share.reading
        if reading is None or not reading.source:
            return
        while len(reading.reads) < self._context.config.writes_in_flight:
            if attempt.draining or (piece := self._next(attempt, reading)) is None:
                return
            if isinstance(reading.plan, StagedPlan):
                # One slab at a time, so that transfers take turns.
                self._context.slabs.ask(
                    _key(attempt, share), lambda slab, now: self._fill(attempt, share, slab, now)
                )
                return
            self._post(attempt, share, piece, now)

    def _next(self, attempt: Attempt, reading: Reading) -> tuple[int, int] | None:
        command = attempt.command
        return reading.cut.next(reading.posted, command.start, command.stop, command.stop)

    def _fill(self, attempt: Attempt, share: Share, slab: int, now: float) -> bool:
        """A slab of ours is free: READ the next piece into it, if there still is one."""
        reading = share.reading
        assert reading is not None
        piece = self._next(attempt, reading)
        if piece is None or attempt.draining:
            return False
        self._post(attempt, share, piece, now, slab)
        self.advance(attempt, share, now)
        return True

    def _post(
        self, attempt: Attempt, share: Share, piece: tuple[int, int], now: float, slab: int = -1
    ) -> None:
        reading, link, me = share.reading, share.link, self._context.identity
        assert reading is not None
        number = WriteId(next(self._context.operations))
        reading.posted.add(*piece)
        reading.reads[number] = Read(*piece, link.generation, link.agent, now)
        self._in_flight[number] = attempt.command.attempt, link
        share.quiet = False
        link.posted(link.generation, link.agent)
        if slab >= 0:
            share.landing.granted[number] = slab
        self._context.act(
            Fetch(
                number, attempt.command.attempt, link.generation, link.agent, reading.plan,
                link.geometry, reading.source, attempt.blocks, *piece,
                me.slabs.slab(slab) if me.slabs and slab >= 0 else None,
                last=piece[1] == attempt.command.stop,
            )
        )  # fmt: skip

    def ended(self, attempt: Attempt, share: Share, event: ReadEnded, now: float) -> str | None:
        """A READ is over, was never started, or failed half way; why it failed, if it did."""
        reading = share.reading
        assert reading is not None
        if event.outcome == "broken":
            reading.broken = True
            return event.reason
        read = self.drained(share, event.read)
        if event.outcome != "done":
            self._landings.unused(share, event.read)
            return event.reason
        self._context.count("received_bytes", event.nbytes)
        reading.nbytes += event.nbytes
        self.arrived(attempt, share, event.read, read)
        self.advance(attempt, share, now)
        if self.conclude(attempt, share):
            attempt.announced = True
            attempt.wait = 0.0
            attempt.wait_longer(self._context.config, now)
        return None

    def drained(self, share: Share, number: WriteId) -> Read:
        """One READ is not in flight any more."""
        reading = share.reading
        assert reading is not None
        read = reading.reads.pop(number)
        self._in_flight.pop(number, None)
        share.link.drained(read.generation, read.agent)
        share.quiet = reading.quiet
        return read

    def arrived(self, attempt: Attempt, share: Share, number: WriteId, read: Read) -> None:
        """The bytes of a READ are here: in their blocks, or to be unpacked into them."""
        reading = share.reading
        assert reading is not None
        if isinstance(reading.plan, StagedPlan):
            self._landings.arrived(attempt, share, reading.plan, number, read.start, read.stop)
        elif self._compares:
            share.landing.received.add(read.start, read.stop)
        else:
            share.landed.add(read.start, read.stop)

    def conclude(self, attempt: Attempt, share: Share) -> bool:
        """Ask whether the blocks were held, once every READ has ended; whether that was now."""
        reading, command = share.reading, attempt.command
        if reading is None or reading.asked or not reading.quiet or attempt.draining:
            return False
        later = self._compares or isinstance(reading.plan, StagedPlan)
        arrived = share.landing.received if later else share.landed
        if not arrived.covers(command.start, command.stop):
            return False
        reading.asked = True
        self.ask(attempt, share)
        return True

    def ask(self, attempt: Attempt, share: Share) -> None:
        """Say `Taken`, unless it was answered."""
        reading = share.reading
        if reading is not None and reading.asked and not reading.kept:
            self._context.send(share.link, Taken(attempt.number, share.link.hello))

    def confirmed(self, attempt: Attempt, share: Share, message: Kept) -> None:
        """The blocks were held until our last READ had ended."""
        reading, command = share.reading, attempt.command
        if reading is None or not reading.asked or reading.kept:
            return
        reading.kept = True
        if self._compares and not attempt.draining:
            done = Done(message.attempt, command.start, command.stop, reading.nbytes,
                        digest=message.digest)  # fmt: skip
            self._landings.check(attempt, share, reading.plan, done, reading.source)

    def stop(self, attempt: Attempt, share: Share) -> None:
        """Post no more."""
        self._context.slabs.drop(_key(attempt, share))

    def fenced(self, share: Share) -> None:
        """Our agent that READ for this share is gone."""
        reading = share.reading
        if reading is not None:
            reading.broken = False
            for number in list(reading.reads):
                self.drained(share, number)

    def stuck(self, share: Share, now: float) -> bool:
        """Whether a READ takes longer than any may."""
        reads = share.reading.reads.values() if share.reading else ()
        return any(now >= read.posted + self._context.config.drain_timeout for read in reads)


def _key(attempt: Attempt, share: Share) -> tuple[str, int, int]:
    return "read", attempt.command.attempt, share.link.id
