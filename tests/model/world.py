"""Everything that may happen in a state, and the states after it.

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

from neuron_push.protocol import decode_notification
from tests.model.bounds import Bounds, D, P, Slot, spend
from tests.model.effects import Read, rank_of
from tests.model.judge import Judge
from tests.model.machines import BROKEN, FLYING, LANDED, SPOILT, Change, Machines


class World:
    """The steps between states."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.machines = Machines(bounds)
        self.judge = Judge(self.machines)
        self.locals, self.change = self.machines.locals, self.machines.change
        self.messages, self.writes = self.machines.messages, self.machines.writes
        self.names = [leg.name for leg in bounds.legs]
        self.pulls = any(leg.pull for leg in bounds.legs)

    # -------------------------------------------------------------------- one state

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

    def check(self, state):
        """Promises 1 and 2; raises Broken."""
        ps, ds, _, writes, *_ = state
        p, d = (self.locals[number] if number >= 0 else None for number in (ps, ds))
        self.judge.check(p, d, writes)

    # -------------------------------------------------------------------- what may happen

    def successors(self, state, *, calm=False):
        """(what happens, the state after it) for all that may happen; `calm`: without faults."""
        found = next(self._instant(state), None)
        if found is not None:
            yield found
            return
        for side in (P, D):
            if state[side] >= 0:
                yield from self._internal(state, side)
                yield from self._deliveries(state, side)
        if state[D] >= 0:
            yield from self._unpacking(state)
        yield from self._questions(state, calm)
        yield from self._landings(state, calm)
        for side in (P, D):
            if state[side] >= 0:
                yield from self._engine(state, side, calm)
                yield from self._unreachable(state, side, calm)
                yield self._tick(state, side)
                if self.locals[state[side]].crippled:
                    yield (side, "dies"), self._die(state, side, state[5])
        if not calm:
            yield from self._router(state)
            yield from self._faults(state)

    def _instant(self, state):
        """What happens at once, in bounds that do not look at the time it takes."""
        if "generations" not in self.bounds.slow:
            for side in (P, D):
                if state[side] >= 0:
                    yield from self._internal(state, side)
        if "greetings" not in self.bounds.slow and state[D] >= 0:
            yield from self._questions(state, True)
        if "unpacking" not in self.bounds.slow and state[D] >= 0:
            yield from self._unpacking(state)

    def _internal(self, state, side):
        number = state[side]
        for rank in self.locals[number].process.ranks:
            for waiting, name in ((rank.opening, "opened"), (rank.closing, "closed")):
                if waiting:
                    event = ("at", rank.number, name)
                    change = self.change(number, event, event)
                    yield (side, name, rank.number), self.after(state, side, change)

    def _unpacking(self, state):
        for rank in self.locals[state[D]].process.ranks:
            if rank.unpacking:
                event = ("at", rank.number, "unpacked")
                change = self.change(state[D], event, event)
                yield (D, "has unpacked", rank.number), self.after(state, D, change)

    def _deliveries(self, state, side):
        number, net = state[side], state[2]
        local = self.locals[number]
        news = net & self.machines.inbox(local) & ~local.idle
        for bit, (sender, agent, message) in self.messages.of(news):
            change = self.machines.changes.get((number, bit))
            if change is None:
                event = ("at", rank_of(agent), "message", sender, decode_notification(message))
                change = self.change(number, bit, event)
            if change.local == number and not (change.sent | change.posted | change.asked):
                if change.broken is None:
                    local.idle |= bit
                    continue
            elif change.local == number and not (change.sent & ~net | change.posted):
                continue
            yield (side, "hears", bit), self.after(state, side, change)

    def _questions(self, state, calm):
        ps, ds, _, _, asked, budget, *_ = state
        for bit, (kind, incarnation, rank, *question) in self.machines.asked.of(asked):
            rest = asked & ~bit
            if ds < 0:
                continue
            mine = incarnation == self.locals[ds].incarnation
            if kind == "find":
                peer = self._listens(ps)
                event = ("at", rank, "found", peer)
                change = self.change(ds, event, event)
                yield (D, "finds", peer), self.after(state, D, change, asked=rest)
            elif kind == "hello":
                link, there, hello = question
                nobody = ("at", rank, "greeted", link, None)
                if ps >= 0 and self.locals[ps].ranks[there].open:
                    event = ("at", there, "hello", (incarnation, rank, link), hello)
                    change = self.change(ps, ("hello", bit), event)
                    yield (P, "is greeted", link), self.after(state, P, change, asked=rest)
                elif mine:
                    change = self.change(ds, nobody, nobody)
                    yield (D, "greets nobody", link), self.after(state, D, change, asked=rest)
                if not calm and budget[Slot.OVERTAKEN] and mine:
                    change = self.change(ds, nobody, nobody)
                    yield (
                        (D, "waits no longer to be welcome", link),
                        self.after(state, D, change, budget=spend(budget, Slot.OVERTAKEN)),
                    )
            elif kind == "answer" and mine:
                link, message = question
                change = self.change(ds, ("answer", bit), ("at", rank, "greeted", link, message))
                yield (D, "is answered", link), self.after(state, D, change, asked=rest)

    def _listens(self, ps):
        """The incarnation whose listener answers, or 0; it goes with its engine's first rank."""
        there = ps >= 0 and self.locals[ps].ranks[0].open
        return self.locals[ps].incarnation if there else 0

    def _landings(self, state, calm):
        ps, ds, net, writes, _, _, _, landed = state
        d = self.locals[ds] if ds >= 0 else None
        p = self.locals[ps] if ps >= 0 else None
        for bit, (write, phase) in self.writes.of(writes):
            if isinstance(write, Read):
                yield from self._reading(state, bit, write, phase, calm)
                continue
            mine = p is not None and write.writer in p.open
            rest = writes & ~bit
            if phase == LANDED:
                event = ("at", write.lane[0], "ended", write.number, "done")
                change = self.change(ps, ("ended", bit), event)
                yield (P, "sees a WRITE done", bit), self.after(state, P, change, writes=rest)
            elif d is not None and write.target in d.open:
                known = mine and phase == FLYING
                after = rest | (self.writes.bit((write, LANDED)) if known else 0)
                fact = self.judge.landed(d, write)
                done = self.messages.bit((write.writer, write.target, write.done))
                yield (D, "has a WRITE landed", bit), (
                    ps, ds, net | done, after, *state[4:7], landed | fact,
                )  # fmt: skip
            if mine and phase == FLYING and not calm:
                yield from self._break(state, bit, write, d is not None and write.target in d.open)

    def _reading(self, state, bit, read, phase, calm):
        """Decode sees a READ end well, or is told that it is broken; bytes may move until then.

        With prefill gone it may have ended before; faults being over, it just never ends.
        """
        ps, ds, _, writes, _, budget, _, landed = state
        if phase == BROKEN or ds < 0 or read.reader not in self.locals[ds].open:
            return
        there = ps >= 0 and read.owner in self.locals[ps].open
        rest = writes & ~bit
        if there or not calm:
            event = ("at", read.lane[1], "read", read.number, "done")
            change = self.change(ds, ("read", bit), event)
            good = self.judge.landed(self.locals[ds], read, spoilt=phase == SPOILT)
            after = self.after(state, D, change, writes=rest, landed=landed | good)
            yield (D, "sees a READ done", bit), after
        if calm or (there and not budget[Slot.BROKEN]):
            return
        event = ("at", read.lane[1], "read", read.number, "broken")
        change = self.change(ds, ("broken READ", bit), event)
        rest |= self.writes.bit((read, BROKEN))
        spent = spend(budget, Slot.BROKEN) if there else budget
        after = self.after(state, D, change, writes=rest, budget=spent)
        yield (D, "sees a READ broken", bit), after

    def _fact(self, d, moved, *, spoilt=False):
        """That tokens have landed: in blocks, or as a piece in a slab; spoilt ones for nothing."""
        fact = (d.incarnation, moved.attempt, moved.start, moved.stop)
        if moved.slab < 0:
            return 0 if spoilt else self.landed.bit(fact)
        return self.landed.bit((*fact, moved.piece, SPOILT) if spoilt else (*fact, moved.piece))

    def _break(self, state, bit, write, there):
        """The transport calls a WRITE broken: its target is gone, or only the connection is."""
        budget, told = state[5], self.writes.bit((write, BROKEN))
        if there and not budget[Slot.BROKEN]:
            return
        event = ("at", write.lane[0], "ended", write.number, "broken")
        change = self.change(state[P], ("broken", bit), event)
        yield (
            (P, "sees a WRITE broken", bit),
            self.after(
                state, P, change, writes=state[3] & ~bit | told,
                budget=spend(budget, Slot.BROKEN) if there else budget,
            ),
        )  # fmt: skip

    def _engine(self, state, side, calm):
        number, budget = state[side], state[5]
        for event in self.locals[number].events:
            name = event[0]
            spent = budget
            if name in ("abort", "preempt", "reset"):
                slot = Slot.ABORTS + side if name == "abort" else Slot.PREEMPTS
                if calm or not budget[slot]:
                    continue
                spent = spend(budget, slot)
            change = self.change(number, event, event)
            yield (side, *event), self.after(state, side, change, budget=spent)

    def _unreachable(self, state, side, calm):
        number, budget, other = state[side], state[5], state[1 - side]
        there = self.locals[other].open if other >= 0 else ()
        for rank, seen in enumerate(self.locals[number].ranks):
            for agent in seen.peers:
                spent = budget
                if agent in there:
                    if calm or not budget[Slot.ALARMS + side]:
                        continue
                    spent = spend(budget, Slot.ALARMS + side)
                elif calm:
                    continue
                event = ("at", rank, "unreachable", agent)
                change = self.change(number, event, event)
                yield (side, "cannot reach", agent), self.after(state, side, change, budget=spent)

    def _tick(self, state, side):
        change = self.change(state[side], "soon", ("soon",))
        return (side, "repeats"), self.after(state, side, change)

    def late(self, state, side, deaf=False, **parts):
        """All timeouts of a side fall due; it hears its peers if they are there and know it."""
        local = self.locals[state[side]]
        alive = ((),) * len(local.ranks)
        if state[1 - side] >= 0 and not deaf:
            alive = local.hears(self.locals[state[1 - side]])
        change = self.change(state[side], ("late", alive), ("late", alive))
        return (side, "waits", alive), self.after(state, side, change, **parts)

    def _router(self, state):
        sent = state[6]
        for index, leg in enumerate(self.bounds.legs):
            number = state[leg.side]
            if sent >> index & 1 or number < 0:
                continue
            if leg.after and not self._over(state, leg.after):
                continue
            change = self.change(number, leg, ("new", leg.args()))
            yield (
                (leg.side, "is sent", leg.name),
                self.after(state, leg.side, change, legs=sent | 1 << index),
            )

    def _over(self, state, name):
        index = self.names.index(name)
        leg = self.bounds.legs[index]
        local = self.locals[state[leg.side]] if state[leg.side] >= 0 else None
        running = local is not None and name in local.process.engine.requests
        return state[6] >> index & 1 and not running

    def _faults(self, state):
        budget = state[5]
        for side in (P, D):
            if state[side] < 0:
                if self.bounds.losses[side]:
                    continue  # what comes after is as after any other death
                yield (
                    (side, "starts again"),
                    self._replace(state, side, self.machines.start(side, 1 - state[side])),
                )
                continue
            if budget[Slot.LATES + side]:
                spent = spend(budget, Slot.LATES + side)
                yield self.late(state, side, budget=spent)
                if self.bounds.deaf:
                    yield self.late(state, side, True, budget=spent)
            if budget[Slot.CRASHES + side]:
                yield (side, "dies"), self._die(state, side, spend(budget, Slot.CRASHES + side))
            if budget[Slot.LOSSES + side]:
                yield from self._lose(state, side, spend(budget, Slot.LOSSES + side))

    def _lose(self, state, side, budget):
        """One rank dies alone; what it WROTE may still land."""
        for rank in range(self.bounds.ranks[side]):
            change = self.change(state[side], ("lose", rank), ("lose", rank))
            after = self.after(state, side, change, budget=budget)
            yield (
                (side, "loses rank", rank),
                (*after[:3], self._unseen(after[P], after[3]), *after[4:]),
            )

    def _unseen(self, ps, writes):
        """Without WRITEs that have landed and whose poster will not see it."""
        p_open = self.locals[ps].open if ps >= 0 else ()
        for bit, (write, phase) in self.writes.of(writes):
            if phase == LANDED and write.writer not in p_open:
                writes ^= bit
        return writes

    def _replace(self, state, side, number):
        ps, ds = (number, state[D]) if side == P else (state[P], number)
        return (ps, ds, *state[2:])

    def _die(self, state, side, budget):
        ps, ds, net, writes, asked, _, sent, landed = state
        dead = -self.locals[state[side]].incarnation
        if side == P:
            ps = dead
            writes = self._unseen(ps, writes)
        else:
            ds, asked, landed = dead, 0, 0
        net &= self._deliverable(ps, ds)
        return (ps, ds, net, writes, asked, budget, sent, landed)

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
