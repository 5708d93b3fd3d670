"""Drives the prefill side: which sending does what, on which event (states in producer.py)."""

from __future__ import annotations

from itertools import count

from neuron_push.commands import Near, Offer, Retire, Settle, Unpinned
from neuron_push.errors import PeerError, PlanError
from neuron_push.geometry import Region
from neuron_push.plan import Blocks, StagedPlan, decode_runs
from neuron_push.protocol import (
    MAX_BLOCKS,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Grant,
    Need,
    Register,
    Registered,
    Return,
    Soon,
    clip,
)
from neuron_push.rendezvous.events import Post, Tell, WriteEnded
from neuron_push.rendezvous.links import Context, Link, Links
from neuron_push.rendezvous.producer import (
    Sending,
    SendingState,
    Source,
    Sources,
    Want,
    Write,
    bytes_per_token,
    extend,
    keys,
    matches,
)
from neuron_push.transport import WriteId

# Largest grain at which a transfer is cut: the least common multiple of all block sizes,
# unless that is absurd; then a prompt travels in one piece.
MOST_GRAIN = 1 << 14
ONE_PIECE = 1 << 40
# Reasons of dispatches that ended here, kept so that a late registration hears them.
MOST_EPITAPHS = 4096
OVER = "this attempt is over"
# A day: what `Config.patience` allows.
MOST_PATIENCE = 86_400.0


