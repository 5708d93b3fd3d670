"""What comes from outside: legs of requests, time that passes, deaths."""

from __future__ import annotations

from tests.model.bounds import D, P, Slot, spend
from tests.model.states import States


class Faults(States):
    """What the router and fate may do."""

    def router(self, state):
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

    def faults(self, state):
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
                yield (side, "dies"), self.die(state, side, spend(budget, Slot.CRASHES + side))
            if budget[Slot.LOSSES + side]:
                yield from self._lose(state, side, spend(budget, Slot.LOSSES + side))

    def late(self, state, side, deaf=False, **parts):
        """All timeouts of a side fall due; it hears its peers if they are there and know it."""
        local = self.locals[state[side]]
        alive = ((),) * len(local.ranks)
        if state[1 - side] >= 0 and not deaf:
            alive = local.hears(self.locals[state[1 - side]])
        change = self.change(state[side], ("late", alive), ("late", alive))
        return (side, "waits", alive), self.after(state, side, change, **parts)

    def _lose(self, state, side, budget):
        """One rank dies alone; what it WROTE may still land."""
        for rank in range(self.bounds.ranks[side]):
            change = self.change(state[side], ("lose", rank), ("lose", rank))
            after = self.after(state, side, change, budget=budget)
            yield (
                (side, "loses rank", rank),
                (*after[:3], self._unseen(after[P], after[3]), *after[4:]),
            )

    def die(self, state, side, budget):
        ps, ds, net, writes, asked, _, sent, landed = state
        dead = -self.locals[state[side]].incarnation
        if side == P:
            ps = dead
            writes = self._unseen(ps, writes)
        else:
            ds, asked, landed = dead, 0, 0
        net &= self._deliverable(ps, ds)
        return (ps, ds, net, writes, asked, budget, sent, landed)

    def _replace(self, state, side, number):
        ps, ds = (number, state[D]) if side == P else (state[P], number)
        return (ps, ds, *state[2:])
