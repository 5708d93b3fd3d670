"""Defects, one at a time, that the random worlds must notice: {name: patch(monkeypatch)}."""

from __future__ import annotations

from neuron_push.commands import Unpinned
from neuron_push.protocol import Cancelled, Moved
from neuron_push.rendezvous import consumer, fence, links, producer, ranges, sender
from neuron_push.rendezvous.consumer import AttemptState
from neuron_push.rendezvous.events import Tell


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

    def link_lost(self, link, reason, now, original=consumer.Consumer.link_lost):
        original(self, link, reason, now)
        self.fenced([link])
        return False

    patch.setattr(consumer.Consumer, "link_lost", link_lost)


def revive_ended_attempts(patch):
    """Prefill applies a late copy of a registration that is over."""
    patch.setattr(ranges.EndedAttempts, "__contains__", lambda self, attempt: False)


def accept_registrations_of_earlier_links(patch):
    """Prefill does not look over which link a registration was sent."""

    def on_register(self, link, message, now, original=sender.Producer.on_register):
        original(self, link, message.__class__(
            message.attempt, link.hello, message.match, message.start, message.stop,
            message.blocks, message.patience_ms), now)  # fmt: skip

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


MUTANTS = {
    mutant.__name__: mutant
    for mutant in (
        free_on_timeout, free_when_the_link_is_lost, revive_ended_attempts,
        accept_registrations_of_earlier_links, count_instead_of_sets,
        unpin_a_source_under_a_write, moved_before_the_drain,
        join_a_rotation_too_late, cancelled_before_the_drain, post_again_after_preemption,
        settle_twice_as_far,
    )
}  # fmt: skip
