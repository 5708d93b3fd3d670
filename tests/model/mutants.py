"""Defects, one at a time, that the checker must find: (patch, the bounds it is found in)."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from neuron_push.commands import Settle, decode, encode, pack_ids, unpack_ids
from neuron_push.protocol import Done
from neuron_push.rendezvous import consumer, core, landing, ranges, writes
from neuron_push.rendezvous.attempt import AttemptState, attempt_of
from neuron_push.rendezvous.events import Opened
from neuron_push.vllm import pins, prefills, worker
from neuron_push.vllm.metadata import StepMeta
from tests.model.effects import BLOCK
from tests.model.scenarios import NIGHT, SCENARIOS
from tests.model.space import Counterexample, Space
from tests.rendezvous import mutants as worlds


def free_on_timeout(patch):
    """Decode frees its blocks when a cancellation is not confirmed in time."""

    def overdue(self, attempt, now, original=consumer.Consumer._overdue):
        if attempt.state is AttemptState.DRAINING:
            for share in attempt.shares.values():
                self._quieten(attempt, share)
            self._finish_drain(attempt)
            return []
        return original(self, attempt, now)

    patch.setattr(consumer.Consumer, "_overdue", overdue)


def free_on_handle_release(patch):
    """Prefill releases the handle of a WRITE that failed half way, and takes it for drained."""

    def write_ended(self, event, now):
        outcome = "unposted" if event.outcome == "broken" else event.outcome
        self.producer.write_ended(event.__class__(event.write, outcome, event.reason), now)

    patch.setattr(core.Core, "_write_ended", write_ended)


def free_on_deregistration(patch):
    """Memory is registered anew with the next agent, and the old one, still there, forgotten."""

    def handle(self, event, now, original=core.Core.handle):
        actions = original(self, event, now)
        rotation = self.generations._rotation
        if isinstance(event, Opened) and rotation is not None:
            self.consumer.fenced(rotation.lost)
            self.producer.fenced(rotation.lost)
        return actions + self._take(now)

    patch.setattr(core.Core, "handle", handle)


def accept_an_old_attempt(patch):
    """Prefill takes a late copy of a registration for a new one."""
    patch.setattr(ranges.EndedAttempts, "__contains__", lambda self, attempt: False)


def settle_a_prefix_hit_early(patch):
    """What the prefix cache holds is settled when the request is scheduled, not with its step."""

    def bind(self, meta, original=worker.WorkerHalf.bind):
        original(self, meta)
        for command in decode(StepMeta(*meta).due):
            ids = unpack_ids(command.blocks[0]) if isinstance(command, Settle) else []
            if len(ids) > 1:
                hit = (pack_ids(ids[:1]),)
                early = Settle(command.source, BLOCK, command.first, hit, command.pin, False)
                self._thread.submit(encode([early]))

    patch.setattr(worker.WorkerHalf, "bind", bind)


def free_when_the_engine_gives_up(patch):
    """Decode takes its own abort for the end of the transfer."""

    def send_cancels(self, attempt, now, original=consumer.Consumer._send_cancels):
        original(self, attempt, now)
        for share in attempt.shares.values():
            self._quieten(attempt, share)

    patch.setattr(consumer.Consumer, "_send_cancels", send_cancels)


def ask_nothing_before_a_preemption(patch):
    """vLLM lets a running prompt go, and no reference of ours is taken."""
    patch.setattr(prefills.Prefills, "before_preemption", lambda self, pins: None)


def ask_nothing_before_an_allocation(patch):
    """vLLM lets everything go unasked, and no reference of ours is taken before it is reused."""
    patch.setattr(prefills.Prefills, "before_allocation", lambda self, pins: None)


def keep_pins_for_ever(patch):
    """The scheduler half does not hear that blocks are quiet."""
    patch.setattr(pins.Pins, "quiet", lambda self, number, rank: None)


def forget_to_say_it_again(patch):
    """A cancellation is said once; who does not confirm it is never given up."""

    def tick(self, now, original=consumer.Consumer.tick):
        for attempt in self.attempts.values():
            if attempt.state is AttemptState.DRAINING:
                attempt.deadline = attempt.send_at = float("inf")
        return original(self, now)

    def link_lost(self, link, reason, now, original=consumer.Consumer.link_lost, **how):
        original(self, link, reason, now, **how)
        return False

    patch.setattr(consumer.Consumer, "tick", tick)
    patch.setattr(consumer.Consumer, "link_lost", link_lost)


def give_a_slab_back_when_it_is_posted(patch):
    """Prefill packs the next piece into a slab that a WRITE still reads."""

    def post(self, *given, own=-1, original=writes.Writes.post, **named):
        original(self, *given, own=own, **named)
        if own >= 0:
            number, write = list(given[0].writes.items())[-1]
            given[0].writes[number] = replace(write, slab=-1)
            self._context.slabs.give(own)

    patch.setattr(writes.Writes, "post", post)


def pack_over_what_is_on_its_way(patch):
    """Prefill packs into a slab from which it fills one of decode's that is still to be used."""
    give_a_slab_back_when_it_is_posted(patch)


