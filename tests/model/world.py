"""Everything that may happen in a state, and the states after it."""

from __future__ import annotations

from neuron_push.protocol import decode_notification
from tests.model.bounds import D, P, Slot, spend
from tests.model.effects import rank_of
from tests.model.faults import Faults
from tests.model.flights import Flights


class World(Flights, Faults):
    """The steps between states."""

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
        yield from self.landings(state, calm)
        for side in (P, D):
            if state[side] >= 0:
                yield from self._engine(state, side, calm)
                yield from self._unreachable(state, side, calm)
                yield self._tick(state, side)
                if self.locals[state[side]].crippled:
                    yield (side, "dies"), self.die(state, side, state[5])
        if not calm:
            yield from self.router(state)
            yield from self.faults(state)

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