class Producer:
    """All sources and sendings of this prefill rank."""

    def __init__(self, context: Context, links: Links) -> None:
        self._context = context
        self._links = links
        self._write_ids = count(1)
        self.sources = Sources()
        self.sendings: dict[tuple[int, int], Sending] = {}
        self._by_write: dict[WriteId, Sending] = {}
        self._piece_numbers = count(1)
        self._epitaphs: dict[tuple[str, ...], str] = {}

    @property
    def writing(self) -> bool:
        """Whether any WRITE is in flight."""
        return bool(self._by_write)

    def of_write(self, number: WriteId) -> Sending | None:
        """The sending that a WRITE in flight belongs to."""
        return self._by_write.get(number)

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
                self._announce(sending)

    def settle(self, command: Settle, now: float) -> None:
        """More tokens of a source are settled: their bytes may be read."""
        source = self.sources.get(command.source)
        if source is None or (source.gone and source.pin != command.pin):
            self._context.act(Tell(Unpinned(command.pin)))
            return
        if source.gone:
            return  # WRITEs still read it: the pin goes when they have drained
        for group, (first, ids) in enumerate(zip(command.first, command.blocks, strict=True)):
            extend(source.blocks, group, first, ids)
        source.settled = max(source.settled, command.stop)
        source.pin = command.pin
        source.last = source.last or command.last
        for sending in list(source.sendings):
            self._advance(sending, now)

    def retire(self, command: Retire, now: float) -> None:
        """The request left the engine; see `commands.Retire` for what each outcome means."""
        source = self.sources.get(command.source)
        if source is None:
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
        if message.attempt in link.over:
            self._context.count("stale_messages", label="Register")
            self._context.send(link, Failed(message.attempt, OVER))
            return
        try:
            sending = self._sending(link, message, now)
        except (PeerError, PlanError) as error:
            self._context.count("rejected_messages", label="Register")
            link.over.add(message.attempt)
            self._context.send(link, Failed(message.attempt, clip(str(error))))
            return
        self.sendings[sending.key] = sending
        link.sessions += 1
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
        self._stop(sending)

    def on_grant(self, link: Link, message: Grant, now: float) -> None:
        """The decode rank has a slab for a piece: WRITE it there, or give the slab back."""
        sending, piece = self.sendings.get((link.id, message.attempt)), message.piece
        if sending is None:
            return  # decode takes its slabs back when it hears how the attempt ended
        want, slabs = sending.wants.pop(piece, None), link.slabs
        if want is None or slabs is None:
            # A late copy must not return a slab whose WRITE may still be on its way.
            if not sending.pieces.covers(piece, piece + 1):
                self._context.send(link, Return(message.attempt, piece))
            return
        if not 0 <= message.slab < slabs.count:
            self._fail(sending, f"decode granted slab {message.slab} of {slabs.count}", now)
            return
        slab = slabs.slab(message.slab)
        sending.pieces.add(piece, piece + 1)
        self._post(sending, want.start, want.stop, now, slab=slab, piece=piece)

    def write_ended(self, event: WriteEnded, now: float) -> None:
        """A WRITE is over, was never started, or failed half way."""
        sending = self._by_write.get(event.write)
        if sending is None:
            return
        if event.outcome == "broken":
            # Its blocks are being read until our own agent is gone.
            sending.broken = True
            self._fail(sending, event.reason, now)
            return
        write = self._drained(sending, event.write)
        if event.outcome == "done":
            sending.landed.add(write.start, write.stop)
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
            if sending.quiet:
                self._end(sending)
                continue
            loud = sending.broken = True
            self._forget_slabs(sending)
            if sending.state is not SendingState.STOPPING:
                sending.move(SendingState.STOPPING)
        return loud

    def fenced(self, links: list[Link]) -> None:
        """Our agent that wrote to these links is gone: their WRITEs are over."""
        for sending in [s for s in self.sendings.values() if s.link in links]:
            for number in list(sending.writes):
                self._release(self._drained(sending, number).source)
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
        for number, want in sending.wants.items():
            if now - want.asked >= config.resend_most:
                want.asked = now
                self._context.send(sending.link, Need(sending.register.attempt, number))
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

    def _sending(self, link: Link, message: Register, now: float) -> Sending:
        groups = link.geometry.groups
        if len(message.blocks) != len(groups):
            raise PeerError(f"{len(message.blocks)} block lists for {len(groups)} KV groups")
        blocks = []
        for group, entry in zip(groups, message.blocks, strict=True):
            ids = decode_runs(entry.runs, MAX_BLOCKS)
            if entry.first < 0 or (ids.size and int(ids.max()) >= group.num_blocks):
                raise PeerError("a block id or index lies outside the registered pages")
            low, high = entry.first, entry.first + ids.size
            if message.start < message.stop and group.kind in ("full", "mla") and not (
                low * group.block_tokens <= message.start
                and message.stop <= high * group.block_tokens
            ):  # fmt: skip
                raise PeerError(
                    f"blocks {low}..{high} of {group.block_tokens} tokens do not hold tokens "
                    f"{message.start}..{message.stop}"
                )
            blocks.append(Blocks(entry.first, ids))
        grain, most = self._pieces(link)
        expires = now + min(message.patience_ms / 1000, MOST_PATIENCE)
        return Sending(link, message, tuple(blocks), grain, most, now, expires)

    def _pieces(self, link: Link) -> tuple[int, int]:
        """(grain, tokens per WRITE) of transfers towards a link."""
        plan = link.plan
        assert plan is not None
        if isinstance(plan, StagedPlan):
            return plan.grain, plan.tokens
        if plan.grain > MOST_GRAIN:
            return ONE_PIECE, ONE_PIECE
        token = bytes_per_token(link.geometry)
        most = self._context.config.slice_bytes // max(1, token)
        return plan.grain, max(plan.grain, most // plan.grain * plan.grain)

    def _match(self, sending: Sending, now: float) -> None:
        """Join a sending with the source it names, if that is here."""
        source = self.sources.find(sending.register.match, sending.link)
        if source is None:
            known = [k for k in keys(sending.register.match) if k in self._epitaphs]
            if known:
                self._fail(sending, self._epitaphs[known[0]], now)
            return
        sending.source = source
        sending.move(SendingState.SENDING)
        source.sendings.add(sending)
        source.sharers = max(source.sharers, sending.link.sharers)
        self._context.count("match_seconds", now - sending.began)
        if sending.complete:
            self._end(sending)
            return
        if source.near:
            self._announce(sending)
        self._advance(sending, now)

    def _advance(self, sending: Sending, now: float) -> None:
        """Post what is settled and not posted, up to the WRITEs allowed in flight."""
        assert sending.link.plan is not None
        way = sending.link.plan.way
        while len(sending.writes) + len(sending.wants) < self._context.config.writes_in_flight:
            piece = sending.next_piece()
            if piece is None:
                return
            if way == "packed":
                # One slab at a time, so that transfers take turns.
                self._context.slabs.ask(
                    ("pack", sending.key), lambda slab, now: self._pack(sending, slab, now)
                )
                return
            if way == "unpacked":
                number = next(self._piece_numbers)
                sending.wants[number] = Want(*piece, now)
                self._context.send(sending.link, Need(sending.register.attempt, number))
            else:
                self._post(sending, *piece, now)

    def _pack(self, sending: Sending, slab: int, now: float) -> bool:
        """A slab of ours is free: use it for the next piece, if there still is one."""
        slabs, piece = self._context.identity.slabs, sending.next_piece()
        if slabs is None or piece is None:
            return False
        self._post(sending, *piece, now, slab=slabs.slab(slab), own=slab)
        self._advance(sending, now)
        return True

    def _announce(self, sending: Sending) -> None:
        """Say once that bytes are about to arrive."""
        if not sending.soon:
            sending.soon = True
            self._context.send(sending.link, Soon(sending.register.attempt))

    def _post(
        self,
        sending: Sending,
        start: int,
        stop: int,
        now: float,
        *,
        slab: Region | None = None,
        own: int = -1,
        piece: int = 0,
    ) -> None:
        link, source, attempt = sending.link, sending.source, sending.register.attempt
        assert source is not None and link.plan is not None
        number = WriteId(next(self._write_ids))
        self._announce(sending)
        sending.started = sending.started or now
        sending.posted.add(start, stop)
        write = Write(start, stop, source, link.generation, link.agent, now, slab=own)
        sending.writes[number] = write
        self._by_write[number] = sending
        source.writes += 1
        route = (link.generation, link.agent)
        link.writes[route] = link.writes.get(route, 0) + 1
        self._context.act(
            Post(
                number,
                link.generation,
                link.agent,
                link.plan,
                link.geometry,
                tuple(source.blocks),
                sending.blocks,
                Done(attempt, start, stop, piece=piece),
                slab,
                last=stop == sending.register.stop,
            )
        )

    def _drained(self, sending: Sending, number: WriteId) -> Write:
        """One WRITE is not in flight any more."""
        write = sending.writes.pop(number)
        self._by_write.pop(number, None)
        write.source.writes -= 1
        if write.slab >= 0:
            self._context.slabs.give(write.slab)
        route = (write.generation, write.agent)
        sending.link.writes[route] -= 1
        if not sending.link.writes[route]:
            del sending.link.writes[route]
        return write

    def _discard(self, source: Source, reason: str, *, again: bool, now: float) -> None:
        """Stop reading a source; `again` when the same prompt will be offered once more."""
        source.gone = True
        self.sources.hide(source)
        for sending in list(source.sendings):
            if not again:
                self._fail(sending, reason, now)
            elif sending.state is SendingState.SENDING:
                sending.move(SendingState.WAITING)
                sending.source = None
                self._forget_slabs(sending)
                source.sendings.discard(sending)
                self._match(sending, now)  # it may have been offered again already
        if not again:
            self._remember(source, reason)

    def _remember(self, source: Source, reason: str) -> None:
        """Keep how a dispatch ended; only router-given ids are unique enough for that."""
        if source.match.transfer:
            self._epitaphs[keys(source.match)[0]] = reason
            while len(self._epitaphs) > MOST_EPITAPHS:
                del self._epitaphs[next(iter(self._epitaphs))]

    def _fail(self, sending: Sending, reason: str, now: float) -> None:
        """Tell the decode rank; it answers with a cancellation, which is confirmed when quiet."""
        if sending.state in (SendingState.STOPPING, SendingState.ENDED):
            return
        sending.move(SendingState.STOPPING)
        self._forget_slabs(sending)
        sending.reason = reason
        sending.repeat_at = now + self._context.config.resend_most
        self._context.count("sends", label="failed")
        self._context.send(sending.link, Failed(sending.register.attempt, clip(reason)))

    def _stop(self, sending: Sending) -> None:
        """No more WRITEs; when none is in flight either, say so and end."""
        if sending.state is not SendingState.STOPPING:
            sending.move(SendingState.STOPPING)
        self._forget_slabs(sending)
        if sending.quiet and sending.cancelled:
            self._context.send(sending.link, Cancelled(sending.register.attempt))
            self._end(sending)

    def _forget_slabs(self, sending: Sending) -> None:
        """Use no slab that is still to come: grants under way go back when they arrive."""
        sending.wants.clear()
        self._context.slabs.drop(("pack", sending.key))

    def _end(self, sending: Sending) -> None:
        self._forget_slabs(sending)
        sending.move(SendingState.ENDED)
        sending.link.sessions -= 1
        sending.link.over.add(sending.register.attempt)
        del self.sendings[sending.key]
        source = sending.source
        if source is not None:
            source.sendings.discard(sending)
            source.served.add((sending.link.engine, sending.link.rank))
            self._release(source)

    def _release(self, source: Source) -> None:
        """Let the source and its pin go once nobody needs it and no WRITE reads it."""
        served = source.finished is not None and len(source.served) >= source.sharers
        idle = source.gone or (served and not source.sendings)
        if source.writes or not idle or not self.sources.remove(source):
            return
        if served:
            self._remember(source, "this prompt was handed over already")
        if source.pin >= 0:
            self._context.act(Tell(Unpinned(source.pin)))
