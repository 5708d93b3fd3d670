"""WRITEs and READs in flight: they land, break, and are seen to end."""

from __future__ import annotations

from tests.model.bounds import D, P, Slot, spend
from tests.model.effects import Read
from tests.model.machines import BROKEN, FLYING, LANDED, SPOILT
from tests.model.states import States


class Flights(States):
    """What bytes that are under way may do."""

    def landings(self, state, calm):
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
