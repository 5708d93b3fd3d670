"""What may happen in a world, and how often at most."""

from __future__ import annotations

from dataclasses import dataclass

P, D = 0, 1
NAMES = "PD"


class Slot:
    """Places in a budget; where both sides have one, prefill's, and decode's is the next."""

    CRASHES, LATES, ABORTS, PREEMPTS, ALARMS, OVERTAKEN, BROKEN, LOSSES = 0, 2, 4, 6, 7, 9, 10, 11


@dataclass(frozen=True)
class Leg:
    """One leg that the router may send; `after` names a leg that must be over by then."""

    side: int
    name: str
    transfer: str | None
    prompt: str = "prompt"
    tokens: int = 8
    after: str = ""
    pull: bool = False  # of decode: READ what prefill lends

    def args(self):
        return (self.side, self.name, self.transfer, self.prompt, self.tokens, self.pull)


@dataclass(frozen=True)
class Bounds:
    """What may happen, how often at most. Repeats and network trouble are never bounded."""

    legs: tuple[Leg, ...]
    crashes: tuple[int, int] = (0, 0)  # of prefill, of decode
    losses: tuple[int, int] = (0, 0)  # of one rank alone, whose engine dies when it has noticed
    lates: tuple[int, int] = (0, 0)  # times in which every timeout falls due
    deaf: bool = False  # whether such a time may pass without signs of life of a living peer
    aborts: tuple[int, int] = (0, 0)
    preempts: int = 0
    alarms: tuple[int, int] = (0, 0)  # transports that call a living peer unreachable
    # WRITEs and READs whose failure their poster is told of while they may still land.
    broken: int = 0
    overtaken: int = 0  # hellos that decode gave up and that arrive all the same
    blocks: tuple[int, int] = (2, 2)
    recompute: bool = False
    # Things that take their time here, so that others come in between; elsewhere they are instant.
    slow: frozenset[str] = frozenset()  # of "greetings", "generations", "steps", "unpacking"
    # Who reorders, in slabs: "packed" by prefill, "unpacked" by decode, or "both".
    staged: str = ""
    ranks: tuple[int, int] = (1, 1)  # of prefill, of decode; each has its share of the heads

    def budget(self) -> tuple[int, ...]:
        """How often what is bounded may still happen."""
        return (
            *self.crashes, *self.lates, *self.aborts, self.preempts, *self.alarms,
            self.overtaken, self.broken, *self.losses,
        )  # fmt: skip


def spend(budget, slot):
    return (*budget[:slot], budget[slot] - 1, *budget[slot + 1 :])