def use_a_grant_twice(patch):
    """Prefill takes a late copy of a grant for another one."""

    def granted(self, sending, message, now, original=writes.Writes.granted):
        want = copy(sending.wants.get(message.piece))
        complaint = original(self, sending, message, now)
        if want is not None:
            sending.wants[message.piece] = want
        return complaint

    patch.setattr(writes.Writes, "granted", granted)


def decode_after_the_first_piece(patch):
    """Decode takes the first piece that is unpacked for all of them."""

    def finished(self, share, piece, original=landing.Landings.finished):
        original(self, share, piece)
        share.landing.received.add(0, 1 << 20)
        share.landed.add(0, 1 << 20)

    patch.setattr(landing.Landings, "finished", finished)


def unpack_when_granted(patch):
    """Decode unpacks a slab that it has just granted, as if the bytes were there."""

    def on_need(self, attempt, share, message, original=landing.Landings.on_need):
        original(self, attempt, share, message)
        self._context.slabs.serve(0.0)
        if message.piece in share.landing.granted and not share.landing.running:
            begin = max([0, *(stop for _, stop in share.landing.received)])
            if begin < attempt.command.stop:
                self.arrived(attempt, share, share.link.unpack, message.piece, begin, begin + BLOCK)

    patch.setattr(landing.Landings, "on_need", on_need)


def unpack_all_that_is_granted(patch):
    """Decode takes the end of one piece for that of all that it has slabs for."""

    def on_done(self, attempt, share, message, original=landing.Landings.on_done):
        complaint = original(self, attempt, share, message)
        begin = max([0, *(stop for _, stop in share.landing.received)])
        for piece in sorted(share.landing.granted.keys() - share.landing.running):
            if begin < attempt.command.stop:
                self.arrived(attempt, share, share.link.unpack, piece, begin, begin + BLOCK)
        return complaint

    patch.setattr(landing.Landings, "on_done", on_done)


def give_slabs_back_when_the_engine_gives_up(patch):
    """Decode takes its slabs back with the request, not when nothing can land in them any more."""

    def send_cancels(self, attempt, now, original=consumer.Consumer._send_cancels):
        original(self, attempt, now)
        for share in attempt.shares.values():
            self.landings.quiet(attempt, share)

    patch.setattr(consumer.Consumer, "_send_cancels", send_cancels)


def give_a_slab_back_under_its_unpacking(patch):
    """Decode grants a slab anew while what is in it is still being unpacked."""

    def arrived(self, attempt, share, *given, original=landing.Landings.arrived):
        original(self, attempt, share, *given)
        for piece in list(share.landing.running):
            self.unused(share, piece)

    patch.setattr(landing.Landings, "arrived", arrived)


def decode_when_one_rank_has_sent(patch):
    """Decode takes what one prefill rank owed for all of it."""

    def complete(self, attempt, now, original=consumer.Consumer._complete):
        span = attempt.command.start, attempt.command.stop
        if any(share.holds(*span) for share in attempt.shares.values()):
            for share in attempt.shares.values():
                share.landed.add(*span)
        original(self, attempt, now)

    patch.setattr(consumer.Consumer, "_complete", complete)


