"""Blocks that a prefill rank lends: to decode ranks that READ a finished prompt.

    registered --prompt settled--> lent (Lend, repeated) --Taken--> over (Kept)
                                     |
                                     +-- Cancel, decode lost, long overdue --> over

A source's pin stays while any of its blocks are lent. A loan called in on a decode rank that is
taken for dead, or that says nothing for too long, may still be READ; whoever READs decodes nothing
without `Kept`, so that costs bytes and no truth.
"""

from __future__ import annotations

from neuron_push.protocol import Kept, Lend
from neuron_push.rendezvous.blocklists import encode_blocks
from neuron_push.rendezvous.links import Context, Link
from neuron_push.rendezvous.producer import Sending, SendingState

# Pulls per link whose good end is remembered, for decode ranks that did not hear of it.
MOST_KEPT = 4096


class Loans:
    """All loans of this rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def lend(self, sending: Sending, now: float) -> None:
        """Lend the prompt's blocks if all that is wanted of it is settled."""
        source, register = sending.source, sending.register
        waits = sending.state is SendingState.SENDING and sending.lender is None
        if waits and source is not None and source.settled >= register.stop:
            sending.lender, sending.started = source, now
            source.loans += 1
            self._count += 1
            self._tell(sending, now)

    def repeat(self, sending: Sending, now: float) -> None:
        """Say again what was not answered."""
        lent = sending.lender is not None and sending.state is SendingState.SENDING
        if lent and now >= sending.repeat_at:
            self._tell(sending, now)

    def held(self, sending: Sending, now: float) -> bool:
        """Whether the blocks are lent still, now that all of them was READ; counted if so."""
        if sending.lender is None or sending.state is not SendingState.SENDING:
            return False
        self._context.count("sends", label="lent")
        self._context.count("transfer_seconds", now - sending.started)
        return True

    def overdue(self, sending: Sending, now: float) -> bool:
        """Call a loan in that was not given back in time; whether that was now."""
        latest = sending.expires + self._context.config.drain_timeout
        if sending.lender is None or now < latest:
            return False
        self._context.count("cancellations", label="loan")
        self.end(sending)
        return True

    def end(self, sending: Sending) -> None:
        """Nothing is lent any more; returns silently if nothing was."""
        if sending.lender is not None:
            sending.lender.loans -= 1
            sending.lender = None
            self._count -= 1

    def confirm(self, link: Link, attempt: int) -> None:
        """The blocks were held until all was READ: say so, now and whenever asked again."""
        link.kept[attempt] = None
        if len(link.kept) > MOST_KEPT:
            del link.kept[next(iter(link.kept))]
        self._context.send(link, Kept(attempt, link.hello))

    def _tell(self, sending: Sending, now: float) -> None:
        source, register = sending.lender, sending.register
        assert source is not None
        sending.repeat_at = now + self._context.config.resend_most
        geometry = self._context.identity.geometry
        blocks = encode_blocks(geometry, source.blocks, register.start, register.stop)
        self._context.send(sending.link, Lend(register.attempt, sending.link.hello, blocks))
