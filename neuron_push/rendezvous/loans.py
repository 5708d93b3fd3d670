"""Blocks that a prefill rank lends: to decode ranks that READ a finished prompt.

    registered --prompt settled--> lent (Lend, repeated) --Taken--> [sealed] --> over (Kept)
                                     |
                                     +-- Cancel, decode lost, long overdue --> over

A source's pin stays while any of its blocks are lent. A loan called in on a decode rank that is
taken for dead, or that says nothing for too long, may still be READ; whoever READs decodes nothing
without `Kept`, so that costs bytes and no truth. Where digests are compared, `Kept` carries that of
the blocks, taken while they still are lent.
"""

from __future__ import annotations

from neuron_push.plan import PairPlan, Plan, pair
from neuron_push.protocol import Kept, Lend
from neuron_push.rendezvous.blocklists import encode_blocks
from neuron_push.rendezvous.events import Seal
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

    def held(self, sending: Sending) -> bool:
        """Whether the blocks are lent still, now that all of them was READ."""
        return sending.lender is not None and sending.state is SendingState.SENDING

    def seal(self, sending: Sending) -> bool:
        """Have a digest taken of what was READ, if both engines compare; whether they do.

        Raises:
            PlanError: what was lent cannot have been READ.
        """
        if not (self._context.config.kv_digest and sending.blocks):
            return False
        if sending.sealing:
            return True
        sending.sealing = True
        source, link, register = sending.lender, sending.link, sending.register
        assert source is not None
        plan, span = self._read(link), (register.start, register.stop)
        lists = tuple(source.blocks), sending.blocks
        self._context.act(Seal(*sending.key, plan, link.geometry, *lists, *span))
        return True

    def _read(self, link: Link) -> Plan:
        """How a decode rank READs our pages where digests are compared: straight."""
        if link.read == "unknown":
            assert link.ask is not None
            me, straight = self._context.identity.geometry, isinstance(link.plan, PairPlan)
            link.read = link.plan if straight else pair(me, link.geometry, link.ask, min_run=1)
        assert link.read is not None
        return link.read

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

    def end_well(self, sending: Sending, digest: bytes, now: float) -> None:
        """The blocks were held until all was READ: count it, and say so."""
        self._context.count("sends", label="lent")
        self._context.count("transfer_seconds", now - sending.started)
        link, attempt = sending.link, sending.register.attempt
        link.kept[attempt] = digest
        if len(link.kept) > MOST_KEPT:
            del link.kept[next(iter(link.kept))]
        self.confirm(link, attempt)

    def confirm(self, link: Link, attempt: int) -> None:
        """Say of a pull that ended well that it did, as often as asked."""
        self._context.send(link, Kept(attempt, link.hello, link.kept[attempt]))

    def _tell(self, sending: Sending, now: float) -> None:
        source, register = sending.lender, sending.register
        assert source is not None
        sending.repeat_at = now + self._context.config.resend_most
        geometry = self._context.identity.geometry
        blocks = encode_blocks(geometry, source.blocks, register.start, register.stop)
        self._context.send(sending.link, Lend(register.attempt, sending.link.hello, blocks))
