"""Bounds worth exploring, each about one kind of trouble.

What is not bounded anywhere: how often a message arrives and in which order, whether it does, how
often things are repeated, when a WRITE lands, and how the two engines' steps interleave.
"""

from __future__ import annotations

from dataclasses import replace

from tests.model.bounds import Bounds, D, Leg, P

ONE = (Leg(P, "p", "t"), Leg(D, "d", "t"))
SHORT = (Leg(P, "p", "t", tokens=4), Leg(D, "d", "t", tokens=4))
# Another attempt for the same prompt, as routers make them that repeat a request with its id.
TWICE = (*ONE, Leg(D, "d2", "t", after="d"))
AGAIN = (*TWICE, Leg(P, "p2", "t", after="p"))
# Another request computes the same prompt: its blocks are in the prefix cache before their bytes.
HIT = (Leg(P, "other", None), *ONE)
# Another request takes the blocks that are let go.
CROWD = (*ONE, Leg(P, "other", None, prompt="another"))
# In three pieces, so that a slab is used again.
LONG = (replace(ONE[0], tokens=12), replace(ONE[1], tokens=12))
# Decode READs what prefill lends: in one piece, or in two.
PULL = (SHORT[0], replace(SHORT[1], pull=True))
LONG_PULL = (ONE[0], replace(ONE[1], pull=True))
STEPS, GREETINGS, GENERATIONS, UNPACKING = (
    frozenset({x}) for x in ("steps", "greetings", "generations", "unpacking")
)

# Of CI: every state, less than a minute in all.
SCENARIOS = {
    "one request": Bounds(ONE),
    "abort": Bounds(ONE, aborts=(1, 1), slow=STEPS),
    "abort and timeouts": Bounds(ONE, aborts=(0, 1), lates=(0, 1), deaf=True),
    "recompute": Bounds(ONE, aborts=(0, 1), recompute=True, lates=(0, 1)),
    "preemption": Bounds(CROWD, preempts=1, blocks=(3, 2)),
    "prefix hit": Bounds(HIT, blocks=(3, 2), slow=STEPS),
    "broken WRITE": Bounds(ONE, broken=1, slow=GENERATIONS),
    "false alarm": Bounds(SHORT, alarms=(0, 1)),
    "P dies": Bounds(ONE, crashes=(1, 0)),
    "D dies": Bounds(ONE, crashes=(0, 1)),
    "greetings": Bounds(ONE, overtaken=1, slow=GREETINGS),
    "pull": Bounds(LONG_PULL, aborts=(1, 1), preempts=1, slow=STEPS),
    "pull, false alarm": Bounds(PULL, alarms=(1, 0), aborts=(1, 1), slow=STEPS),
    "pull, timeouts": Bounds(PULL, aborts=(0, 1), lates=(2, 0), deaf=True),
    "pull, broken READ": Bounds(PULL, broken=1, aborts=(0, 1), slow=GENERATIONS),
    "pull, P dies": Bounds(PULL, crashes=(1, 0), aborts=(0, 1)),
    "packed, aborts": Bounds(ONE, staged="packed", aborts=(1, 1)),
    "unpacked, aborts": Bounds(ONE, staged="unpacked", aborts=(0, 1), slow=UNPACKING),
    "unpacked, timeouts": Bounds(SHORT, staged="unpacked", aborts=(0, 1), lates=(0, 1), deaf=True),
    "unpacked, false alarm": Bounds(SHORT, staged="unpacked", alarms=(0, 1)),
    "both, aborts": Bounds(ONE, staged="both", aborts=(0, 1)),
    "two ranks of P, abort": Bounds(SHORT, ranks=(2, 1), aborts=(0, 1)),
    "pull, unpacked": Bounds(PULL, staged="unpacked", aborts=(0, 1), slow=UNPACKING),
}

