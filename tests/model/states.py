"""States of a world, and what a step of a process does to one.

A state is two processes and what is between them, in small numbers (machines.py).

The network keeps whatever was sent to an agent that still exists: it may arrive at any time, any
number of times, in any order, or never. A posted WRITE may land, whole or torn, at any time until
one of its agents is gone, so no step lands bytes: in *every* state the blocks of every WRITE that
flies must be its attempt's, and the bytes that it reads its prompt's (judge.py).

A posted READ changes decode's blocks likewise, until decode's own agent is gone. Prefill may take
back the blocks that it reads, if it takes decode for dead: then the READ is *spoilt*, it may have
brought anything, and decode must never decode over what it brought.
"""

from __future__ import annotations

from tests.model.bounds import Bounds, D, P
from tests.model.effects import Read
from tests.model.judge import Judge
from tests.model.machines import BROKEN, LANDED, Change, Machines


class States:
    """All that a state is, and the state after a change."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.machines = Machines(bounds)
        self.judge = Judge(self.machines)
        self.locals, self.change = self.machines.locals, self.machines.change
        self.messages, self.writes = self.machines.messages, self.machines.writes
        self.names = [leg.name for leg in bounds.legs]
        self.pulls = any(leg.pull for leg in bounds.legs)

    def first(self) -> tuple:
        """Both engines are up and nothing was asked of them."""
        start = self.machines.start
        return (start(P, 1), start(D, 1), 0, 0, 0, self.bounds.budget(), 0, 0)

    def after(self, state, side, change: Change, **parts):
        """The state after a process did something; `parts` are what the event took away."""
        if change.broken is not None:
            raise change.broken
        ps, ds, net, writes, asked, budget, sent, landed = state
        net = parts.get("net", net) | change.sent
        writes = parts.get("writes", writes) | change.posted
        asked = parts.get("asked", asked) | change.asked
        budget, sent = parts.get("budget", budget), parts.get("legs", sent)
        landed = parts.get("landed", landed)
        ps, ds = (change.local, ds) if side == P else (ps, change.local)
        if self.bounds.staged:
            d = self.locals[ds] if ds >= 0 else None
            landed = self.judge.staged(d, change, writes, landed)
        if change.closed:
            writes = self._close(side, change.closed, writes)
        if self.pulls and ps >= 0:
            writes = self.judge.spoil(self.locals[ps], writes)
        if change.received:
            self.judge.received(self.locals[ds], change.received, landed)
        net &= self._deliverable(ps, ds)
        return (ps, ds, net, writes, asked, budget, sent, landed)

    def _deliverable(self, ps, ds) -> int:
        """Messages whose agent exists: for a process that is down there are none."""
        bits = 0
        for number in (ps, ds):
            if number >= 0:
                bits |= self.machines.inbox(self.locals[number])
        return bits

    def _close(self, side, agents, writes):
        """Agents are gone: what they moved is gone too, what they were sent may be missed."""
        for bit, (item, _) in self.writes.of(writes):
            reads = isinstance(item, Read)
            if side == (D if reads else P) and (item.reader if reads else item.writer) in agents:
                writes ^= bit
        return writes

    def _unseen(self, ps, writes):
        """Without WRITEs that have landed and whose poster will not see it."""
        p_open = self.locals[ps].open if ps >= 0 else ()
        for bit, (write, phase) in self.writes.of(writes):
            if phase == LANDED and write.writer not in p_open:
                writes ^= bit
        return writes

    def prune(self, state):
        """Leave out WRITEs of the dead that cannot land any more, and READs of the dead."""
        ps, ds, net, writes, *rest = state
        if not writes:
            return state
        p_open = self.locals[ps].open if ps >= 0 else ()
        d_open = self.locals[ds].open if ds >= 0 else ()
        for bit, (write, phase) in self.writes.of(writes):
            told = isinstance(write, Read) or phase == BROKEN or write.writer not in p_open
            if told and write.into not in d_open:
                writes ^= bit
        return (ps, ds, net, writes, *rest)

    def check(self, state):
        """Promises 1 and 2; raises Broken."""
        ps, ds, _, writes, *_ = state
        p, d = (self.locals[number] if number >= 0 else None for number in (ps, ds))
        self.judge.check(p, d, writes)
