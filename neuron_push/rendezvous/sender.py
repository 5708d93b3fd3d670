"""Drives the prefill side: which sending does what, on which event (states in producer.py)."""

from __future__ import annotations

from neuron_push.commands import Compute, Layers, Near, Offer, Retire, Settle, Unpinned
from neuron_push.errors import PeerError, PlanError
from neuron_push.protocol import (
    Cancel,
    Cancelled,
    Failed,
    Grant,
    Register,
    Registered,
    Taken,
    clip,
)
from neuron_push.rendezvous.admission import admit_register
from neuron_push.rendezvous.events import Sealed, Tell, WriteEnded
from neuron_push.rendezvous.links import Context, Link, Links
from neuron_push.rendezvous.loans import Loans
from neuron_push.rendezvous.producer import Sending, SendingState, Source
from neuron_push.rendezvous.sources import Sources, matches
from neuron_push.rendezvous.writes import Writes

OVER = "this attempt is over"


class Producer:
    """All sources and sendings of this prefill rank."""

    def __init__(self, context: Context, links: Links) -> None:
        self._context = context
        self._links = links
        self.sources = Sources()
        self.sendings: dict[tuple[int, int], Sending] = {}
        self.writes = Writes(context)
        self.loans = Loans(context)

    # ------------------------------------------------------------------ from the engine

    def offer(self, command: Offer, now: float) -> None:
        """A prompt is about to be computed here: registrations that wait for it match now."""
        source = Source(command.source, command.request, command.match)
        self.sources.add(source)
        for sending in list(self.sendings.values()):
            waits = sending.state is SendingState.WAITING
            if waits and matches(sending.register.match, command.match):
                self._match(sending, now)

    def near(self, command: Near) -> None:
        """The last tokens are about to be computed: tell those who wait to look sharp."""
        source = self.sources.get(command.source)
        if source is not None:
            source.near = True
            for sending in source.sendings:
                self.writes.announce(sending)

    def compute(self, command: Compute) -> None:
        """A step computes more tokens of a source; its layers will be settled one by one."""
        self.sources.compute(command)

    def layers(self, command: Layers, now: float) -> None:
        """So many parts of the layers are settled of what a step computes."""
        for source in self.sources.reach(command):
            for sending in list(source.sendings):
                self._advance(sending, now)

    def settle(self, command: Settle, now: float) -> None:
        """More tokens of a source are settled: their bytes may be read."""
        source = self.sources.settle(command)
        if source is None:
            self._context.act(Tell(Unpinned(command.pin)))
        elif not source.gone:  # else WRITEs still read it: the pin goes when they have drained
            for sending in list(source.sendings):
                self._advance(sending, now)

    def retire(self, command: Retire, now: float) -> None:
        """The request left the engine; see `commands.Retire` for what each outcome means."""
        source = self.sources.get(command.source)
        if source is None:
            if command.pin >= 0:
                self._context.act(Tell(Unpinned(command.pin)))
            return
        if command.outcome == "finished" and source.last:
            source.finished = now
        else:
            self._discard(source, command.reason or "the prefill request ended",
                          again=command.outcome == "preempted", now=now)  # fmt: skip
        self._release(source)

    # ------------------------------------------------------------------ from the peers

    def on_register(self, link: Link, message: Register, now: float) -> None:
        """A decode rank wants tokens; answered every time, applied once."""
        if message.link != link.hello:
            self._context.count("stale_messages", label="Register")
            return
        sending = self.sendings.get((link.id, message.attempt))
        if sending is not None:
            if sending.state is SendingState.STOPPING:
                self._context.send(link, Failed(message.attempt, clip(sending.reason or OVER)))
            else:
                self._context.send(link, Registered(message.attempt))
            return
        if message.attempt in link.kept:  # a late copy, while `Kept` is on its way
            self.loans.confirm(link, message.attempt)
            return
        if message.attempt in link.over:
            self._context.count("stale_messages", label="Register")
            self._context.send(link, Failed(message.attempt, OVER))
            return
        try:
            sending = admit_register(link, message, self._context, now)
        except (PeerError, PlanError) as error:
            self._context.count("rejected_messages", label="Register")
            link.over.add(message.attempt)
            self._context.send(link, Failed(message.attempt, clip(str(error))))
            return
        self.sendings[sending.key] = sending
        link.sessions += 1
        link.listed += sending.listed
        self._context.count("registrations")
        self._context.send(link, Registered(message.attempt))
        self._match(sending, now)

    def on_cancel(self, link: Link, message: Cancel, now: float) -> None:
        """The decode rank gives up: stop, drain, then confirm; confirm again if asked again."""
        sending = self.sendings.get((link.id, message.attempt))
        if sending is None:
            link.over.add(message.attempt)
            self._context.send(link, Cancelled(message.attempt))
            return
        if not sending.cancelled:
            self._context.count("cancellations", label="decode")
        sending.cancelled = True
        self.loans.end(sending)
        self._stop(sending)

    def on_taken(self, link: Link, message: Taken, now: float) -> None:
        """The decode rank has READ all that it wanted: were the blocks held until now?"""
        if message.link != link.hello:
            self._context.count("stale_messages", label="Taken")
            return
        sending, attempt = self.sendings.get((link.id, message.attempt)), message.attempt
        if sending is not None and self.loans.held(sending):
            self._taken(sending, now)
        elif attempt in link.kept:
            self.loans.confirm(link, attempt)
        else:
            if sending is not None:
                self.loans.end(sending)
            reason = sending.reason if sending else "the blocks were not held until they were read"
            self._context.send(link, Failed(attempt, clip(reason or OVER)))

    def sealed(self, event: Sealed, now: float) -> None:
        """The digest of what was READ is taken: if it still is lent, the decode rank may know."""
        sending = self.sendings.get((event.link, event.attempt))
        if sending is None or not self.loans.held(sending):
            return  # it hears how that ended
        if event.reason:
            self._fail(sending, event.reason, now)
        else:
            self.loans.end_well(sending, event.digest, now)
            self._end(sending)

    def on_grant(self, link: Link, message: Grant, now: float) -> None:
        """The decode rank has a slab for a piece: WRITE it there, or give the slab back."""
        sending = self.sendings.get((link.id, message.attempt))
        if sending is None:
            return  # decode takes its slabs back when it hears how the attempt ended
        complaint = self.writes.granted(sending, message, now)
        if complaint:
            self._fail(sending, complaint, now)

    def write_ended(self, event: WriteEnded, now: float) -> None:
        """A WRITE is over, was never started, or failed half way."""
        sending = self.writes.sending(event.write)
        if sending is None:
            return
        if event.outcome == "broken":
            # Its blocks are being read until our own agent is gone.
            sending.broken = True
            self._fail(sending, event.reason, now)
            return
        write = self.writes.ended(sending, event)
        if event.outcome == "done":
            self._advance(sending, now)
            if sending.complete and sending.state is not SendingState.STOPPING:
                self._context.count("sends", label="sent")
                self._context.count("transfer_seconds", now - sending.started)
                self._end(sending)
        else:
            self._fail(sending, event.reason, now)
        if sending.state is SendingState.STOPPING:
            self._stop(sending)
        self._release(write.source)
        if sending.link.leaving:
            self._links.settle_move(sending.link)

    def link_lost(self, link: Link) -> bool:
        """A decode rank is lost; returns whether WRITEs towards it may still read our blocks."""
        loud = False
        for sending in [s for s in self.sendings.values() if s.link is link]:
            self.loans.end(sending)
            if sending.quiet:
                self._end(sending)
                continue
            loud = sending.broken = True
            self.writes.forget_slabs(sending)
            if sending.state is not SendingState.STOPPING:
                sending.move(SendingState.STOPPING)
        return loud

    def fenced(self, links: list[Link]) -> None:
        """Our agent that wrote to these links is gone: their WRITEs are over."""
        for sending in [s for s in self.sendings.values() if s.link in links]:
            for number in list(sending.writes):
                self._release(self.writes.drained(sending, number).source)
            sending.broken = False
            self._end(sending)

    def tick(self, now: float) -> list[tuple[Link, str]]:
        """End what waited too long, repeat what must be heard; returns links with a stuck WRITE."""
        config = self._context.config
        stuck: list[tuple[Link, str]] = []
        for sending in list(self.sendings.values()):
            if any(now >= write.posted + config.drain_timeout for write in sending.writes.values()):
                stuck.append((sending.link, "a WRITE towards it does not end"))
            self._overdue(sending, now)
        for source in self.sources:
            held = source.finished is not None and not source.sendings and not source.gone
            if held and now >= (source.finished or 0.0) + config.lease:
                self._context.count("cancellations", label="lease")
                self._discard(
                    source, "the lease on the finished prompt ended", again=False, now=now
                )
                self._release(source)
        return stuck

    # ------------------------------------------------------------------ inside

    def _overdue(self, sending: Sending, now: float) -> None:
        """End a sending that waited too long; repeat what was not answered."""
        config = self._context.config
        self.writes.repeat_needs(sending, now)
        self.loans.repeat(sending, now)
        if self.loans.overdue(sending, now):
            self._fail(sending, "the loan of the prompt's blocks was not given back", now)
        if sending.state is SendingState.WAITING and now >= sending.expires:
            if sending.register.start == sending.register.stop:
                self._end(sending)
            else:
                self._fail(sending, "no such prompt was prefilled here in time", now)
        elif sending.state is SendingState.STOPPING and not sending.cancelled:
            if sending.quiet and now >= sending.expires + config.drain_timeout:
                self._end(sending)
            elif now >= sending.repeat_at:
                sending.repeat_at = now + config.resend_most
                failed = Failed(sending.register.attempt, clip(sending.reason))
                self._context.send(sending.link, failed)

    def _match(self, sending: Sending, now: float) -> None:
        """Join a sending with the source it names, if that is here."""
        source = self.sources.find(sending.register.match, sending.link)
        if source is None:
            reason = self.sources.epitaph(sending.register.match)
            if reason is not None:
                self._fail(sending, reason, now)
            return
        sending.source = source
        sending.move(SendingState.SENDING)
        source.sendings[sending] = None
        source.sharers = max(source.sharers, sending.link.sharers)
        self._context.count("match_seconds", now - sending.began)
        if sending.complete:
            self._end(sending)
            return
        if source.near:
            self.writes.announce(sending)
        self._advance(sending, now)

    def _advance(self, sending: Sending, now: float) -> None:
        """Push what is settled, or lend all of it."""
        if sending.register.pull:
            self.loans.lend(sending, now)
        else:
            self.writes.advance(sending, now)

    def _taken(self, sending: Sending, now: float) -> None:
        """All that was lent was READ: say that it was held, with a digest if that is wanted."""
        try:
            if self.loans.seal(sending):
                return
        except PlanError as error:
            self._fail(sending, str(error), now)
            return
        self.loans.end_well(sending, b"", now)
        self._end(sending)

    def _discard(self, source: Source, reason: str, *, again: bool, now: float) -> None:
        """Stop reading a source; `again` when the same prompt will be offered once more."""
        source.gone = True
        self.sources.hide(source)
        for sending in list(source.sendings):
            if not again:
                self._fail(sending, reason, now)
            elif sending.lender is not None:
                pass  # its blocks are whole and pinned: the loan goes on
            elif sending.state is SendingState.SENDING:
                sending.move(SendingState.WAITING)
                sending.source = None
                self.writes.forget_slabs(sending)
                source.sendings.pop(sending, None)
                self._match(sending, now)  # it may have been offered again already
        if not again:
            self.sources.remember(source, reason)

    def _fail(self, sending: Sending, reason: str, now: float) -> None:
        """Tell the decode rank; it answers with a cancellation, which is confirmed when quiet."""
        if sending.state in (SendingState.STOPPING, SendingState.ENDED):
            return
        sending.move(SendingState.STOPPING)
        self.writes.forget_slabs(sending)
        sending.reason = reason
        sending.repeat_at = now + self._context.config.resend_most
        self._context.count("sends", label="failed")
        self._context.send(sending.link, Failed(sending.register.attempt, clip(reason)))

    def _stop(self, sending: Sending) -> None:
        """No more WRITEs; when none is in flight either, say so and end."""
        if sending.state is not SendingState.STOPPING:
            sending.move(SendingState.STOPPING)
        self.writes.forget_slabs(sending)
        if sending.quiet and sending.cancelled:
            self._context.send(sending.link, Cancelled(sending.register.attempt))
            self._end(sending)

    def _end(self, sending: Sending) -> None:
        self.writes.forget_slabs(sending)
        self.loans.end(sending)
        sending.move(SendingState.ENDED)
        sending.link.sessions -= 1
        sending.link.listed -= sending.listed
        sending.link.over.add(sending.register.attempt)
        del self.sendings[sending.key]
        source = sending.source
        if source is not None:
            source.sendings.pop(sending, None)
            source.served.add((sending.link.engine, sending.link.rank))
            self._release(source)

    def _release(self, source: Source) -> None:
        """Let the source and its pin go once nobody needs it and no WRITE reads it."""
        if not source.idle or not self.sources.remove(source):
            return
        if source.handed_over:
            self.sources.remember(source, "this prompt was handed over already")
        if source.pin >= 0:
            self._context.act(Tell(Unpinned(source.pin)))