# Of the night: what troubles do to each other. Of the largest so many states, the nearest first.
MOST = 1_000_000
NIGHT = {
    "timeouts, both": Bounds(ONE, aborts=(0, 1), lates=(1, 1), deaf=True),
    "recompute, aborts": Bounds(ONE, aborts=(1, 1), recompute=True, lates=(0, 1), deaf=True),
    "preemption, aborts": Bounds(ONE, preempts=1, aborts=(1, 1), blocks=(3, 2)),
    "broken WRITE, aborts": Bounds(ONE, broken=1, aborts=(0, 1), slow=GENERATIONS),
    "false alarm, slowly": Bounds(ONE, alarms=(0, 1), slow=GENERATIONS),
    "false alarms": Bounds(ONE, alarms=(1, 1), aborts=(0, 1), slow=GENERATIONS),
    "P dies, timeouts": Bounds(ONE, crashes=(1, 0), lates=(0, 1), slow=GENERATIONS),
    "D dies, timeouts": Bounds(ONE, crashes=(0, 1), lates=(1, 0), slow=GENERATIONS),
    "P restarts, again": Bounds(AGAIN, crashes=(1, 0)),
    "greetings, P restarts": Bounds(TWICE, crashes=(1, 0), overtaken=1, slow=GREETINGS),
    "again": Bounds(AGAIN, aborts=(1, 1)),
    "false alarm, again": Bounds(TWICE, alarms=(0, 1), slow=GENERATIONS),
    "D restarts, again": Bounds(TWICE, crashes=(0, 1)),
    "D restarts, both again": Bounds(AGAIN, crashes=(0, 1)),
    "again, timeouts": Bounds(AGAIN, lates=(1, 1), deaf=True),
    "aborts, timeouts twice": Bounds(ONE, aborts=(1, 1), lates=(2, 2), deaf=True),
    "preemption, timeouts": Bounds(ONE, preempts=2, aborts=(1, 1), lates=(1, 1), blocks=(3, 2)),
    "alarms, timeouts": Bounds(
        ONE, alarms=(1, 1), aborts=(0, 1), lates=(1, 1), deaf=True, slow=GENERATIONS
    ),
    "broken WRITEs": Bounds(
        ONE, broken=2, aborts=(1, 1), lates=(1, 1), deaf=True, slow=GENERATIONS
    ),
    "both die": Bounds(ONE, crashes=(1, 1), lates=(1, 1), aborts=(0, 1), slow=GENERATIONS),
    "pull, aborts, timeouts": Bounds(PULL, aborts=(1, 1), lates=(2, 1), deaf=True),
    "pull, false alarms": Bounds(PULL, alarms=(1, 1), aborts=(0, 1), slow=GENERATIONS),
    "pull, broken READs": Bounds(LONG_PULL, broken=2, aborts=(0, 1), slow=GENERATIONS),
    "pull, preemption, aborts": Bounds(
        (*LONG_PULL, CROWD[2]), preempts=1, aborts=(1, 1), blocks=(3, 2)
    ),
    "pull, P restarts": Bounds(PULL, crashes=(1, 0), lates=(0, 1), slow=GENERATIONS),
    "pull, D restarts": Bounds(PULL, crashes=(0, 1), lates=(1, 0), slow=GENERATIONS),
    "both, three pieces": Bounds(LONG, staged="both", blocks=(3, 3)),
    "both, three pieces, an abort": Bounds(
        LONG, staged="both", aborts=(0, 1), blocks=(3, 3), slow=UNPACKING
    ),
    "both, preemption, aborts": Bounds(
        (*ONE, CROWD[2]), staged="both", preempts=1, aborts=(1, 1), blocks=(3, 2)
    ),
    "both, broken WRITE": Bounds(
        ONE, staged="both", broken=1, aborts=(0, 1), slow=GENERATIONS | UNPACKING
    ),
    "both, timeouts": Bounds(ONE, staged="both", aborts=(0, 1), lates=(1, 1), deaf=True),
    "two ranks of P, aborts": Bounds(ONE, ranks=(2, 1), aborts=(1, 1)),
    "two ranks of P, one is lost": Bounds(SHORT, ranks=(2, 1), losses=(1, 0)),
    "two ranks of P, false alarm": Bounds(SHORT, ranks=(2, 1), alarms=(0, 1), slow=GENERATIONS),
    "two ranks of P, timeouts": Bounds(SHORT, ranks=(2, 1), aborts=(0, 1), lates=(1, 1), deaf=True),
    "two ranks of D, abort": Bounds(SHORT, ranks=(1, 2), aborts=(0, 1)),
    "two ranks of D, aborts": Bounds(ONE, ranks=(1, 2), aborts=(1, 1)),
    "two ranks of D, one is lost": Bounds(SHORT, ranks=(1, 2), losses=(0, 1)),
    "two ranks of D, false alarms": Bounds(SHORT, ranks=(1, 2), alarms=(1, 1)),
    "two ranks of each": Bounds(SHORT, ranks=(2, 2), aborts=(0, 1)),
    "two ranks, pull": Bounds(PULL, ranks=(2, 1), aborts=(1, 1)),
    "two ranks, unpacked": Bounds(
        SHORT, ranks=(2, 1), staged="unpacked", aborts=(0, 1), slow=UNPACKING
    ),
    "prefix hit, preemption": Bounds(HIT, preempts=1, aborts=(1, 1), blocks=(4, 2), slow=STEPS),
}
