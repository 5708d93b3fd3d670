"""Defects, one at a time, that the random worlds must notice: {name: patch(monkeypatch)}."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from neuron_push.commands import Unpinned
from neuron_push.protocol import Cancel, Cancelled, Moved, Return
from neuron_push.rendezvous import (
    consumer,
    fence,
    landing,
    links,
    loans,
    producer,
    ranges,
    reads,
    sender,
    slabs,
    writes,
)
from neuron_push.rendezvous.attempt import Attempt, AttemptState, number_of
from neuron_push.rendezvous.events import Tell
from neuron_push.rendezvous.parts import Parted


def look_again_before_the_fence(patch):
    """Decode takes a registration that was never answered for one that was never heard."""

    def link_lost(self, link, reason, now, *, there, original=consumer.Consumer.link_lost):
        original(self, link, reason, now, there=True)
        for attempt in list(self.attempts.values()):
            if attempt.again:
                for share in attempt.shares.values():
                    share.quiet = True
                self._finish_drain(attempt)
        return False

    patch.setattr(consumer.Consumer, "link_lost", link_lost)


def free_on_timeout(patch):
    """Decode gives its blocks back when a cancellation is not confirmed in time."""

    def tick(self, now, original=consumer.Consumer.tick):
        for attempt in list(self.attempts.values()):
            if attempt.state is AttemptState.DRAINING and now >= attempt.deadline - 0.8:
                for share in attempt.shares.values():
                    share.quiet = True
                self._finish_drain(attempt)
        return original(self, now)

    patch.setattr(consumer.Consumer, "tick", tick)


def free_when_the_link_is_lost(patch):
    """Decode takes a lost link for a fence."""

    def link_lost(self, link, reason, now, *, there, original=consumer.Consumer.link_lost):
        original(self, link, reason, now, there=there)
        self.fenced([link])
        return False

    patch.setattr(consumer.Consumer, "link_lost", link_lost)


def revive_ended_attempts(patch):
    """Prefill applies a late copy of a registration that is over."""
    patch.setattr(ranges.EndedAttempts, "__contains__", lambda self, attempt: False)


def accept_registrations_of_earlier_links(patch):
    """Prefill does not look over which link a registration was sent."""

    def on_register(self, link, message, now, original=sender.Producer.on_register):
        original(self, link, replace(message, link=link.hello), now)

    patch.setattr(sender.Producer, "on_register", on_register)


def count_instead_of_sets(patch):
    """Decode adds up what arrived."""

    class Counter(ranges.RangeSet):
        __slots__ = ("total",)

        def add(self, start, stop):
            self.total = getattr(self, "total", 0) + stop - start

        def covers(self, start, stop):
            return getattr(self, "total", 0) >= stop - start

    def linked(self, number, peers, now, original=consumer.Consumer.linked):
        attempt = self.attempts.get(number)
        original(self, number, peers, now)
        for share in attempt.shares.values() if attempt else ():
            share.landed = Counter()

    patch.setattr(consumer.Consumer, "linked", linked)


def unpin_a_source_under_a_write(patch):
    """Prefill lets the blocks of a source go with a WRITE in flight."""

    def release(self, source):
        served = source.finished is not None and len(source.served) >= source.sharers
        idle = source.gone or (served and not source.sendings)
        if idle and self.sources.remove(source) and source.pin >= 0:
            self._context.act(Tell(Unpinned(source.pin)))

    patch.setattr(sender.Producer, "_release", release)


def moved_before_the_drain(patch):
    """A peer confirms a move with WRITEs towards the old agent in flight."""

    def settle_move(self, link):
        if not link.lost:
            link.leaving.clear()
            self._context.send(link, Moved(link.us, link.agent))

    patch.setattr(links.Links, "settle_move", settle_move)


def join_a_rotation_too_late(patch):
    """A link that may have moved is fenced by closing the generation it may have left."""

    def want(self, link):
        rotation = self._rotation
        if rotation and not rotation.closing and link.generation <= rotation.old:
            rotation.lost.append(link)
            rotation.staying.pop(link.id, None)
        else:
            self._wanted.append(link)

    patch.setattr(fence.Generations, "want", want)


def cancelled_before_the_drain(patch):
    """Prefill confirms a cancellation with WRITEs in flight."""

    def on_cancel(self, link, message, now, original=sender.Producer.on_cancel):
        original(self, link, message, now)
        self._context.send(link, Cancelled(message.attempt))

    patch.setattr(sender.Producer, "on_cancel", on_cancel)


def post_again_after_preemption(patch):
    """A sending forgets what it posted when its source is preempted."""

    def move(self, state, original=producer.Sending.move):
        if state is producer.SendingState.WAITING:
            self.posted = ranges.RangeSet()
        original(self, state)

    patch.setattr(producer.Sending, "move", move)


def settle_twice_as_far(patch):
    """Prefill takes tokens for settled that are still being computed."""

    def settle(self, command, now, original=sender.Producer.settle):
        size = self._context.identity.geometry.groups[0].block_tokens
        reach = (command.first[0] + len(command.blocks[0])) * size
        original(self, command.__class__(
            command.source, max(command.stop, reach), command.first, command.blocks,
            command.pin, command.last), now)  # fmt: skip

    patch.setattr(sender.Producer, "settle", settle)


def free_slabs_when_cancelling(patch):
    """Decode takes granted slabs back when it gives up, before prefill has confirmed."""

    def send_cancels(self, attempt, now, original=consumer.Consumer._send_cancels):
        for share in attempt.shares.values():
            self.landings.quiet(attempt, share)
        original(self, attempt, now)

    patch.setattr(consumer.Consumer, "_send_cancels", send_cancels)


def free_slabs_when_landed(patch):
    """Decode takes a slab back when its WRITE has landed, before it is unpacked."""

    def on_done(self, attempt, share, message, original=landing.Landings.on_done):
        complaint = original(self, attempt, share, message)
        for piece in list(share.landing.running):
            if share.landing.granted.get(piece) in self._context.slabs.used:
                self._context.slabs.give(share.landing.granted[piece])
        return complaint

    def finished(self, share, piece):
        share.landing.running.discard(piece)
        share.landing.granted.pop(piece, None)

    patch.setattr(landing.Landings, "on_done", on_done)
    patch.setattr(landing.Landings, "finished", finished)


def unpin_while_unpacking(patch):
    """Decode gives its blocks back while a piece is being copied into them."""
    patch.setattr(Attempt, "unpacking", False)


def reuse_a_packed_slab_at_once(patch):
    """Prefill packs into a slab whose WRITE is still in flight."""

    def post(self, *piece, own=-1, original=writes.Writes.post, **rest):
        original(self, *piece, own=own, **rest)
        if own >= 0:
            sending, number = piece[0], max(self._in_flight)
            sending.writes[number] = dataclasses.replace(sending.writes[number], slab=-1)
            self._context.slabs.give(own)

    patch.setattr(writes.Writes, "post", post)


def write_into_a_slab_without_a_grant(patch):
    """Prefill uses the slab of its last grant again instead of asking."""

    def advance(self, sending, now, original=writes.Writes.advance):
        original(self, sending, now)
        for number, want in list(sending.wants.items()):
            if sending.pieces and sending.link.slabs is not None and not sending.writes:
                del sending.wants[number]
                slab = sending.link.slabs.slab(0)
                self.post(sending, want.start, want.stop, want.plan, now,
                          granted=slab, piece=number)  # fmt: skip

    patch.setattr(writes.Writes, "advance", advance)


def return_a_slab_whose_write_is_under_way(patch):
    """Prefill answers a late copy of a grant by returning the slab that it has used."""

    def on_grant(self, link, message, now, original=sender.Producer.on_grant):
        sending = self.sendings.get((link.id, message.attempt))
        if sending is not None and message.piece not in sending.wants:
            self._context.send(link, Return(message.attempt, message.piece))
            return
        original(self, link, message, now)

    patch.setattr(sender.Producer, "on_grant", on_grant)


def promise_every_slab(patch):
    """Engines that serve each other grant all their slabs before they have one to pack into."""

    def ask(self, key, serve, *, promise=False, original=slabs.SlabPool.ask):
        original(self, key, serve)

    patch.setattr(slabs.SlabPool, "ask", ask)


def keep_a_grant_that_is_not_used(patch):
    """Prefill forgets a grant that waits for a slab of its own, and says nothing."""

    def forget_slabs(self, sending, original=writes.Writes.forget_slabs):
        for number in sending.granted:
            del sending.wants[number]
        original(self, sending)

    patch.setattr(writes.Writes, "forget_slabs", forget_slabs)


def lend_what_may_go(patch):
    """Prefill lets the blocks of a source go while decode READs them."""

    def lend(self, sending, now, original=loans.Loans.lend):
        original(self, sending, now)
        if sending.lender is not None:
            sending.lender.loans = 0
            sending.source.served.add((sending.link.engine, sending.link.rank))
            sending.source.sendings.pop(sending, None)

    def end(self, sending):
        if sending.lender is not None:
            sending.lender, self._count = None, self._count - 1

    patch.setattr(loans.Loans, "lend", lend)
    patch.setattr(loans.Loans, "end", end)


def keep_the_number_of_an_earlier_registration(patch):
    """What is registered anew is called as before, over whichever link."""

    def on_taken(self, link, message, now, original=sender.Producer.on_taken):
        original(self, link, replace(message, link=link.hello), now)

    patch.setattr(Attempt, "number", property(lambda self: number_of(self.command.attempt)))
    patch.setattr(sender.Producer, "on_taken", on_taken)


def decode_without_confirmation(patch):
    """Decode takes what it READ for good without asking whether it was held."""

    def conclude(self, attempt, share, original=reads.Reads.conclude):
        asked = original(self, attempt, share)
        if asked:
            share.reading.kept = True
        return asked

    patch.setattr(reads.Reads, "conclude", conclude)


def decode_before_the_comparison(patch):
    """Decode takes what it READ for good as soon as it was held, whatever its digest says."""

    def arrived(self, attempt, share, number, read, original=reads.Reads.arrived):
        original(self, attempt, share, number, read)
        share.landed.add(read.start, read.stop)

    patch.setattr(reads.Reads, "arrived", arrived)


def confirm_whatever_is_asked(patch):
    """Prefill says that it kept blocks which it had called in."""

    def on_taken(self, link, message, now, original=sender.Producer.on_taken):
        sending = self.sendings.get((link.id, message.attempt))
        if sending is None:
            link.kept.setdefault(message.attempt, b"")
            self.loans.confirm(link, message.attempt)
        else:
            original(self, link, message, now)

    def tick(self, now, original=sender.Producer.tick):
        for sending in list(self.sendings.values()):
            if sending.lender is not None:
                self._end(sending)
        return original(self, now)

    patch.setattr(sender.Producer, "on_taken", on_taken)
    patch.setattr(sender.Producer, "tick", tick)


def call_a_read_quiet(patch):
    """Decode gives its blocks back with a READ into them in flight."""

    def post(self, attempt, share, *rest, original=reads.Reads._post):
        original(self, attempt, share, *rest)
        share.quiet = True

    patch.setattr(reads.Reads, "_post", post)


def give_a_loan_back_too_early(patch):
    """Decode cancels a pull before its READs have ended."""

    def stop(self, attempt, share, original=reads.Reads.stop):
        original(self, attempt, share)
        if share.reading is not None:
            self._context.send(share.link, Cancel(attempt.number, "too early"))

    patch.setattr(reads.Reads, "stop", stop)


def send_layers_before_their_fence(patch):
    """Prefill takes one part more of the layers for settled than is."""

    def layers(self, command, now, original=sender.Producer.layers):
        original(self, command.__class__(command.step, command.parts + 1), now)

    patch.setattr(sender.Producer, "layers", layers)


def complete_by_one_part(patch):
    """Decode takes tokens for landed of which one part of the layers has."""
    patch.setattr(Parted, "add", lambda self, part, parts, start, stop: [(start, stop)])


MUTANTS = {
    mutant.__name__: mutant
    for mutant in (
        look_again_before_the_fence, free_on_timeout, free_when_the_link_is_lost,
        revive_ended_attempts,
        accept_registrations_of_earlier_links, count_instead_of_sets,
        unpin_a_source_under_a_write, moved_before_the_drain,
        join_a_rotation_too_late, cancelled_before_the_drain, post_again_after_preemption,
        settle_twice_as_far, free_slabs_when_cancelling, free_slabs_when_landed,
        unpin_while_unpacking, reuse_a_packed_slab_at_once, write_into_a_slab_without_a_grant,
        return_a_slab_whose_write_is_under_way, promise_every_slab,
        keep_a_grant_that_is_not_used, lend_what_may_go, decode_without_confirmation,
        confirm_whatever_is_asked, call_a_read_quiet, give_a_loan_back_too_early,
        send_layers_before_their_fence, complete_by_one_part,
        keep_the_number_of_an_earlier_registration, decode_before_the_comparison,
    )
}  # fmt: skip
