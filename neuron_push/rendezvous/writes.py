"""The WRITEs of a prefill rank: what is posted next, through which slabs, and what is in flight.

    direct:    settled --> WRITE into the registered blocks
    packed:    settled --> slab of ours free --> packed, and WRITE from it
    unpacked:  settled --Need--> (Grant) --> WRITE into the decode rank's slab
    both:      settled --Need--> (Grant) --> slab of ours free --> packed, and WRITE from the one
               into the other; a piece whose blocks lie well goes as if decode had no slabs

A slab of ours is given back when its WRITE is not in flight any more; a granted one belongs to
its WRITE alone (landing.py has the decode side).
"""

from __future__ import annotations

from itertools import count

from neuron_push.geometry import Region
from neuron_push.plan import Plan, StagedPlan
from neuron_push.protocol import Done, Grant, Need, Return, Soon
from neuron_push.rendezvous.events import Post, WriteEnded
from neuron_push.rendezvous.links import Context
from neuron_push.rendezvous.producer import Sending, Want, Write
from neuron_push.transport import WriteId


class Writes:
    """All WRITEs in flight, and the slabs that the next ones wait for."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pieces = count(1)
        self._in_flight: dict[WriteId, Sending] = {}

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    def sending(self, number: WriteId) -> Sending | None:
        """The sending that a WRITE in flight belongs to."""
        return self._in_flight.get(number)

    def advance(self, sending: Sending, now: float) -> None:
        """Post what is settled and not posted, up to the WRITEs allowed in flight."""
        while len(sending.writes) + len(sending.wants) < self._context.config.writes_in_flight:
            found = sending.next_piece()
            if found is None:
                if (streamed := sending.next_part()) is None:
                    return
                start, stop, part = streamed
                self.post(sending, start, stop, sending.link.parts[part - 1], now, part=part)
                continue
            start, stop, plan = found
            if isinstance(plan, StagedPlan) and plan.unpacks:
                number = next(self._pieces)
                sending.wants[number] = Want(start, stop, plan, now)
                self._context.send(sending.link, Need(sending.register.attempt, number))
            elif isinstance(plan, StagedPlan):
                self._ask_own(sending)
                return
            else:
                self.post(sending, start, stop, plan, now)

    def _ask_own(self, sending: Sending) -> None:
        """Ask for one slab of ours at a time, so that transfers take turns."""
        self._context.slabs.ask(
            ("pack", sending.key), lambda slab, now: self._pack(sending, slab, now)
        )

    def _pack(self, sending: Sending, slab: int, now: float) -> bool:
        """A slab of ours is free: use it for the next piece, if there still is one."""
        if granted := sending.granted:
            self._use(sending, granted[0], now, slab)
            if granted[1:]:
                self._ask_own(sending)
        else:
            found = sending.next_piece()
            needed = found is not None and found[2].way == "packed"
            if found is not None and needed:
                self.post(sending, *found, now, own=slab)
            self.advance(sending, now)
            return needed
        return True

    def _use(self, sending: Sending, piece: int, now: float, own: int = -1) -> None:
        """WRITE a piece into the slab that was granted for it, and from one of ours if need be."""
        want = sending.wants.pop(piece)
        sending.pieces.add(piece, piece + 1)
        self.post(sending, want.start, want.stop, want.plan, now,
                  own=own, granted=want.slab, piece=piece)  # fmt: skip

    def post(
        self,
        sending: Sending,
        start: int,
        stop: int,
        plan: Plan,
        now: float,
        *,
        own: int = -1,
        granted: Region | None = None,
        piece: int = 0,
        part: int = 0,
    ) -> None:
        """WRITE into the registered blocks, or by way of slabs: `own` is the number of ours.

        `part` of the layers, from 1; 0 for all.
        """
        link, source, attempt = sending.link, sending.source, sending.register.attempt
        slabs = self._context.identity.slabs
        assert source is not None
        number = WriteId(next(self._context.operations))
        self.announce(sending)
        sending.started = sending.started or now
        (sending.parted.of(part) if part else sending.posted).add(start, stop)
        write = Write(start, stop, source, link.generation, link.agent, now, slab=own, part=part)
        sending.writes[number] = write
        self._in_flight[number] = sending
        source.writes += 1
        link.posted(link.generation, link.agent)
        self._context.act(
            Post(
                number,
                link.generation,
                link.agent,
                plan,
                link.geometry,
                tuple(source.blocks),
                sending.blocks,
                Done(
                    attempt,
                    start,
                    stop,
                    piece=piece,
                    part=part,
                    parts=len(link.parts) if part else 0,
                ),
                slabs.slab(own) if slabs and own >= 0 else None,
                granted,
                last=stop == sending.register.stop,
            )
        )

    def granted(self, sending: Sending, message: Grant, now: float) -> str:
        """WRITE a piece into decode's slab for it, or give the slab back; a complaint, or ""."""
        piece = message.piece
        want, slabs = sending.wants.get(piece), sending.link.slabs
        if want is None or slabs is None:
            # A late copy must not return a slab whose WRITE may still be on its way.
            if not sending.pieces.covers(piece, piece + 1):
                self._context.send(sending.link, Return(message.attempt, piece))
            return ""
        if not 0 <= message.slab < slabs.count:
            return f"decode granted slab {message.slab} of {slabs.count}"
        want.slab = slabs.slab(message.slab)
        if want.plan.way == "both":
            self._ask_own(sending)
        else:
            self._use(sending, piece, now)
        return ""

    def ended(self, sending: Sending, event: WriteEnded) -> Write:
        """One WRITE has landed, or was never started."""
        write = self.drained(sending, event.write)
        if event.outcome == "done":
            ranges = [(write.start, write.stop)]
            if write.part:
                parts = len(sending.link.parts)
                ranges = sending.arrived.add(write.part, parts, *ranges[0])
            for start, stop in ranges:
                sending.landed.add(start, stop)
        return write

    def drained(self, sending: Sending, number: WriteId) -> Write:
        """One WRITE is not in flight any more."""
        write = sending.writes.pop(number)
        self._in_flight.pop(number, None)
        write.source.writes -= 1
        if write.slab >= 0:
            self._context.slabs.give(write.slab)
        sending.link.drained(write.generation, write.agent)
        return write

    def announce(self, sending: Sending) -> None:
        """Say once that bytes are about to arrive."""
        if not sending.soon:
            sending.soon = True
            self._context.send(sending.link, Soon(sending.register.attempt))

    def forget_slabs(self, sending: Sending) -> None:
        """Use no slab that is still to come: grants under way go back when they arrive."""
        for number in sending.granted:
            self._context.send(sending.link, Return(sending.register.attempt, number))
        sending.wants.clear()
        self._context.slabs.drop(("pack", sending.key))

    def repeat_needs(self, sending: Sending, now: float) -> None:
        """Ask again for slabs that were not granted."""
        for number, want in sending.wants.items():
            if want.slab is None and now - want.asked >= self._context.config.resend_most:
                want.asked = now
                self._context.send(sending.link, Need(sending.register.attempt, number))
