"""Every state that a prefill engine, a decode engine, a router and a network can reach."""

from __future__ import annotations

from collections import deque

from neuron_push.protocol import decode_notification
from tests.model.bounds import NAMES, Bounds, D, P
from tests.model.effects import Broken
from tests.model.world import World

# Times in which every timeout falls due that anything may take to end, faults being over.
MOST_LATES = 8
# Steps between two of those.
MOST_STEPS = 400


class Space(World):
    """The states within some bounds, explored breadth first."""

    def __init__(self, bounds: Bounds):
        super().__init__(bounds)
        self.parents: dict[tuple, tuple | None] = {}
        self._ends: set[tuple] = set()
        self.whole = False  # every state was visited
        self.steps = 0

    def explore(self, most=10**7, *, ends=True, whole=True) -> int:
        """Visit every state; raises Counterexample. Returns how many there are.

        `ends`: whether each must lead to an end as well. `whole`: whether more than `most` states
        are an error; else those that the fewest steps lead to are visited.
        """
        first = self.first()
        self.parents = {first: None}
        frontier = deque([first])
        while frontier and len(self.parents) < most:
            state = frontier.popleft()
            try:
                for label, after in self.successors(state):
                    self.steps += 1
                    if after not in self.parents:
                        after = self.prune(after)
                        if after in self.parents:
                            continue
                        self.parents[after] = (state, label)
                        self.check(after)
                        if ends:
                            self.settle(after)
                        frontier.append(after)
            except Exception as error:
                raise Counterexample(self, error, self._blamed(state)) from error
        self.whole = not frontier
        if frontier and whole:
            raise Unbounded(f"there are more than {most} states")
        return len(self.parents)

    def _blamed(self, state):
        """The state that was being looked at: the newest one, unless none was reached."""
        newest = next(reversed(self.parents))
        parent = self.parents[newest]
        return newest if parent is not None and parent[0] == state else state

    def quiescent(self, state) -> bool:
        """Nothing is under way or held on any side that lives."""
        held = any(number >= 0 and self.locals[number].leftovers for number in state[:2])
        return not held and not state[4] and not (state[3] and state[P] >= 0)

    def settle(self, state):
        """Promise 4: from here, without faults, everything ends and every block comes back.

        Raises Broken. States on the way are remembered: most runs end after a step or two.
        """
        way, lates = {state: None}, 0
        while state not in self._ends and not self.quiescent(state):
            after = self._next(state, way)
            if len(way) > MOST_STEPS:
                raise Broken(f"this goes on for more than {MOST_STEPS} steps without a fault")
            if after is None:
                lates += 1
                if lates > MOST_LATES:
                    left = {
                        NAMES[s]: self.locals[state[s]].leftovers for s in (P, D) if state[s] >= 0
                    }
                    raise Broken(f"this never ends without a fault: {left}")
                way.clear()
                after = state
                for side in (P, D):
                    if after[side] >= 0:
                        _, after = self.late(after, side)
            state = self.prune(after)
            self.check(state)
            way[state] = None
        self._ends.update(way)

    def _next(self, state, way):
        for _, after in self.successors(state, calm=True):
            if after not in way:
                return after
        return None


class Unbounded(AssertionError):
    """There are more states than one cares to look at."""


class Counterexample(AssertionError):
    """A promise was broken: the shortest way there, step by step."""

    def __init__(self, space, error, state):
        self.error = error
        self.story = story(space, state)
        super().__init__("\n".join([f"{type(error).__name__}: {error}", *self.story]))


def story(space, state):
    """The steps that lead to a state."""
    steps = []
    while space.parents.get(state) is not None:
        state, label = space.parents[state]
        steps.append(describe(space, label))
    return [f"{index:3}. {text}" for index, text in enumerate(reversed(steps), 1)]


def describe(space, label):
    side, what, *rest = label
    text = f"{NAMES[side]} {what}"
    if what == "hears":
        sender, _, message = space.messages.things[rest[0].bit_length() - 1]
        return f"{text} {decode_notification(message)} from {sender}"
    if "WRITE" in what or "READ" in what:
        write, _ = space.writes.things[rest[0].bit_length() - 1]
        return f"{text}: tokens {write.start}..{write.stop} of attempt {write.attempt}"
    return " ".join([text, *map(str, rest)])