def count_ranks_that_are_done(patch):
    """Decode counts what it hears of ranks that are done, not the ranks."""

    def on_message(self, link, message, now, original=consumer.Consumer.on_message):
        attempt = self.attempts.get(attempt_of(message.attempt))
        if attempt is not None and isinstance(message, Done) and link.id in attempt.shares:
            first = next(iter(attempt.shares.values()))
            first.parts += 1  # of no use here otherwise
            if first.parts == len(attempt.shares):
                for share in attempt.shares.values():
                    share.landed.add(attempt.command.start, attempt.command.stop)
        original(self, link, message, now)

    patch.setattr(consumer.Consumer, "on_message", on_message)


def take_one_rank_for_all(patch):
    """Decode takes one rank's word that nothing lands any more for that of its engine."""

    def quieten(self, attempt, share, original=consumer.Consumer._quieten):
        for each in attempt.shares.values():
            original(self, attempt, each)

    patch.setattr(consumer.Consumer, "_quieten", quieten)


def fence_all_ranks_with_one(patch):
    """Decode takes the loss of one rank for the end of what all ranks of its engine WRITE."""

    def link_lost(self, link, reason, now, original=consumer.Consumer.link_lost, **how):
        loud = original(self, link, reason, now, **how)
        for attempt in list(self.attempts.values()):
            for share in attempt.shares.values():
                if share.link is not link and link.id in attempt.shares:
                    self._quieten(attempt, share)
            self._finish_drain(attempt)
        return loud

    patch.setattr(consumer.Consumer, "link_lost", link_lost)


def unpin_with_the_first_rank(patch):
    """The scheduler half frees a pin when one rank has let go of it."""

    def quiet(self, number, rank):
        if number in self._pins:
            self.drop(number)

    patch.setattr(pins.Pins, "quiet", quiet)


def unpin_on_decode_with_the_first_rank(patch):
    """The same, where two ranks of decode are WRITTEN into."""
    unpin_with_the_first_rank(patch)


MUTANTS = {
    free_on_timeout: "abort and timeouts",
    free_on_handle_release: "broken WRITE, aborts",
    free_on_deregistration: "false alarm, slowly",
    accept_an_old_attempt: "abort",
    worlds.count_instead_of_sets: "one request",
    settle_a_prefix_hit_early: "prefix hit",
    worlds.free_when_the_link_is_lost: "false alarm, slowly",
    worlds.accept_registrations_of_earlier_links: "false alarm, again",
    worlds.cancelled_before_the_drain: "abort",
    worlds.unpin_a_source_under_a_write: "preemption",
    worlds.post_again_after_preemption: "preemption",
    free_when_the_engine_gives_up: "abort",
    ask_nothing_before_a_preemption: "preemption",
    ask_nothing_before_an_allocation: "preemption",
    keep_pins_for_ever: "one request",
    worlds.decode_without_confirmation: "pull, false alarm",
    worlds.lend_what_may_go: "pull",
    worlds.call_a_read_quiet: "pull",
    give_a_slab_back_when_it_is_posted: "packed, aborts",
    use_a_grant_twice: "unpacked, aborts",
    decode_after_the_first_piece: "unpacked, aborts",
    unpack_when_granted: "unpacked, aborts",
    give_slabs_back_when_the_engine_gives_up: "unpacked, aborts",
    give_a_slab_back_under_its_unpacking: "unpacked, aborts",
    pack_over_what_is_on_its_way: "both, three pieces",
    unpack_all_that_is_granted: "both, aborts",
    decode_when_one_rank_has_sent: "two ranks of P, abort",
    count_ranks_that_are_done: "two ranks of P, abort",
    take_one_rank_for_all: "two ranks of P, abort",
    fence_all_ranks_with_one: "two ranks of P, one is lost",
    unpin_with_the_first_rank: "two ranks of P, aborts",
    unpin_on_decode_with_the_first_rank: "two ranks of D, abort",
    forget_to_say_it_again: "abort and timeouts",
}
BOUNDS = {**SCENARIOS, **NIGHT}
# Found as what never ends; the rest are found as what corrupts.
ENDLESS = (keep_pins_for_ever, forget_to_say_it_again)


def hunt(mutant, patch) -> Counterexample:
    """What a mutant breaks, and the shortest way there."""
    mutant(patch)
    try:
        states = Space(BOUNDS[MUTANTS[mutant]]).explore(50_000, ends=mutant in ENDLESS)
    except Counterexample as found:
        return found
    raise AssertionError(f"{mutant.__name__} is not noticed in {states} states")
